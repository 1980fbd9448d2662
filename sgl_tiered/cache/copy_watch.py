"""Which pages came to a tier or left it, told in portions to somebody outside.

A router keeps a picture of what every server holds. It is told what changed, with names
that are chained along a prompt as the engine names pages itself. The table says which
rows changed (they are queued, nothing else happens there); ``take`` compares what was
told with what is so, so that what came and went in between is never mentioned, and
names pages when they are told first. Parents go before children: who hears of a page
has heard of the pages in front of it, if any tier has them.

One call does bounded work, however much is queued: a disk of millions of pages that is
adopted must not hold every step. What is left over waits for the next call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sgl_tiered.cache.index import Node, RadixIndex
from sgl_tiered.cache.table import CacheTable
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import Bools, Int32s, Int64s, UInt8s

__all__ = ["STATE_BYTES", "CopyWatch", "Gained", "Lost", "PageNames"]

STATE_BYTES = 32
"""What the name of the next page is derived from: a SHA-256."""
_LOOKS, _LOOKS_PER_PAGE = 1024, 8
"""Changed rows that one call looks at, and more for each page that it may tell: most of
them are pages to tell, others were lost, or came and went."""


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
        # By row: bits of tiers that were told, whether there is news, name and state.
        self._told: UInt8s = np.zeros(0, np.uint8)
        self._is_news: Bools = np.zeros(0, np.bool_)
        self._has_name: Bools = np.zeros(0, np.bool_)
        self._names: Int64s = np.zeros(0, np.int64)
        self._states: UInt8s = np.zeros((0, STATE_BYTES), np.uint8)
        # Rows with news, in the order in which it came; some may have none any more.
        self._queue: deque[Int32s] = deque()
        self._num_queued = 0
        table.on_copies = self._changed
        self._fit()
        self._changed(np.flatnonzero(table.flags & self._mask).astype(np.int32))

    def retell(self, digest: bytes) -> None:
        """Look at a namespace's pages again, whose names are known only now."""
        self._fit()
        for node in self._index.nodes(digest):
            news = (self._table.flags[node.rows] & self._mask) != self._told[node.rows]
            self._changed(node.rows[news])

    def clear(self) -> None:
        """Begin anew: whoever listens knows that nothing is left."""
        self._told[:] = 0
        self._is_news[:] = False
        self._has_name[:] = False
        self._lost = [[] for _ in self._table.tiers]
        self._queue.clear()
        self._num_queued = 0

    def freed(self, rows: Int32s) -> None:
        """Take note of rows that the table gives back; they name other pages soon."""
        self._fit()
        self._lose(rows, self._told[rows])
        self._told[rows] = 0
        self._is_news[rows] = False
        self._has_name[rows] = False

    def take(self, max_pages: int) -> list[Gained | Lost]:
        """Return what is new, in the order in which it is to be told.

        What was lost comes first: it costs a number per page. Of what was gained,
        ``max_pages`` are named and told at most.
        """
        self._fit()
        gained: list[Gained | Lost] = []
        left, num_looks = max_pages, _LOOKS + _LOOKS_PER_PAGE * max_pages
        while self._queue and left > 0 and num_looks > 0:
            rows = self._dequeue(max_pages)
            num_looks -= len(rows)
            left = self._tell_rows(rows[self._is_news[rows]], left, gained)
        found: list[Gained | Lost] = []
        for number, names in enumerate(self._lost):
            if names:
                found.append(Lost(self._table.tiers[number], tuple(names)))
                self._lost[number] = []
        return found + gained

    def _changed(self, rows: Int32s) -> None:
        self._fit()
        new = rows[~self._is_news[rows]]
        self._is_news[new] = True
        self._queue.append(new)
        self._num_queued += len(new)
        if self._num_queued > 2 * len(self._is_news):
            # Mostly rows that were freed, and named other pages: begin anew without.
            self._queue = deque([np.flatnonzero(self._is_news).astype(np.int32)])
            self._num_queued = len(self._queue[0])

    def _dequeue(self, num_rows: int) -> Int32s:
        """Return the next rows of the queue, so many at most."""
        parts: list[Int32s] = []
        left = num_rows
        while self._queue and left > 0:
            rows = self._queue.popleft()
            if len(rows) > left:
                self._queue.appendleft(rows[left:])
                rows = rows[:left]
            parts.append(rows)
            left -= len(rows)
        self._num_queued -= num_rows - left
        return np.concatenate(parts)

    def _tell_rows(self, rows: Int32s, left: int, found: list[Gained | Lost]) -> int:
        """Tell what is new of some rows; returns how much may still be told."""
        table = self._table
        rows = rows[self._settle(rows)]
        for node in dict.fromkeys(table.node[rows].tolist()):
            if left <= 0:
                break
            if node is not None and self._is_news[node.rows].any():
                left = self._tell(self._index.path_to(node), left, found)
        # Pages that were reset away, and whose rows go with their last copy.
        self._is_news[rows[~table.in_index[rows]]] = False
        rest = rows[self._is_news[rows]]
        if len(rest):
            self._queue.appendleft(rest)
            self._num_queued += len(rest)
        return left

    def _settle(self, rows: Int32s) -> Bools:
        """Note what rows have lost; return which of them have gained, the only news."""
        has = self._table.flags[rows] & self._mask
        told = self._told[rows]
        self._lose(rows, told & ~has)
        self._told[rows] = told & has
        is_gained: Bools = (has & ~told) != 0
        self._is_news[rows[~is_gained]] = False
        return is_gained

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
            known = int(self._has_name[rows].argmin())
            if self._has_name[rows[known]]:
                known = len(rows)
            if known < len(rows):
                more = min(len(rows) - known, left)
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
            left -= self._tell_node(node, known, parent, left, found)
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
        news = np.flatnonzero(self._is_news[node.rows[:known]])
        news = news[self._settle(node.rows[news])][:left]
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
        more = len(self._table.flags) - len(self._told)
        if more <= 0:
            return
        self._told = _longer(self._told, more)
        self._is_news = _longer(self._is_news, more)
        self._has_name = _longer(self._has_name, more)
        self._names = _longer(self._names, more)
        self._states = _longer(self._states, more)


def _longer(column: npt.NDArray[Any], more: int) -> npt.NDArray[Any]:
    shape = (more, *column.shape[1:])
    return np.concatenate([column, np.zeros(shape, column.dtype)])
