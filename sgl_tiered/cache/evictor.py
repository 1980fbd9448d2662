"""Which copies of a tier go when it needs room: a lazy heap over the tier's leaves.

The heap has at most one valid item per node. An item may be stale (the node was used
again, is no leaf any more, or is gone); it is put right when its turn comes, so that an
access costs nothing here. Where a number may have fallen, ``requeue`` makes a new item;
where all may have, the heap is gone through some nodes at a time. Pages go from the end
of a leaf, so what stays of a prompt is always its beginning.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from sgl_tiered.cache.index import Node
from sgl_tiered.cache.outlook import NO_OUTLOOK, Outlook
from sgl_tiered.cache.table import CacheTable
from sgl_tiered.core.plans import Int32s
from sgl_tiered.policies.eviction.base import EvictionFacts, EvictionPolicy

__all__ = ["Evictor", "Victims"]

_REQUEUED = 64
"""Nodes ranked anew per call after horizons changed: 0.3 ms of 4,096 in one go."""
_MIN_ITEMS = 1024
"""Up to so many items, and as many again as were valid, none is looked for in vain."""


@dataclass(frozen=True, slots=True, eq=False)
class Victims:
    """Pages of one node whose copies are to go, in token order."""

    node: Node
    rows: Int32s


class Evictor:
    """Chooses victims in one tier; changes no copy itself.

    Args:
        table: holds the copies.
        tier: number of the tier.
        policy: ranks.
        outlook: what is known of coming uses.
    """

    def __init__(
        self,
        table: CacheTable,
        tier: int,
        policy: EvictionPolicy,
        outlook: Outlook = NO_OUTLOOK,
    ) -> None:
        self._table = table
        self._tier = tier
        self._policy = policy
        self._outlook = outlook
        self._version = 0
        # Nodes to rank anew, since horizons have changed.
        self._aged: list[Node] = []
        self._heap: list[tuple[float, int, int, int, Node]] = []
        self._num_pushed = 0
        self._compact_at = _MIN_ITEMS

    @property
    def policy(self) -> EvictionPolicy:
        """The policy that ranks."""
        return self._policy

    def priority(self, node: Node, num_taken: int = 0) -> float:
        """Return the policy's number for a node, less some of its last pages."""
        score, queued, next_use, horizon = self._outlook.facts(
            node, self._tier, num_taken
        )
        facts = EvictionFacts(
            tier=self._table.tiers[self._tier],
            num_pages=node.resident[self._tier] - num_taken,
            last_access_s=node.last_access_s,
            inserted_s=node.inserted_s,
            access_sequence=node.access_sequence,
            insert_sequence=node.insert_sequence,
            num_hits=node.num_hits,
            score=score,
            queued=queued,
            next_use=next_use,
            horizon=horizon,
        )
        return self._policy.priority(facts)

    def push(self, node: Node) -> None:
        """Take note of a node that may be a leaf; O(log nodes)."""
        if not node.queued[self._tier]:
            self._put(node)

    def requeue(self, node: Node) -> None:
        """Rank a node anew whose number may have fallen; O(log nodes)."""
        if node.queued[self._tier]:
            self._put(node)

    def _put(self, node: Node, num_taken: int = 0) -> None:
        self._num_pushed += 1
        node.queued[self._tier] = self._num_pushed
        # Ties: least recently used, then the end of the longer prompt.
        item = (
            self.priority(node, num_taken),
            node.access_sequence,
            -node.first_page,
            self._num_pushed,
            node,
        )
        heapq.heappush(self._heap, item)
        if len(self._heap) > self._compact_at:
            tier = self._tier
            self._heap[:] = [i for i in self._heap if i[-1].queued[tier] == i[3]]
            heapq.heapify(self._heap)
            self._compact_at = 2 * len(self._heap) + _MIN_ITEMS

    def clear(self) -> None:
        """Forget all nodes."""
        self._heap.clear()
        self._aged.clear()

    def select(
        self,
        num_pages: int,
        *,
        protected: Collection[Node] = (),
        below: float | None = None,
    ) -> list[Victims]:
        """Choose up to ``num_pages`` copies to evict, worst first.

        Args:
            num_pages: copies wanted.
            protected: nodes that must keep theirs.
            below: leave runs alone whose priority is not lower than this.

        Returns:
            Victims that can all be dropped, in this order; fewer pages where the rest
            is pinned, in flight, protected or too valuable. Nothing has changed.
        """
        tier = self._tier
        self._age()
        heap = self._heap
        chosen: list[Victims] = []
        aside: list[Node] = []
        # Pages below a node, and of it, that would be gone if the victims so far were.
        gone: dict[Node, int] = {}
        taken: dict[Node, int] = {}
        while num_pages > 0 and heap:
            item = heapq.heappop(heap)
            node = item[-1]
            if node.queued[tier] != item[3]:
                # It was ranked anew since.
                continue
            node.queued[tier] = 0
            if node.parent is None or not node.resident[tier]:
                continue
            if node.below[tier] > gone.get(node, 0):
                continue
            num_taken = taken.get(node, 0)
            priority = self.priority(node, num_taken)
            if (priority, node.access_sequence) > item[:2]:
                self._put(node, num_taken)
                continue
            aside.append(node)
            if below is not None and priority >= below:
                break
            if node in protected:
                continue
            rows, has_more = self._evictable(node, num_pages, num_taken)
            if not len(rows):
                continue
            chosen.append(Victims(node, rows))
            num_pages -= len(rows)
            taken[node] = num_taken + len(rows)
            if has_more:
                if num_pages > 0:
                    self._put(node, taken[node])
                continue
            above: Node | None = node.parent
            while above is not None:
                gone[above] = gone.get(above, 0) + taken[node]
                if above.resident[tier] and above.below[tier] == gone[above]:
                    self.push(above)
                above = above.parent
        for node in dict.fromkeys(aside):
            if node in taken:
                # What was ranked without its last pages is ranked with them again.
                node.queued[tier] = 0
            self.push(node)
        return chosen

    def _age(self) -> None:
        """Go on ranking nodes anew, if horizons have changed."""
        version = self._outlook.version(self._tier)
        if version != self._version:
            self._version = version
            self._aged = [item[-1] for item in self._heap]
        for node in self._aged[-_REQUEUED:]:
            self.requeue(node)
        del self._aged[-_REQUEUED:]

    def _evictable(
        self, node: Node, num_pages: int, num_taken: int
    ) -> tuple[Int32s, bool]:
        """Return the last copies of a run that may go, and whether more may then.

        Pages go together as long as the same requests wait for them.
        """
        entries = self._table.entry_of[self._tier][node.rows]
        resident = np.flatnonzero(entries >= 0)
        stop = len(resident) - num_taken
        busy = np.flatnonzero(self._table.busy(entries[resident[:stop]]))
        free_from = int(busy[-1]) + 1 if len(busy) else 0
        first = max(free_from, stop - num_pages)
        if stop:
            alike_from = self._outlook.alike_from(node, int(resident[stop - 1]))
            first = max(first, int(np.searchsorted(resident, alike_from)))
        return node.rows[resident[first:stop]], first > 0
