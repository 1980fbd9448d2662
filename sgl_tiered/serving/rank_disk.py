"""The disk tier of one rank: its folders, and what a former server left in them."""

from __future__ import annotations

import hashlib
import logging
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from sgl_tiered.cache.adoption import Adoption, Arranged, arrange
from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.core.background import give_way
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import Namespace
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import FoundPages
from sgl_tiered.errors import RanksPartedError
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.serving.agreement import Agreement
from sgl_tiered.serving.options import Options
from sgl_tiered.serving.tier_sizes import rank_folder
from sgl_tiered.tiers.base import Tier
from sgl_tiered.tiers.disk_io import SystemCalls
from sgl_tiered.tiers.disk_striped import open_disk_tier

__all__ = ["DiskAdoption", "disk_fingerprint", "open_disk"]

logger = logging.getLogger(__name__)

_SCANNING, _ADOPTING, _DONE = "scanning", "adopting", "done"
_SHARE = 0.03
"""Of the scheduler's time while requests run."""
_PAGES_LEAST, _PAGES_IDLE = 256, 4096
"""In a slice, which has a cost of its own, about 0.5 ms: while requests run, passes go
by until the share pays for the least. Where nothing runs it takes 5 to 15 ms, for which
a request that comes just then waits."""
_IDLE_S = 0.1
"""Without work before the engine counts as idle: clients that ask again as soon as they
are answered leave gaps of a few milliseconds, which are theirs."""
_FIRST_PAGE_S = 4e-6
"""What a page that is asked for takes, until it was measured."""
_DIGEST_PAGES = 1 << 16
_SCAN_NICE = 19
"""The lowest: seconds of computing for millions of pages, in which a server with as
many threads as cores answers a quarter less at a priority of 10. Where all cores are
busy the scan takes some times as long instead."""


def open_disk(
    config: Options,
    layout: PageLayout,
    namespace: Namespace,
    calls: SystemCalls | None,
    agreement: Agreement,
) -> Tier | None:
    """Open the disk tier of a rank; None where there is none.

    Args:
        config: names its folders.
        layout: shape of a page.
        namespace: of all ranks; a folder belongs to one and to the rank.
        calls: of the system, where some of them fail; None for the real ones.
        agreement: between the ranks.

    Raises:
        ConfigError: a size is wrong.
        TierUnavailableError: a folder cannot be used.
    """
    if not config.tiers.disk_paths:
        return None
    rank, num_ranks = agreement.rank, agreement.num_ranks
    # One folder has one user.
    paths = [rank_folder(path, rank, num_ranks) for path in config.tiers.disk_paths]
    return open_disk_tier(
        paths,
        slot_bytes=layout.slot_bytes,
        page_bytes=layout.page_bytes,
        page_tokens=layout.page_tokens,
        max_bytes=config.tiers.disk_bytes,
        fingerprint=disk_fingerprint(namespace, agreement),
        num_threads=config.tiers.disk_threads,
        io=config.tiers.disk_io,
        calls=calls,
    )


def disk_fingerprint(namespace: Namespace, agreement: Agreement) -> str:
    """Return what a folder of this rank's is marked with.

    Args:
        namespace: of all ranks, without adapter and salt.
        agreement: between the ranks.
    """
    if agreement.is_shared:
        # Each rank keeps its own heads' part of a page.
        shard = f"{agreement.rank}/{agreement.num_ranks}"
        namespace = replace(namespace, shard=shard)
    return namespace.digest().hex()


class DiskAdoption:
    """Takes over what a former server left, behind serving.

    A thread reads the records, and nothing is written to the disk until it has. Then
    the scheduler adopts pages between its passes, in slices that take a small share of
    its time while requests run. With several ranks nothing is adopted unless all have
    found the same (a crash may have cut them off apart), and rank 0 says at each
    meeting how many pages follow, so that the caches stay alike.

    On the scheduler's thread but for the reading.

    Args:
        cache: gets the pages.
        disk: is read; nothing may have been stored since it was opened.
        agreement: between the ranks.
        metrics: counts disks of which nothing is used: ``adoptions_unreadable``, and
            ``adoptions_unlike`` where the ranks have found different pages or only some
            could read their own.
    """

    def __init__(
        self,
        cache: TieredCache,
        disk: Tier,
        agreement: Agreement,
        metrics: MetricsRegistry,
    ) -> None:
        self.is_idle: Callable[[], bool] = lambda: False
        """Says whether the engine has nothing to compute; rank 0's counts."""
        self._cache = cache
        self._disk = disk
        self._agreement = agreement
        self._metrics = metrics
        self._clock = agreement.own_clock
        self._arranged: Arranged | None = None
        self._adoption: Adoption | None = None
        self._state = _SCANNING
        self._is_discarded = False
        self._digest = ""
        self._num_found = 0
        self._page_s = _FIRST_PAGE_S
        self._stepped_at_s = self._began_s = self._clock.now()
        self._busy_at_s = -math.inf
        self._seconds = dict.fromkeys(
            ("read_s", "begin_s", "longest_slice_s", "total_s"), 0.0
        )
        agreement.tell("adoption", self._tell, self._hear)
        self._reader = threading.Thread(
            target=self._read, name="tiered-disk-scan", daemon=True
        )
        self._reader.start()

    @property
    def is_scanning(self) -> bool:
        """Whether it is still to be found out which slots are in use."""
        return self._state == _SCANNING

    @property
    def is_adopting(self) -> bool:
        """Whether pages were found that are still to be adopted."""
        return self._state == _ADOPTING

    @property
    def is_done(self) -> bool:
        """Whether all pages have been adopted or refused."""
        return self._state == _DONE

    def advance(self) -> None:
        """Go on by one slice; between two passes. Does nothing with several ranks."""
        if self._agreement.is_shared or self._state == _DONE:
            return
        if self._state == _ADOPTING:
            self._adopt(self._num_pages())
        elif self._arranged is not None:
            self._begin(self._arranged)

    def discard(self) -> None:
        """Adopt nothing of what was found so far or is being looked for.

        Nor is it left to the next server, though it could not be read. Does not wait
        for the disk. To be called before the cache is reset or the disk's copies are
        dropped, which ends what was begun.
        """
        if not self._is_discarded:
            # What the cache does not know of either: the scan has not ended, and may
            # fail yet, or it has failed. Nobody else will learn what is there.
            is_unknown = np.ones(self._disk.num_slots, np.bool_)
            is_unknown[self._cache.slots_in_use(self._disk.tier_id)] = False
            self._disk.forget(np.flatnonzero(is_unknown))
        self._is_discarded = True

    def finish(self) -> None:
        """Adopt everything now; for tests and tools, alone."""
        self._reader.join()
        while self._state != _DONE:
            if self._state == _ADOPTING:
                self._adopt(_PAGES_IDLE)
            else:
                self.advance()

    def stats(self) -> dict[str, Any]:
        """Return how far it has come, in pages and seconds since the start."""
        adoption = self._adoption
        return {
            "state": self._state,
            "found": self._num_found,
            "adopted": 0 if adoption is None else adoption.num_adopted,
            "refused": 0 if adoption is None else adoption.num_refused,
            "left": 0 if adoption is None else adoption.num_left,
            **self._seconds,
        }

    def _read(self) -> None:
        give_way(_SCAN_NICE)
        try:
            arranged = arrange(self._disk.recover())
            if self._agreement.is_shared:
                self._digest = _digest_of(arranged)
        except Exception:
            # A server without its old pages is better than none. The digest stays
            # empty, which no pages have.
            logger.exception("sgl-tiered: what is on disk could not be read")
            self._metrics.add("adoptions_unreadable")
            arranged = arrange(FoundPages.of([]))
        self._seconds["read_s"] = self._clock.now() - self._began_s
        self._arranged = arranged

    def _tell(self) -> Any:
        """Return what the ranks are to hear: what was found, then how many follow."""
        if self._state == _SCANNING:
            return None if self._arranged is None else self._digest
        if self._state == _ADOPTING and self._agreement.rank == 0:
            return self._num_pages()
        return None

    def _hear(self, told: list[Any]) -> None:
        if self._state == _ADOPTING:
            if not isinstance(told[0], int):
                # Rank 0 has adopted everything already, or nothing yet.
                raise RanksPartedError(0, len(told))
            self._adopt(told[0])
        elif self._state == _SCANNING and None not in told:
            assert self._arranged is not None
            if len(set(told)) > 1:
                logger.warning(
                    "sgl-tiered: the ranks have found different pages on disk, or one "
                    "could not read its own, so none is used"
                )
                self._metrics.add("adoptions_unlike")
                self.discard()
            self._begin(self._arranged)

    def _begin(self, arranged: Arranged) -> None:
        self._arranged = None
        self._num_found = len(arranged.found)
        if self._is_discarded:
            self._state = _DONE
            return
        began_s = self._clock.now()
        self._adoption = self._cache.begin_adoption(self._disk.tier_id, arranged)
        self._seconds["begin_s"] = self._clock.now() - began_s
        self._state = _ADOPTING
        # Slots beyond the cache's, which no copy will ever replace.
        beyond = arranged.found.addresses
        beyond = beyond[beyond >= self._cache.occupancy(TierId.DISK).capacity_slots]
        if len(beyond):
            self._disk.forget(beyond)
        self._stepped_at_s = self._clock.now()

    def _num_pages(self) -> int:
        """Return how many pages to adopt now, 0 for none; reads this rank's clock."""
        now_s = self._clock.now()
        if not self.is_idle():
            self._busy_at_s = now_s
        if now_s - self._busy_at_s >= _IDLE_S:
            return _PAGES_IDLE
        num = int(_SHARE * (now_s - self._stepped_at_s) / self._page_s)
        return min(num, _PAGES_IDLE) if num >= _PAGES_LEAST else 0

    def _adopt(self, num_pages: int) -> None:
        if not num_pages:
            return
        adoption = self._adoption
        assert adoption is not None
        began_s = self._clock.now()
        adoption.step(num_pages)
        adoption.take_refused()
        self._stepped_at_s = now_s = self._clock.now()
        seconds = self._seconds
        seconds["longest_slice_s"] = max(seconds["longest_slice_s"], now_s - began_s)
        if adoption.num_left:
            # For each that was asked for: where runs are short it takes fewer, and as
            # long.
            self._page_s += (now_s - began_s) / num_pages / 8 - self._page_s / 8
            return
        self._state = _DONE
        seconds["total_s"] = now_s - self._began_s
        if not self._is_discarded and self._num_found:
            logger.info(
                "sgl-tiered: %d pages from a former run are on disk, %d more were "
                "unusable; read in %.1f s, adopted after %.1f s",
                adoption.num_adopted,
                adoption.num_refused,
                seconds["read_s"],
                seconds["total_s"],
            )


def _digest_of(arranged: Arranged) -> str:
    """Return what is equal where ranks have found the same pages at the same slots."""
    found, order = arranged.found, arranged.order
    seen = hashlib.blake2b(digest_size=16)
    for column in (found.keys, found.addresses, found.representations):
        for start in range(0, len(order), _DIGEST_PAGES):
            seen.update(column[order[start : start + _DIGEST_PAGES]].tobytes())
    seen.update(len(found).to_bytes(8, "little"))
    return seen.hexdigest()
