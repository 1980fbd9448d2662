"""Cache theory: known hit ratios of two public traces, found again.

Give the Mooncake conversation trace and the WEKA development conversations, in any
order. Each is replayed through exclusive GPU, host and disk tiers under LRU, with
131,072 B per token (Llama-3.1-8B in bfloat16) and 54, 512 and 4,000 decimal GB, and
the token hit ratio is compared with the one that is known for it. Prints a table in
Markdown; exits with 1 where a ratio is off by more than 0.005.

    python benchmarks/sim/theory.py mooncake_conversation_trace.jsonl.gz \
        weka_agentic_dev.jsonl.gz [--page-tokens 512] [--no-served]

Columns: `exclusive` is a direct replay with the product's table, index, evictors and
LRU policy; `stack` is the same from the capacity plan, by stack distances (they must
agree to the token); `served` is the form that is shipped, an inclusive write-through
TieredCache under a device tree; `OPT` is Belady's bound.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from sgl_tiered_workloads.traces.base import Trace, TraceError
from sgl_tiered_workloads.traces.files import json_rows
from sgl_tiered_workloads.traces.mooncake import read_mooncake
from sgl_tiered_workloads.traces.weka import read_weka

from sgl_tiered.cache.tiered_cache import TierConfig
from sgl_tiered.core.ids import TierId
from sgl_tiered.policies.eviction.lru import LRUPolicy
from sgl_tiered.sim.capacity import capacity_plan
from sgl_tiered.sim.exclusive import ExclusiveTier
from sgl_tiered.sim.page_trace import PageTrace
from sgl_tiered.sim.replay import ReplayResult, replay_exclusive, replay_served

TOKEN_BYTES = 131_072
GB = 10**9
TIER_BYTES = {TierId.DEVICE: 54 * GB, TierId.HOST: 512 * GB, TierId.DISK: 4000 * GB}
UNLIMITED_GB = 10**9
WEKA_MAX_PROMPT_TOKENS = 128_000
TOLERANCE = 0.005
EXACT = 1e-9
"""Two ways to count the same tokens, whose shares are added up in floats."""


@dataclass(frozen=True)
class Known:
    """What is known of a trace: hit ratios of LRU and OPT by decimal GB, and the ideal.

    54 GB, 566 GB and 4,566 GB are the tiers of ``TIER_BYTES``, added up.
    """

    curve: dict[int, tuple[float, float]]
    ideal: float


MOONCAKE = Known(
    {
        27: (0.043, 0.125),
        54: (0.044, 0.176),
        100: (0.049, 0.231),
        200: (0.066, 0.300),
        400: (0.141, 0.362),
        566: (0.190, 0.374),
        800: (0.234, 0.374),
        1600: (0.312, 0.374),
        2500: (0.354, 0.374),
        4566: (0.367, 0.374),
        8000: (0.372, 0.374),
    },
    0.374,
)
WEKA = Known(
    {
        27: (0.147, 0.452),
        54: (0.379, 0.669),
        100: (0.703, 0.843),
        200: (0.903, 0.939),
        400: (0.946, 0.956),
        566: (0.950, 0.957),
        4566: (0.957, 0.957),
    },
    0.957,
)


def read(path: Path) -> tuple[Trace, Known]:
    """Read a trace of either format, told apart by the first record."""
    first = next(json_rows(path)).fields
    if "hash_ids" in first:
        return read_mooncake(path), MOONCAKE
    if "requests" in first:
        return read_weka(path, max_prompt_tokens=WEKA_MAX_PROMPT_TOKENS), WEKA
    raise TraceError(path, 1, "neither Mooncake nor WEKA", "give one of the two")


def as_pages(trace: Trace, page_tokens: int) -> PageTrace:
    return PageTrace(
        [request.block_ids for request in trace.requests],
        [request.num_prompt_tokens for request in trace.requests],
        trace.block_tokens,
        page_tokens,
    )


def cumulative(result: ReplayResult) -> list[float]:
    """Return the hit ratio of the first tier, of the first two, and of all three."""
    shares = [result.token_hit_rate_of(tier) for tier in TIER_BYTES]
    return [sum(shares[: n + 1]) for n in range(len(shares))]


def rounded(difference: float) -> float:
    """Return it to four digits, without a negative zero."""
    return round(difference, 4) + 0.0


class Stopwatch:
    """Seconds since the last look, on the wall and of this process's one thread."""

    def __init__(self) -> None:
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()

    def lap(self) -> str:
        """Return the seconds since the last call, in words."""
        wall_s, cpu_s = self._wall_s, self._cpu_s
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()
        return f"{self._cpu_s - cpu_s:.1f} s CPU ({self._wall_s - wall_s:.1f} s wall)"


def check(path: Path, page_tokens: int, with_served: bool) -> bool:
    """Print one trace's tables; return whether every ratio is as known."""
    watch = Stopwatch()
    trace, known = read(path)
    pages = as_pages(trace, page_tokens)
    laps = [f"read {watch.lap()}"]
    page_bytes = page_tokens * TOKEN_BYTES
    slots = {tier: size // page_bytes for tier, size in TIER_BYTES.items()}
    tiers = [ExclusiveTier(tier, n, LRUPolicy()) for tier, n in slots.items()]
    exclusive = cumulative(replay_exclusive(pages, tiers))
    laps.append(f"exclusive {watch.lap()}")
    served = [""] * len(tiers)
    if with_served:
        lower = [TierConfig(tier, slots[tier]) for tier in list(slots)[1:]]
        reached = cumulative(replay_served(pages, slots[TierId.DEVICE], lower))
        served = [f"{rate:.4f}" for rate in reached]
        laps.append(f"served {watch.lap()}")
    choices = [{TierId.DEVICE: gb * GB} for gb in [*known.curve, UNLIMITED_GB]]
    *rows, unlimited, split = capacity_plan(pages, TOKEN_BYTES, [*choices, TIER_BYTES])
    laps.append(f"all sizes, stack and OPT, {watch.lap()}")

    print(
        f"\n**{trace.name}**: {len(pages):,} requests, {pages.total_tokens:,} prompt "
        f"tokens, pages of {page_tokens}\n"
    )
    print("| tiers, GB | wanted | exclusive | difference | stack | served |")
    print("|---|---|---|---|---|---|")
    fine = True
    total_gb, stack = 0, 0.0
    for n, (tier, size) in enumerate(TIER_BYTES.items()):
        total_gb += size // GB
        stack += split.hit_rate[tier]
        wanted = known.curve[total_gb][0]
        off = exclusive[n] - wanted
        fine &= abs(off) <= TOLERANCE and abs(exclusive[n] - stack) < EXACT
        print(
            f"| {total_gb:,} | {wanted:.3f} | {exclusive[n]:.4f} | {rounded(off):+.4f} "
            f"| {stack:.4f} | {served[n]} |"
        )
    print("\n| one LRU, GB | wanted | stack | difference | OPT wanted | OPT |")
    print("|---|---|---|---|---|---|")
    wanted_of = {**known.curve, UNLIMITED_GB: (known.ideal, known.ideal)}
    for (gb, wanted), row in zip(wanted_of.items(), [*rows, unlimited], strict=True):
        seen = (row.token_hit_rate, row.opt_hit_rate)
        off = seen[0] - wanted[0]
        fine &= abs(off) <= TOLERANCE and abs(seen[1] - wanted[1]) <= TOLERANCE
        label = "no limit" if gb == UNLIMITED_GB else f"{gb:,}"
        print(
            f"| {label} | {wanted[0]:.3f} | {seen[0]:.4f} | {rounded(off):+.4f} "
            f"| {wanted[1]:.3f} | {seen[1]:.4f} |"
        )
    moved = [
        f"{tier.label} {split.stored_bytes[tier] / 1e12:.2f} TB in, "
        f"{split.loaded_bytes[tier] / 1e12:.2f} TB up"
        for tier in list(TIER_BYTES)[1:]
    ]
    print(f"\nMoved between exclusive tiers: {'; '.join(moved)}.")
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"\n{'; '.join(laps)}; peak memory of the process {peak_mib:,.0f} MiB.")
    return fine


def main() -> int:
    """Check all traces; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    parser.add_argument("--page-tokens", type=int, default=512)
    parser.add_argument(
        "--no-served", action="store_true", help="leave out the shipped form"
    )
    args = parser.parse_args()
    try:
        fine = [
            check(path, args.page_tokens, not args.no_served) for path in args.paths
        ]
    except (TraceError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
