"""The equality gate: does a server answer exactly as plain SGLang does?

Two servers get the same requests in the same order (one at a time, or in forced
batches) and the gate compares tokens and the top-5 logprobs of every output
token. What "the same" can mean is settled by arithmetic: in bfloat16 a matrix
product over 16 rows rounds otherwise than one over 2,000, so plain SGLang that
reuses a prefix and plain SGLang that recomputes it differ in the last bits. Only
where both servers did the same computation may bit equality be asked, and there
it is asked, with no tolerance.

The forced schedule. The reference is plain SGLang whose device pool holds the
whole workload: each earlier prefix is a device hit. The candidate has a small
pool and tiers. Its prefixes come from lower tiers, but with equal lengths, so
each forward pass has equal shapes and must give equal bits. A request is
compared *exactly* when all of this holds, else under the near-tie rule:

1. both servers report the same ``cached_tokens``, for it and its whole batch;
2. none of the pages it reuses is *tainted*. A page is tainted when the request
   that computed it was itself not exact, or when either server computed it more
   than once (two copies that differ in rounding exist then, and the two servers
   may serve different ones).

The near-tie rule. A logprob may differ by at most the spread that plain SGLang
shows against itself when batching or hit lengths change (``plain_spread``),
and a token may differ only where the two tokens' logprobs are closer than that
spread moves them. After a differing token the rest of the answer is out of
comparison: it follows another text. ``slack`` allows for the maximum of one
sample being exceeded by another sample of the same noise.

The gate fails when anything differs, when too small a share of the output was
compared exactly, or when a tier named in ``must_cover`` served no exact answer.
``negative_control`` proves that it can fail: it must catch a zeroed and a
swapped page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sgl_tiered_workloads.lineage import exact_orders
from sgl_tiered_workloads.records import RequestRecord

__all__ = [
    "Difference",
    "GateResult",
    "NegativeControlError",
    "Spread",
    "check_equality",
    "measure_spread",
    "negative_control",
    "plain_spread",
    "widest_spread",
]

TopLogprobs = tuple[tuple[float, int], ...]

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Difference:
    """One reason why the gate is red.

    Attributes:
        key: the request.
        position: of the output token; -1 when the whole request is meant.
        reason: what differs, with the numbers.
    """

    key: str
    position: int
    reason: str


@dataclass(frozen=True, slots=True)
class Spread:
    """How far plain SGLang is from itself, in natural-log probability.

    Attributes:
        max_logprob: largest move of a top-5 logprob.
        mean_logprob: mean move of a top-5 logprob.
        max_gap: largest move of the distance between the best two tokens.
        num_tokens: output tokens behind these figures.
    """

    max_logprob: float
    mean_logprob: float
    max_gap: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class GateResult:
    """What the gate found.

    Attributes:
        differences: why it is red; empty when it is green.
        num_requests: in the schedule.
        num_exact: requests compared bit for bit.
        num_near: requests compared under the near-tie rule.
        exact_fraction: share of all output tokens compared bit for bit.
        near_ties: tokens that differed at an explained near-tie.
        exact_tokens_by_tier: cached tokens behind the exact answers, by tier.
    """

    differences: tuple[Difference, ...]
    num_requests: int
    num_exact: int
    num_near: int
    exact_fraction: float
    near_ties: int
    exact_tokens_by_tier: Mapping[str, int] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether the gate is green."""
        return not self.differences

    def summary(self) -> str:
        """Say the result in a few lines, the first differences included."""
        tiers = ", ".join(f"{n} {v}" for n, v in self.exact_tokens_by_tier.items())
        lines = [
            f"equality gate {'GREEN' if self.passed else 'RED'}: "
            f"{self.num_exact} of {self.num_requests} answers compared bit for bit "
            f"({self.exact_fraction:.0%} of the output tokens), {self.num_near} under "
            f"the near-tie rule, {self.near_ties} explained near-ties; cached tokens "
            f"behind exact answers: {tiers or 'none'}"
        ]
        for item in self.differences[:_SHOWN]:
            where = "" if item.position < 0 else f" token {item.position}"
            lines.append(f"  {item.key}{where}: {item.reason}")
        if len(self.differences) > _SHOWN:
            lines.append(f"  and {len(self.differences) - _SHOWN} more")
        return "\n".join(lines)


class NegativeControlError(AssertionError):
    """The gate let a corrupted run pass, so its green means nothing.

    Attributes:
        name: of the corruption that was not caught.
    """

    def __init__(self, name: str, result: GateResult) -> None:
        super().__init__(f"corruption {name!r} was not caught: {result.summary()}")
        self.name = name


def measure_spread(
    plain: Sequence[RequestRecord], other_plain: Sequence[RequestRecord]
) -> Spread:
    """Measure plain SGLang against itself over the same prompts.

    Give it two runs whose batching or hit lengths differ, as they may between
    reference and candidate. Answers count up to their first differing token.

    Raises:
        ValueError: the runs share no comparable output token.
    """
    pairs, problems = _pair(plain, other_plain)
    if problems:
        raise ValueError(f"not two runs of one schedule: {problems[0]}")
    moves: list[float] = []
    gaps: list[float] = []
    for ours, theirs in pairs:
        for position in range(_common_tokens(ours, theirs)):
            best, other = ours.top_logprobs[position], theirs.top_logprobs[position]
            moves.extend(_moves(best, other))
            gaps.append(_gap_move(best, other))
    if not moves:
        raise ValueError("no output token to measure the spread on")
    return Spread(max(moves), sum(moves) / len(moves), max(gaps), len(gaps))


def plain_spread(
    reference: Sequence[RequestRecord], plain: Sequence[RequestRecord], page_size: int
) -> Spread:
    """Measure plain against itself where it did not compute alike.

    Answers that were computed alike do not move; among the others they would only make
    the mean look smaller than the moves that it is compared with. Where all were, they
    are what there is.

    Args:
        reference: plain SGLang's records, in schedule order.
        plain: the same requests to plain SGLang with a small pool, which recomputes
            where the reference hits: the rounding that a load-or-recompute decision
            may rightly cause.
        page_size: tokens per page, on both servers.

    Raises:
        ValueError: the runs share no comparable output token, or one has failed.
    """
    pairs, problems = _pair(reference, plain)
    if problems:
        raise ValueError(f"not two runs of one schedule: {problems[0]}")
    alike = exact_orders(pairs, page_size)
    moved = [pair for pair in pairs if pair[0].order not in alike] or pairs
    return measure_spread([ours for ours, _ in moved], [other for _, other in moved])


def widest_spread(spreads: Sequence[Spread]) -> Spread:
    """Return what allows as much as any of several spreads, at least one."""
    return Spread(
        max_logprob=max(spread.max_logprob for spread in spreads),
        mean_logprob=max(spread.mean_logprob for spread in spreads),
        max_gap=max(spread.max_gap for spread in spreads),
        num_tokens=sum(spread.num_tokens for spread in spreads),
    )


def check_equality(
    reference: Sequence[RequestRecord],
    candidate: Sequence[RequestRecord],
    *,
    page_size: int,
    spread: Spread | None = None,
    forced: bool = True,
    min_exact_fraction: float = 1.0,
    must_cover: Iterable[str] = (),
    slack: float = 1.5,
    unlike: Collection[int] = (),
) -> GateResult:
    """Compare a candidate's answers with the reference's.

    Args:
        reference: plain SGLang's records, in schedule order.
        candidate: the records to judge.
        page_size: tokens per page, on both servers.
        spread: plain against plain; without it only exact requests are judged.
        forced: whether both runs had the same batches. False (free concurrency)
            puts every request under the near-tie rule.
        min_exact_fraction: least share of output tokens to compare exactly.
            Ignored when not ``forced``.
        must_cover: tiers (as in ``cached_by_tier``) that must be behind at least
            one exact answer; behind any compared one where no run was ``forced``.
        slack: factor on the spread.
        unlike: ``order`` of forced batches that turned out other than the reference's;
            they, and what reuses their pages, come under the near-tie rule.
    """
    pairs, problems = _pair(reference, candidate)
    differences = list(problems)
    if not forced and spread is None:
        differences.append(Difference("*", -1, "free concurrency needs a spread"))
    exact = exact_orders(pairs, page_size, unlike) if forced else frozenset[int]()
    covered: Counter[str] = Counter()
    near_covered: Counter[str] = Counter()
    near_ties = num_exact = num_near = exact_tokens = 0
    moves: list[float] = []
    for ours, theirs in pairs:
        if ours.order in exact:
            num_exact += 1
            exact_tokens += len(ours.output)
            covered.update(theirs.cached_by_tier)
            differences.extend(_exact_differences(ours, theirs))
        elif spread is not None:
            num_near += 1
            near_covered.update(theirs.cached_by_tier)
            found, tied = _near_differences(ours, theirs, spread, slack, moves)
            differences.extend(found)
            near_ties += tied
    if spread is not None and len(moves) >= 100:
        mean = sum(moves) / len(moves)
        if mean > slack * spread.mean_logprob:
            reason = (
                f"mean logprob move {mean:.4f} > {slack} x {spread.mean_logprob:.4f}"
            )
            differences.append(Difference("*", -1, reason))
    total_tokens = sum(len(ours.output) for ours, _ in pairs)
    fraction = exact_tokens / total_tokens if total_tokens else 0.0
    if not total_tokens:
        differences.append(Difference("*", -1, "nothing to compare"))
    elif forced and fraction < min_exact_fraction:
        reason = f"only {fraction:.1%} compared exactly, {min_exact_fraction:.1%} asked"
        differences.append(Difference("*", -1, reason))
    for tier in must_cover:
        if (covered if forced else near_covered)[tier] <= 0:
            kind = "exact" if forced else "compared"
            reason = f"no {kind} answer used the {tier} tier"
            differences.append(Difference("*", -1, reason))
    return GateResult(
        differences=tuple(differences),
        num_requests=len(pairs),
        num_exact=num_exact,
        num_near=num_near,
        exact_fraction=fraction,
        near_ties=near_ties,
        exact_tokens_by_tier={n: v for n, v in covered.items() if v > 0},
    )


def negative_control(corrupted: Mapping[str, GateResult]) -> None:
    """Demand that the gate caught every corruption.

    Args:
        corrupted: by name, the gate's result on a run whose KV was damaged on
            purpose: one cached page zeroed (``zero``), one replaced by a page of
            another prompt (``swap``).

    Raises:
        NegativeControlError: a damaged run passed, or failed for another reason
            than a differing token or logprob (too little compared, say).
        ValueError: no corruption was tried.
    """
    if not corrupted:
        raise ValueError("a negative control needs at least one corruption")
    for name, result in corrupted.items():
        if not any(difference.position >= 0 for difference in result.differences):
            raise NegativeControlError(name, result)


def _pair(
    reference: Sequence[RequestRecord], candidate: Sequence[RequestRecord]
) -> tuple[list[tuple[RequestRecord, RequestRecord]], list[Difference]]:
    """Pair records by key, in schedule order; say what cannot be paired."""
    theirs = {record.key: record for record in candidate}
    pairs = []
    problems = []
    if len(theirs) != len(candidate):
        problems.append(Difference("*", -1, "the candidate repeats a key"))
    for ours in sorted(reference, key=lambda record: record.order):
        found = theirs.pop(ours.key, None)
        if found is None:
            problems.append(Difference(ours.key, -1, "missing in the candidate"))
            continue
        reason = _unusable(ours, found)
        if reason is None:
            pairs.append((ours, found))
        else:
            problems.append(Difference(ours.key, -1, reason))
    problems.extend(Difference(key, -1, "missing in the reference") for key in theirs)
    return pairs, problems


def _unusable(ours: RequestRecord, theirs: RequestRecord) -> str | None:
    for side, record in (("reference", ours), ("candidate", theirs)):
        if record.error is not None:
            return f"error in the {side}: {record.error}"
        if len(record.top_logprobs) != len(record.output):
            return f"the {side} lacks top logprobs of some output token"
    if ours.prompt != theirs.prompt:
        return "the prompts differ: not the same schedule"
    if len(ours.output) != len(theirs.output):
        return f"{len(ours.output)} output tokens against {len(theirs.output)}"
    return None


def _common_tokens(ours: RequestRecord, theirs: RequestRecord) -> int:
    """Output tokens up to and including the first that differs."""
    for position, (a, b) in enumerate(zip(ours.output, theirs.output, strict=True)):
        if a != b:
            return position + 1
    return len(ours.output)


def _exact_differences(
    ours: RequestRecord, theirs: RequestRecord
) -> Iterable[Difference]:
    for position in range(_common_tokens(ours, theirs)):
        a, b = ours.output[position], theirs.output[position]
        if a != b:
            reason = f"token {a} became {b}, computed alike on both sides"
            yield Difference(ours.key, position, reason)
            return
        best, other = ours.top_logprobs[position], theirs.top_logprobs[position]
        if best != other:
            move = max(_moves(best, other), default=0.0)
            reason = f"top-5 logprobs differ by {move:.5f}, computed alike"
            yield Difference(ours.key, position, reason)
            return


def _near_differences(
    ours: RequestRecord,
    theirs: RequestRecord,
    spread: Spread,
    slack: float,
    moves: list[float],
) -> tuple[list[Difference], int]:
    """Judge one answer under the near-tie rule.

    Appends the logprob moves it saw to ``moves``.

    Returns:
        what is not explained, and the number of explained near-ties (0 or 1).
    """
    most, most_gap = slack * spread.max_logprob, slack * spread.max_gap
    for position in range(_common_tokens(ours, theirs)):
        best, other = ours.top_logprobs[position], theirs.top_logprobs[position]
        here = _moves(best, other)
        moves.extend(here)
        move = max(here, default=0.0)
        if move > most:
            reason = f"a top-5 logprob moved {move:.4f}, plain moves {most:.4f} at most"
            return [Difference(ours.key, position, reason)], 0
        a, b = ours.output[position], theirs.output[position]
        if a == b:
            continue
        gap = _gap(best, a, b)
        if gap > most_gap:
            reason = f"token {a} became {b} across a gap of {gap:.4f} > {most_gap:.4f}"
            return [Difference(ours.key, position, reason)], 0
        return [], 1
    return [], 0


def _moves(best: TopLogprobs, other: TopLogprobs) -> list[float]:
    """Return how far each of the best tokens' logprobs moved, at least.

    A token that left the other side's list fell at least below that list's end.
    """
    there = {token: logprob for logprob, token in other}
    floor = min(there.values(), default=0.0)
    return [
        abs(logprob - there[token]) if token in there else max(0.0, logprob - floor)
        for logprob, token in best
    ]


def _gap(top: TopLogprobs, first: int, second: int) -> float:
    """Distance of two tokens' logprobs; infinite if one is not in the list."""
    logprobs = {token: logprob for logprob, token in top}
    if first not in logprobs or second not in logprobs:
        return float("inf")
    return abs(logprobs[first] - logprobs[second])


def _gap_move(best: TopLogprobs, other: TopLogprobs) -> float:
    """How far the distance between the best two tokens moved; 0 if unknown."""
    there = {token: logprob for logprob, token in other}
    if len(best) < 2 or best[0][1] not in there or best[1][1] not in there:
        return 0.0
    before = best[0][0] - best[1][0]
    return abs(before - (there[best[0][1]] - there[best[1][1]]))
