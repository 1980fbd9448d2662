"""Time per salt from the end of a prompt to its page on disk, for very many salts.

The runtime of a server over a pool of random bytes, a host tier and a disk tier in a
temporary folder; no engine. Each salt has one prompt of a few pages. Prompts end in
passes of as many as copies to the host may wait; the runtime is pumped after each pass,
as a scheduler does it, and until all pages are on disk.

Prints one JSON object: time and processor time per salt, writes that the disk was asked
for, and pages on disk.

    python -m benchmarks.micro.salts [--salts 10000] [--pages 1] [--policy on-evict]
"""

from __future__ import annotations

import argparse
import cProfile
import json
import tempfile
import time
from pathlib import Path

import numpy as np

from sgl_tiered.cache.config import CacheConfig, TierConfig
from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.core.clock import SystemClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import Namespace
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import TransferResult
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost
from sgl_tiered.engines.sglang.runtime import Parts, TieredRuntime
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.pipelines.completions import CompletionQueue
from sgl_tiered.pipelines.demote import DemoteWorker
from sgl_tiered.pipelines.layerwise_load import LayerwiseLoader
from sgl_tiered.pipelines.offload import OffloadWorker
from sgl_tiered.policies.eviction.lru import LRUPolicy
from sgl_tiered.serving.agreement import Agreement
from sgl_tiered.serving.options import Options
from sgl_tiered.serving.weights import WeightsIdentity
from sgl_tiered.testing.fakes import FakeDevicePool
from sgl_tiered.tiers.base import TierIO
from sgl_tiered.tiers.disk import DiskTier
from sgl_tiered.tiers.host import HostTier
from tests.unit.engines.weights_support import FakeWeights

LAYOUT = PageLayout(num_layers=2, page_tokens=16, token_bytes=128)
PER_PASS = 48
PATIENCE_S = 600.0


class CountedDisk(DiskTier):
    """Counts its stores."""

    num_stores = 0

    def store(self, io: TierIO) -> TransferResult:
        """Count, and store."""
        self.num_stores += 1
        return super().store(io)


def make_runtime(folder: Path, num_slots: int, policy: str) -> TieredRuntime:
    """Return a runtime whose tiers hold all pages."""
    clock, tiers = SystemClock(), (TierId.HOST, TierId.DISK)
    pool = FakeDevicePool(LAYOUT, 4096)
    pool.fill(np.random.default_rng(1))
    host = HostTier(LAYOUT.slot_bytes, num_slots)
    disk = CountedDisk.open(
        folder,
        slot_bytes=LAYOUT.slot_bytes,
        page_bytes=LAYOUT.page_bytes,
        page_tokens=LAYOUT.page_tokens,
        max_bytes=num_slots * (LAYOUT.slot_bytes + 512),
        fingerprint="salts",
    )
    metrics, completions = MetricsRegistry(), CompletionQueue()
    cost = CostModel(
        PrefillCost(1000, 3, 64, 1e9), {tier: LinkCost(1e-4, 1e9) for tier in tiers}
    )
    cache = TieredCache(
        CacheConfig(
            layout=LAYOUT,
            tiers=(
                TierConfig(TierId.HOST, num_slots),
                TierConfig(TierId.DISK, disk.num_slots),
            ),
            demote_policy=policy,
            demote_watermark=0.0,
        ),
        cost=cost,
        eviction={tier: LRUPolicy() for tier in tiers},
        clock=clock,
    )
    work = (completions, clock, metrics)
    return TieredRuntime(
        Parts(
            config=Options(),
            namespace=Namespace("model", "bfloat16", LAYOUT.page_tokens),
            weights=WeightsIdentity(FakeWeights().begin, Agreement(clock), metrics),
            clock=clock,
            cost=cost,
            cache=cache,
            device=pool,
            host=host,
            cxl=None,
            disk=disk,
            emulator=None,
            metrics=metrics,
            completions=completions,
            loader=LayerwiseLoader(pool, *work),
            offloader=OffloadWorker(pool, host, *work),
            demoters={tiers: DemoteWorker(host, disk, *work)},
            stager=None,
            lookahead=None,
            deferred=None,
            probe={},
            served={},
        ),
        wait_whole=False,
    )


def keep_all(runtime: TieredRuntime, num_salts: int, num_pages: int) -> None:
    """End one prompt under each salt, and write until all are on disk."""
    tokens = np.arange(num_pages * LAYOUT.page_tokens, dtype=np.int32)
    cache, give_up_s = runtime.cache, time.monotonic() + PATIENCE_S
    for first in range(0, num_salts, PER_PASS):
        for number in range(first, min(first + PER_PASS, num_salts)):
            digest = runtime.namespace(None, f"tenant {number}")
            plan = cache.plan_offload(digest, tokens)
            assert plan is not None
            device = (number * num_pages + plan.positions.astype(np.int64)) % 4096
            assert runtime.offload(plan, device)
        runtime.drain_device()
        runtime.pump()
    num_all = num_salts * num_pages
    while cache.occupancy(TierId.DISK).used_slots < num_all or runtime.is_moving:
        runtime.pump()
        time.sleep(1e-4)
        assert time.monotonic() < give_up_s, "pages are not written"


def main() -> None:
    """Keep, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--salts", type=int, default=10_000)
    parser.add_argument("--pages", type=int, default=1)
    parser.add_argument("--policy", default="write-through")
    parser.add_argument("--profile", type=Path)
    args = parser.parse_args()
    num_slots = args.salts * args.pages * 11 // 10 + 1024
    with tempfile.TemporaryDirectory() as folder:
        runtime = make_runtime(Path(folder) / "disk", num_slots, args.policy)
        profile = cProfile.Profile()
        begun_s, begun_cpu_s = time.monotonic(), time.process_time()
        if args.profile:
            profile.enable()
        keep_all(runtime, args.salts, args.pages)
        if args.profile:
            profile.disable()
            profile.dump_stats(args.profile)
        wall_s = time.monotonic() - begun_s
        cpu_s = time.process_time() - begun_cpu_s
        runtime.cache.check()
        print(
            json.dumps(
                {
                    "benchmark": "micro/salts",
                    "salts": args.salts,
                    "pages": args.pages,
                    "policy": args.policy,
                    "us_per_salt": round(wall_s / args.salts * 1e6, 1),
                    "cpu_us_per_salt": round(cpu_s / args.salts * 1e6, 1),
                    "disk_writes": runtime.parts.disk.num_stores,
                    "disk_pages": runtime.cache.occupancy(TierId.DISK).used_slots,
                }
            )
        )
        runtime.close(runtime.pump)


if __name__ == "__main__":
    main()
