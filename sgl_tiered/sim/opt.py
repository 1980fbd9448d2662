"""OPT: the most that any eviction could hit (Belady, 1966), with the future known.

Between requests the cache keeps the pages whose next use comes first; a page may be
passed over altogether. Along a prompt the next use never comes earlier (whoever uses a
page uses those before it), so with ties broken against the ends of prompts, what is
kept of a prompt is always its beginning, and every kept page can be hit.

So only counts matter. Of the pages to be used next by a given request, those kept are
the first ones, and all of them are hit when it comes.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from sgl_tiered.sim.page_trace import PageTrace
from sgl_tiered.sim.segments import NEVER, Segment, next_uses

__all__ = ["OptBound"]


class OptBound:
    """Belady's bound on a trace, for any size."""

    def __init__(self, trace: PageTrace) -> None:
        self._trace = trace
        self._next_uses: Sequence[Sequence[Segment]] = next_uses(trace)

    def hits(self, capacity_pages: int) -> list[int]:
        """Return, per request, the pages hit; O(segments x log requests)."""
        kept = [0] * len(self._trace)
        # Requests with kept pages, the furthest first; an item may be stale.
        furthest: list[int] = []
        num_kept = 0
        hits = []
        for request, segments in enumerate(self._next_uses):
            hits.append(kept[request])
            num_kept -= kept[request]
            kept[request] = 0
            for segment in segments:
                if segment.request == NEVER:
                    continue
                if not kept[segment.request]:
                    heapq.heappush(furthest, -segment.request)
                kept[segment.request] += segment.stop - segment.start
                num_kept += segment.stop - segment.start
            while num_kept > capacity_pages:
                target = -furthest[0]
                dropped = min(kept[target], num_kept - capacity_pages)
                kept[target] -= dropped
                num_kept -= dropped
                if not kept[target]:
                    heapq.heappop(furthest)
        return hits

    def hit_tokens(self, capacity_pages: int) -> int:
        """Return the prompt tokens hit in the whole trace."""
        tokens_of = self._trace.tokens_of
        hits = enumerate(self.hits(capacity_pages))
        return sum(tokens_of(request, num_pages) for request, num_pages in hits)
