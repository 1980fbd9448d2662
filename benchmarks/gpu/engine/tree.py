"""Prefixes on the device by whole pages; where pages lie is known to the device only.

As in SGLang, pages are taken and given back by work on the schedule stream, so the host
knows how many are free and not which.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np
import torch

__all__ = ["PagePool", "PrefixTree"]


class PagePool:
    """Free pages, as a tensor of the device.

    Args:
        num_pages: pages 1 to ``num_pages``; page 0 is for padding.
        device: of the tensor.
    """

    def __init__(self, num_pages: int, device: torch.device) -> None:
        self.num_pages = num_pages
        self._free = torch.arange(1, num_pages + 1, dtype=torch.int64, device=device)

    @property
    def num_free(self) -> int:
        """Pages that nobody has."""
        return len(self._free)

    def take(self, count: int) -> torch.Tensor:
        """Return pages, int64 [count]; there must be so many."""
        assert count <= self.num_free, f"{count} pages of {self.num_free}"
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give(self, pages: torch.Tensor) -> None:
        """Take pages back; the first to be taken again, as they may still be in use."""
        self._free = torch.cat([pages, self._free])


class PrefixTree:
    """Nodes of one page each, dropped from the leaves, the oldest first.

    Args:
        pool: of the pages.
        page_tokens: tokens in a page.
        upload: brings whole numbers to the device.
        max_nodes: at a time.
        device: of the tensors.
        newest_first: drop what was used last.
    """

    def __init__(
        self,
        pool: PagePool,
        page_tokens: int,
        upload: Callable[[Sequence[int]], torch.Tensor],
        max_nodes: int,
        device: torch.device,
        *,
        newest_first: bool = False,
    ) -> None:
        self._sign = -1 if newest_first else 1
        self._pool, self._page_tokens, self._upload = pool, page_tokens, upload
        self._pages = torch.zeros(max_nodes, dtype=torch.int64, device=device)
        self._unused = list(range(max_nodes))[::-1]
        self._ids: dict[tuple[int, bytes], int] = {}
        self._keys: dict[int, tuple[int, bytes]] = {}
        self._locks: dict[int, int] = {}
        self._children: dict[int, int] = {}
        self._stamps: dict[int, int] = {}
        self._now = 0
        self.num_evicted = 0

    @property
    def num_unlocked(self) -> int:
        """Pages that ``evict`` could give back."""
        return sum(not lock for lock in self._locks.values())

    def match(self, tokens: np.ndarray, max_pages: int) -> list[int]:
        """Return the nodes of the leading pages that are there."""
        found: list[int] = []
        parent = -1
        self._now += 1
        for key in self._split(tokens[: max_pages * self._page_tokens]):
            node = self._ids.get((parent, key))
            if node is None:
                break
            found.append(node)
            self._stamps[node] = self._now
            parent = node
        return found

    def pages_of(self, nodes: Sequence[int]) -> torch.Tensor:
        """Return their pages, int64 [n] on the device."""
        return self._pages[self._upload(nodes)]

    def insert(
        self, tokens: np.ndarray, held: Sequence[int], pages: torch.Tensor
    ) -> tuple[list[int], list[int]]:
        """Put a request's pages in, behind those that it holds.

        Args:
            tokens: of whole pages.
            held: nodes of the leading ones.
            pages: int64 [n] on the device, the pages behind them.

        Returns:
            The nodes of these, and which of them were there already: their pages are
            given back, and the request has to read the tree's.
        """
        nodes: list[int] = []
        fresh: list[int] = []
        known: list[int] = []
        parent = held[-1] if held else -1
        self._now += 1
        for number, key in enumerate(self._split(tokens)[len(held) :]):
            node = self._ids.get((parent, key))
            if node is None:
                node = self._unused.pop()
                self._ids[parent, key], self._keys[node] = node, (parent, key)
                self._locks[node] = self._children[node] = 0
                if parent >= 0:
                    self._children[parent] += 1
                fresh.append(number)
            else:
                known.append(number)
            self._stamps[node] = self._now
            nodes.append(node)
            parent = node
        if fresh:
            where = self._upload([nodes[number] for number in fresh])
            self._pages[where] = pages[self._upload(fresh)]
        if known:
            self._pool.give(pages[self._upload(known)])
        return nodes, known

    def lock(self, nodes: Sequence[int]) -> None:
        """Keep nodes until they are unlocked as often."""
        for node in nodes:
            self._locks[node] += 1

    def unlock(self, nodes: Sequence[int]) -> None:
        """Let go of nodes."""
        for node in nodes:
            self._locks[node] -= 1
            assert self._locks[node] >= 0, f"node {node} was not locked"

    def evict(self, count: int) -> int:
        """Drop up to ``count`` pages, leaves first; return how many."""
        leaves = [
            (self._sign * self._stamps[node], node)
            for node, lock in self._locks.items()
            if not lock and not self._children[node]
        ]
        heapq.heapify(leaves)
        dropped: list[int] = []
        while leaves and len(dropped) < count:
            _, node = heapq.heappop(leaves)
            parent, _ = key = self._keys.pop(node)
            del self._ids[key], self._locks[node], self._children[node]
            del self._stamps[node]
            dropped.append(node)
            if parent >= 0:
                self._children[parent] -= 1
                if not self._children[parent] and not self._locks[parent]:
                    stamp = self._sign * self._stamps[parent]
                    heapq.heappush(leaves, (stamp, parent))
        if dropped:
            self._pool.give(self.pages_of(dropped))
            self._unused += dropped
            self.num_evicted += len(dropped)
        return len(dropped)

    def _split(self, tokens: np.ndarray) -> list[bytes]:
        size = self._page_tokens
        return [
            tokens[begin : begin + size].tobytes()
            for begin in range(0, len(tokens) - size + 1, size)
        ]
