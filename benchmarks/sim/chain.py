"""A chain of tiers against the cache theory, and what its policies cost and bring.

Give a Mooncake or a WEKA trace. It is replayed through the product's own TieredCache,
with device, host, CXL and disk of the sizes given (decimal GB) at 131,072 B per token
(Llama-3.1-8B in bfloat16). Three tables in Markdown, then one JSON object:

1. Token hits by tier, the shipped chain (inclusive) beside what LRU of the same sizes
   must hit by stack distances, and beside an exclusive chain. Exits with 1 where a tier
   of the shipped chain is further than 2 points from the theory.
2. Write admission of the disk: bytes written there, and hits, for each policy, and
   under each eviction policy of the tiers below the device that is named.
3. Write policy of the first tier: bytes copied off the device, and hits.

    python benchmarks/sim/chain.py mooncake_conversation_trace.jsonl.gz \
        [--sizes-gb 54,256,1000,4000] [--page-tokens 512] \
        [--eviction lru,cost] [--requests 4000]
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from sgl_tiered_workloads.traces.base import Trace, TraceError
from sgl_tiered_workloads.traces.files import json_rows
from sgl_tiered_workloads.traces.mooncake import read_mooncake
from sgl_tiered_workloads.traces.weka import read_weka

from sgl_tiered.cache.tiered_cache import TierConfig
from sgl_tiered.core.ids import TierId
from sgl_tiered.policies.write_admission.registry import WRITE_ADMISSIONS
from sgl_tiered.sim.page_trace import PageTrace
from sgl_tiered.sim.replay import ReplayResult, ServedPolicies, replay_served
from sgl_tiered.sim.stack import LRUCurve

TOKEN_BYTES = 131_072
GB = 10**9
CHAIN = (TierId.DEVICE, TierId.HOST, TierId.CXL, TierId.DISK)
WEKA_MAX_PROMPT_TOKENS = 128_000
TOLERANCE = 0.02


def read(path: Path) -> Trace:
    """Read a trace of either format, told apart by the first record."""
    first = next(json_rows(path)).fields
    if "hash_ids" in first:
        return read_mooncake(path)
    if "requests" in first:
        return read_weka(path, max_prompt_tokens=WEKA_MAX_PROMPT_TOKENS)
    raise TraceError(path, 1, "neither Mooncake nor WEKA", "give one of the two")


class Chain:
    """A trace, and the tiers that it is replayed through."""

    def __init__(self, trace: Trace, sizes_gb: list[float], page_tokens: int) -> None:
        self.pages = PageTrace(
            [request.block_ids for request in trace.requests],
            [request.num_prompt_tokens for request in trace.requests],
            trace.block_tokens,
            page_tokens,
        )
        self.page_bytes = page_tokens * TOKEN_BYTES
        self.slots = {
            tier: int(size * GB) // self.page_bytes
            for tier, size in zip(CHAIN, sizes_gb, strict=True)
            if size
        }
        self._curve = LRUCurve(self.pages)

    def run(self, **policies: Any) -> ReplayResult:
        """Replay through the product's cache."""
        device, *lower = self.slots
        return replay_served(
            self.pages,
            self.slots[device],
            [TierConfig(tier, self.slots[tier]) for tier in lower],
            ServedPolicies(**policies),
        )

    def inclusive(self) -> list[float]:
        """Return what LRU hits in each tier where each holds what those above do."""
        return self._by_tier(list(accumulate(self.slots.values(), max)))

    def exclusive(self) -> list[float]:
        """Return what LRU hits in each tier where every page is in one of them."""
        return self._by_tier(list(accumulate(self.slots.values())))

    def _by_tier(self, totals: list[int]) -> list[float]:
        hits = [0, *(self._curve.hit_tokens(total) for total in totals)]
        return [(b - a) / self.pages.total_tokens for a, b in pairwise(hits)]


def by_tier(chain: Chain, result: ReplayResult) -> list[float]:
    return [result.token_hit_rate_of(tier) for tier in chain.slots]


def shares(rates: list[float]) -> str:
    return " | ".join(f"{rate:.4f}" for rate in [*rates, sum(rates)])


def tables(chain: Chain, evictions: list[str]) -> dict[str, Any]:
    """Print the tables; return their figures."""
    tiers = [tier.label for tier in chain.slots]
    titles = " | ".join([*tiers, "all"])
    rule = "|---" * (len(tiers) + 2) + "|"
    base = chain.run()
    theory = chain.inclusive()
    served = by_tier(chain, base)
    worst = max(abs(a - b) for a, b in zip(served, theory, strict=True))
    cold = chain.run(demote_policy="on-evict")
    print(f"\n| token hits | {titles} |\n{rule}")
    print(f"| theory, inclusive | {shares(theory)} |")
    print(f"| served, write-through | {shares(served)} |")
    print(f"| served, demotion on-evict | {shares(by_tier(chain, cold))} |")
    print(f"| theory, exclusive | {shares(chain.exclusive())} |")
    print(f"\nWorst tier: {100 * worst:.2f} points off.")

    def tb(result: ReplayResult, tier: TierId) -> float:
        return result.stored_pages[tier] * chain.page_bytes / 1e12

    admissions = {}
    if TierId.DISK in chain.slots:
        titles = "disk admission | eviction | TB written to disk | disk hits | all hits"
        print(f"\n| {titles} |\n|---|---|---|---|---|")
        for name in WRITE_ADMISSIONS:
            for eviction in evictions:
                result = base
                if (name, eviction) != ("all", "lru"):
                    result = chain.run(disk_admission=name, eviction=eviction)
                rates = by_tier(chain, result)
                written = tb(result, TierId.DISK)
                key = name if eviction == "lru" else f"{name} {eviction}"
                admissions[key] = {
                    "tb_written": written,
                    "disk": rates[-1],
                    "all": sum(rates),
                }
                print(
                    f"| {name} | {eviction} | {written:.2f} | {rates[-1]:.4f} | "
                    f"{sum(rates):.4f} |",
                    flush=True,
                )
    first = list(chain.slots)[1]
    runs = {
        "write-through": base,
        "selective": chain.run(write_policy="selective"),
        **{
            f"on-evict {threshold}": chain.run(
                write_policy="on-evict", offload_threshold=threshold
            )
            for threshold in (0.9, 0.5)
        },
    }
    print("\n| write policy | TB off the device | TB lost by the device | all hits |")
    print("|---|---|---|---|")
    writes = {}
    for name, result in runs.items():
        lost = result.late_pages * chain.page_bytes / 1e12
        rate = result.token_hit_rate
        writes[name] = {"tb_copied": tb(result, first), "tb_late": lost, "all": rate}
        print(f"| {name} | {tb(result, first):.2f} | {lost:.2f} | {rate:.4f} |")
    return {
        "theory": dict(zip(tiers, theory, strict=True)),
        "served": dict(zip(tiers, served, strict=True)),
        "worst_points": 100 * worst,
        "admissions": admissions,
        "writes": writes,
    }


def main() -> int:
    """Print the tables of one trace; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path)
    parser.add_argument(
        "--sizes-gb",
        default="54,256,1000,4000",
        help="device, host, CXL and disk; 0 for a tier that is not there",
    )
    parser.add_argument("--page-tokens", type=int, default=512)
    parser.add_argument("--eviction", default="lru", help="below the device")
    parser.add_argument("--requests", type=int, default=0, help="first ones; 0: all")
    args = parser.parse_args()
    try:
        sizes = [float(size) for size in args.sizes_gb.split(",")]
        trace = read(args.path)
        kept = trace.requests[: args.requests or None]
        trace = Trace(trace.name, trace.block_tokens, kept)
        chain = Chain(trace, sizes, args.page_tokens)
        print(
            f"**{trace.name}**: {len(chain.pages):,} requests, "
            f"{chain.pages.total_tokens:,} prompt tokens, pages of "
            f"{args.page_tokens}; {args.sizes_gb} GB of device, host, CXL and disk"
        )
        figures = tables(chain, args.eviction.split(","))
    except (TraceError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(figures))
    return 0 if figures["worst_points"] <= 100 * TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
