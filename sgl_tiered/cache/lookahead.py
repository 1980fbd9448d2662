"""What waiting and running requests will use: the queue as others see it.

One object per rank, fed alike by the engine and by the simulator. Pages go by the first
64 bits of their keys, in any tree: two pages with equal bits would only be ranked
alike. A place in the queue is a number that grows with every request that enters it, so
it does not change while the queue moves on.

CaR's Score is kept beside it: a request gives its pages 1 while it is in the window
(the first requests of the queue) and 2 while it runs.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.keys import page_keys
from sgl_tiered.core.plans import Int32s, UInt8s, UInt64s

__all__ = ["DEFAULT_WINDOW", "QueueLookahead", "short_keys"]

DEFAULT_WINDOW = 16
"""Requests of the window."""
_MAX_PAGES = 1 << 20
"""Pages of all requests together, about 130 bytes each; requests beyond go unseen."""

OnFall = Callable[[bytes, Int32s], None]


class _Seen:
    __slots__ = ("digest", "in_window", "keys", "place", "runs", "tokens")

    def __init__(
        self, digest: bytes, tokens: Int32s, keys: list[int], place: int
    ) -> None:
        self.digest = digest
        self.tokens = tokens
        self.keys = keys
        self.place = place
        self.in_window = False
        self.runs = False


class QueueLookahead:
    """Requests from their arrival to their end, and the pages of their prompts.

    Args:
        page_tokens: tokens of a page.
        window: requests at the head of the queue that CaR's Score counts.
        keys_of: (digest, tokens) -> keys of the pages, where they are not page keys.
    """

    def __init__(
        self,
        page_tokens: int,
        *,
        window: int = DEFAULT_WINDOW,
        keys_of: Callable[[bytes, Int32s], UInt64s] | None = None,
    ) -> None:
        self._page_tokens = page_tokens
        self._window = window
        self._keys_of = keys_of or self._page_keys
        self._requests: dict[Hashable, _Seen] = {}
        # Waiting requests in order of arrival: those in the window, those behind it.
        self._inside: OrderedDict[Hashable, None] = OrderedDict()
        self._outside: OrderedDict[Hashable, None] = OrderedDict()
        self._places: dict[int, list[int]] = {}
        self._scores: dict[int, int] = {}
        self._num_entered = 0
        self._num_pages = 0
        self._on_fall: list[OnFall] = []

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._inside) + len(self._outside)

    def listen(self, on_fall: OnFall) -> None:
        """Call ``on_fall(digest, tokens)`` when pages of a prompt have lost worth."""
        self._on_fall.append(on_fall)

    # -- Requests ------------------------------------------------------------------

    def entered(self, rid: Hashable, digest: bytes, tokens: Int32s) -> None:
        """Note a request that is queued; nothing if it is known."""
        if rid in self._requests:
            return
        keys = self._keys_of(digest, tokens).tolist()
        if self._num_pages + len(keys) > _MAX_PAGES:
            return
        self._num_pages += len(keys)
        self._num_entered += 1
        seen = _Seen(digest, tokens, keys, self._num_entered)
        self._requests[rid] = seen
        for key in keys:
            self._places.setdefault(key, []).append(seen.place)
        self._outside[rid] = None
        self._fill_window()

    def running(self, rid: Hashable) -> None:
        """Note that a request left the queue for the device."""
        seen = self._requests.get(rid)
        if seen is None or seen.runs:
            return
        # One that came so late that it never was in the window passes through it.
        self._add_score(seen, 1 if seen.in_window else 2)
        seen.runs = True
        self._leave_queue(rid, seen)
        self._fell(seen)

    def finished(self, rid: Hashable) -> None:
        """Note the end of a request, wherever it was."""
        seen = self._requests.pop(rid, None)
        if seen is None:
            return
        self._num_pages -= len(seen.keys)
        if seen.runs:
            self._add_score(seen, -2)
        else:
            if seen.in_window:
                self._add_score(seen, -1)
            self._leave_queue(rid, seen)
        self._fell(seen)

    def left(self, rid: Hashable) -> None:
        """Note that a request gave up (an abort) or goes back to the queue."""
        self.finished(rid)

    def clear(self) -> None:
        """Forget every request."""
        for rid in list(self._requests):
            self.finished(rid)

    # -- Pages ---------------------------------------------------------------------

    def queued(self, key: int) -> int:
        """Return how many waiting requests will use a page."""
        places = self._places.get(key)
        return 0 if places is None else len(places)

    def next_use(self, key: int) -> float:
        """Return the place of the first of these; infinite without one."""
        places = self._places.get(key)
        return math.inf if places is None else float(places[0])

    def score(self, key: int) -> float:
        """Return CaR's Score of a page."""
        return float(self._scores.get(key, 0))

    # -- Private -------------------------------------------------------------------

    def _leave_queue(self, rid: Hashable, seen: _Seen) -> None:
        places = self._places
        for key in seen.keys:
            waiting = places[key]
            if len(waiting) == 1:
                del places[key]
            else:
                waiting.remove(seen.place)
        seen.in_window = False
        self._outside.pop(rid, None)
        if rid in self._inside:
            del self._inside[rid]
            self._fill_window()

    def _fill_window(self) -> None:
        while self._outside and len(self._inside) < self._window:
            rid, _ = self._outside.popitem(last=False)
            self._inside[rid] = None
            seen = self._requests[rid]
            seen.in_window = True
            self._add_score(seen, 1)

    def _add_score(self, seen: _Seen, change: int) -> None:
        scores = self._scores
        for key in seen.keys:
            score = scores.get(key, 0) + change
            if score:
                scores[key] = score
            else:
                del scores[key]

    def _fell(self, seen: _Seen) -> None:
        for on_fall in self._on_fall:
            on_fall(seen.digest, seen.tokens)

    def _page_keys(self, digest: bytes, tokens: Int32s) -> UInt64s:
        return short_keys(page_keys(digest, tokens, self._page_tokens))


def short_keys(keys: UInt8s) -> UInt64s:
    """Return the first 64 bits of page keys, uint64 [n] of uint8 [n, 16]."""
    words: npt.NDArray[np.uint64] = np.ascontiguousarray(keys).view(np.uint64)
    return words[:, 0].copy()
