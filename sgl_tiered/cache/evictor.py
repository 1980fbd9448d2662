"""Which copies of a tier go when it needs room: lazy heaps over the tier's leaves.

A node has at most one valid item. An item may be stale (the node was used again, is no
leaf any more, or is gone); it is put right when its turn comes, so that an access costs
nothing here. Where a number may have fallen, ``requeue`` makes a new item. Runs whose
worth changes as they age, alike for all of a kind, have two heaps per kind, with the
least and with the most recently used on top: worth mostly rises to an age and falls
from there on, so only the tops have to be ranked when room is needed. Pages go from
the end of a leaf, so what stays of a prompt is always its beginning.
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

_MIN_ITEMS = 1024
"""Up to so many items, and as many again as were valid, none is looked for in vain."""
_NO_GROUP = 1 << 62
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
        self._heaps: dict[int, list[_Item]] = {}
        self._num_items = 0
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
        if not node.queued[self._tier]:
            self._put(node)

    def requeue(self, node: Node) -> None:
        """Rank a node anew whose number may have fallen; O(log nodes)."""
        if node.queued[self._tier]:
            self._put(node)

    def clear(self) -> None:
        """Forget all nodes."""
        self._heaps.clear()
        self._num_items = 0

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
        self._regroup()
        chosen: list[Victims] = []
        aside: list[Node] = []
        # Pages below a node, and of it, that would be gone if the victims so far were.
        gone: dict[Node, int] = {}
        taken: dict[Node, int] = {}
        raised: dict[Node, None] = {}
        # The tops of the heaps by their numbers now; the last field is the group.
        tops: list[tuple[_Item, int]] = []
        for group in list(self._heaps):
            self._look(group, tops, gone)
        while num_pages > 0 and tops:
            item, group = heapq.heappop(tops)
            node = item[-1]
            if node.queued[tier] != item[3]:
                # It was ranked anew since.
                continue
            node.queued[tier] = 0
            self._look(group, tops, gone)
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
                self._raise(node, tops, taken[node])
                raised[node] = None
                continue
            above: Node | None = node.parent
            while above is not None:
                gone[above] = gone.get(above, 0) + taken[node]
                if above.resident[tier] and above.below[tier] == gone[above]:
                    self._raise(above, tops)
                    raised[above] = None
                above = above.parent
        for node in raised:
            # Ranked as if the victims were gone, which they need not be.
            node.queued[tier] = 0
        for node in (*aside, *raised):
            self.push(node)
        return chosen

    def _put(self, node: Node) -> None:
        group = self._outlook.group(node, self._tier)
        number = float(node.access_sequence) if group else self.priority(node)
        item = self._item(node, number)
        heapq.heappush(self._heaps.setdefault(group, []), item)
        self._num_items += 1
        if group:
            # What was just used may be worth less than what is due again: see both.
            young = self._heaps.setdefault(-group, [])
            heapq.heappush(young, (-number, *item[1:]))
            self._num_items += 1
        if self._num_items > self._compact_at:
            self._compact()

    def _item(self, node: Node, number: float) -> _Item:
        """Return a new item, the node's valid one from now on."""
        self._num_pushed += 1
        node.queued[self._tier] = self._num_pushed
        # Ties: least recently used, then the end of the longer prompt.
        sequence, first = node.access_sequence, -node.first_page
        return (number, sequence, first, self._num_pushed, node)

    def _raise(
        self, node: Node, tops: list[tuple[_Item, int]], num_taken: int = 0
    ) -> None:
        """Put a node among the tops that has become a leaf, or lost its end."""
        item = self._item(node, self.priority(node, num_taken))
        heapq.heappush(tops, (item, _NO_GROUP))

    def _look(
        self, group: int, tops: list[tuple[_Item, int]], gone: dict[Node, int]
    ) -> None:
        """Put the valid top of a heap among the tops, by its number now."""
        tier, heap = self._tier, self._heaps.get(group)
        while heap:
            item = heap[0]
            node = item[-1]
            if node.queued[tier] != item[3]:
                heapq.heappop(heap)
                self._num_items -= 1
                continue
            is_leaf = node.resident[tier] and node.parent is not None
            if not is_leaf or node.below[tier] > gone.get(node, 0):
                # It is pushed when it is a leaf again.
                node.queued[tier] = 0
                continue
            number = self.priority(node)
            is_grouped = self._outlook.group(node, tier) == abs(group)
            known = float(node.access_sequence) if group else number
            if group < 0:
                known = item[0]
            if is_grouped and (known, node.access_sequence) <= (item[0], item[1]):
                heapq.heappush(tops, ((number, *item[1:]), group))
                return
            self._put(node)

    def _regroup(self) -> None:
        """Rank all anew where groups have begun or ceased to be."""
        version = self._outlook.version(self._tier)
        if version != self._version:
            self._version = version
            self._compact()
            items = [item for heap in self._heaps.values() for item in heap]
            self.clear()
            for *_, number, node in items:
                if node.queued[self._tier] != number:
                    # Done already: a kind's runs are in two heaps.
                    continue
                node.queued[self._tier] = 0
                if node.parent is not None and node.resident[self._tier]:
                    self._put(node)

    def _compact(self) -> None:
        """Drop the items that are not valid."""
        tier = self._tier
        for heap in self._heaps.values():
            heap[:] = [item for item in heap if item[-1].queued[tier] == item[3]]
            heapq.heapify(heap)
        self._num_items = sum(len(heap) for heap in self._heaps.values())
        self._compact_at = 2 * self._num_items + _MIN_ITEMS

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
