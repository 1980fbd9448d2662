"""Which pages came to a tier or left it, told in portions to somebody outside.

A router keeps a picture of what every server holds. It is told what changed, with names
that are chained along a prompt as the engine names pages itself. The table says which
rows changed (nothing else happens there); ``take`` compares what was told with what is
so, so that what came and went in between is never mentioned, and names pages when they
are told first. Parents go before children: who hears of a page has heard of the pages
in front of it, if any tier has them.

Besides looking at what changed since the last, one call does bounded work, however much
is still to be told. What is left over waits for the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sgl_tiered.cache.index import Node, RadixIndex
from sgl_tiered.cache.table import CacheTable, grown
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import Bools, Int32s, Int64s, UInt8s

__all__ = ["STATE_BYTES", "CopyWatch", "Gained", "Lost", "PageNames"]

STATE_BYTES = 32
"""What the name of the next page is derived from: a SHA-256."""
_PART_ROWS = 256
"""Looked at together."""


@dataclass(frozen=True, slots=True)
class Gained:
    """Neighbours of one prompt that have a copy in a tier now.

    Attributes:
        digest: their namespace.
        tier: where.
        parent: name of the page in front of them; None at the start of a prompt.
        names: theirs, shape [num_pages].
        raw: their tokens, int32 as bytes.
    """

    digest: bytes
    tier: TierId
    parent: int | None
    names: tuple[int, ...]
    raw: bytes


@dataclass(frozen=True, slots=True)
class Lost:
    """Pages whose copy in a tier is gone.

    Attributes:
        tier: where it was.
        names: of the pages, shape [num_pages].
    """

    tier: TierId
    names: tuple[int, ...]


class PageNames(Protocol):
    """How pages are named outside."""

    def chain(self, digest: bytes, before: bytes | None, raw: bytes) -> bytes | None:
        """Return the states of pages that follow each other, joined.

        Args:
            digest: their namespace.
            before: state of the page in front of them; None at the start.
            raw: their tokens, int32 as bytes.

        Returns:
            ``STATE_BYTES`` for each; None where nobody is to hear of this namespace.
        """
        ...

    def names(self, digest: bytes, states: bytes) -> list[int]:
        """Return the names that go with states, signed integers of 64 bits."""
        ...


class CopyWatch:
    """What of a cache was told, and what is to be told.

    Args:
        table: whose copies; this is its only watcher.
        index: where its pages are in their prompts.
        page_bytes: bytes of one page's token ids.
        names: of the pages.
    """

    def __init__(
        self, table: CacheTable, index: RadixIndex, page_bytes: int, names: PageNames
    ) -> None:
        self._table = table
        self._index = index
        self._page_bytes = page_bytes
        self._page_names = names
        self._mask = np.uint8((1 << len(table.tiers)) - 1)
        self._lost: list[list[int]] = [[] for _ in table.tiers]
        # Rows that changed since the last call, and parts of those still to be told.
        self._changes: list[Int32s] = []
        self._backlog: deque[Int32s] = deque()
        # By row: bits of tiers that were told, whether there is something to tell and
        # whether it stands in the backlog, name and state.
        self._told: UInt8s = np.zeros(0, np.uint8)
        self._is_news: Bools = np.zeros(0, np.bool_)
        self._is_waiting: Bools = np.zeros(0, np.bool_)
        self._has_name: Bools = np.zeros(0, np.bool_)
        self._names: Int64s = np.zeros(0, np.int64)
        self._states: UInt8s = np.zeros((0, STATE_BYTES), np.uint8)
        table.on_copies = self._changed
        self._changed(np.flatnonzero(table.flags & self._mask).astype(np.int32))

    def retell(self, digest: bytes) -> None:
        """Look at a namespace's pages again, whose names are known only now."""
        for node in self._index.nodes(digest):
            self._changed(node.rows)

    def clear(self) -> None:
        """Begin anew: whoever listens knows that nothing is left."""
        self._told[:] = 0
        self._is_news[:] = False
        self._is_waiting[:] = False
        self._has_name[:] = False
        self._lost = [[] for _ in self._table.tiers]
        self._changes.clear()
        self._backlog.clear()

    def freed(self, rows: Int32s) -> None:
        """Take note of rows that the table gives back; they name other pages soon."""
        self._fit()
        self._lose(rows, self._told[rows])
        self._told[rows] = 0
        self._is_news[rows] = False
        self._has_name[rows] = False

    def take(self, max_pages: int) -> list[Gained | Lost]:
        """Return what is new, in the order in which it is to be told.

        What was lost comes first and whole: it costs a number per page. Of what was
        gained, ``max_pages`` are named and told at most.
        """
        self._fit()
        self._sort_changes()
        found: list[Gained | Lost] = []
        for number, names in enumerate(self._lost):
            if names:
                found.append(Lost(self._table.tiers[number], tuple(names)))
                self._lost[number] = []
        left = max_pages
        while self._backlog and left > 0:
            left = self._tell_rows(self._backlog.popleft(), left, found)
        return found

    def _sort_changes(self) -> None:
        """Look what changed since the last call: what was lost, what is to be told."""
        if not self._changes:
            return
        rows, self._changes = np.unique(np.concatenate(self._changes)), []
        has = self._table.flags[rows] & self._mask
        told = self._told[rows]
        self._lose(rows, told & ~has)
        self._told[rows] = told & has
        self._is_news[rows] = is_gained = (has & ~told) != 0
        new = rows[is_gained & ~self._is_waiting[rows]]
        self._is_waiting[new] = True
        for start in range(0, len(new), _PART_ROWS):
            self._backlog.append(new[start : start + _PART_ROWS])

    def _tell_rows(self, rows: Int32s, left: int, found: list[Gained | Lost]) -> int:
        """Tell what is new of a part of the backlog; returns how much still may be."""
        self._is_waiting[rows] = False
        rows = rows[self._is_news[rows]]
        # Pages that were reset away, and whose rows go with their last copy.
        is_there = self._table.in_index[rows]
        self._is_news[rows[~is_there]] = False
        rows = rows[is_there]
        for node in dict.fromkeys(self._table.node[rows].tolist()):
            if left <= 0:
                break
            if self._is_news[node.rows].any():
                left = self._tell(self._index.path_to(node), left, found)
        rest = rows[self._is_news[rows]]
        if not len(rest):
            return left
        self._is_waiting[rest] = True
        self._backlog.appendleft(rest)
        return 0

    def _changed(self, rows: Int32s) -> None:
        if len(rows):
            self._changes.append(rows)

    def _lose(self, rows: Int32s, bits: UInt8s) -> None:
        """Note copies that were told of and are gone, by row and tier."""
        if not bits.any():
            return
        for number, lost in enumerate(self._lost):
            gone = rows[(bits >> number) & 1 == 1]
            lost.extend(self._names[gone].tolist())

    def _tell(self, path: Sequence[Node], left: int, found: list[Gained | Lost]) -> int:
        """Tell what is new along a prompt; returns how much may still be told."""
        before: bytes | None = None
        parent: int | None = None
        for node in path:
            rows = node.rows
            num_named = 0
            known = int(self._has_name[rows].argmin())
            if self._has_name[rows[known]]:
                known = len(rows)
            if known < len(rows):
                more = num_named = min(len(rows) - known, left)
                if known:
                    before = self._states[rows[known - 1]].tobytes()
                start = known * self._page_bytes
                raw = node.raw[start : start + more * self._page_bytes]
                states = self._page_names.chain(node.digest, before, raw)
                if states is None:
                    for each in path:
                        self._is_news[each.rows] = False
                    return left
                new = rows[known : known + more]
                shape = (more, STATE_BYTES)
                self._states[new] = np.frombuffer(states, np.uint8).reshape(shape)
                self._names[new] = self._page_names.names(node.digest, states)
                self._has_name[new] = True
                known += more
            num_told = self._tell_node(node, known, parent, left, found)
            # Naming is the work, also of pages of which there is nothing to tell.
            left -= max(num_named, num_told)
            if known < len(rows) or left <= 0:
                return left
            before = self._states[rows[-1]].tobytes()
            parent = int(self._names[rows[-1]])
        return left

    def _tell_node(
        self,
        node: Node,
        known: int,
        parent: int | None,
        left: int,
        found: list[Gained | Lost],
    ) -> int:
        """Tell what is new of a run's first ``known`` pages; returns of how many."""
        news = np.flatnonzero(self._is_news[node.rows[:known]])[:left]
        rows = node.rows[news]
        gained = self._table.flags[rows] & self._mask & ~self._told[rows]
        for number, tier in enumerate(self._table.tiers):
            here = news[(gained >> number) & 1 == 1]
            if not len(here):
                continue
            for run in np.split(here, np.flatnonzero(np.diff(here) > 1) + 1):
                first, stop = int(run[0]), int(run[-1]) + 1
                names = self._names[node.rows[first:stop]].tolist()
                above = int(self._names[node.rows[first - 1]]) if first else parent
                raw = node.raw[first * self._page_bytes : stop * self._page_bytes]
                found.append(Gained(node.digest, tier, above, tuple(names), raw))
        self._told[rows] |= gained
        self._is_news[rows] = False
        return len(news)

    def _fit(self) -> None:
        """Grow with the table."""
        capacity, most = len(self._table.flags), self._table.num_most
        if capacity <= len(self._told):
            return
        self._told = grown(self._told, capacity, num_most=most)
        self._is_news = grown(self._is_news, capacity, num_most=most)
        self._is_waiting = grown(self._is_waiting, capacity, num_most=most)
        self._has_name = grown(self._has_name, capacity, num_most=most)
        self._names = grown(self._names, capacity, num_most=most)
        self._states = grown(self._states, capacity, num_most=most)
