"""Fetches: pages in memory below the device that are loaded before anybody's turn.

Unlike a request's own load a fetch does not mark its pages as being loaded: a request
that cannot wait for it loads them itself, as if there were none. It only pins what it
reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from sgl_tiered.cache.index import Node, concat_rows
from sgl_tiered.cache.store import PageStore
from sgl_tiered.cache.table import LOADING
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import Int32s, Int64s, LoadPlan

__all__ = ["Fetches"]


class Fetches:
    """Plans fetches of one cache.

    Args:
        store: pages and copies.
        take_plan_id: numbers plans.
    """

    def __init__(self, store: PageStore, take_plan_id: Callable[[], int]) -> None:
        self._store = store
        self._take_plan_id = take_plan_id
        # Tiers that fail: nothing is read from them.
        self._resting: frozenset[TierId] = frozenset()
        self._under_way: dict[int, Int64s] = {}

    @property
    def under_way(self) -> list[Int64s]:
        """The entries that each fetch reads."""
        return list(self._under_way.values())

    def rest(self, tiers: Collection[TierId]) -> None:
        """Read nothing from these tiers, until it is called without them."""
        self._resting = frozenset(tiers)

    def paths(self, prompts: Sequence[tuple[bytes, Int32s]]) -> list[list[Node]]:
        """Return the runs of pages of each prompt, whole ones only; not a use."""
        index = self._store.index

        def walk(prompt: tuple[bytes, Int32s]) -> list[Node]:
            digest, tokens = prompt
            return index.walk(index.root(digest), tokens.tobytes())

        # Twice: a walk may split a run of a path found before it.
        for prompt in prompts:
            walk(prompt)
        return [walk(prompt) for prompt in prompts]

    def run(self, path: Sequence[Node], first_page: int, max_pages: int) -> Int32s:
        """Return the rows after ``first_page`` that memory holds, without a gap."""
        rows = concat_rows(path)[first_page:max_pages]
        if not len(rows):
            return rows
        table, mask = self._store.table, 0
        for number, _ in self._memory():
            mask |= 1 << number
        flags = table.flags.take(rows)
        # What a request loads itself is about to be on the device anyway.
        stops = ((flags & np.uint8(mask)) == 0) | ((flags & LOADING) != 0)
        return rows[: int(stops.argmax())] if stops.any() else rows

    def is_loading(self, plan: LoadPlan) -> bool:
        """Return whether a request loads some of the pages itself."""
        return bool((self._store.table.flags[plan.pages] & LOADING).any())

    def tiers_of(self, rows: Int32s) -> dict[TierId, int]:
        """Return how many of these pages would be read from which tier."""
        found = {}
        for number, tier in self._memory():
            has_copy = (self._store.table.flags.take(rows) >> number & 1) == 1
            rows = rows[~has_copy]
            if has_copy.any():
                found[tier] = int(np.count_nonzero(has_copy))
        return found

    def plan(self, rows: Int32s, first_page: int, predicted_s: float) -> LoadPlan:
        """Pin the sources of pages that ``run`` returned at this very moment."""
        table = self._store.table
        entries = np.full(len(rows), -1, np.int64)
        tiers = np.zeros(len(rows), np.uint8)
        for number, tier in reversed(self._memory()):
            mine = (table.flags.take(rows) >> number & 1) == 1
            entries[mine] = table.entry_of[number][rows[mine]]
            tiers[mine] = tier
        assert (entries >= 0).all(), "a page that memory does not hold"
        table.pin(entries)
        plan = LoadPlan(
            plan_id=self._take_plan_id(),
            first_page=first_page,
            pages=rows.copy(),
            tiers=tiers,
            addresses=table.address.take(entries),
            checksums=table.checksum.take(entries),
            predicted_s=predicted_s,
            representations=table.kinds(entries),
            num_bytes=table.bytes_by_kind(entries),
        )
        self._under_way[plan.plan_id] = entries
        return plan

    def finish(self, plan: LoadPlan) -> None:
        """Release the sources; finishing a plan twice is a broken invariant."""
        entries = self._under_way.pop(plan.plan_id, None)
        assert entries is not None, f"fetch {plan.plan_id} is not under way"
        store = self._store
        for number, tier in enumerate(store.tiers):
            mine = plan.tiers == tier
            if mine.any():
                store.unpin(number, entries[mine])
        store.settle()

    def _memory(self) -> list[tuple[int, TierId]]:
        """Return the tiers that are read in place, fastest first."""
        return [
            (number, tier)
            for number, tier in enumerate(self._store.tiers)
            if tier in (TierId.HOST, TierId.CXL) and tier not in self._resting
        ]
