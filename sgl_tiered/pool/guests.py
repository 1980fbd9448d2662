"""Blocks that this instance allocated for others, and what becomes of them.

A guest's block is held, so that nobody else gets it while bytes may arrive. It becomes
ours when the guest finishes it, free when the guest frees it; and when the guest's
incarnation is over, its blocks are refused at once and free after a grace time: what
the dead one had handed to the network may arrive until then.
"""

from __future__ import annotations

import numpy as np

from sgl_tiered.core.clock import Clock
from sgl_tiered.core.plans import UInt64s
from sgl_tiered.pool.base import BlockStore
from sgl_tiered.pool.messages import Incarnation

__all__ = ["Guests"]


class Guests:
    """The ledger of blocks that belong to other instances. One thread calls it.

    Args:
        store: the blocks.
        clock: for the grace time.
        grace_s: how long blocks of an incarnation that is over are kept unused.
    """

    def __init__(self, store: BlockStore, clock: Clock, grace_s: float) -> None:
        self._store = store
        self._clock = clock
        self._grace_s = grace_s
        self._blocks: dict[Incarnation, set[int]] = {}
        # (end of the grace time, blocks), oldest first.
        self._quarantine: list[tuple[float, UInt64s]] = []

    @property
    def num_blocks(self) -> int:
        """Blocks that belong to incarnations that live."""
        return sum(len(blocks) for blocks in self._blocks.values())

    @property
    def num_quarantined(self) -> int:
        """Blocks whose grace time runs."""
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
        """Return whether all of these belong to the peer."""
        return self._blocks.get(peer, set()).issuperset(addresses.tolist())

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
        blocks = self._blocks.get(peer, set())
        own = np.array([a for a in addresses.tolist() if a in blocks], np.uint64)
        if len(own):
            self.take_back(peer, own)
            refusal = self._store.free(own)
            assert not refusal, refusal
        return len(own)

    def lose(self, peer: Incarnation) -> None:
        """Take all blocks from a peer whose incarnation is over."""
        blocks = self._blocks.pop(peer, None)
        if blocks:
            addresses = np.array(sorted(blocks), np.uint64)
            # Held still: refused from now on, and free with the release.
            refusal = self._store.free(addresses)
            assert not refusal, refusal
            until_s = self._clock.now() + self._grace_s
            self._quarantine.append((until_s, addresses))

    def poll(self) -> None:
        """Free blocks whose grace time is over."""
        now_s = self._clock.now()
        while self._quarantine and self._quarantine[0][0] <= now_s:
            self._store.release(self._quarantine.pop(0)[1])
