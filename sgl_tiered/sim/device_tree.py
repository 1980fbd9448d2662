"""A small model of the engine's device pool and of its radix tree, in whole pages.

Pages are either in the tree (shared, evictable unless locked) or private to a running
request. As in SGLang a locked node locks its ancestors, eviction takes whole leaves,
least recently used first or as a policy ranks them, and a match touches its whole path.

Law: ``tree_pages + private_pages + lent_pages + free_pages == capacity_pages``. Lent
pages are given back before anything is evicted, so that they count as available.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from sgl_tiered.cache.device_ranking import DeviceRanking
from sgl_tiered.core.plans import Int32s

__all__ = ["DeviceTree", "TreeNode"]

_ITEM = 4
"""Bytes of a stand-in."""
_MIN_ITEMS = 1024


class TreeNode:
    """A run of pages; ``lock`` counts the requests and transfers that need it."""

    __slots__ = (
        "accessed",
        "children",
        "inserted",
        "item",
        "key",
        "kind",
        "lock",
        "num_hits",
        "num_pages",
        "parent",
        "raw",
    )

    def __init__(self, parent: TreeNode | None, raw: bytes) -> None:
        self.parent = parent
        self.raw = raw
        self.num_pages = len(raw) // _ITEM
        self.children: dict[bytes, TreeNode] = {}
        self.lock = 0
        self.accessed = 0
        self.inserted = 0
        self.num_hits = 0
        self.kind = 0
        # Number of its valid item in the heap, 0 for none.
        self.item = 0
        # Of the last page, where a policy looks ahead.
        self.key: bytes | None = None


class DeviceTree:
    """The device's pages.

    Args:
        capacity_pages: pages of the pool.
        ranking: what goes first; None for the least recently used.
        digest: namespace of all pages.
    """

    def __init__(
        self,
        capacity_pages: int,
        ranking: DeviceRanking | None = None,
        digest: bytes = b"",
    ) -> None:
        self._ranking = ranking
        self._digest = digest
        self._version = 0
        if ranking is not None and ranking.lookahead is not None:
            ranking.lookahead.listen(self._fell)
        self.capacity_pages = capacity_pages
        self.tree_pages = 0
        self.private_pages = 0
        self.lent_pages = 0
        # Gives as many of them back as it is asked for, if there are; says how many.
        self.give_back: Callable[[int], int] = lambda num_pages: 0
        self.evictable_pages = 0
        self.num_evicted_pages = 0
        self.peak_pages = 0
        self._root = TreeNode(None, b"")
        self._heap: list[tuple[float, int, TreeNode]] = []
        self._compact_at = _MIN_ITEMS
        self._clock = 0
        self._sequence = 0

    @property
    def root(self) -> TreeNode:
        """The node without pages."""
        return self._root

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds."""
        held = self.tree_pages + self.private_pages + self.lent_pages
        return self.capacity_pages - held

    @property
    def available_pages(self) -> int:
        """Pages that can be had, by eviction if need be."""
        return self.free_pages + self.evictable_pages + self.lent_pages

    def match(self, raw: bytes) -> tuple[TreeNode, int]:
        """Return where the tree's agreement with ``raw`` ends, and its pages."""
        self._clock += 1
        node, position = self._root, 0
        while position < len(raw):
            child = node.children.get(raw[position : position + _ITEM])
            if child is None:
                break
            if raw.startswith(child.raw, position):
                node = child
                position += len(child.raw)
                self._touch(node)
                continue
            node = self._split(child, _num_equal(child.raw, raw[position:]))
            self._touch(node)
            position += len(node.raw)
            break
        return node, position // _ITEM

    def find(self, raw: bytes) -> tuple[TreeNode, int]:
        """Return the last node that ``raw`` agrees with and the pages; no use of them.

        Of the last node only a part may agree.
        """
        node, position = self._root, 0
        while position < len(raw):
            child = node.children.get(raw[position : position + _ITEM])
            if child is None:
                break
            node = child
            if not raw.startswith(child.raw, position):
                return node, position // _ITEM + _num_equal(child.raw, raw[position:])
            position += len(child.raw)
        return node, position // _ITEM

    def insert(self, raw: bytes, owned_pages: int) -> tuple[TreeNode, int]:
        """Publish a request's pages.

        Args:
            raw: stand-ins of all its whole pages.
            owned_pages: how many of these are in the tree and locked by it already;
                the others are private to it.

        Returns:
            The end node, and how many private pages the tree already had (freed).
        """
        node, num_known = self.match(raw)
        num_pages = len(raw) // _ITEM
        self.private_pages -= num_pages - owned_pages
        if num_known < num_pages:
            leaf = TreeNode(node, raw[num_known * _ITEM :])
            leaf.accessed = leaf.inserted = self._clock
            node.children[leaf.raw[:_ITEM]] = leaf
            self.tree_pages += leaf.num_pages
            self.evictable_pages += leaf.num_pages
            node = leaf
            self._push(leaf)
        return node, num_known - owned_pages

    def note(self, node: TreeNode, pages: Int32s, seen_pages: int) -> None:
        """Tell a policy that learns of a request's pages, which end with ``node``.

        Args:
            node: where they end.
            pages: int32, stand-ins of all of them.
            seen_pages: leading pages of earlier calls for the same request.
        """
        if self._ranking is None or not self._ranking.learns:
            return
        kinds = self._ranking.see(self._digest, pages, seen_pages, self._clock)
        end, above = len(pages), node
        while above.parent is not None and end > 0:
            above.kind = kinds[end - 1]
            end -= above.num_pages
            above = above.parent

    def lock(self, node: TreeNode) -> None:
        """Keep a node and its ancestors."""
        above: TreeNode | None = node
        while above is not None:
            if above.lock == 0:
                self.evictable_pages -= above.num_pages
            above.lock += 1
            above = above.parent

    def unlock(self, node: TreeNode) -> None:
        """Undo a ``lock``."""
        above: TreeNode | None = node
        while above is not None:
            assert above.lock > 0, "unlocked more often than locked"
            above.lock -= 1
            if above.lock == 0:
                self.evictable_pages += above.num_pages
                self._push(above)
            above = above.parent

    def take_private(self, num_pages: int, spare_pages: int = 0) -> bool:
        """Give pages to a request, evicting as needed; False if there are too few.

        Args:
            num_pages: wanted.
            spare_pages: further pages to have free before, if eviction can: SGLang
                makes room for more than it allocates.
        """
        if num_pages > self.available_pages:
            return False
        if num_pages + spare_pages > self.free_pages:
            self.evict(num_pages + spare_pages - self.free_pages)
        self.private_pages += num_pages
        held = self.tree_pages + self.private_pages
        self.peak_pages = max(self.peak_pages, held)
        return True

    def promise_private(self, num_pages: int) -> bool:
        """Give pages to a request before there is room; ``make_room`` has to follow.

        SGLang puts a whole pass together, and so locks the prefixes of all of its
        requests, before it evicts anything for it.
        """
        if num_pages > self.available_pages:
            return False
        self.private_pages += num_pages
        return True

    def make_room(self, spare_pages: int) -> None:
        """Evict for what was promised, until as many pages are free, if they can be."""
        if self.free_pages < spare_pages:
            self.evict(spare_pages - self.free_pages)
        held = self.tree_pages + self.private_pages
        assert held <= self.capacity_pages, "more was promised than can be evicted"
        self.peak_pages = max(self.peak_pages, held)

    def give_private(self, num_pages: int) -> None:
        """Take private pages back."""
        assert num_pages <= self.private_pages, (num_pages, self.private_pages)
        self.private_pages -= num_pages

    def evict(self, num_pages: int) -> int:
        """Free as many pages; return how many: lent ones first, then whole leaves."""
        num_given = self.give_back(num_pages) if self.lent_pages else 0
        return num_given + self.evict_leaves(num_pages - num_given)

    def publish_lent(self, raw: bytes, first_page: int) -> bool:
        """Put lent pages into the tree; False where what precedes them is gone.

        Args:
            raw: stand-ins of all pages from the prompt's start.
            first_page: where the lent ones begin; they are given up either way.
        """
        num_pages = len(raw) // _ITEM
        self.lent_pages -= num_pages - first_page
        num_known = self.find(raw)[1]
        if not first_page <= num_known < num_pages:
            return False
        self.private_pages += num_pages - num_known
        self.insert(raw, num_known)
        return True

    def evict_leaves(self, num_pages: int) -> int:
        """Drop whole leaves until as many pages are gone; return how many went."""
        num_gone = 0
        self._age()
        while num_gone < num_pages and self._heap:
            number, item, node = heapq.heappop(self._heap)
            if node.item != item:
                # It was ranked anew since.
                continue
            node.item = 0
            parent = node.parent
            if parent is None or node.lock or node.children:
                continue
            if self._number(node) > number:
                self._push(node)
                continue
            del parent.children[node.raw[:_ITEM]]
            node.parent = None
            num_gone += node.num_pages
            self._push(parent)
        self.tree_pages -= num_gone
        self.evictable_pages -= num_gone
        self.num_evicted_pages += num_gone
        return num_gone

    def check(self) -> None:
        """Assert the laws; O(nodes)."""
        tree = evictable = 0
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            tree += node.num_pages
            evictable += 0 if node.lock else node.num_pages
            if not node.lock:
                assert not any(child.lock for child in node.children.values())
            stack.extend(node.children.values())
        assert (tree, evictable) == (self.tree_pages, self.evictable_pages)
        assert self.private_pages >= 0, self.private_pages
        assert self.free_pages >= 0, self.free_pages

    def _touch(self, node: TreeNode) -> None:
        node.accessed = self._clock
        node.num_hits += 1

    def _push(self, node: TreeNode) -> None:
        if node.item or node.lock or node.children or node.parent is None:
            return
        self._put(node)

    def _put(self, node: TreeNode) -> None:
        self._sequence += 1
        node.item = self._sequence
        heapq.heappush(self._heap, (self._number(node), self._sequence, node))
        if len(self._heap) > self._compact_at:
            self._heap[:] = [item for item in self._heap if item[2].item == item[1]]
            heapq.heapify(self._heap)
            self._compact_at = 2 * len(self._heap) + _MIN_ITEMS

    def _number(self, node: TreeNode) -> float:
        ranking = self._ranking
        if ranking is None:
            return node.accessed
        return ranking.number(
            self._key(node) if ranking.looks_ahead else None,
            node.kind,
            node.num_pages,
            node.accessed,
            node.inserted,
            node.num_hits,
        )

    def _key(self, node: TreeNode) -> bytes:
        """Return the key of a run's last page; derived once per run."""
        if node.key is None:
            assert self._ranking is not None
            parent = node.parent
            if parent is None:
                return self._digest
            pages = np.frombuffer(node.raw, np.int32)
            node.key = self._ranking.last_key(self._key(parent), pages)
        return node.key

    def _age(self) -> None:
        """Rank all anew where numbers change as runs age, as SGLang's tree does."""
        ranking = self._ranking
        if ranking is None:
            return
        if not ranking.is_aging and ranking.version == self._version:
            return
        self._version = ranking.version
        nodes = [node for _, item, node in self._heap if node.item == item]
        self._heap.clear()
        for node in nodes:
            self._put(node)

    def _fell(self, digest: bytes, pages: Int32s) -> None:
        """Rank pages anew that a request no longer waits for."""
        del digest
        node, position, raw = self._root, 0, pages.tobytes()
        while position < len(raw):
            child = node.children.get(raw[position : position + _ITEM])
            if child is None:
                return
            if child.item:
                self._put(child)
            if not raw.startswith(child.raw, position):
                return
            position += len(child.raw)
            node = child

    def _split(self, node: TreeNode, num_pages: int) -> TreeNode:
        """Cut a run; return the upper part, a new node. Locks hold the lower one."""
        parent = node.parent
        assert parent is not None
        assert 0 < num_pages < node.num_pages, (num_pages, node.num_pages)
        upper = TreeNode(parent, node.raw[: num_pages * _ITEM])
        upper.lock = node.lock
        upper.accessed = node.accessed
        upper.inserted = node.inserted
        upper.num_hits = node.num_hits
        upper.kind = node.kind
        parent.children[upper.raw[:_ITEM]] = upper
        node.raw = node.raw[num_pages * _ITEM :]
        node.num_pages -= num_pages
        node.parent = upper
        upper.children[node.raw[:_ITEM]] = node
        return upper


def _num_equal(run: bytes, raw: bytes) -> int:
    num = min(len(run), len(raw)) // _ITEM
    a = np.frombuffer(run, np.int32, num)
    b = np.frombuffer(raw, np.int32, num)
    different = a != b
    return int(different.argmax()) if different.any() else num
