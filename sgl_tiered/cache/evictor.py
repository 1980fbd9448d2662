"""Which copies of a tier go when it needs room: a lazy heap over the tier's leaves.

The heap has at most one item per node. An item may be stale (the node was used again,
is no leaf any more, or is gone); it is put right when its turn comes, so that an access
costs nothing here. Pages go from the end of a leaf, so what stays of a prompt is
always its beginning.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from sgl_tiered.cache.index import Node
from sgl_tiered.cache.table import CacheTable
from sgl_tiered.core.plans import Int32s
from sgl_tiered.policies.eviction.base import EvictionFacts, EvictionPolicy

__all__ = ["Evictor", "Victims"]


@dataclass(frozen=True, slots=True, eq=False)
class Victims:
    """Pages of one node whose copies are to go, in token order."""

    node: Node
    rows: Int32s


class Evictor:
    """Chooses victims in one tier; changes no copy itself."""

    def __init__(self, table: CacheTable, tier: int, policy: EvictionPolicy) -> None:
        self._table = table
        self._tier = tier
        self._policy = policy
        self._heap: list[tuple[float, int, int, int, Node]] = []
        self._num_pushed = 0

    @property
    def policy(self) -> EvictionPolicy:
        """The policy that ranks."""
        return self._policy

    def priority(self, node: Node) -> float:
        """Return the policy's number for a node as it is now."""
        facts = EvictionFacts(
            tier=self._table.tiers[self._tier],
            num_pages=node.resident[self._tier],
            last_access_s=node.last_access_s,
            inserted_s=node.inserted_s,
            access_sequence=node.access_sequence,
            insert_sequence=node.insert_sequence,
            num_hits=node.num_hits,
            score=node.score,
        )
        return self._policy.priority(facts)

    def push(self, node: Node) -> None:
        """Take note of a node that may be a leaf; O(log nodes)."""
        if node.queued[self._tier]:
            return
        node.queued[self._tier] = True
        self._num_pushed += 1
        # Ties: least recently used, then the end of the longer prompt.
        item = (
            self.priority(node),
            node.access_sequence,
            -node.first_page,
            self._num_pushed,
            node,
        )
        heapq.heappush(self._heap, item)

    def clear(self) -> None:
        """Forget all nodes."""
        self._heap.clear()

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
        heap = self._heap
        chosen: list[Victims] = []
        aside: list[Node] = []
        # Pages below a node that would be gone if the victims so far were.
        gone: dict[Node, int] = {}
        while num_pages > 0 and heap:
            item = heapq.heappop(heap)
            node = item[-1]
            node.queued[tier] = False
            if node.parent is None or not node.resident[tier]:
                continue
            if node.below[tier] > gone.get(node, 0):
                continue
            priority = self.priority(node)
            if (priority, node.access_sequence) > item[:2]:
                self.push(node)
                continue
            aside.append(node)
            if below is not None and priority >= below:
                break
            if node in protected:
                continue
            rows, is_all = self._evictable(node, num_pages)
            if not len(rows):
                continue
            chosen.append(Victims(node, rows))
            num_pages -= len(rows)
            if not is_all:
                continue
            above: Node | None = node.parent
            while above is not None:
                gone[above] = gone.get(above, 0) + len(rows)
                if above.resident[tier] and above.below[tier] == gone[above]:
                    self.push(above)
                above = above.parent
        for node in aside:
            self.push(node)
        return chosen

    def _evictable(self, node: Node, num_pages: int) -> tuple[Int32s, bool]:
        """Return the last copies of a run that may go, and whether these are all."""
        entries = self._table.entry_of[self._tier][node.rows]
        resident = np.flatnonzero(entries >= 0)
        busy = np.flatnonzero(self._table.busy(entries[resident]))
        first = int(busy[-1]) + 1 if len(busy) else 0
        first = max(first, len(resident) - num_pages)
        return node.rows[resident[first:]], first == 0
