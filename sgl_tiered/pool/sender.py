"""Transfers from this instance, its blocks at others, and when those may be freed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from sgl_tiered.core.addresses import mediums_of
from sgl_tiered.core.clock import Clock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import UInt64s
from sgl_tiered.pool.base import BlockStore
from sgl_tiered.pool.block_slots import NO_ADDRESSES
from sgl_tiered.pool.entries import Entries
from sgl_tiered.pool.facts import Fact, Facts
from sgl_tiered.pool.messages import FreeBlocks, Incarnation, PoolInfo, to_wire
from sgl_tiered.pool.requests import Requests
from sgl_tiered.pool.transfer import Ending, Job, Rank, Step, Transfer
from sgl_tiered.transport.incidents import Incidents

__all__ = ["Sender"]

IsThere = Callable[[int, int], bool]
"""Whether an incarnation of an instance is a member."""


class Sender:
    """What this instance writes to others. One thread calls it.

    Args:
        store: the blocks here.
        info: how this instance is built.
        ranks: those of its ranks that this process moves bytes for.
        requests: to others.
        clock: for deadlines.
        may_write: whether this instance's own lease holds.
        pump: moves everything along once, and waits a moment.
        facts: what ranks tell each other of what they send.
        entries: how the others are built.
        incidents: counts what fails here.
    """

    def __init__(
        self,
        store: BlockStore,
        info: PoolInfo,
        ranks: Sequence[Rank],
        requests: Requests,
        clock: Clock,
        may_write: Callable[[], bool],
        pump: Callable[[], None],
        facts: Facts,
        entries: Entries,
        incidents: Incidents,
    ) -> None:
        self._facts = facts
        self._entries = entries
        self._incidents = incidents
        self._is_there: IsThere = lambda *peer: True
        self._store = store
        self._info = info
        self._ranks = tuple(ranks)
        self._requests = requests
        self._clock = clock
        self._may_write = may_write
        self._pump = pump
        self._transfers: list[Transfer] = []
        # With each, whether all ranks have found that nothing touches its blocks.
        self._endings: list[tuple[Transfer, Ending, Fact]] = []
        # Blocks at others that are ours.
        self._at_others: dict[Incarnation, set[int]] = {}
        # And those that we are done with, until nothing of ours writes to them.
        self._to_free: list[tuple[Incarnation, UInt64s]] = []

    @property
    def num_transfers(self) -> int:
        """Transfers that have not ended."""
        return len(self._transfers)

    @property
    def num_endings(self) -> int:
        """Ended ones that may still touch blocks, and blocks to free after that."""
        return len(self._endings) + len(self._to_free)

    # Blocks of ours at others.

    def own(self, peer: Incarnation, addresses: UInt64s) -> None:
        """Note that blocks at a peer are ours."""
        self._at_others.setdefault(peer, set()).update(addresses.tolist())

    def refusal_there(
        self, peer: Incarnation | None, instance: int, addresses: UInt64s
    ) -> str:
        """Return why these are not blocks of ours at a peer; else an empty text."""
        if peer is None:
            return f"instance {instance} is not in the pool"
        if self._at_others.get(peer, set()).issuperset(addresses.tolist()):
            return ""
        return f"a block at instance {instance} is not, or no longer, ours"

    def free(self, peer: Incarnation, addresses: UInt64s) -> None:
        """Let a peer free blocks of ours, once nothing of ours writes to them."""
        self._at_others[peer].difference_update(addresses.tolist())
        self._to_free.append((peer, addresses))

    # Transfers.

    def left_for(self, peer: Incarnation) -> list[Transfer]:
        """Return what has ended, one way or the other, and may still write to a peer.

        That is all that was begun with a former incarnation of its instance, or by a
        former one of this; and what has failed since.
        """
        left = [each for each, ending, _ in self._endings if ending.peer[0] == peer[0]]
        for transfer in self._transfers:
            receiver = transfer.job.peer
            is_over = transfer.step is Step.OVER or receiver != peer
            if receiver[0] == peer[0] and is_over:
                left.append(transfer)
        return left

    def send(self, job: Job, refusal: str = "") -> Transfer:
        """Begin a transfer; with a refusal, one that has failed already."""
        staged = job.sources if refusal else self.in_memory(job.sources)
        if staged is None:
            refusal = "there is no room in the host for blocks that lie on disk"
            staged = job.sources
        if refusal:
            job = replace(job, targets=NO_ADDRESSES)
            transfer = self._transfer(job)
            transfer.fail(refusal)
            return transfer
        if staged is not job.sources:
            job, sources = replace(job, sources=staged), job.sources
            return self.launch(job, sources)
        return self.launch(job, staged)

    def in_memory(self, sources: UInt64s) -> UInt64s | None:
        """Return these blocks, with copies in the host of those that lie on a disk."""
        places = {place.medium for rank in self._info.ranks for place in rank.places}
        media = mediums_of(sources)
        away = np.isin(media, sorted(places), invert=True)
        if not away.any():
            return sources
        copies = self._store.duplicate(sources[away], TierId.HOST)
        if copies is None:
            return None
        staged = sources.copy()
        staged[away] = copies
        return staged

    def launch(self, job: Job, sources: UInt64s) -> Transfer:
        """Begin a transfer whose blocks are these, or copies of them."""
        transfer = self._transfer(job)
        self._store.hold(job.sources)
        if job.sources is not sources:
            # Copies of ours: free as soon as nothing reads them.
            self._store.free(job.sources[job.sources != sources])
        self._transfers.append(transfer)
        return transfer

    def advance(self, is_there: IsThere) -> None:
        """Move transfers along, and free what can be freed."""
        self._is_there = is_there
        if self._transfers:
            if not self._may_write():
                self._stop_writing()
            for transfer in self._transfers:
                try:
                    transfer.advance()
                except Exception as error:  # noqa: BLE001 - others have to go on
                    self._incidents.note("failed", "a transfer failed here", error)
                    transfer.fail("it failed here")
            self._end_transfers()
        if self._endings:
            self._settle_endings()
        if self._to_free:
            self._free_there(is_there)

    def lose(self, peer: Incarnation, reason: str) -> None:
        """End everything with an incarnation that is over."""
        for transfer in self._transfers:
            if transfer.job.peer == peer:
                transfer.fail(reason)
        self._at_others.pop(peer, None)
        # The connections are found by it when the peer is gone.
        info = self._entries.info(peer)
        for other in () if info is None else info.ranks:
            for rank in self._ranks:
                connection = rank.peers.pop(other.address, None)
                if connection is not None:
                    rank.transport.disconnect(connection)

    def stop(self, reason: str) -> None:
        """End everything; what was ours at others is so no longer."""
        for transfer in self._transfers:
            transfer.fail(reason)
        self._stop_writing()
        self._end_transfers()
        self._at_others.clear()
        self._to_free.clear()

    def _transfer(self, job: Job) -> Transfer:
        return Transfer(
            job,
            self._info,
            self._ranks,
            self._requests,
            self._clock,
            self._may_write,
            self._pump,
            self._facts,
            partial(self._entries.info, job.peer),
        )

    def _stop_writing(self) -> None:
        """Break our connections, so that the transports hand nothing more over."""
        for transfer in self._transfers:
            if transfer.step is Step.TRANSMIT:
                transfer.fail("this instance's own lease is over")
        for rank in self._ranks:
            for connection in rank.peers.values():
                rank.transport.disconnect(connection)
            rank.peers.clear()

    def _end_transfers(self) -> None:
        for transfer in [t for t in self._transfers if t.step is Step.OVER]:
            self._transfers.remove(transfer)
            job, ending = transfer.job, transfer.ending()
            over = self._facts.watch(partial(self._is_over, transfer, ending))
            self._endings.append((transfer, ending, over))
            if job.targets is None:
                if transfer.error and len(ending.targets):
                    self._to_free.append((job.peer, ending.targets))
            elif job.finish is not None and not transfer.error:
                ours = self._at_others.get(job.peer, set())
                ours.difference_update(job.targets.tolist())

    def _is_over(self, transfer: Transfer, ending: Ending) -> bool | None:
        """Return whether nothing that this rank does touches them; None for not yet."""
        gone = not self._is_there(*ending.peer)
        over = not transfer.is_pushing and ending.is_over(is_peer_gone=gone)
        return True if over else None

    def _settle_endings(self) -> None:
        left = []
        for transfer, ending, over in self._endings:
            if not over.is_common:
                left.append((transfer, ending, over))
            else:
                transfer.is_settled = True
                self._store.release(ending.sources)
        self._endings = left

    def _free_there(self, is_there: IsThere) -> None:
        """Let others free blocks of ours, once nothing of ours writes to them."""
        touched: dict[Incarnation, set[int]] = {}
        for _, ending, _ in self._endings:
            touched.setdefault(ending.peer, set()).update(ending.targets.tolist())
        for transfer in self._transfers:
            if transfer.targets is not None:
                blocks = touched.setdefault(transfer.job.peer, set())
                blocks.update(transfer.targets.tolist())
        left = []
        for peer, addresses in self._to_free:
            if not is_there(*peer):
                continue
            if touched.get(peer, set()).isdisjoint(addresses.tolist()):
                self._requests.ask(peer, FreeBlocks(to_wire(addresses)))
            else:
                left.append((peer, addresses))
        self._to_free = left
