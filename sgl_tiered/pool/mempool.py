"""MemPool: the memory of all instances behind one set of calls (MemServe, Table 1).

The calls have the paper's names. Blocks here are allocated, indexed and moved at once;
what concerns another instance is a conversation, which ``poll`` moves along: call it
often, from the thread that calls everything else. An address that is stale, of another
instance or of an incarnation that is over is refused; so is a peer that nobody knows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.addresses import instances_of, mediums_of
from sgl_tiered.core.clock import Clock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import as_tokens
from sgl_tiered.core.plans import UInt64s
from sgl_tiered.pool.base import BlockStore, BlockType, Inserted, allocator
from sgl_tiered.pool.block_slots import NO_ADDRESSES
from sgl_tiered.pool.guests import Guests
from sgl_tiered.pool.layouts import Way
from sgl_tiered.pool.membership import View
from sgl_tiered.pool.messages import (
    Answer,
    AskBlocks,
    Channel,
    Finish,
    FreeBlocks,
    Incarnation,
    PoolInfo,
    from_wire,
    to_wire,
)
from sgl_tiered.pool.receiver import Arrival, Receiver
from sgl_tiered.pool.requests import Requests
from sgl_tiered.pool.transfer import Ending, Job, Rank, Step, Transfer

__all__ = ["MemPool", "PoolConfig", "PoolUsage"]

_PAUSE_S = 50e-6
"""Between two polls of a call that waits: a twentieth of a message's way."""


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Times of a pool, in seconds.

    Attributes:
        timeout_s: of a transfer or a remote allocation, unless the call says another.
        retry_s: pause before a request is sent again.
        grace_s: how long blocks that an instance held here stay unused after its
            incarnation is over; longer than what it had handed to the network lives.
    """

    timeout_s: float = 10.0
    retry_s: float = 0.5
    grace_s: float = 30.0


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """What a pool has under way; all zero when nothing is.

    Attributes:
        num_guest_blocks: blocks here that belong to others.
        num_quarantined_blocks: blocks here of incarnations that are over.
        num_transfers: transfers that have not ended.
        num_endings: ended ones whose blocks a peer or the network may still touch.
        num_requests: requests without an answer.
    """

    num_guest_blocks: int
    num_quarantined_blocks: int
    num_transfers: int
    num_endings: int
    num_requests: int


class MemPool:
    """The pool as one instance sees it. One thread calls it.

    Args:
        store: this instance's blocks and index.
        incarnation: number of this start, from its lease.
        info: how this instance is built.
        ranks: those of its ranks that this process moves bytes for.
        channel: carries messages.
        clock: for deadlines and grace times.
        config: times.
        pause: waits a moment, in calls that wait.
    """

    def __init__(
        self,
        store: BlockStore,
        incarnation: int,
        info: PoolInfo,
        ranks: Sequence[Rank],
        channel: Channel,
        clock: Clock,
        config: PoolConfig | None = None,
        pause: Callable[[], None] = lambda: time.sleep(_PAUSE_S),
    ) -> None:
        self._store = store
        self._instance = store.instance
        # By type; what every decode step calls should look nothing up.
        self._allocators = [allocator(store, type) for type in BlockType]
        self._me: Incarnation = (store.instance, incarnation)
        self._info = info
        self._ranks = tuple(ranks)
        self._channel = channel
        self._clock = clock
        self._config = config or PoolConfig()
        self._pause = pause
        self._view = View(0)
        self._guests = Guests(store, clock, self._config.grace_s)
        self._requests = Requests(self._me, channel, clock, self._config.retry_s)
        self._receiver = Receiver(self._me, store, self._guests, info, channel)
        self._infos: dict[Incarnation, PoolInfo] = {}
        self._transfers: list[Transfer] = []
        self._endings: list[tuple[Transfer, Ending]] = []
        # Blocks at others that are ours.
        self._at_others: dict[Incarnation, set[int]] = {}
        # And those that we are done with, until nothing of ours writes to them.
        self._to_free: list[tuple[Incarnation, UInt64s]] = []
        self.lease_ends_s = math.inf

    # Memory blocks.

    def alloc_mem(
        self, size: int, type: BlockType = BlockType.DEVICE, id: int | None = None
    ) -> UInt64s | None:
        """Allocate blocks, all or none; None if there are not so many.

        The addresses are read-only.

        Args:
            size: blocks.
            type: where.
            id: the instance; None for this one. Another one is asked, and its answer
                waited for until the timeout; the blocks are then ours at that one.
        """
        if id is None or id == self._instance:
            return self._allocators[type](size)
        peer = self._peer(id)
        if peer is None:
            return None
        body = AskBlocks(size, type, self._info.shape)
        request = self._requests.ask(peer, body, self._config.timeout_s)
        while request.answer is None:
            self._pump()
        answer: Answer = request.answer
        if answer.refusal or answer.info is None:
            return None
        addresses = from_wire(answer.addresses)
        self._infos[peer] = answer.info
        self._at_others.setdefault(peer, set()).update(addresses.tolist())
        return addresses

    def free_mem(self, addrList: UInt64s) -> str:  # noqa: N803 - the paper's name
        """Free active blocks of this instance, or blocks of ours at others.

        Those that a transfer uses are free when it is over. Blocks at others are freed
        by a message; an incarnation that is over has none.

        Returns:
            Why nothing was freed, in one clause; else empty.
        """
        instances = instances_of(addrList)
        others = set(instances.tolist()) - {self._instance}
        away = {i: addrList[instances == i] for i in others}
        for instance, addresses in away.items():
            refusal = self._refusal_there(self._peer(instance), instance, addresses)
            if refusal:
                return refusal
        refusal = self._store.free(addrList[instances == self._instance])
        if refusal:
            return refusal
        for instance, addresses in away.items():
            peer = self._peer(instance)
            assert peer is not None, f"instance {instance} has no block of ours"
            self._at_others[peer].difference_update(addresses.tolist())
            self._to_free.append((peer, addresses))
        self._free_there()
        return ""

    def swap_out(self, num_blocks: int) -> UInt64s:
        """Move the coldest historical blocks from the device to the host.

        Returns:
            The new addresses; fewer where there are no more that can go, or no room.
        """
        cold = self._store.coldest(TierId.DEVICE, num_blocks)
        moved = self._store.move(cold, TierId.HOST)
        return NO_ADDRESSES if moved is None else moved

    def swap_in(self, addrList: UInt64s) -> UInt64s | None:  # noqa: N803
        """Move blocks to the device; None, and nothing changed, without room.

        Returns:
            The new addresses, in the same order.
        """
        return self._store.move(addrList, TierId.DEVICE)

    # Index.

    def insert(
        self,
        tokenList: npt.ArrayLike,  # noqa: N803
        addrList: UInt64s,  # noqa: N803
        *,
        namespace: bytes = b"",
        first_page: int = 0,
        free_duplicates: bool = False,
    ) -> Inserted:
        """Map a prompt's tokens to active blocks, which become historical.

        Args:
            tokenList: token ids from the prompt's start on.
            addrList: the blocks of its pages from ``first_page`` on.
            namespace: digest of a ``Namespace``.
            first_page: pages before it must be in the index.
            free_duplicates: free blocks of pages that the index has already.
        """
        done = self._store.insert(namespace, tokenList, addrList, first_page)
        if free_duplicates and not done.refusal:
            self._store.free(done.duplicates)
        return done

    def match(self, tokenList: npt.ArrayLike, *, namespace: bytes = b"") -> UInt64s:  # noqa: N803
        """Return the blocks of a prompt's first pages that this instance has.

        They may be evicted or moved at any later call, and are refused then.
        """
        return self._store.match(namespace, tokenList)

    def delete(self, tokenList: npt.ArrayLike, *, namespace: bytes = b"") -> int:  # noqa: N803
        """Drop a prompt's cached pages, except those that others go on from."""
        return self._store.delete(namespace, tokenList)

    # Distributed.

    def transfer(
        self,
        id: int,
        srcAddrList: UInt64s,  # noqa: N803
        dstAddrList: UInt64s | None = None,  # noqa: N803
        *,
        type: BlockType = BlockType.DEVICE,
        private: bytes = b"",
        way: Way = Way.BY_REQUEST_AGG,
        layers: tuple[int, int] | None = None,
        more: bool = False,
        timeout_s: float | None = None,
    ) -> Transfer:
        """Send blocks to another instance, which has them as active ones then.

        Args:
            id: the receiver.
            srcAddrList: blocks of this instance, active or historical.
            dstAddrList: blocks there that ``alloc_mem`` gave us; None: allocate. They
                stay ours if it fails: free them.
            type: where the receiver allocates, or moves them in the end.
            private: data for whoever takes the arrival there.
            way: in how many batches.
            layers: first and one past the last layer; None for all.
            more: more layers are to follow: the blocks there stay ours.
            timeout_s: for all steps; None for the pool's.
        """
        finish = None if more else Finish(b"", type, private)
        return self._send(
            id, srcAddrList, dstAddrList, type, way, layers, finish, timeout_s
        )

    def transfer_with_insert(
        self,
        id: int,
        tokenList: npt.ArrayLike,  # noqa: N803
        srcAddrList: UInt64s,  # noqa: N803
        dstAddrList: UInt64s | None = None,  # noqa: N803
        *,
        namespace: bytes = b"",
        first_page: int = 0,
        type: BlockType = BlockType.DEVICE,
        private: bytes = b"",
        way: Way = Way.BY_REQUEST_AGG,
        layers: tuple[int, int] | None = None,
        timeout_s: float | None = None,
    ) -> Transfer:
        """Send a prompt's blocks to another instance, which enters them into its index.

        Args as for ``transfer`` and ``insert``. Blocks of pages that the receiver has
        already are freed there.
        """
        tokens = as_tokens(tokenList).astype("<i4").tobytes()
        finish = Finish(b"", type, private, True, namespace, tokens, first_page)
        return self._send(
            id, srcAddrList, dstAddrList, type, way, layers, finish, timeout_s
        )

    # Upkeep.

    def see(self, view: View) -> None:
        """Act on a new view: what concerns incarnations that are over, ends now."""
        former, self._view = self._view, view
        self._receiver.see(view)
        for member in former.members:
            peer = (member.instance, member.incarnation)
            if not view.has(*peer):
                self._lose(peer)

    def poll(self) -> None:
        """Take messages, move transfers along, free what can be freed."""
        for envelope in self._channel.take():
            if isinstance(envelope.body, Answer):
                if envelope.receiver == self._me:
                    self._requests.take(envelope)
            else:
                self._receiver.handle(envelope)
        self._requests.poll()
        for transfer in self._transfers:
            transfer.advance()
        self._end_transfers()
        self._settle_endings()
        self._free_there()
        self._guests.poll()

    def take_arrivals(self) -> list[Arrival]:
        """Return what others have sent since the last call."""
        found, self._receiver.arrivals = self._receiver.arrivals, []
        return found

    def usage(self) -> PoolUsage:
        """Return what is under way."""
        return PoolUsage(
            self._guests.num_blocks,
            self._guests.num_quarantined,
            len(self._transfers),
            len(self._endings) + len(self._to_free),
            self._requests.num_under_way,
        )

    def _peer(self, instance: int) -> Incarnation | None:
        member = self._view.member(instance)
        return None if member is None else (instance, member.incarnation)

    def _refusal_there(
        self, peer: Incarnation | None, instance: int, addresses: UInt64s
    ) -> str:
        """Return why these are not blocks of ours at a peer; else an empty text."""
        if peer is None:
            return f"instance {instance} is not in the pool"
        if self._at_others.get(peer, set()).issuperset(addresses.tolist()):
            return ""
        return f"a block at instance {instance} is not, or no longer, ours"

    def _pump(self) -> None:
        self.poll()
        self._pause()

    def _may_write(self) -> bool:
        return self._clock.now() < self.lease_ends_s and self._view.has(*self._me)

    def _send(
        self,
        instance: int,
        sources: UInt64s,
        targets: UInt64s | None,
        type: BlockType,
        way: Way,
        layers: tuple[int, int] | None,
        finish: Finish | None,
        timeout_s: float | None,
    ) -> Transfer:
        refusal = self._store.refusal(sources)
        peer = self._peer(instance)
        if peer is None:
            refusal = f"instance {instance} is not in the pool"
            peer = (instance, 0)
        elif instance == self._instance:
            refusal = "the receiver is this instance"
        elif targets is not None and not refusal:
            refusal = self._refusal_there(peer, instance, targets)
        staged = sources if refusal else self._in_memory(sources)
        if staged is None:
            refusal = "there is no room in the host for blocks that lie on disk"
            staged = sources
        job = Job(
            peer,
            staged,
            NO_ADDRESSES if refusal else targets,
            type,
            way,
            layers,
            finish,
            self._config.timeout_s if timeout_s is None else timeout_s,
        )
        transfer = Transfer(
            job,
            self._info,
            self._ranks,
            self._requests,
            self._clock,
            self._may_write,
            self._pump,
            self._infos.get(peer),
        )
        if refusal:
            transfer.fail(refusal)
            return transfer
        self._store.hold(staged)
        if staged is not sources:
            # Copies of ours: free as soon as nothing reads them.
            copies = staged[staged != sources]
            self._store.free(copies)
        self._transfers.append(transfer)
        return transfer

    def _in_memory(self, sources: UInt64s) -> UInt64s | None:
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

    def _end_transfers(self) -> None:
        for transfer in [t for t in self._transfers if t.step is Step.OVER]:
            self._transfers.remove(transfer)
            job, ending = transfer.job, transfer.ending()
            self._endings.append((transfer, ending))
            if job.targets is None:
                if transfer.error and len(ending.targets):
                    self._to_free.append((job.peer, ending.targets))
            elif job.finish is not None and not transfer.error:
                ours = self._at_others.get(job.peer, set())
                ours.difference_update(job.targets.tolist())

    def _settle_endings(self) -> None:
        left = []
        for transfer, ending in self._endings:
            gone = not self._view.has(*ending.peer)
            if transfer.is_pushing or not ending.is_over(is_peer_gone=gone):
                left.append((transfer, ending))
            else:
                self._store.release(ending.sources)
        self._endings = left

    def _free_there(self) -> None:
        """Let others free blocks of ours, once nothing of ours writes to them."""
        if not self._to_free:
            return
        touched: dict[Incarnation, set[int]] = {}
        for _, ending in self._endings:
            touched.setdefault(ending.peer, set()).update(ending.targets.tolist())
        for transfer in self._transfers:
            if transfer.targets is not None:
                blocks = touched.setdefault(transfer.job.peer, set())
                blocks.update(transfer.targets.tolist())
        left = []
        for peer, addresses in self._to_free:
            if not self._view.has(*peer):
                continue
            if touched.get(peer, set()).isdisjoint(addresses.tolist()):
                self._requests.ask(peer, FreeBlocks(to_wire(addresses)))
            else:
                left.append((peer, addresses))
        self._to_free = left

    def _lose(self, peer: Incarnation) -> None:
        """End everything with an incarnation that is over."""
        text = f"instance {peer[0]} is gone"
        self._requests.lose(peer, text)
        for transfer in self._transfers:
            if transfer.job.peer == peer:
                transfer.fail(text)
        self._at_others.pop(peer, None)
        info = self._infos.pop(peer, None)
        if info is not None:
            for rank in self._ranks:
                for other in info.ranks:
                    connection = rank.peers.pop(other.address, None)
                    if connection is not None:
                        rank.transport.disconnect(connection)
