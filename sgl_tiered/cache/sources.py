"""Which copy of each page a load reads, and whether an older decision still holds."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from sgl_tiered.cache.table import LOADING, CacheTable
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import Decision, Int32s, Int64s, UInt8s

__all__ = ["BUSY", "MISS", "Sources"]

MISS, BUSY = 255, 254
"""Codes beside the tier ids in the table that maps a row's flags to a source."""


class Sources:
    """Finds the fastest ready copies.

    Args:
        table: of the cache.
        tiers: the tiers, fastest first.
    """

    def __init__(self, table: CacheTable, tiers: Sequence[TierId]) -> None:
        self._table = table
        self._tiers = tuple(tiers)
        self._by_mask: dict[int, UInt8s] = {}
        self._awake = (1 << len(self._tiers)) - 1

    def rest(self, tiers: Collection[TierId]) -> None:
        """Read nothing from these tiers, until it is called without them."""
        self._awake = sum(1 << n for n, t in enumerate(self._tiers) if t not in tiers)

    def by_flags(self, tiers_allowed: Collection[TierId] | None) -> UInt8s:
        """Return, for each value of a row's flags, the tier to read or a code."""
        mask = self._awake
        if tiers_allowed is not None:
            mask &= sum(1 << n for n, t in enumerate(self._tiers) if t in tiers_allowed)
        sources = self._by_mask.get(mask)
        if sources is None:
            sources = np.full(256, MISS, np.uint8)
            flags = np.arange(256)
            for number in reversed(range(len(self._tiers))):
                if mask >> number & 1:
                    sources[(flags >> number & 1) == 1] = self._tiers[number]
            sources[(flags & LOADING) != 0] = BUSY
            self._by_mask[mask] = sources
        return sources

    def entries(self, rows: Int32s, tiers: UInt8s) -> Int64s:
        """Return the copies of pages in these tiers; each has to have one."""
        entries = np.empty(len(rows), np.int64)
        for number, tier in enumerate(self._tiers):
            mine = tiers == tier
            if mine.all():
                return self._table.entry_of[number].take(rows).astype(np.int64)
            entries[mine] = self._table.entry_of[number][rows[mine]]
        return entries

    def kinds(self, rows: Int32s, tiers: UInt8s) -> UInt8s | None:
        """Return what these copies hold; None for KV, where nothing else can be."""
        if not self._table.act_page_bytes:
            return None
        return self._table.kinds(self.entries(rows, tiers))

    def still_hold(self, decision: Decision) -> bool:
        """Return whether a decision made on an older table can be carried out."""
        table, rows = self._table, decision.pages
        if (table.born[rows] > decision.version).any():
            return False
        flags = table.flags[rows]
        if not table.in_index[rows].all() or (flags & LOADING).any():
            return False
        if not all(
            bool((flags[decision.tiers == tier] & (1 << number)).all())
            for number, tier in enumerate(self._tiers)
        ):
            return False
        # Room is taken by what a page is said to be: another copy may be otherwise.
        kinds, said = self.kinds(rows, decision.tiers), decision.representations
        return kinds is None or said is None or bool((kinds == said).all())
