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
from concurrent.futures import Executor
from functools import partial

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.addresses import instances_of
from sgl_tiered.core.clock import Clock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import UInt8s, UInt64s
from sgl_tiered.pool.base import BlockStore, BlockType, Inserted, allocator
from sgl_tiered.pool.block_slots import NO_ADDRESSES
from sgl_tiered.pool.config import PoolConfig, PoolUsage
from sgl_tiered.pool.disk_reads import DiskReads
from sgl_tiered.pool.entries import Entries
from sgl_tiered.pool.facts import Facts
from sgl_tiered.pool.fences import Fences, Words
from sgl_tiered.pool.fetch import Fetch, Fetches, Search
from sgl_tiered.pool.guests import Guests
from sgl_tiered.pool.layouts import MemoryForm, Way
from sgl_tiered.pool.membership import View
from sgl_tiered.pool.messages import (
    MAX_TIMEOUT_S,
    Answer,
    AskBlocks,
    AskHeld,
    AskPages,
    Channel,
    Envelope,
    Finish,
    Incarnation,
    PoolInfo,
    from_wire,
    to_wire,
    tokens_to_wire,
)
from sgl_tiered.pool.receiver import Arrival, Receiver
from sgl_tiered.pool.requests import Requests
from sgl_tiered.pool.sender import Sender
from sgl_tiered.pool.serving import Servings
from sgl_tiered.pool.sums import SumsOf
from sgl_tiered.pool.transfer import Job, Rank, Transfer
from sgl_tiered.transport.incidents import Incidents
from sgl_tiered.transport.release import ReleaseWatch

__all__ = ["MemPool", "PoolConfig", "PoolUsage"]

_PAUSE_S = 50e-6
"""Between two polls of a call that waits: a twentieth of a message's way."""
_MAX_ASKED = 16
"""Instances that one ``locate`` asks, where the caller does not say which."""


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
        executor: sums up fetched pages; None: this thread does.
        wake: called when the executor has done something.
        reads: what the disk is read for others; None where the blocks are all there is.
        facts: what this rank and the others tell each other; None where this process
            moves the bytes of all ranks. With several, no call may wait.
        watch: looks for processes of peers that are gone; None for one of its own.
        incidents: counts what of others is refused, and what fails here.

    Attributes:
        info: how this instance is built.
        incidents: as given, or its own.
        lease_ends_s: until when this instance may write to others; any thread may
            set it.
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
        executor: Executor | None = None,
        wake: Callable[[], None] = lambda: None,
        reads: DiskReads | None = None,
        facts: Facts | None = None,
        watch: ReleaseWatch | None = None,
        incidents: Incidents | None = None,
    ) -> None:
        self.incidents = incidents or Incidents()
        self._entries = Entries(self.incidents)
        self._facts = facts = facts or Facts()
        self._store = store
        self._instance = store.instance
        # By type; what every decode step calls should look nothing up.
        self._allocators = [allocator(store, type) for type in BlockType]
        self._me: Incarnation = (store.instance, incarnation)
        self.info = self._info = info
        self._channel = channel
        self._clock = clock
        self._config = config or PoolConfig()
        self._pause = pause
        self._view = View(0)
        grace_s = self._config.grace_s
        self._watch = watch or ReleaseWatch(
            clock, after_death_s=grace_s, incidents=self.incidents
        )
        self._requests = Requests(
            self._me, channel, clock, self._config.retry_s, self.incidents
        )
        self._fences = Fences(self._me, self._requests, self._watch, clock, facts)
        self._guests = Guests(store, self._fences)
        self._sender = Sender(
            store,
            info,
            ranks,
            self._requests,
            clock,
            self._may_write,
            self._pump,
            facts,
            self._entries,
            self.incidents,
        )
        memories: dict[int, tuple[UInt8s, MemoryForm]] = {}
        # Who moves the bytes of several ranks sums up none: each has a part.
        if len(info.ranks) == facts.num_ranks:
            memories = self._memories(ranks[0])
        self._sums = sums = SumsOf(info.shape, memories, executor, wake, facts)
        self._fetches = Fetches(store, clock, grace_s, sums, self._fences)
        self._servings = Servings(
            store,
            sums,
            self._sender.in_memory,
            self._sender.launch,
            self._config.timeout_s,
            clock,
            reads,
        )
        self._words = words = Words(incarnation, self._sender.left_for)
        self._receiver = Receiver(
            self._me,
            store,
            self._guests,
            info,
            channel,
            self._servings,
            sums,
            words,
            self._entries,
            self.incidents,
            reads,
            keeps_arrivals=self._config.keeps_arrivals,
        )
        self._searches: list[Search] = []
        self._num_searches = 0
        # What ``poll`` does after messages, in this order.
        self._steps: tuple[Callable[[], None], ...] = (
            self._requests.poll,
            lambda: self._sender.advance(self._view.has),
            self._receiver.advance,
            self._fences.poll,
            lambda: self._fetches.advance(self._requests, self._view.has),
            self._search,
            self._guests.poll,
        )
        self.lease_ends_s = math.inf

    @property
    def incarnation(self) -> int:
        """Number of this instance's start, as others know it."""
        return self._me[1]

    @property
    def is_talking(self) -> bool:
        """Whether something is under way that a message or a moment may end."""
        return bool(
            self._sender.num_transfers
            or self._searches
            or self._requests.num_under_way
            or self._fetches.num_running
            or self._servings.num_under_way
            or self._receiver.num_checks
        )

    @property
    def is_idle(self) -> bool:
        """Whether ``poll`` has nothing to do until a message comes; any thread asks."""
        return not (
            self.is_talking
            or self._sender.num_endings
            or self._fetches.num_lent
            or self._guests.num_quarantined
        )

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
        body = AskBlocks(size, type)
        request = self._requests.ask(peer, body, self._config.timeout_s)
        while request.answer is None:
            self._pump()
        answer: Answer = request.answer
        if answer.refusal:
            return None
        addresses = from_wire(answer.addresses)
        self._sender.own(peer, addresses)
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
            refusal = self._sender.refusal_there(
                self._peer(instance), instance, addresses
            )
            if refusal:
                return refusal
        refusal = self._store.free(addrList[instances == self._instance])
        if refusal:
            return refusal
        for instance, addresses in away.items():
            peer = self._peer(instance)
            assert peer is not None, f"instance {instance} has no block of ours"
            self._sender.free(peer, addresses)
        self._sender.advance(self._view.has)
        return ""

    def swap_out(self, num_blocks: int) -> UInt64s:
        """Move the coldest historical blocks from the device to the host.

        Returns:
            The new addresses; fewer where there are no more that can go, or no room.
        """
        cold = self._store.coldest(TierId.DEVICE, num_blocks)
        moved = self._store.move(cold, TierId.HOST)
        if moved is not None:
            return moved
        # One that cannot go (its copy there is in use) does not keep the others here.
        each = [
            self._store.move(cold[n : n + 1], TierId.HOST) for n in range(len(cold))
        ]
        went = [one for one in each if one is not None]
        return np.concatenate(went) if went else NO_ADDRESSES

    def swap_in(self, addrList: UInt64s) -> UInt64s | None:  # noqa: N803
        """Move blocks to the device; None, and nothing changed, where that is refused.

        There is no room, or a page has a copy there that is not usable (yet).

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
        only_missing: bool = False,
        checked: bool = False,
        timeout_s: float | None = None,
    ) -> Transfer:
        """Send a prompt's blocks to another instance, which enters them into its index.

        Args as for ``transfer`` and ``insert``. Blocks of pages that the receiver has
        already are freed there, or with ``only_missing`` not even sent: then it is
        asked first, and no destinations are given. It may evict those pages meanwhile,
        which fails the transfer. With ``checked`` it enters them only if what arrived
        sums to what was sent; the blocks are in memory, and one rank has all of each.
        """
        assert dstAddrList is None or not only_missing, "which blocks are they for?"
        tokens = tokens_to_wire(tokenList)
        finish = Finish(b"", type, private, True, namespace, tokens, first_page)
        return self._send(
            id,
            srcAddrList,
            dstAddrList,
            type,
            way,
            layers,
            finish,
            timeout_s,
            only_missing,
            self._sums if checked else None,
        )

    # Peer reads.

    def locate(
        self,
        tokenList: npt.ArrayLike,  # noqa: N803
        *,
        namespace: bytes = b"",
        first_page: int = 0,
        ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> Search:
        """Ask other instances how many first pages of a prompt they hold.

        Args:
            tokenList: token ids from the prompt's start on.
            namespace: digest of a ``Namespace``.
            first_page: pages before this one are not needed.
            ids: whom; None for up to 16 of those that are there.
            timeout_s: how long to wait for answers; None for the pool's.
        """
        search = Search(self._pump)
        others = [m.instance for m in self._view.members if m.instance != self._me[0]]
        if ids is None and len(others) > _MAX_ASKED:
            # Others each time.
            first = self._num_searches * _MAX_ASKED % len(others)
            others = (others[first:] + others[:first])[:_MAX_ASKED]
        self._num_searches += 1
        wanted = others if ids is None else [i for i in ids if i in others]
        peers = [peer for peer in map(self._peer, wanted) if peer is not None]
        body = AskHeld(namespace, tokens_to_wire(tokenList), first_page)
        wait_s = self._config.locate_s if timeout_s is None else timeout_s
        search.ask(self._requests, peers, body, wait_s)
        if peers:
            self._searches.append(search)
        return search

    def fetch(
        self,
        id: int,
        tokenList: npt.ArrayLike,  # noqa: N803
        dstAddrList: UInt64s,  # noqa: N803
        *,
        namespace: bytes = b"",
        first_page: int = 0,
        timeout_s: float | None = None,
    ) -> Fetch:
        """Let another instance write a prompt's pages to blocks of this one.

        Args:
            id: the holder.
            tokenList: token ids from the prompt's start on.
            dstAddrList: blocks for pages ``first_page`` and on, which nobody else
                reads or writes; they stay the caller's. Freed after a failure they
                are used again when nobody may write to them any more.
            namespace: digest of a ``Namespace``.
            first_page: the first page that is wanted.
            timeout_s: for all of it; None for the pool's.
        """
        peer = self._peer(id)
        fetch = Fetch(peer or (id, 0), dstAddrList, self._pump)
        refusal = self._fetches.refusal(id, dstAddrList)
        if peer is None:
            refusal = f"instance {id} is not in the pool"
        elif id == self._instance:
            refusal = "the holder is this instance"
        elif not self._sums.is_able:
            refusal = "pages cannot be fetched to several ranks of one process"
        if refusal:
            fetch.fail(refusal)
            return fetch
        wait_s = self._config.timeout_s if timeout_s is None else timeout_s
        body = AskPages(
            to_wire(dstAddrList),
            namespace,
            tokens_to_wire(tokenList),
            first_page,
            min(max(wait_s, 0.0), MAX_TIMEOUT_S),
        )
        self._fetches.begin(fetch, self._requests, body, wait_s)
        return fetch

    # Upkeep.

    def see(self, view: View) -> None:
        """Act on a new view: what concerns incarnations that are over, ends now.

        Whatever stands in it, nothing is raised: what fails is counted.
        """
        former, self._view = self._view, view
        what = "a look at a view"
        for see in (self._entries.see, self._fences.see, self._receiver.see):
            self.incidents.guard(what, partial(see, view))
        for member in former.members:
            peer = (member.instance, member.incarnation)
            if not view.has(*peer):
                self.incidents.guard(what, partial(self._lose, peer))
        self.incidents.guard(what, partial(self._entries.forget, view))

    def poll(self) -> None:
        """Take messages, move transfers along, free what can be freed.

        Whatever others have said, nothing is raised: what fails is counted.
        """
        for envelope in self._channel.take():
            self.incidents.guard("a poll", partial(self._take, envelope))
        for step in self._steps:
            self.incidents.guard("a poll", step)

    def begin_anew(self, incarnation: int) -> None:
        """Go on as a new incarnation, as the lease of the last one is over.

        Blocks here stay as they are. All that is under way with others ends; what they
        may still write to is set aside until they do not.
        """
        self.stop("the lease of this instance was over")
        self._me = (self._instance, incarnation)
        for step in (
            partial(self._requests.begin_anew, self._me),
            partial(self._receiver.begin_anew, self._me),
            partial(self._words.begin_anew, incarnation),
            partial(self._fences.begin_anew, self._me),
        ):
            self.incidents.guard("a new beginning", step)

    def stop(self, reason: str) -> None:
        """End all that is under way with others; the reason is one clause."""
        what = "the end of what is under way"
        self.incidents.guard(what, partial(self._sender.stop, reason))
        self.incidents.guard(what, partial(self._fetches.end_all, reason))
        for member in self._view.members:
            peer = (member.instance, member.incarnation)
            self.incidents.guard(what, partial(self._requests.lose, peer, reason))
        self.incidents.guard(what, self._search)
        self._searches.clear()

    def close(self, reason: str) -> None:
        """End all, for good."""
        self.stop(reason)
        self._watch.close()

    def take_arrivals(self) -> list[Arrival]:
        """Return what others have sent since the last call."""
        found, self._receiver.arrivals = self._receiver.arrivals, []
        return found

    def usage(self) -> PoolUsage:
        """Return what is under way."""
        return PoolUsage(
            self._guests.num_blocks,
            self._guests.num_quarantined,
            self._sender.num_transfers,
            self._sender.num_endings,
            self._requests.num_under_way,
            self._fetches.num_running,
            self._fetches.num_lent,
            self._servings.num_under_way,
            self._fences.num_open,
        )

    def _peer(self, instance: int) -> Incarnation | None:
        member = self._view.member(instance)
        return None if member is None else (instance, member.incarnation)

    def _take(self, envelope: Envelope) -> None:
        if not isinstance(envelope.body, Answer):
            self._receiver.handle(envelope)
        elif envelope.receiver == self._me:
            self._requests.take(envelope)

    def _search(self) -> None:
        for search in self._searches:
            search.advance()
        self._searches = [search for search in self._searches if not search.is_over]

    def _pump(self) -> None:
        assert self._facts.num_ranks == 1, "ranks that wait in a call would part"
        # First the pause: who is there may have changed since the last poll.
        self._pause()
        self.poll()

    def _memories(self, rank: Rank) -> dict[int, tuple[UInt8s, MemoryForm]]:
        """Return by medium the memory of a rank, and how pages lie there."""
        found = {}
        for place in self._info.ranks[rank.number].places:
            memory = self._store.memory(TierId(place.medium))
            if memory is not None:
                found[place.medium] = (memory, place.form)
        return found

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
        only_missing: bool = False,
        sums: SumsOf | None = None,
    ) -> Transfer:
        refusal = self._store.refusal(sources)
        if sums is not None and not refusal and not sums.reaches(sources).all():
            refusal = "blocks that are not in memory cannot be summed up"
        peer = self._peer(instance)
        if peer is None:
            refusal = f"instance {instance} is not in the pool"
            peer = (instance, 0)
        elif instance == self._instance:
            refusal = "the receiver is this instance"
        elif targets is not None and not refusal:
            refusal = self._sender.refusal_there(peer, instance, targets)
        job = Job(
            peer,
            sources,
            targets,
            type,
            way,
            layers,
            finish,
            self._config.timeout_s if timeout_s is None else timeout_s,
            only_missing,
            sums,
        )
        return self._sender.send(job, refusal)

    def _lose(self, peer: Incarnation) -> None:
        """End everything with an incarnation that is over."""
        text = f"instance {peer[0]} is gone"
        self._requests.lose(peer, text)
        self._sender.lose(peer, text)
