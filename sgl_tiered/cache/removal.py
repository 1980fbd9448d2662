"""Giving back what was forgotten, in steps of bounded work.

A tier that is dropped, or a cache that is reset, is out of sight at once, which costs
nanoseconds a page. To give back slots, rows and nodes costs microseconds: seconds for a
large tier, which the thread that serves does not have. So every copy is doomed, as one
that somebody still uses, and freed by steps between which the cache is used as ever.
What a step frees was of no use to anybody from the first moment on, so it does not
matter when that is.

A step depends on nothing but the state of the cache and its own number, so that several
ranks stay alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from sgl_tiered.cache.table import READY, CacheTable
from sgl_tiered.core.plans import Int64s

__all__ = ["Removal"]

_WINDOW = 1 << 14
"""Entries or rows looked at together: 20 us."""
_MOST_WINDOWS = 16
"""Looked at in a step that finds nothing."""


class Removal:
    """Frees what was forgotten.

    Args:
        table: whose copies and rows.
        discard: (tier number, idle entries) -> drops them, with all that follows.

    Attributes:
        max_pages: given back in a step, or items let go of.
        max_nodes: visited in a step, those above the pages' own included; but for the
            first page's.
        tiers: numbers of those whose slots are still being given back.
    """

    def __init__(
        self, table: CacheTable, discard: Callable[[int, Int64s], None]
    ) -> None:
        self._table = table
        self._discard = discard
        self.max_pages = 1024
        self.max_nodes = 128
        self.tiers: set[int] = set()
        # Where the next window begins, and where the last one ends.
        self._entry = self._last_entry = 0
        self._row = self._last_row = 0
        self._refusals: deque[Iterator[None]] = deque()
        self._rest: deque[Iterator[None]] = deque()

    @property
    def is_under_way(self) -> bool:
        """Whether there is something left to give back."""
        return bool(self.tiers or self._rest) or self._row < self._last_row

    def covers(self, entry: int) -> bool:
        """Return whether an entry that is doomed and idle will still be freed."""
        return self._entry <= entry < self._last_entry

    def covers_row(self, row: int) -> bool:
        """Return whether a row that no node holds will still be freed."""
        return self._row <= row < self._last_row

    def begin(self, tiers: Iterable[int]) -> None:
        """Free the idle ones of all copies in tiers, which have just been doomed."""
        self.tiers.update(tiers)
        self._entry, self._last_entry = 0, self._table.entries.capacity

    def begin_rows(self) -> None:
        """Give back the rows as well, which have just been detached."""
        self._row, self._last_row = 0, self._table.rows.capacity

    def add_slots(self, tier: int, steps: Iterator[None]) -> None:
        """Go through what gives slots back in a tier, a value in each step."""
        self.tiers.add(tier)
        self._refusals.append(steps)

    def add(self, steps: Iterator[None]) -> None:
        """Go through what can be done last, a value in each step."""
        self._rest.append(steps)

    def add_items(self, items: list[Any]) -> None:
        """Let go of the items of a long list, which nobody else holds."""
        self._rest.append(self._let_go(items))

    def step(self) -> bool:
        """Do bounded work; False once nothing is left.

        May leave nodes unsettled.
        """
        if self._entry < self._last_entry:
            self._free_copies()
        elif self._refusals:
            _go_on(self._refusals)
        elif self._row < self._last_row:
            self._free_rows()
        elif self._rest:
            _go_on(self._rest)
        if self._entry >= self._last_entry and not self._refusals:
            self.tiers.clear()
        return self.is_under_way

    def _free_copies(self) -> None:
        table = self._table
        for _ in range(_MOST_WINDOWS):
            start = self._entry
            stop = self._entry = min(start + _WINDOW, self._last_entry)
            part = slice(start, stop)
            idle = table.doomed[part] & (table.state[part] == READY)
            idle &= table.pins[part] == 0
            found = np.flatnonzero(idle) + start
            if len(found):
                some = self._as_many(found)
                if len(some) < len(found):
                    self._entry = int(some[-1]) + 1
                tiers = table.tier[some]
                for tier in np.unique(tiers).tolist():
                    self._discard(tier, some[tiers == tier])
            if len(found) or stop == self._last_entry:
                return

    def _as_many(self, entries: Int64s) -> Int64s:
        """Return the first ones, as many as a step may free."""
        entries = entries[: self.max_pages]
        last, num_visited = None, 0
        nodes = self._table.nodes_of(self._table.entry_row[entries])
        for position, node in enumerate(nodes):
            if node is last:
                continue
            last = above = node
            while above is not None:
                num_visited += 1
                above = above.parent
            if num_visited > self.max_nodes and position:
                return entries[:position]
        return entries

    def _free_rows(self) -> None:
        table = self._table
        for _ in range(_MOST_WINDOWS):
            start = self._row
            stop = self._row = min(start + _WINDOW, self._last_row)
            here = np.arange(start, stop)
            found = here[~table.in_index[start:stop] & ~table.rows.is_free(here)]
            if len(found):
                some = found[: self.max_pages]
                if len(some) < len(found):
                    self._row = int(some[-1]) + 1
                table.let_go(some)
            if len(found) or stop == self._last_row:
                return

    def _let_go(self, items: list[Any]) -> Iterator[None]:
        while items:
            del items[-self.max_pages :]
            yield


def _go_on(jobs: deque[Iterator[None]]) -> None:
    """Take one step of the first job; it goes once it has no more."""
    try:
        next(jobs[0])
    except StopIteration:
        jobs.popleft()
