"""The disk of an instance of the tests' world: reads end as the test says."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.core.clock import Clock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import PromotePlan, TransferResult
from sgl_tiered.pool.cache_store import CacheStore
from sgl_tiered.pool.disk_reads import DiskReads


@dataclass(eq=False)
class Reading:
    """A read under way."""

    plan: PromotePlan
    is_cancelled: bool = False
    is_over: bool = False

    @property
    def num_left(self) -> int:
        return 0 if self.is_over else self.plan.num_pages

    def hurry(self) -> None:
        """There is nothing else to do."""

    def cancel(self) -> None:
        self.is_cancelled = True


class Disk:
    """Pages by slot, and the reads of them for others.

    Args:
        cache: whose last tier this is.
        store: its blocks.
        host: uint8 [slots, bytes], the memory of its first tier.
        clock: of the instance.
        num_pages: capacity.
    """

    def __init__(
        self,
        cache: TieredCache,
        store: CacheStore,
        host: np.ndarray,
        clock: Clock,
        num_pages: int,
    ) -> None:
        self.cache = cache
        self.host = host
        self.rows = np.zeros((num_pages, host.shape[1]), np.uint8)
        self.running: list[Reading] = []
        self.is_busy = False
        self.reads = DiskReads(cache, store, self, clock, lambda: self.is_busy)

    def submit(self, plan: PromotePlan) -> Reading:
        """Begin a read."""
        self.running.append(Reading(plan))
        return self.running[-1]

    def end(self, reading: Reading, num: int | None = None, *, bad: int = 0) -> None:
        """Let the first pages come, or what a cancelled read leaves; some unreadable.

        Args:
            reading: one that runs.
            num: pages; None for all.
            bad: of the first ones, so many fail their check.
        """
        plan = reading.plan
        num = plan.num_pages if num is None else min(num, plan.num_pages)
        sources, targets = plan.source_addresses[:num], plan.target_addresses[:num]
        ok = np.arange(num) >= bad
        self.host[targets[ok]] = self.rows[sources[ok]]
        reading.is_over = True
        self.running.remove(reading)
        result = TransferResult(ok, 0, 0.0, error="" if ok.all() else "unreadable")
        positions = np.arange(num, dtype=np.int32)
        assert self.reads.finished(plan, positions, result)

    def write_out(self) -> None:
        """Give the disk a copy of all that the cache wants there."""
        while (plan := self.cache.plan_demote(8)) is not None:
            self.rows[plan.target_addresses] = self.host[plan.source_addresses]
            num = len(plan.pages)
            sums = np.zeros(num, np.uint64)
            result = TransferResult(np.ones(num, np.bool_), 0, 0.0, sums)
            self.cache.finish_demote(plan, result)

    def forget_host(self) -> None:
        """Leave the pages to the disk alone."""
        self.write_out()
        self.cache.drop_tier(TierId.HOST)
