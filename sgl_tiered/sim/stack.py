"""LRU at every size in one pass: stack distances of pages (Mattson et al., 1970).

Least recently used first, and the end of a prompt before its beginning, is one order
of all pages that does not depend on the cache's size. A page's place in it, counted
just before it is used again, says how large a cache must be to hit it. Exclusive tiers
under LRU cut this order into pieces, so the same places give the hits of each tier
and what crosses each boundary.

Capacities count pages and hold between requests: a running request's own pages are
extra, as in an engine that never evicts what it computes with.
"""

from __future__ import annotations

import numpy as np

from sgl_tiered.core.plans import Int64s
from sgl_tiered.sim.page_trace import PageTrace
from sgl_tiered.sim.segments import NEVER, last_uses

__all__ = ["LRUCurve"]


class LRUCurve:
    """What LRU of any size makes of a trace.

    O(segments x log requests) to make, O(segments) per size asked for.
    """

    def __init__(self, trace: PageTrace) -> None:
        self._trace = trace
        self.num_unique = 0
        """Different pages in the trace: the size from which on nothing is evicted."""
        newer = _Fenwick(len(trace))
        places, lengths, last_tokens = [], [], []
        for request, segments in enumerate(last_uses(trace)):
            for segment in segments:
                num_pages = segment.stop - segment.start
                if segment.request == NEVER:
                    self.num_unique += num_pages
                    continue
                # Pages of that request before this segment have been used since, so
                # the segment heads what is left of it.
                places.append(newer.sum_after(segment.request))
                lengths.append(num_pages)
                last = trace.tokens_of(request, segment.stop)
                last_tokens.append(last - (segment.stop - 1) * trace.page_tokens)
            for segment in segments:
                if segment.request != NEVER:
                    newer.add(segment.request, segment.start - segment.stop)
            newer.add(request, int(trace.num_pages[request]))
        self._places: Int64s = np.array(places, np.int64)
        self._lengths: Int64s = np.array(lengths, np.int64)
        self._last_tokens: Int64s = np.array(last_tokens, np.int64)

    def hit_pages(self, capacity_pages: int) -> int:
        """Return the pages hit in the whole trace."""
        return int(self._hits(capacity_pages).sum())

    def hit_tokens(self, capacity_pages: int) -> int:
        """Return the prompt tokens hit in the whole trace."""
        hits = self._hits(capacity_pages)
        page_tokens = self._trace.page_tokens
        missing = page_tokens - self._last_tokens
        return int((hits * page_tokens - (hits == self._lengths) * missing).sum())

    def pushed_pages(self, capacity_pages: int) -> int:
        """Return the pages that leave the ``capacity_pages`` most recent ones.

        That is what crosses a boundary between exclusive tiers downwards.
        """
        used = int(self._trace.num_pages.sum())
        entered = used - self.hit_pages(capacity_pages)
        return entered - min(capacity_pages, self.num_unique)

    def _hits(self, capacity_pages: int) -> Int64s:
        hits: Int64s = np.clip(capacity_pages - self._places, 0, self._lengths)
        return hits


class _Fenwick:
    """Sums over the later of numbered counts; O(log n) for each operation."""

    def __init__(self, num_counts: int) -> None:
        self._tree = [0] * (num_counts + 1)
        self._total = 0

    def add(self, number: int, delta: int) -> None:
        """Change one count."""
        self._total += delta
        number += 1
        while number < len(self._tree):
            self._tree[number] += delta
            number += number & -number

    def sum_after(self, number: int) -> int:
        """Return the sum of the counts behind this one."""
        before = 0
        number += 1
        while number:
            before += self._tree[number]
            number &= number - 1
        return self._total - before
