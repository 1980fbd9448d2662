"""Eviction policies on traces: what each keeps of what the best possible one would.

Give traces as KIND=PATH: conversation (Mooncake), weka (dev set, prompts up to 128,000
tokens), sharegpt (lengths, Poisson sessions), tau and react (recorded agents). Each is
replayed without time through the simulator's exclusive hierarchy, whose evictor and
policies are the product's, as one tier of each size at 131,072 B per token
(Llama-3.1-8B in bfloat16). A policy sees no queue, the next 16 requests (``next 16``),
or the requests that would really wait (``queue``): those behind each request in the
simulated server's queue (an H800 with 54 GB of KV and 512 GB of host) at the trace's
rate, or at the slower one named.

Ratios are hit prompt tokens over all. ``gap`` is (hit - LRU) / (OPT - LRU). Exits with
1 where ``cost`` hits less than LRU. The last line is one JSON object.

    python benchmarks/sim/eviction.py conversation=PATH weka=PATH sharegpt=PATH tau=PATH
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from sgl_tiered_workloads.registry import make_workload
from sgl_tiered_workloads.traces.base import TraceError
from sgl_tiered_workloads.traces.mooncake import read_mooncake
from sgl_tiered_workloads.traces.weka import read_weka

from sgl_tiered.cli.simulate_workload import from_sessions, from_trace
from sgl_tiered.core.ids import TierId
from sgl_tiered.policies.eviction.registry import make_eviction_policy
from sgl_tiered.sim.exclusive import ExclusiveTier
from sgl_tiered.sim.opt import OptBound
from sgl_tiered.sim.page_trace import PageTrace
from sgl_tiered.sim.replay import replay_exclusive
from sgl_tiered.sim.requests import SimWorkload
from sgl_tiered.sim.server import simulate
from sgl_tiered.sim.spec import SimSpec
from sgl_tiered.sim.stack import LRUCurve

TOKEN_BYTES = 131_072
GB = 10**9
SIZES_GB = (27.0, 54.0, 100.0, 200.0, 566.0)
SMALL_SIZES_GB = (0.5, 1.0, 2.0, 5.0, 10.0)
WEKA_MAX_PROMPT_TOKENS = 128_000
NEXT = 16
SEED = 1


@dataclass(frozen=True)
class Kind:
    """How a trace is read and replayed.

    Attributes:
        page_tokens: of a page.
        sizes_gb: of the tier.
        slowdown: of the simulated server's arrivals; one device cannot keep up with
            a trace of many.
        workload, params: where it is a workload of the harness.
    """

    page_tokens: int
    sizes_gb: tuple[float, ...] = SIZES_GB
    slowdown: float = 1.0
    workload: str = ""
    params: dict[str, Any] = field(default_factory=dict)


def poisson(rate_per_s: float) -> dict[str, Any]:
    return {"process": "poisson", "rate_per_s": rate_per_s}


KINDS = {
    "conversation": Kind(512, slowdown=8.0),
    "weka": Kind(512, slowdown=2.0),
    "sharegpt": Kind(
        16,
        sizes_gb=(10.0, *SIZES_GB),
        workload="sharegpt",
        params={"num_sessions": 5_000, "think_s": 30.0, "arrivals": poisson(1.0)},
    ),
    "tau": Kind(
        16,
        sizes_gb=(*SMALL_SIZES_GB, 27.0),
        workload="tau_bench",
        params={"think_s": 5.0, "tool_s": 5.0, "arrivals": poisson(0.5)},
    ),
    "react": Kind(
        16,
        sizes_gb=(0.25, 0.5, 1.0, 27.0),
        workload="react",
        params={"tool_s": 5.0, "arrivals": poisson(1.0)},
    ),
}
PATH_OF = {"sharegpt": "lengths", "tau": "path", "react": "sessions"}


def read(name: str, kind: Kind, path: Path) -> SimWorkload:
    """Read a trace as requests of the simulator."""
    if kind.workload:
        params = {**kind.params, PATH_OF[name]: str(path)}
        workload = make_workload(kind.workload, params, SEED, 128_000)
        return from_sessions(workload, kind.page_tokens)
    if name == "conversation":
        trace = read_mooncake(path)
    else:
        trace = read_weka(path, max_prompt_tokens=WEKA_MAX_PROMPT_TOKENS)
    spec = SimSpec(page_size=kind.page_tokens, slowdown=kind.slowdown)
    return from_trace(trace, spec)


def in_time(workload: SimWorkload, page_tokens: int) -> tuple[PageTrace, list[int]]:
    """Return prompts in the order in which they would be sent, and whose they are.

    A turn follows the one before it by its pause: answers take no time here.
    """
    sent_s: list[float] = []
    for request in workload.requests:
        after_s = sent_s[request.after] if request.after >= 0 else 0.0
        sent_s.append(max(request.arrival_s, after_s + request.think_s))
    order = np.argsort(sent_s, kind="stable").tolist()
    requests = [workload.requests[number] for number in order]
    lengths = [request.num_prompt_tokens for request in requests]
    pages = [
        request.page_ids[: length // page_tokens]
        for request, length in zip(requests, lengths, strict=True)
    ]
    return PageTrace(pages, lengths, page_tokens), order


def waiting_behind(
    workload: SimWorkload, order: Sequence[int], page_tokens: int
) -> list[int]:
    """Return how many requests wait behind each one when a server admits it."""
    spec = SimSpec(
        page_size=page_tokens, device_gb=54.0, host_gb=512.0, order="fcfs"
    ).server()
    records = simulate(spec, workload).records
    admitted_s = np.array([records[number].admitted_s for number in order])
    arrived_s = np.array([records[number].arrival_s for number in order])
    behind = []
    for place, now_s in enumerate(admitted_s):
        # First come, first served: only what was sent later can wait behind it.
        later = slice(place + 1, place + 4_097)
        waits = (arrived_s[later] <= now_s) & (admitted_s[later] > now_s)
        behind.append(int(waits.sum()))
    return behind


class Table:
    """One trace: what every policy hits at every size."""

    def __init__(self, name: str, kind: Kind, path: Path, num_requests: int) -> None:
        self.name = name
        self.kind = kind
        workload = read(name, kind, path)
        if num_requests:
            kept = workload.requests[:num_requests]
            workload = SimWorkload(workload.name, workload.page_tokens, kept)
        self._workload = workload
        self.pages, self._order = in_time(workload, kind.page_tokens)
        self._lru = LRUCurve(self.pages)
        self._opt = OptBound(self.pages)
        self._behind: list[int] = []
        self.rows: dict[str, dict[str, float]] = {}

    def run(self, policies: Sequence[str]) -> None:
        """Replay; prints a row per policy."""
        total = self.pages.total_tokens
        sizes = self.kind.sizes_gb
        slots = [
            max(1, int(size * GB) // (self.kind.page_tokens * TOKEN_BYTES))
            for size in sizes
        ]
        print(
            f"\n**{self.name}**: {len(self.pages):,} requests, {total:,} tokens, "
            f"pages of {self.kind.page_tokens}"
        )
        if any(name.endswith(" queue") for name in policies):
            self._behind = waiting_behind(
                self._workload, self._order, self.kind.page_tokens
            )
            behind = np.array(self._behind)
            print(
                f"Waiting behind a request, {self.kind.slowdown:g} times slower than "
                f"recorded: mean {behind.mean():.1f}, median {np.median(behind):.0f}, "
                f"p99 {np.percentile(behind, 99):.0f}"
            )
        print(f"\n| policy | {' | '.join(f'{size:g} GB' for size in sizes)} |")
        print("|---" * (len(sizes) + 1) + "|")
        self._row("lru", [self._lru.hit_tokens(num) / total for num in slots])
        for name in policies:
            policy, _, sees = name.partition(" ")
            visible: int | Sequence[int] = 0
            if sees:
                visible = NEXT if sees.startswith("next") else self._behind
            self._row(name, [self._hit(policy, num, visible) for num in slots])
        self._row("opt", [self._opt.hit_tokens(num) / total for num in slots])
        for name in self.rows:
            if name.startswith("cost"):
                self._print_gap(name)

    def gap(self, name: str, size: str) -> float:
        """Return the share of what LRU leaves to OPT that a policy closes."""
        lru, opt = self.rows["lru"][size], self.rows["opt"][size]
        return (self.rows[name][size] - lru) / (opt - lru) if opt > lru else 0.0

    def worst(self) -> float:
        """Return by how much ``cost`` is above LRU where it is least."""
        return min(
            row[size] - self.rows["lru"][size]
            for name, row in self.rows.items()
            if name.startswith("cost")
            for size in row
        )

    def _hit(self, policy: str, slots: int, visible: int | Sequence[int]) -> float:
        rng = np.random.default_rng(SEED)
        tier = ExclusiveTier(TierId.DEVICE, slots, make_eviction_policy(policy, rng))
        return replay_exclusive(self.pages, [tier], visible).token_hit_rate

    def _row(self, name: str, rates: Sequence[float]) -> None:
        keys = [f"{size:g}" for size in self.kind.sizes_gb]
        self.rows[name] = dict(zip(keys, rates, strict=True))
        print(f"| {name} | {' | '.join(f'{rate:.4f}' for rate in rates)} |", flush=True)

    def _print_gap(self, name: str) -> None:
        gaps = [f"{self.gap(name, size):.1%}" for size in self.rows[name]]
        print(f"| gap closed by {name} | {' | '.join(gaps)} |")


POLICIES = (
    "fifo",
    "random",
    "score queue",
    f"score next {NEXT}",
    "cost",
    "cost queue",
    f"cost next {NEXT}",
)


def main() -> int:
    """Replay all traces; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="+", metavar="KIND=PATH")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--requests", type=int, default=0, help="first ones; 0: all")
    parser.add_argument("--sizes-gb", default="", help="of the tier; else by kind")
    parser.add_argument("--slowdown", type=float, default=0.0, help="else by kind")
    args = parser.parse_args()
    tables = []
    try:
        for item in args.traces:
            name, _, path = item.partition("=")
            if name not in KINDS:
                parser.error(f"{name!r} is none of {', '.join(KINDS)}")
            kind = KINDS[name]
            if args.sizes_gb:
                sizes = tuple(float(size) for size in args.sizes_gb.split(","))
                kind = replace(kind, sizes_gb=sizes)
            if args.slowdown:
                kind = replace(kind, slowdown=args.slowdown)
            table = Table(name, kind, Path(path), args.requests)
            table.run(args.policies.split(","))
            tables.append(table)
    except (TraceError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(
        json.dumps(
            {
                "hit_ratio": {table.name: table.rows for table in tables},
                "cost_minus_lru_worst": min(table.worst() for table in tables),
            }
        )
    )
    return 0 if all(table.worst() >= 0 for table in tables) else 1


if __name__ == "__main__":
    sys.exit(main())
