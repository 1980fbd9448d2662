"""Pages that only this instance's disk has, brought to memory for another instance.

The way is that of the cache's own promotions: its first tier makes room by its policy,
the pipeline's thread reads and checks the pages in parts that yield to loads, and what
has come is an ordinary copy, pinned by nobody. What others may use of the host tier
bounds the pages under way. Requests of this instance come first: while it reads for
them nothing is begun here, and what is under way for others is cut short. Then peers
get what memory has.

One thread calls it. Everything that it decides by is in the cache or handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from sgl_tiered.cache.prefetcher import Read, Reader
from sgl_tiered.cache.promotion import Prompt
from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.core.clock import Clock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import Int32s, PromotePlan, TransferResult, UInt64s
from sgl_tiered.pool.cache_store import CacheStore
from sgl_tiered.pool.fetch import Held

__all__ = ["DiskRead", "DiskReads"]

_MAX_READS = 4
"""Reads for others at once: more would only wait for each other."""


@dataclass(slots=True, eq=False)
class DiskRead:
    """One read under way for another instance.

    Attributes:
        num_pages: pages that only the disk had.
        began_s: when it was asked for.
        read: how to cut it short.
        done: it has ended, whole or not.
        num_read: of those pages, how many are in memory now.
    """

    num_pages: int
    began_s: float
    read: Read
    done: bool = False
    num_read: int = 0


class DiskReads:
    """What a cache's disk is read for others.

    Args:
        cache: plans the reads.
        store: its copies as blocks.
        reader: reads; None where it cannot.
        clock: says when a read began.
        is_busy: whether this instance reads its disk for its own requests.
        needed: prompts whose copies are not evicted for others.
    """

    def __init__(
        self,
        cache: TieredCache,
        store: CacheStore,
        reader: Reader | None,
        clock: Clock,
        is_busy: Callable[[], bool],
        needed: Callable[[], Iterable[Prompt]] = tuple,
    ) -> None:
        self._cache = cache
        self._store = store
        self._reader = reader
        self._clock = clock
        self._is_busy = is_busy
        self._needed = needed
        self._reads: dict[int, DiskRead] = {}

    @property
    def num_under_way(self) -> int:
        """Reads that have not ended."""
        return len(self._reads)

    def held(self, namespace: bytes, tokens: Int32s, first_page: int) -> Held:
        """Say what a peer could have of a prompt, and how long the disk would take.

        Args:
            namespace: digest of a ``Namespace``.
            tokens: int32, the prompt.
            first_page: only pages from this one on count.
        """
        tiers = self._tiers_of(namespace, tokens, first_page)
        if not len(tiers):
            return Held(0, {})
        media, counts = np.unique(tiers, return_counts=True)
        by_medium = {
            TierId(medium): num
            for medium, num in zip(media.tolist(), counts.tolist(), strict=True)
        }
        num_disk = by_medium.get(TierId.DISK, 0)
        read_s = 0.0
        if num_disk:
            read_s = self._cache.planner.load_s(TierId.DISK, num_disk)
        return Held(first_page + len(tiers), by_medium, read_s)

    def match(
        self, namespace: bytes, tokens: Int32s, first_page: int, num_pages: int
    ) -> UInt64s:
        """Return the blocks of pages from ``first_page`` on that memory has now."""
        return self._store.match_from(namespace, tokens, first_page)[:num_pages]

    def begin(
        self, namespace: bytes, tokens: Int32s, first_page: int, num_pages: int
    ) -> DiskRead | None:
        """Begin to bring pages to memory; None where there is nothing to wait for.

        That is, where the disk alone has none of them, or this instance is busy.
        """
        if self._reader is None or len(self._reads) >= _MAX_READS or self._is_busy():
            return None
        tiers = self._tiers_of(namespace, tokens, first_page)[:num_pages]
        wanted = np.flatnonzero(tiers == TierId.DISK)
        room = self._store.num_allowed(TierId.HOST) - sum(
            read.num_pages for read in self._reads.values()
        )
        if not len(wanted) or room <= 0:
            return None
        stop = int(wanted[room]) if len(wanted) > room else len(tiers)
        prompt = (namespace, tokens)
        promoter = self._cache.promoter
        plan = promoter.plan(prompt, first_page, first_page + stop, self._needed())
        if plan is None:
            return None
        under_way = self._reader.submit(plan)
        if under_way is None:
            nothing = TransferResult.failed(0, 0.0, "")
            promoter.finish(plan, np.zeros(0, np.int32), nothing)
            return None
        read = DiskRead(plan.num_pages, self._clock.now(), under_way)
        self._reads[plan.plan_id] = read
        return read

    def finished(
        self, plan: PromotePlan, positions: Int32s, result: TransferResult
    ) -> bool:
        """Take the end of a promotion; False, and nothing done, for one not ours.

        Args as for ``Prefetcher.finished``.
        """
        read = self._reads.pop(plan.plan_id, None)
        if read is None:
            return False
        self._cache.promoter.finish(plan, positions, result)
        read.done = True
        read.num_read = int(np.count_nonzero(result.ok))
        return True

    def poll(self) -> None:
        """Cut short what runs, if this instance needs its disk."""
        if self._reads and self._is_busy():
            self.cancel_all()

    def cancel_all(self) -> None:
        """Leave out what was not begun; the reads end as ever."""
        for read in self._reads.values():
            read.read.cancel()

    def _tiers_of(self, namespace: bytes, tokens: Int32s, first_page: int) -> Int32s:
        """Return the fastest tier of each page that a peer could have, int32 [n]."""
        tiers = self._store.tiers_of(namespace, tokens, first_page)
        if self._reader is None or self._cache.promoter.rests:
            away = np.flatnonzero(tiers == TierId.DISK)
            return tiers[: int(away[0])] if len(away) else tiers
        return tiers
