"""Horizons against LRU, on a sample of pages: which of the two a tier should trust.

Two small caches see the sampled pages that a tier's requests use, with the same share of
its capacity (a miniature simulation, Waldspurger et al., USENIX ATC 2017). One evicts
the least recently used page, the other the page past its horizon for longest. The
horizons win once they have hit more by twice the spread of that difference from request
to request, and lose again as soon as they have hit less. What was long ago counts less.
"""

from __future__ import annotations

import heapq
import math

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.plans import UInt64s

__all__ = ["Duel"]

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
        # Page -> end of its horizon; items of the heap may be stale.
        self._until: dict[int, float] = {}
        self._heap: list[tuple[float, int, int]] = []
        self._num_pushed = 0
        self._gain = 0.0
        self._spread = 0.0
        self._hits = 0.0
        self.is_won = False
        self.turned = False
        """Whether the last request changed ``is_won``."""

    @property
    def gain(self) -> float:
        """Pages that the horizons hit more than LRU did, faded."""
        return self._gain

    def see(
        self, keys: UInt64s, horizons: npt.NDArray[np.float64], sequence: int
    ) -> None:
        """Let both serve one request.

        Args:
            keys: its sampled pages, in the order of the prompt.
            horizons: of each, in accesses.
            sequence: number of the access.
        """
        pages = keys.tolist()
        lru_hits, won_hits = _run(pages, self._recent), _run(pages, self._until)
        self._use_recent(pages)
        self._use_until(pages, horizons, sequence)
        self._judge(lru_hits, won_hits)

    def clear(self) -> None:
        """Forget the pages; the score stays."""
        self._recent.clear()
        self._until.clear()
        self._heap.clear()

    def _use_recent(self, pages: list[int]) -> None:
        recent = self._recent
        for page in reversed(pages):
            recent.pop(page, None)
            recent[page] = None
        excess = len(recent) - self._capacity
        if excess > 0:
            for page in [page for page, _ in zip(recent, range(excess), strict=False)]:
                del recent[page]

    def _use_until(
        self, pages: list[int], horizons: npt.NDArray[np.float64], sequence: int
    ) -> None:
        # A tree loses no page before those behind it.
        ends = np.maximum.accumulate((sequence + horizons)[::-1])[::-1].tolist()
        until = self._until
        for place in range(len(pages) - 1, -1, -1):
            page = pages[place]
            end = max(ends[place], until.get(page, 0.0))
            until[page] = end
            self._num_pushed += 1
            heapq.heappush(self._heap, (end, self._num_pushed, page))
        while len(until) > self._capacity:
            end, _, page = heapq.heappop(self._heap)
            if until.get(page) == end:
                del until[page]
        if len(self._heap) > 4 * self._capacity + 1024:
            self._heap = [item for item in self._heap if until.get(item[2]) == item[0]]
            heapq.heapify(self._heap)

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


def _run(pages: list[int], cache: dict[int, None] | dict[int, float]) -> int:
    """Return how many of the first pages a cache has."""
    num = 0
    for page in pages:
        if page not in cache:
            break
        num += 1
    return num
