"""Which copies of a tier go when it needs room: a lazy heap over the tier's leaves.

A node has at most one valid item. An item may be stale (the node was used again, is no
leaf any more, or is gone); it is put right when its turn comes, so that an access costs
nothing here. Where a number may have fallen, ``requeue`` makes a new item. A worth that
changes with age does so in steps: a second heap has the access at which each run takes
its next one, and only then it is ranked anew. Pages go from the end of a leaf, so what
stays of a prompt is always its beginning.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from sgl_tiered.cache.index import Node
from sgl_tiered.cache.outlook import NO_OUTLOOK, Outlook
from sgl_tiered.cache.table import CacheTable
from sgl_tiered.core.plans import Int32s
from sgl_tiered.policies.eviction.base import EvictionFacts, EvictionPolicy

__all__ = ["Evictor", "Victims"]

_MIN_ITEMS = 1024
"""Up to so many items, and as many again as were valid, none is looked for in vain."""
_Item = tuple[float, int, int, int, Node]
"""Number, last access, place in the prompt negated, number of the item, node."""


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
        self._heap: list[_Item] = []
        # (number of the access, number of the item, node), where worth takes a step.
        self._steps: list[tuple[int, int, Node]] = []
        self._num_pushed = 0
        self._compact_at = _MIN_ITEMS

    @property
    def policy(self) -> EvictionPolicy:
        """The policy that ranks."""
        return self._policy

    def priority(self, node: Node, num_taken: int = 0) -> float:
        """Return the policy's number for a node, less some of its last pages."""
        score, queued, next_use, worth = self._outlook.facts(
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
            worth=worth,
        )
        return self._policy.priority(facts)

    def push(self, node: Node) -> None:
        """Take note of a node that may be a leaf; O(log nodes)."""
        if not node.queued[self._tier] or self._outlook.ages(self._tier):
            # One that was no leaf may be younger by now, and worth less for it.
            self._put(node)

    def requeue(self, node: Node) -> None:
        """Rank a node anew whose number may have fallen; O(log nodes)."""
        if node.queued[self._tier]:
            self._put(node)

    def clear(self) -> list[list[Any]]:
        """Forget all nodes; return the items, of which there may be very many."""
        former: list[list[Any]] = [self._heap, self._steps]
        self._heap, self._steps = [], []
        return former

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
        self._refresh()
        chosen: list[Victims] = []
        aside: list[Node] = []
        # Pages below a node, and of it, that would be gone if the victims so far were.
        gone: dict[Node, int] = {}
        taken: dict[Node, int] = {}
        raised: dict[Node, None] = {}
        while num_pages > 0 and (item := self._pop(gone, taken)) is not None:
            node = item[-1]
            aside.append(node)
            if below is not None and item[0] >= below:
                break
            if node in protected:
                continue
            num_taken = taken.get(node, 0)
            rows, has_more = self._evictable(node, num_pages, num_taken)
            if not len(rows):
                continue
            chosen.append(Victims(node, rows))
            num_pages -= len(rows)
            taken[node] = num_taken + len(rows)
            if has_more:
                self._add(node, self.priority(node, taken[node]))
                raised[node] = None
                continue
            above: Node | None = node.parent
            while above is not None:
                gone[above] = gone.get(above, 0) + taken[node]
                if above.resident[tier] and above.below[tier] == gone[above]:
                    self._add(above, self.priority(above))
                    raised[above] = None
                above = above.parent
        for node in raised:
            # Ranked as if the victims were gone, which they need not be.
            node.queued[tier] = 0
        for node in (*aside, *raised):
            if not node.queued[tier]:
                self._put(node)
        return chosen

    def _put(self, node: Node) -> None:
        self._add(node, self.priority(node))
        step = self._outlook.next_step(node, self._tier)
        if step is not None:
            heapq.heappush(self._steps, (step, self._num_pushed, node))
        if len(self._heap) + len(self._steps) > self._compact_at:
            self._compact()

    def _add(self, node: Node, number: float) -> None:
        """Make an item, the node's valid one from now on."""
        self._num_pushed += 1
        node.queued[self._tier] = self._num_pushed
        # Ties: least recently used, then the end of the longer prompt.
        sequence, first = node.access_sequence, -node.first_page
        item = (number, sequence, first, self._num_pushed, node)
        heapq.heappush(self._heap, item)

    def _pop(self, gone: dict[Node, int], taken: dict[Node, int]) -> _Item | None:
        """Take out the leaf with the lowest number; None if there is no leaf."""
        tier, heap = self._tier, self._heap
        while heap:
            item = heapq.heappop(heap)
            node = item[-1]
            if node.queued[tier] != item[3]:
                continue
            node.queued[tier] = 0
            if not self._is_leaf(node, gone.get(node, 0)):
                # It is pushed when it is a leaf again.
                continue
            number = self.priority(node, taken.get(node, 0))
            if (number, node.access_sequence) <= (item[0], item[1]):
                return item
            if node in taken:
                self._add(node, number)
            else:
                self._put(node)
        return None

    def _is_leaf(self, node: Node, num_gone: int = 0) -> bool:
        tier = self._tier
        is_there = node.resident[tier] > 0 and node.parent is not None
        return is_there and node.below[tier] <= num_gone

    def _refresh(self) -> None:
        """Rank anew what took a step, and all where learning began or ended."""
        tier = self._tier
        version = self._outlook.version(tier)
        if version != self._version:
            self._version = version
            items = [item for item in self._heap if item[-1].queued[tier] == item[3]]
            self.clear()
            for *_, node in items:
                self._rank_anew(node)
            return
        now, steps = self._outlook.now(tier), self._steps
        while steps and steps[0][0] <= now:
            _, number, node = heapq.heappop(steps)
            if node.queued[tier] == number:
                self._rank_anew(node)

    def _rank_anew(self, node: Node) -> None:
        node.queued[self._tier] = 0
        if self._is_leaf(node):
            self._put(node)

    def _compact(self) -> None:
        """Drop the items that are not valid."""
        tier = self._tier
        heap, steps = self._heap, self._steps
        heap[:] = [item for item in heap if item[-1].queued[tier] == item[3]]
        steps[:] = [item for item in steps if item[-1].queued[tier] == item[1]]
        heapq.heapify(heap)
        heapq.heapify(steps)
        self._compact_at = 2 * (len(heap) + len(steps)) + _MIN_ITEMS

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
