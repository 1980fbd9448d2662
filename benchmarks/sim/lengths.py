"""How well answer lengths are foretold on real traces, request by request.

Each trace is gone through once, in order: a length is predicted, scored, and only then
told to the predictor (or ``--lag`` requests later). Nothing is trained before. Prints a
table per trace in Markdown; the last line is one JSON object.

    python benchmarks/sim/lengths.py TRACE... [--lag N] [--limit N] [--seed N]

Traces: Mooncake and WEKA (JSON lines), Azure 2023 and data sets of lengths (CSV),
ServeGen (an archive of clients, from which 20,000 requests are drawn). Predictors:
`prior` is the distribution of all answers so far, `constant` one length, `online` ours,
`online, groups` ours with the conversation (or client) as group, and `llm, e^0.5` (and
`e^1.0`) ours with an emulated word of the model: the truth times a log-normal error.

Columns: `covered`, share of answers at least as long as the lower bound (wanted 0.90);
`lower`, mean lower bound over mean length, for a bound of 1 covers everything; `error`,
median distance of the median; `mean error`; `class`, share of answers whose class of
five (by the quintiles so far) was foretold; `its bound covers`, share at least as long
as the lower bound of that class; `covered at 100`, of the answers longer than 100,
predicted anew when 100 are out.
"""

from __future__ import annotations

import argparse
import json
import sys
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from sgl_tiered_workloads.traces.azure import read_azure
from sgl_tiered_workloads.traces.base import Trace, TraceError
from sgl_tiered_workloads.traces.files import json_rows, text_lines
from sgl_tiered_workloads.traces.lengths import (
    read_arxiv_lengths,
    read_sharegpt_lengths,
)
from sgl_tiered_workloads.traces.mooncake import read_mooncake
from sgl_tiered_workloads.traces.servegen import read_servegen
from sgl_tiered_workloads.traces.weka import read_weka

from sgl_tiered.policies.length.base import (
    LengthFacts,
    LengthPrediction,
    LengthPredictor,
    bounded,
)
from sgl_tiered.policies.length.constant import ConstantLength
from sgl_tiered.policies.length.llm import LLMLengths
from sgl_tiered.policies.length.online import OnlineLengths

NUM_CLASSES = 5
FIRST_SCORED = 100
"""Answers before the first class is scored: quintiles of fewer mean nothing."""
EDGES_EVERY = 50
AT_TOKENS = 100
CONSTANT_TOKENS = 256
ALLOWANCE = 1 << 18
"""The traces do not say what their requests allowed."""
SERVEGEN_REQUESTS = 20_000
COVERAGE = 0.9


@dataclass(frozen=True)
class Item:
    """A request with its answer's length, and the length a model might have said."""

    facts: LengthFacts
    num_output_tokens: int


class PriorLengths:
    """All answers so far, alike for every request: exact, and nothing is forgotten."""

    name = "prior"

    def __init__(self) -> None:
        self.seen: list[int] = []

    def predict(self, facts: LengthFacts, num_done: int = 0) -> LengthPrediction:
        """Return percentiles of the answers longer than ``num_done``."""
        first = bisect_right(self.seen, num_done)
        left = len(self.seen) - first
        if not left:
            return bounded(facts, num_done, 1, CONSTANT_TOKENS, CONSTANT_TOKENS)
        lower, median, upper = (
            self.seen[first + min(int(q * left), left - 1)]
            for q in (1 - COVERAGE, 0.5, COVERAGE)
        )
        return bounded(facts, num_done, lower, median, upper)

    def observe(self, facts: LengthFacts, num_output_tokens: int) -> None:
        """Count the answer."""
        insort(self.seen, num_output_tokens)

    def edges(self) -> list[int]:
        """Return the first length of each class; equal quintiles make one class."""
        cuts = [
            int(np.percentile(self.seen, 100 * i / NUM_CLASSES))
            for i in range(1, NUM_CLASSES)
        ]
        return [0, *sorted(set(cuts))]

    def shares(self, edges: Sequence[int]) -> list[float]:
        """Return the share of answers in each class."""
        cuts = [bisect_right(self.seen, edge - 1) for edge in edges[1:]]
        cuts = [0, *cuts, len(self.seen)]
        return [(b - a) / len(self.seen) for a, b in pairwise(cuts)]


@dataclass
class Score:
    """What one predictor did on one trace."""

    lowers: list[int] = field(default_factory=list)
    errors: list[int] = field(default_factory=list)
    num_covered: int = 0
    num_classes: int = 0
    num_right: int = 0
    num_class_covered: int = 0
    num_long: int = 0
    num_long_covered: int = 0

    def row(self, outputs: Sequence[int]) -> dict[str, float]:
        """Return the figures of the table."""
        scored = max(self.num_classes, 1)
        return {
            "covered": round(self.num_covered / len(outputs), 4),
            "lower": round(sum(self.lowers) / sum(outputs), 4),
            "error": float(np.median(self.errors)),
            "mean_error": round(float(np.mean(self.errors)), 1),
            "class": round(self.num_right / scored, 4),
            "class_covered": round(self.num_class_covered / scored, 4),
            "covered_at_100": round(self.num_long_covered / max(self.num_long, 1), 4),
        }


Shares = Callable[[LengthFacts, Sequence[int]], Sequence[float]]


def run(
    items: Sequence[Item], predictor: LengthPredictor, lag: int
) -> dict[str, float]:
    """Go through a trace with one predictor."""
    score, prior = Score(), PriorLengths()
    shares = _shares(predictor)
    edges: list[int] = [0]
    late: deque[Item] = deque()
    for number, item in enumerate(items):
        facts, length = item.facts, item.num_output_tokens
        first = predictor.predict(facts)
        score.lowers.append(first.lower)
        score.errors.append(abs(first.median - length))
        score.num_covered += length >= first.lower
        if length > AT_TOKENS:
            score.num_long += 1
            again = predictor.predict(facts, AT_TOKENS)
            score.num_long_covered += length >= again.lower
        if number >= FIRST_SCORED and prior.seen:
            if (number - FIRST_SCORED) % EDGES_EVERY == 0:
                edges = prior.edges()
            guess = int(np.argmax(shares(facts, edges)))
            score.num_classes += 1
            score.num_right += guess == bisect_right(edges, length) - 1
            score.num_class_covered += length >= edges[guess]
        late.append(item)
        while len(late) > lag:
            past = late.popleft()
            predictor.observe(past.facts, past.num_output_tokens)
            prior.observe(past.facts, past.num_output_tokens)
    return score.row([item.num_output_tokens for item in items])


def _shares(predictor: LengthPredictor) -> Shares:
    """Return how the predictor's class is found: the likeliest, or the median's."""
    if isinstance(predictor, OnlineLengths | LLMLengths):
        return predictor.shares
    if isinstance(predictor, PriorLengths):
        return lambda facts, edges: predictor.shares(edges)

    def of_median(facts: LengthFacts, edges: Sequence[int]) -> Sequence[float]:
        place = bisect_right(edges, predictor.predict(facts).median) - 1
        return [float(i == place) for i in range(len(edges))]

    return of_median


def read(path: Path, limit: int, rng: np.random.Generator) -> tuple[str, list[Item]]:
    """Read a file of any of the formats.

    Raises:
        TraceError: it has none of them.
    """
    if path.is_dir() or path.name.endswith((".tgz", ".tar.gz", ".tar")):
        return path.name, _servegen(path, limit or SERVEGEN_REQUESTS, rng)
    trace = _trace(path)
    items = [
        Item(
            LengthFacts(
                request.num_prompt_tokens,
                ALLOWANCE,
                group="" if request.session < 0 else str(request.session),
            ),
            request.num_output_tokens,
        )
        for request in trace.requests[: limit or None]
    ]
    return trace.name, items


def _trace(path: Path) -> Trace:
    head = next(line for _, line in text_lines(path))
    if "TIMESTAMP" in head:
        return read_azure(path)
    if "num_prefill_tokens" in head:
        # Both have the same columns, and only one has conversations.
        chats = "sharegpt" in path.name.lower()
        return read_sharegpt_lengths(path) if chats else read_arxiv_lengths(path)
    first = next(json_rows(path)).fields
    if "hash_ids" in first:
        return read_mooncake(path)
    if "requests" in first:
        return read_weka(path)
    raise TraceError(path, 1, "none of the known formats", "see --help")


def _servegen(path: Path, num: int, rng: np.random.Generator) -> list[Item]:
    """Draw requests in order of time; a client's share follows its rates."""
    clients = read_servegen(path)
    starts = [window.start_s for window in clients[0].rates]
    rates = np.array(
        [
            [c.rates[i].rate_per_s if i < len(c.rates) else 0.0 for c in clients]
            for i in range(len(starts))
        ]
    )
    counts = rng.poisson(rates * (num / rates.sum()))
    items = []
    for start_s, row in zip(starts, counts, strict=True):
        who = rng.permutation(np.repeat(np.arange(len(clients)), row))
        for client in (clients[i] for i in who):
            lengths = client.lengths_at(start_s)
            prompt = int(rng.choice(lengths.input_tokens, p=lengths.input_share))
            output = int(rng.choice(lengths.output_tokens, p=lengths.output_share))
            facts = LengthFacts(prompt, ALLOWANCE, group=str(client.number))
            items.append(Item(facts, output))
    return items


def _without_group(items: Sequence[Item]) -> list[Item]:
    return [replace(item, facts=replace(item.facts, group="")) for item in items]


def _with_word(
    items: Sequence[Item], sigma: float, rng: np.random.Generator
) -> list[Item]:
    """Let a model say each length with a log-normal error."""
    factors = np.exp(rng.normal(0.0, sigma, len(items)))
    return [
        replace(
            item,
            facts=replace(
                item.facts, said_tokens=max(1, round(item.num_output_tokens * factor))
            ),
        )
        for item, factor in zip(items, factors, strict=True)
    ]


def compare(items: Sequence[Item], lag: int, seed: int) -> dict[str, dict[str, float]]:
    """Run all predictors on one trace."""
    plain = _without_group(items)
    rows = {
        "prior": run(plain, PriorLengths(), lag),
        f"constant:{CONSTANT_TOKENS}": run(plain, ConstantLength(CONSTANT_TOKENS), lag),
        "online": run(plain, OnlineLengths(COVERAGE), lag),
    }
    if any(item.facts.group for item in items):
        rows["online, groups"] = run(items, OnlineLengths(COVERAGE), lag)
    for sigma in (0.5, 1.0):
        worded = _with_word(plain, sigma, np.random.default_rng(seed))
        rows[f"llm, e^{sigma}"] = run(worded, LLMLengths(COVERAGE), lag)
    return rows


def print_table(
    name: str, items: Sequence[Item], rows: dict[str, dict[str, float]]
) -> None:
    outputs = np.array([item.num_output_tokens for item in items])
    p10, p50, p90 = np.percentile(outputs, [10, 50, 90])
    print(
        f"\n**{name}**: {len(items):,} answers, {outputs.mean():.0f} tokens on "
        f"average, p10 {p10:.0f}, median {p50:.0f}, p90 {p90:.0f}\n"
    )
    print(
        "| predictor | covered | lower | error | mean error | class | its bound covers "
        "| covered at 100 |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for label, row in rows.items():
        print(
            f"| {label} | {row['covered']:.3f} | {row['lower']:.2f} "
            f"| {row['error']:.0f} | {row['mean_error']:.0f} | {row['class']:.3f} "
            f"| {row['class_covered']:.3f} | {row['covered_at_100']:.3f} |"
        )


def main() -> int:
    """Go through all traces; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--lag", type=int, default=0)
    parser.add_argument("--limit", type=int, default=0, help="first requests only")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    results = {}
    for path in args.paths:
        try:
            name, items = read(path, args.limit, np.random.default_rng(args.seed))
        except TraceError as error:
            print(error, file=sys.stderr)
            return 2
        results[name] = compare(items, args.lag, args.seed)
        print_table(name, items, results[name])
    covered = [rows["online"]["covered"] for rows in results.values()]
    gains = {
        name: round(rows["online"]["class"] - rows["prior"]["class"], 4)
        for name, rows in results.items()
    }
    summary = {
        "worst_coverage": min(covered),
        "class_gain_over_prior": gains,
        "traces": results,
    }
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
