"""The radix index: which pages follow which, one tree of pages per namespace.

A node holds a run of pages: their tokens as bytes and their rows in the table. A walk
compares the prompt's bytes with the node's (memcmp), so every page that it returns has
been verified token for token and nothing is hashed but one page per node, for the
dictionary of children. Runs are split where prompts part; a page leaves the tree when
it has no copy in any tier and no page after it does, and its namespace with the last.

Per node and tier it counts the pages with a copy in the node (``resident``) and below
it (``below``), so that "leaf in tier t" (resident, and nothing below) is O(1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from sgl_tiered.cache.table import CacheTable
from sgl_tiered.core.plans import Int32s

__all__ = ["Node", "RadixIndex", "concat_rows", "take_apart"]

_NO_ROWS = np.zeros(0, np.int32)


class Node:
    """A run of pages with the same history of use.

    Attributes:
        raw: tokens of the run, int32 as bytes.
        rows: int32, the run's rows in the table.
        first_page: pages of the sequence before the run.
        digest: the namespace.
        resident: per tier, pages of the run that have a whole copy there.
        below: per tier, the same over all descendants.
        queued: per tier, number of the evictor's item for the node, 0 for none.
        kinds: per tier, what kind of page the run's last one is (``cache/reuse.py``).
        access_sequence, insert_sequence: numbers that grow with every access.
    """

    __slots__ = (
        "access_sequence",
        "below",
        "children",
        "digest",
        "first_page",
        "insert_sequence",
        "inserted_s",
        "kinds",
        "last_access_s",
        "num_hits",
        "parent",
        "queued",
        "raw",
        "resident",
        "rows",
    )

    def __init__(
        self,
        parent: Node | None,
        raw: bytes,
        rows: Int32s,
        first_page: int,
        digest: bytes,
        num_tiers: int,
    ) -> None:
        self.parent = parent
        self.raw = raw
        self.rows = rows
        self.first_page = first_page
        self.digest = digest
        self.children: dict[bytes, Node] = {}
        self.resident = [0] * num_tiers
        self.below = [0] * num_tiers
        self.queued = [0] * num_tiers
        self.kinds = [0] * num_tiers
        self.access_sequence = 0
        self.insert_sequence = 0
        self.last_access_s = 0.0
        self.inserted_s = 0.0
        self.num_hits = 0

    def is_leaf(self, tier: int) -> bool:
        """Return whether the tier has pages of this run and none after it."""
        return self.resident[tier] > 0 and self.below[tier] == 0


class RadixIndex:
    """Trees of pages over the rows of a table.

    Args:
        table: holds the rows; ``table.node`` is kept up to date here.
        page_bytes: bytes of one page's token ids (4 per token).
        on_leaf: called with (tier number, node) when a node becomes a leaf there.
    """

    def __init__(
        self,
        table: CacheTable,
        page_bytes: int,
        on_leaf: Callable[[int, Node], None],
    ) -> None:
        self._table = table
        self._page_bytes = page_bytes
        self._on_leaf = on_leaf
        self._num_tiers = len(table.tiers)
        # Of namespaces with pages, and of no others.
        self._roots: dict[bytes, Node] = {}
        self.on_gone: Callable[[bytes], None] = _ignore
        """Called with each namespace that has lost its last page."""

    @property
    def num_namespaces(self) -> int:
        """Namespaces with pages."""
        return len(self._roots)

    @property
    def roots(self) -> tuple[Node, ...]:
        """The roots of all namespaces with pages; O(namespaces)."""
        return tuple(self._roots.values())

    def has_pages(self, digest: bytes) -> bool:
        """Return whether a namespace has a page; O(1)."""
        return digest in self._roots

    def root(self, digest: bytes) -> Node:
        """Return the root of a namespace: a node without pages.

        It is kept only once a run is added to it.
        """
        root = self._roots.get(digest)
        if root is None:
            root = Node(None, b"", _NO_ROWS, 0, digest, self._num_tiers)
        return root

    def nodes(self, digest: bytes | None = None) -> Iterator[Node]:
        """Iterate over all nodes but the roots, parents first; None: everywhere."""
        stack = list(self._roots.values()) if digest is None else [self.root(digest)]
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())

    def walk(self, start: Node, raw: bytes) -> list[Node]:
        """Return the nodes below ``start`` whose pages ``raw`` begins with.

        A run that agrees in part only is split, so that the last node of the path ends
        where the agreement does. O(pages) in memcmp, plus O(1) per node.
        """
        page_bytes = self._page_bytes
        stop = len(raw) - len(raw) % page_bytes
        path: list[Node] = []
        node, position = start, 0
        while position < stop:
            child = node.children.get(raw[position : position + page_bytes])
            if child is None:
                break
            run = child.raw
            if raw.startswith(run, position):
                path.append(child)
                position += len(run)
                node = child
                continue
            path.append(self.split(child, self._num_equal(run, raw[position:stop])))
            break
        return path

    def rows_of(self, digest: bytes, raw: bytes) -> Int32s:
        """Return the rows of the pages that ``raw`` begins with; changes nothing.

        Other than ``walk`` it cuts no run, so what is only asked about leaves no trace.
        Empty for a namespace that is not open.
        """
        page_bytes = self._page_bytes
        stop = len(raw) - len(raw) % page_bytes
        node, position = self._roots.get(digest), 0
        found: list[Int32s] = []
        while node is not None and position < stop:
            node = node.children.get(raw[position : position + page_bytes])
            if node is None:
                break
            if not raw.startswith(node.raw, position):
                equal = self._num_equal(node.raw, raw[position:stop])
                found.append(node.rows[:equal])
                break
            found.append(node.rows)
            position += len(node.raw)
        return np.concatenate(found) if found else _NO_ROWS

    def find(self, start: Node, raw: bytes) -> list[Node]:
        """Return the nodes below ``start`` that share a page with ``raw``; no split."""
        page_bytes = self._page_bytes
        stop = len(raw) - len(raw) % page_bytes
        path: list[Node] = []
        node, position = start, 0
        while position < stop:
            child = node.children.get(raw[position : position + page_bytes])
            if child is None:
                break
            path.append(child)
            if not raw.startswith(child.raw, position):
                break
            position += len(child.raw)
            node = child
        return path

    def add(self, parent: Node, raw: bytes, rows: Int32s) -> Node:
        """Add a run after ``parent``; its rows have no copies yet."""
        if parent.parent is None:
            # Another root may have been handed out, and kept, since this one was.
            parent = self._roots.setdefault(parent.digest, parent)
        first = raw[: self._page_bytes]
        assert first not in parent.children, "the run is there already"
        node = Node(
            parent,
            raw,
            rows,
            parent.first_page + len(parent.rows),
            parent.digest,
            self._num_tiers,
        )
        parent.children[first] = node
        self._table.bind(rows, node)
        return node

    def split(self, node: Node, num_pages: int) -> Node:
        """Cut a run after ``num_pages``; return the upper part, a new node.

        The lower part stays the old node, so the evictors' items for it stay right.
        """
        parent = node.parent
        assert parent is not None
        assert 0 < num_pages < len(node.rows), (num_pages, len(node.rows))
        cut = num_pages * self._page_bytes
        upper_rows, lower_rows = node.rows[:num_pages], node.rows[num_pages:]
        upper = Node(
            parent,
            node.raw[:cut],
            # Copies: a view would keep the whole run's memory alive.
            upper_rows.copy(),
            node.first_page,
            node.digest,
            self._num_tiers,
        )
        upper.access_sequence = node.access_sequence
        upper.insert_sequence = node.insert_sequence
        upper.last_access_s = node.last_access_s
        upper.inserted_s = node.inserted_s
        upper.num_hits = node.num_hits
        upper.kinds = list(node.kinds)
        node.raw = node.raw[cut:]
        node.rows = lower_rows.copy()
        node.first_page += num_pages
        node.parent = upper
        upper.children[node.raw[: self._page_bytes]] = node
        parent.children[upper.raw[: self._page_bytes]] = upper
        self._table.bind(upper.rows, upper)
        for tier in range(self._num_tiers):
            if node.resident[tier]:
                column = self._table.entry_of[tier]
                num_upper = int(np.count_nonzero(column[upper.rows] >= 0))
                upper.resident[tier] = num_upper
                node.resident[tier] -= num_upper
            upper.below[tier] = node.resident[tier] + node.below[tier]
            if upper.is_leaf(tier):
                self._on_leaf(tier, upper)
        return upper

    def change(self, tier: int, rows: Int32s, delta: int) -> list[Node]:
        """Count ``delta`` (1 or -1) copies for each of these rows; return the nodes.

        Rows that have left the tree are skipped.
        """
        touched = Counter(self._table.nodes_of(rows))
        touched.pop(None, None)
        for node, num_pages in touched.items():
            self.change_node(tier, node, delta * num_pages)
        return list(touched)

    def change_node(self, tier: int, node: Node, delta: int) -> None:
        """Count ``delta`` copies more in a node, and below its ancestors."""
        node.resident[tier] += delta
        assert 0 <= node.resident[tier] <= len(node.rows), (
            f"{node.resident[tier]} copies of {len(node.rows)} pages"
        )
        if node.is_leaf(tier):
            self._on_leaf(tier, node)
        above = node.parent
        while above is not None:
            above.below[tier] += delta
            if above.is_leaf(tier):
                self._on_leaf(tier, above)
            above = above.parent

    def prune(self, nodes: Iterable[Node]) -> None:
        """Let pages go that have no copy and nothing after them, in nodes and above.

        Their rows are given back together: each call of the allocator costs as much as
        all else that is done for a node.
        """
        gone: list[Int32s] = []
        for node in nodes:
            self._prune(node, gone)
        if gone:
            self._table.free_rows(np.concatenate(gone))

    def clear(self) -> list[Node]:
        """Forget all pages; return the roots of the trees, for ``take_apart``."""
        gone, self._roots = self._roots, {}
        for digest in gone:
            self.on_gone(digest)
        return list(gone.values())

    def path_to(self, node: Node) -> list[Node]:
        """Return the nodes from below the root down to ``node``."""
        path: list[Node] = []
        above: Node | None = node
        while above is not None and above.parent is not None:
            path.append(above)
            above = above.parent
        return path[::-1]

    def _prune(self, node: Node, gone: list[Int32s]) -> None:
        """Take pages out of the tree; their rows are added to ``gone``."""
        copies = self._table.copies
        while node.parent is not None and not node.children:
            if copies[node.rows[-1]]:
                return
            live = np.flatnonzero(copies[node.rows])
            keep = int(live[-1]) + 1 if len(live) else 0
            first = node.raw[: self._page_bytes]
            gone.append(node.rows[keep:])
            node.rows = node.rows[:keep].copy()
            node.raw = node.raw[: keep * self._page_bytes]
            if keep:
                return
            parent = node.parent
            del parent.children[first]
            node.parent = None
            node = parent
        # Not a node that has left the tree before, or a root that was never kept.
        if not node.children and self._roots.get(node.digest) is node:
            del self._roots[node.digest]
            self.on_gone(node.digest)

    def _num_equal(self, run: bytes, raw: bytes) -> int:
        num_bytes = min(len(run), len(raw))
        a = np.frombuffer(run, np.int32, num_bytes // 4)
        b = np.frombuffer(raw, np.int32, num_bytes // 4)
        different = a != b
        if not different.any():
            return num_bytes // self._page_bytes
        return int(different.argmax()) * 4 // self._page_bytes


def take_apart(roots: list[Node], num_visits: int) -> Iterator[None]:
    """Part the nodes of trees that nobody uses; so many visits between two values.

    Parents and children hold each other: left alone they would wait for the garbage
    collector, and a node with many children would let all of them go at once.
    """
    left = num_visits
    while roots:
        if roots[-1].children:
            child = roots[-1].children.popitem()[1]
            child.parent = None
            roots.append(child)
        else:
            roots.pop()
        left -= 1
        if not left:
            left = num_visits
            yield


def _ignore(digest: bytes) -> None:
    """Take no note of a namespace."""


def concat_rows(path: Sequence[Node]) -> Int32s:
    """Return the rows of all pages on a path."""
    if len(path) == 1:
        return path[0].rows
    if not path:
        return _NO_ROWS
    return np.concatenate([node.rows for node in path])
