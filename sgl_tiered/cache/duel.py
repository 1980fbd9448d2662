"""Densities against LRU, on a sample of pages: which of the two a tier should trust.

Two small caches see the sampled pages that a tier's requests use, with the same share
of its capacity (a miniature simulation, Waldspurger et al., USENIX ATC 2017). One
evicts the least recently used page; the other, as the tier does, the leaf of the
prompts' tree with the lowest density. The densities win once they have hit more by
twice the spread of that difference from request to request, and lose again as soon as
they have hit less. What was long ago counts less.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left

import numpy as np
import numpy.typing as npt

__all__ = ["AGE_EDGES", "Duel"]

AGE_EDGES: npt.NDArray[np.int64] = np.unique(
    np.round(2.0 ** (np.arange(0, 49) / 2))
).astype(np.int64)
"""Ages are told apart at these, in accesses."""
_EDGE_LIST: list[int] = AGE_EDGES.tolist()
_HALF_LIFE = 4_096
"""Requests with pages in the sample after which a difference counts half."""
_FADE = 0.5 ** (1 / _HALF_LIFE)
_SIGMAS = 2.0
_MIN_GAIN = 0.01
"""Of LRU's hits: below it, the proof is not worth acting on."""


class Duel:
    """Both caches and the score between them.

    Args:
        capacity: sampled pages that each holds between requests.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # Oldest first; of one request the end of the prompt first.
        self._recent: dict[int, None] = {}
        self._tree = _Tree(capacity)
        self._gain = 0.0
        self._spread = 0.0
        self._hits = 0.0
        self.is_won = False
        self.turned = False
        """Whether the last request changed ``is_won``."""

    @property
    def gain(self) -> float:
        """Pages that the densities hit more than LRU did, faded."""
        return self._gain

    def use(self, densities: npt.NDArray[np.float64]) -> None:
        """Rank by these from now on; [kinds, ages]."""
        self._tree.densities = densities

    def see(
        self, pages: list[int], kinds: list[int], num_seen: int, sequence: int
    ) -> None:
        """Let both serve one request.

        Args:
            pages: its sampled pages, in the order of the prompt.
            kinds: of each.
            num_seen: leading ones that it has used before.
            sequence: number of the access.
        """
        lru_hits = _run(pages[num_seen:], self._recent)
        won_hits = _run(pages[num_seen:], self._tree.pages)
        self._use_recent(pages[num_seen:])
        self._tree.use(pages, kinds, sequence)
        self._judge(lru_hits, won_hits)

    def clear(self) -> None:
        """Forget the pages; the score stays."""
        self._recent.clear()
        self._tree.clear()

    def _use_recent(self, pages: list[int]) -> None:
        recent = self._recent
        for page in reversed(pages):
            recent.pop(page, None)
            recent[page] = None
        excess = len(recent) - self._capacity
        if excess > 0:
            for page in [page for page, _ in zip(recent, range(excess), strict=False)]:
                del recent[page]

    def _judge(self, lru_hits: int, won_hits: int) -> None:
        difference = won_hits - lru_hits
        self._gain = self._gain * _FADE + difference
        self._spread = self._spread * _FADE + difference * difference
        self._hits = self._hits * _FADE + lru_hits
        before = self.is_won
        if self._gain < 0:
            self.is_won = False
        elif self._gain > _SIGMAS * math.sqrt(self._spread) and (
            self._gain > _MIN_GAIN * self._hits
        ):
            self.is_won = True
        self.turned = self.is_won != before


class _Page:
    __slots__ = ("accessed", "item", "kind", "num_children", "parent")

    def __init__(self, parent: int | None) -> None:
        self.parent = parent
        self.num_children = 0
        self.accessed = 0
        self.kind = 0
        # Number of its valid item.
        self.item = 0


class _Tree:
    """Pages of prompts, evicted leaf by leaf: the lowest density first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.pages: dict[int, _Page] = {}
        self.densities: npt.NDArray[np.float64] | None = None
        # (density, last access, number of the item, page); items may be stale.
        self._leaves: list[tuple[float, int, int, int]] = []
        # (access from which on the density is another, number of the item, page).
        self._steps: list[tuple[int, int, int]] = []
        self._num_items = 0

    def use(self, pages: list[int], kinds: list[int], sequence: int) -> None:
        """Bring in the pages of a prompt, and evict what is too much."""
        before: int | None = None
        for page, kind in zip(pages, kinds, strict=True):
            known = self.pages.get(page)
            if known is None:
                known = self.pages[page] = _Page(before)
                if before is not None:
                    self.pages[before].num_children += 1
            known.accessed = sequence
            known.kind = kind
            before = page
        if before is not None:
            self._put(before, sequence)
        if len(self.pages) > self._capacity:
            self._shrink(sequence)

    def clear(self) -> None:
        self.pages.clear()
        self._leaves.clear()
        self._steps.clear()

    def _put(self, page: int, sequence: int) -> None:
        known = self.pages[page]
        if known.num_children:
            return
        self._num_items += 1
        known.item = self._num_items
        place = bisect_left(_EDGE_LIST, sequence - known.accessed)
        density = 0.0
        if self.densities is not None:
            density = float(self.densities[known.kind, place])
        item = (density, known.accessed, known.item, page)
        heapq.heappush(self._leaves, item)
        if place < len(_EDGE_LIST):
            step = known.accessed + _EDGE_LIST[place] + 1
            heapq.heappush(self._steps, (step, known.item, page))
        if len(self._leaves) > 4 * self._capacity + 64:
            self._leaves = [i for i in self._leaves if self._is_valid(*i[2:])]
            self._steps = [i for i in self._steps if self._is_valid(*i[1:])]
            heapq.heapify(self._leaves)
            heapq.heapify(self._steps)

    def _is_valid(self, item: int, page: int) -> bool:
        known = self.pages.get(page)
        return known is not None and known.item == item and not known.num_children

    def _shrink(self, sequence: int) -> None:
        """Evict the leaves of the lowest density, then the least recently used."""
        while self._steps and self._steps[0][0] <= sequence:
            _, item, page = heapq.heappop(self._steps)
            if self._is_valid(item, page):
                self._put(page, sequence)
        while len(self.pages) > self._capacity and self._leaves:
            _, _, item, page = heapq.heappop(self._leaves)
            if not self._is_valid(item, page):
                continue
            parent = self.pages.pop(page).parent
            if parent is not None:
                self.pages[parent].num_children -= 1
                self._put(parent, sequence)


def _run(pages: list[int], cache: dict[int, None] | dict[int, _Page]) -> int:
    """Return how many of the first pages a cache has."""
    num = 0
    for page in pages:
        if page not in cache:
            break
        num += 1
    return num
