"""Blocks that this instance allocated for others, and what becomes of them.

A guest's block is held, so that nobody else gets it while bytes may arrive. It becomes
ours when the guest finishes it, free when the guest frees it; and when the guest's
incarnation is over, its blocks are refused at once, and free when its process is known
to write no more (``Fences``).
"""

from __future__ import annotations

import numpy as np

from sgl_tiered.core.plans import UInt64s
from sgl_tiered.pool.base import BlockStore
from sgl_tiered.pool.fences import Fence, Fences
from sgl_tiered.pool.messages import Incarnation

__all__ = ["Guests"]


class Guests:
    """The ledger of blocks that belong to other instances. One thread calls it.

    Args:
        store: the blocks.
        fences: say when those who are gone write no more.
    """

    def __init__(self, store: BlockStore, fences: Fences) -> None:
        self._store = store
        self._fences = fences
        self._blocks: dict[Incarnation, set[int]] = {}
        self._quarantine: list[tuple[Fence, UInt64s]] = []

    @property
    def num_blocks(self) -> int:
        """Blocks that belong to incarnations that live."""
        return sum(len(blocks) for blocks in self._blocks.values())

    @property
    def num_quarantined(self) -> int:
        """Blocks that incarnations which are over may still write to."""
        return sum(len(blocks) for _, blocks in self._quarantine)

    @property
    def peers(self) -> tuple[Incarnation, ...]:
        """Incarnations that have blocks here."""
        return tuple(self._blocks)

    def lend(self, peer: Incarnation, addresses: UInt64s) -> None:
        """Give active blocks to a peer."""
        self._store.hold(addresses)
        self._blocks.setdefault(peer, set()).update(addresses.tolist())

    def has(self, peer: Incarnation, addresses: UInt64s) -> bool:
        """Return whether all of these, none of which is named twice, are the peer's."""
        blocks = self._blocks.get(peer, set())
        # First by their number: a message may name two million.
        return len(addresses) <= len(blocks) and blocks.issuperset(addresses.tolist())

    def take_back(self, peer: Incarnation, addresses: UInt64s) -> None:
        """Make blocks of a peer ours: active, and no longer held."""
        # A message of no blocks may come from a peer that has none.
        blocks = self._blocks.get(peer, set())
        blocks.difference_update(addresses.tolist())
        if not blocks:
            self._blocks.pop(peer, None)
        self._store.release(addresses)

    def free(self, peer: Incarnation, addresses: UInt64s) -> int:
        """Free those of these blocks that belong to the peer; return how many."""
        blocks = self._blocks.get(peer)
        if not blocks or len(addresses) > self._store.num_blocks:
            # Who has any names none twice, and so no more than there are.
            return 0
        own = np.array([a for a in addresses.tolist() if a in blocks], np.uint64)
        if len(own):
            self.take_back(peer, own)
            refusal = self._store.free(own)
            assert not refusal, refusal
        return len(own)

    def lose(self, peer: Incarnation) -> None:
        """Take all blocks from a peer whose incarnation is over."""
        blocks = self._blocks.get(peer)
        if blocks:
            addresses = np.array(sorted(blocks), np.uint64)
            # First, as it may fail: then nothing has changed.
            fence = self._fences.open(peer)
            # Held still: refused from now on, and free with the release.
            refusal = self._store.free(addresses)
            assert not refusal, refusal
            self._quarantine.append((fence, addresses))
        self._blocks.pop(peer, None)

    def poll(self) -> None:
        """Free blocks that nobody writes to any more."""
        if not any(fence.has_passed for fence, _ in self._quarantine):
            return
        for fence, addresses in self._quarantine:
            if fence.has_passed:
                self._store.release(addresses)
        self._quarantine = [each for each in self._quarantine if not each[0].has_passed]
