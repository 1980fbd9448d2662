"""A transfer in its three steps: allocate at the receiver, transmit, finish.

The receiver answers the first step with addresses and with how it is partitioned; the
sender cuts its pages accordingly and pushes; the last step makes the blocks the
receiver's, and enters them into its index if that is wanted. With a list of
destinations the first step is left out, which is how layers are sent one by one.

Sources are held until nothing reads them any more, and destinations that a failed push
may still write to stay allocated until nothing does (``Ending``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from sgl_tiered.core.addresses import mediums_of, slots_of
from sgl_tiered.core.clock import Clock
from sgl_tiered.core.plans import Int64s, UInt64s
from sgl_tiered.pool.base import BlockType
from sgl_tiered.pool.facts import Fact, Facts
from sgl_tiered.pool.layouts import Shard, Way, batches, shares
from sgl_tiered.pool.messages import (
    AskBlocks,
    Finish,
    Incarnation,
    PoolInfo,
    from_wire,
    to_wire,
)
from sgl_tiered.pool.requests import NO_ANSWER, Request, Requests
from sgl_tiered.pool.sums import Sums, SumsOf
from sgl_tiered.transport.base import (
    Peer,
    PeerAddress,
    Pieces,
    TransferStatus,
    Transport,
)
from sgl_tiered.transport.base import Transfer as Push

__all__ = ["Ending", "Job", "Rank", "Transfer", "plan_pushes"]

_REST_S = 1e-3
"""Longest wait for a push; others' requests wait as long."""


class Step(IntEnum):
    """Where a transfer is."""

    ALLOCATE = 0
    TRANSMIT = 1
    FINISH = 2
    OVER = 3


@dataclass(frozen=True, slots=True, eq=False)
class Rank:
    """A rank that this process moves bytes for.

    Attributes:
        number: its position among the instance's ranks.
        transport: knows its memory.
        peers: its connections, by address.
    """

    number: int
    transport: Transport
    peers: dict[PeerAddress, Peer]

    def peer(self, address: PeerAddress) -> Peer:
        """Return the connection to a rank of another instance, made once.

        One that was lost is made anew: a peer that is a member still may have been
        out of reach only for a while.
        """
        known = self.peers.get(address)
        if known is not None and known.lost:
            self.transport.disconnect(known)
            known = None
        if known is None:
            known = self.peers[address] = self.transport.connect(address)
        return known


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """What is to be sent, and what is to become of it.

    Attributes:
        peer: the receiver.
        sources: uint64 [n], blocks here, in memory.
        targets: uint64 [n], blocks there that are ours; None: to be allocated.
        type: where the receiver allocates.
        way: in how many batches.
        layers: first and one past the last layer to send; None for all.
        finish: what the receiver is told in the end; None: more is to follow. Its
            addresses and type are filled in.
        timeout_s: for all steps together.
        only_missing: leave out pages that the receiver's index has; with ``finish``,
            which says of which prompt.
        sums: sums blocks up, for the receiver to check before it uses any; None: it
            takes what has arrived.
    """

    peer: Incarnation
    sources: UInt64s
    targets: UInt64s | None
    type: BlockType
    way: Way
    layers: tuple[int, int] | None
    finish: Finish | None
    timeout_s: float
    only_missing: bool = False
    sums: SumsOf | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Ending:
    """What a failed push may still touch.

    Attributes:
        peer: the receiver.
        sources, targets: the blocks on either side.
        pushes: how to ask whether they are held.
    """

    peer: Incarnation
    sources: UInt64s
    targets: UInt64s
    pushes: tuple[tuple[Transport, Peer, Pieces], ...]

    def is_over(self, *, is_peer_gone: bool) -> bool:
        """Return whether nothing touches them any more.

        Args:
            is_peer_gone: its blocks are no concern of ours.
        """
        for transport, peer, pieces in self.pushes:
            here = transport.quarantine.held(
                pieces.local_region, pieces.local, pieces.lengths
            )
            if here.any():
                return False
            there = peer.quarantine.held(
                pieces.remote_region, pieces.remote, pieces.lengths
            )
            if not is_peer_gone and there.any():
                return False
        return True


class Transfer:
    """One transfer under way; the pool's ``poll`` moves it along.

    Args:
        job: what to send.
        info: how this instance is built.
        ranks: those of its ranks that this process moves bytes for.
        requests: to the receiver.
        clock: for the deadline.
        may_write: whether this instance's own lease holds.
        pump: moves everything along once, and waits a moment; what ``wait`` does.
        facts: what ranks tell each other of their pushes.
        peer_info: returns how the receiver is built; None where that is not known.

    Attributes:
        error: why it failed, in one clause; else empty.
        targets: uint64, the blocks at the receiver, once known.
        num_inserted: blocks that entered the receiver's index.
        num_known: first blocks that were not sent, as the receiver had their pages.
        is_settled: it is over, and nobody touches its blocks any more.
    """

    def __init__(
        self,
        job: Job,
        info: PoolInfo,
        ranks: Sequence[Rank],
        requests: Requests,
        clock: Clock,
        may_write: Callable[[], bool],
        pump: Callable[[], None],
        facts: Facts,
        peer_info: Callable[[], PoolInfo | None],
    ) -> None:
        self.job = job
        self.error = ""
        self.targets = job.targets
        self.num_inserted = 0
        self.num_known = 0
        self.is_settled = False
        self._info = info
        self._ranks = ranks
        self._requests = requests
        self._clock = clock
        self._may_write = may_write
        self._pump = pump
        self._peer_info = peer_info
        self._deadline_s = clock.now() + job.timeout_s
        self._pushes: list[tuple[Transport, Peer, Push]] = []
        # Why this rank's own pushes could not begin, and how all ranks' have ended.
        self._trouble = ""
        self._facts = facts
        self._pushed: Fact | None = None
        self._sums: Sums | None = None
        self._request: Request | None = None
        self._timed_out = False
        self.step = Step.ALLOCATE
        if job.targets is None:
            ask = AskBlocks(len(job.sources), job.type)
            if job.only_missing and job.finish is not None:
                ask = AskBlocks(
                    len(job.sources),
                    job.type,
                    True,
                    job.finish.namespace,
                    job.finish.tokens,
                    job.finish.first_page,
                )
            self._request = requests.ask(job.peer, ask, job.timeout_s)

    @property
    def status(self) -> TransferStatus:
        """RUNNING, or how it ended."""
        if self.step is not Step.OVER:
            return TransferStatus.RUNNING
        if self._timed_out:
            return TransferStatus.TIMED_OUT
        return TransferStatus.FAILED if self.error else TransferStatus.DONE

    def wait(self, timeout_s: float = math.inf) -> TransferStatus:
        """Move the pool along until this ends; its deadline bounds that."""
        until_s = self._clock.now() + timeout_s
        while self.step is not Step.OVER and self._clock.now() < until_s:
            self.rest()
            self._pump()
        return self.status

    def rest(self, seconds: float = _REST_S) -> None:
        """Wait until a push of this has ended, at most so long; else return at once.

        For who has nothing else to do: looking at it again and again would take the
        time of the very threads that move the bytes.
        """
        if self.step is Step.TRANSMIT:
            for _, _, push in self._pushes:
                if push.poll() is TransferStatus.RUNNING:
                    push.wait(seconds)
                    return

    def advance(self) -> None:
        """Do what can be done now."""
        if self.step is Step.ALLOCATE:
            self._allocate()
        if self.step is Step.TRANSMIT:
            self._transmit()
        if self.step is Step.FINISH:
            self._finish()
        if self.step is not Step.OVER and self._clock.now() >= self._deadline_s:
            self._timed_out = True
            self.fail("its time was over")

    def fail(self, error: str) -> None:
        """End it; what runs is left to the transport, whose deadlines bound it."""
        if self.step is Step.OVER:
            return
        if self._request is not None:
            self._requests.give_up(self._request, error)
        self.error = error
        self.step = Step.OVER

    def ending(self) -> Ending:
        """Return what its pushes may touch still."""
        targets = self.targets
        return Ending(
            self.job.peer,
            self.job.sources,
            np.zeros(0, np.uint64) if targets is None else targets,
            tuple((t, peer, push.pieces) for t, peer, push in self._pushes),
        )

    @property
    def is_pushing(self) -> bool:
        """Whether the transport still works on it, even after it has ended."""
        running = TransferStatus.RUNNING
        return any(push.poll() is running for _, _, push in self._pushes)

    def _refused(self, refusal: str) -> None:
        self._timed_out = refusal == NO_ANSWER
        self.fail(refusal)

    def _allocate(self) -> None:
        if self._request is not None:
            answer = self._request.answer
            if answer is None:
                return
            self._request = None
            if answer.refusal:
                self._refused(answer.refusal)
                return
            self.targets = from_wire(answer.addresses)
            if self.job.only_missing and self.job.finish is not None:
                num_known = max(answer.num_pages - self.job.finish.first_page, 0)
                self.num_known = min(num_known, len(self.job.sources))
                if self.num_known == len(self.job.sources):
                    self.step = Step.OVER
                    return
        if self.targets is not None and not len(self.job.sources):
            # A message only: there is nothing to cut, so nothing to know of the peer.
            self.step = Step.TRANSMIT
        elif self.targets is None or (peer_info := self._peer_info()) is None:
            self.fail("the registry does not say how the receiver is built")
        elif len(self.targets) != len(self.job.sources) - self.num_known:
            wanted = len(self.job.sources) - self.num_known
            self.fail(f"{len(self.targets)} blocks for {wanted}")
        elif not self._may_write():
            # Others may have been told that we are gone, and use the blocks again.
            self.fail("this instance's own lease is over")
        else:
            self._start(peer_info)

    def _start(self, peer_info: PoolInfo) -> None:
        assert self.targets is not None
        plan = plan_pushes(
            self._info,
            peer_info,
            [rank.number for rank in self._ranks],
            self.job.sources[self.num_known :],
            self.targets,
            self.job.way,
            self.job.layers,
        )
        if isinstance(plan, str):
            self._trouble, plan = plan, []
        by_number = {rank.number: rank for rank in self._ranks}
        left_s = max(self._deadline_s - self._clock.now(), 0.0)
        try:
            for number, target, pieces in plan:
                rank = by_number[number]
                peer = rank.peer(peer_info.ranks[target].address)
                push = rank.transport.push(peer, pieces, timeout_s=left_s)
                self._pushes.append((rank.transport, peer, push))
        except ValueError as error:
            # Another kind of transport, or memory that the peer does not have.
            self._trouble = str(error)
        self._pushed = self._facts.watch(self._look)
        if self.job.sums is not None:
            self._sums = self.job.sums.of(self.job.sources[self.num_known :])
        self.step = Step.TRANSMIT

    def _look(self) -> tuple[str, bool] | None:
        """Return how this rank's pushes have ended: an error, and whether it was late.

        None while they run; the first that fails is the end.
        """
        if self._trouble:
            return self._trouble, False
        is_running = False
        for _, _, push in self._pushes:
            status = push.poll()
            is_running |= status is TransferStatus.RUNNING
            if status in (TransferStatus.FAILED, TransferStatus.TIMED_OUT):
                is_late = status is TransferStatus.TIMED_OUT
                return push.error or "the transport failed", is_late
        return None if is_running else ("", False)

    def _transmit(self) -> None:
        # There are none for no blocks.
        if self._pushed is not None:
            for error, is_late in self._pushed.told:
                if error:
                    self._timed_out = is_late
                    self.fail(error)
                    return
            if not self._pushed.is_common:
                return
        if self._sums is not None and not self._sums.done():
            return
        finish, targets = self.job.finish, self.targets
        if finish is None:
            self.step = Step.OVER
            return
        assert targets is not None
        sums = b""
        if self._sums is not None:
            found = self._sums.result()
            if found is None:
                self.fail("its blocks cannot be summed up")
                return
            sums = to_wire(found)
        body = Finish(
            to_wire(targets),
            self.job.type,
            finish.private,
            finish.insert,
            finish.namespace,
            finish.tokens,
            finish.first_page + self.num_known,
            sums,
        )
        left_s = self._deadline_s - self._clock.now()
        self._request = self._requests.ask(self.job.peer, body, left_s)
        self.step = Step.FINISH

    def _finish(self) -> None:
        assert self._request is not None
        answer = self._request.answer
        if answer is None:
            return
        self._request = None
        if answer.refusal:
            self._refused(answer.refusal)
            return
        self.num_inserted = answer.num_inserted
        self.targets = from_wire(answer.addresses)
        self.step = Step.OVER


def plan_pushes(
    info: PoolInfo,
    peer_info: PoolInfo,
    ranks: Sequence[int],
    sources: UInt64s,
    targets: UInt64s,
    way: Way,
    layers: tuple[int, int] | None,
) -> list[tuple[int, int, Pieces]] | str:
    """Return (rank here, rank there, pieces) for all that these ranks have to send.

    Layers come in order. A text says why the blocks cannot be reached.
    """
    for side, blocks in ((info, sources), (peer_info, targets)):
        if refusal := side.refusal(blocks):
            return f"{'this' if side is info else 'the other'} instance: {refusal}"
    groups = _by_media(sources, targets)
    found: list[tuple[int, int, int, Pieces]] = []
    try:
        dealt = shares(_shards(info), _shards(peer_info))
    except ValueError as error:
        return str(error)
    for share in dealt:
        part = _within(share.part, layers)
        if share.source not in ranks or part is None:
            continue
        here, there = info.ranks[share.source], peer_info.ranks[share.target]
        for medium, other, positions in groups:
            place, other_place = here.place(medium), there.place(other)
            if place is None or other_place is None:
                return f"medium {medium} here or {other} there cannot be reached"
            batch = batches(
                way,
                info.shape,
                place.form,
                other_place.form,
                part,
                slots_of(sources[positions]),
                slots_of(targets[positions]),
                (place.region, other_place.region),
            )
            for i, pieces in enumerate(batch):
                layer = part.first_layer + i
                found.append((layer, share.source, share.target, pieces))
    found.sort(key=lambda push: push[0])
    return [(source, target, pieces) for _, source, target, pieces in found]


def _shards(info: PoolInfo) -> list[Shard]:
    return [rank.places[0].form.shard for rank in info.ranks]


def _by_media(sources: UInt64s, targets: UInt64s) -> list[tuple[int, int, Int64s]]:
    """Sort pairs of blocks by the media of both: (medium, medium, positions)."""
    pairs = mediums_of(sources).astype(np.int64) << 4 | mediums_of(targets)
    return [
        (pair >> 4, pair & 15, np.flatnonzero(pairs == pair))
        for pair in np.unique(pairs).tolist()
    ]


def _within(part: Shard, layers: tuple[int, int] | None) -> Shard | None:
    """Return the part of a share within these layers, or None if there is none."""
    if layers is None:
        return part
    first = max(part.first_layer, layers[0])
    last = min(part.first_layer + part.num_layers, layers[1])
    if first >= last:
        return None
    return Shard(first, last - first, part.first_head, part.num_heads)
