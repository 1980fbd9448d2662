"""What an instance does for requests of others: allocate, free, finish, cancel.

A request is carried out once: what was answered is kept until the sender says that it
asks no more about it, or is gone. Of a sender that never says so a few thousand are
kept, and what it asks then is dropped, as if it was lost on its way. Requests from an
incarnation that is over, or for one of ours that is, are refused; those of an instance
that the view does not show yet are dropped, and come again. What takes its time is
answered when it is done.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

import numpy as np

from sgl_tiered.core.addresses import mediums_of
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import UInt64s
from sgl_tiered.errors import ConfigError
from sgl_tiered.pool.base import BlockStore, BlockType, allocator
from sgl_tiered.pool.disk_reads import DiskReads
from sgl_tiered.pool.entries import Entries
from sgl_tiered.pool.fences import Words
from sgl_tiered.pool.guests import Guests
from sgl_tiered.pool.membership import View
from sgl_tiered.pool.messages import (
    MAX_TIMEOUT_S,
    Answer,
    AskBlocks,
    AskDone,
    AskHeld,
    AskPages,
    Body,
    Cancel,
    Channel,
    Envelope,
    Finish,
    FreeBlocks,
    Incarnation,
    PoolInfo,
    from_wire,
    to_wire,
    tokens_from_wire,
)
from sgl_tiered.pool.serving import Servings
from sgl_tiered.pool.sums import Sums, SumsOf
from sgl_tiered.transport.incidents import Incidents

__all__ = ["Arrival", "Receiver"]

_LOG = logging.getLogger(__name__)
_NOT_YOURS = "these blocks are not, or no longer, the sender's"
_SPOILED = Answer("the bytes that arrived are not those that were sent")
_FAILED = Answer("the request has failed here")
_MAX_KEPT = 4096
"""Answers to one sender that it may still ask for again: it asks several times a second
for those that it lacks, and says so with the next request when it has them."""
_MAX_CHECKS = 64
"""Arrivals that are summed up at once."""
_MAX_ARRIVALS = 4096
"""Arrivals that nobody has taken."""


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """Blocks that another instance has sent.

    Attributes:
        sender: who.
        addresses: uint64 [n], the blocks, ours now: active, or in the index where
            ``num_inserted`` says so (then duplicates are free already).
        private: the sender's own data.
        num_inserted: blocks that entered the index.
    """

    sender: Incarnation
    addresses: UInt64s
    private: bytes
    num_inserted: int


@dataclass(slots=True, eq=False)
class _Kept:
    """A request that may come again.

    Attributes:
        nonce: of the request, for its answer.
        answer: None while it is being carried out.
        num_lent: blocks that were allocated for it.
    """

    nonce: int
    answer: Answer | None = None
    num_lent: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Check:
    """Blocks that are summed up before they are taken over.

    Attributes:
        sender, number: whose request, and which.
        body: what it wants.
        sums: of the blocks, which are held meanwhile.
    """

    sender: Incarnation
    number: int
    body: Finish
    sums: Sums


class Receiver:
    """Carries out the requests of others. One thread calls it.

    Args:
        me: this incarnation.
        store: its blocks.
        guests: which of them belong to others.
        info: how this instance is built.
        channel: carries the answers.
        servings: what others fetch from here.
        sums: sums up what has arrived, where the sender says what it sums to.
        words: answers who asks whether something of ours still writes there.
        entries: how the others are built.
        incidents: counts what is dropped.
        reads: what the disk is read for others; None where the blocks are all there is.
        keeps_arrivals: whether somebody takes ``arrivals``; else only what enters the
            index is taken over.
    """

    def __init__(
        self,
        me: Incarnation,
        store: BlockStore,
        guests: Guests,
        info: PoolInfo,
        channel: Channel,
        servings: Servings,
        sums: SumsOf,
        words: Words,
        entries: Entries,
        incidents: Incidents,
        reads: DiskReads | None = None,
        *,
        keeps_arrivals: bool = True,
    ) -> None:
        self._entries = entries
        self._incidents = incidents
        self._keeps_arrivals = keeps_arrivals
        self._reads = reads
        self._me = me
        self._store = store
        self._allocators = [allocator(store, type) for type in BlockType]
        self._guests = guests
        self._info = info
        self._channel = channel
        self._servings = servings
        self._sums = sums
        self._words = words
        self._checks: list[_Check] = []
        self._view = View(0)
        self._is_draining = False
        self._answers: dict[Incarnation, dict[int, _Kept]] = {}
        self._settled: dict[Incarnation, int] = {}
        self.arrivals: list[Arrival] = []

    @property
    def num_answers(self) -> int:
        """Answers that are kept in case that a request comes again."""
        return sum(len(kept) for kept in self._answers.values())

    def see(self, view: View) -> None:
        """Act on a new view: blocks of incarnations that are over are taken back."""
        self._view = view
        member = view.member(self._me[0])
        self._is_draining = member is not None and member.draining
        for peer in self._guests.peers:
            if not view.has(*peer):
                # One that fails is tried again with the next view.
                what = f"the end of instance {peer[0]}"
                self._incidents.guard(what, partial(self._guests.lose, peer))
        self._words.see(view)
        self._servings.forget(lambda peer: view.has(*peer))
        for peer in [peer for peer in self._answers if not view.has(*peer)]:
            del self._answers[peer], self._settled[peer]

    def handle(self, envelope: Envelope) -> None:
        """Carry out a request, or find that it has been, and answer."""
        sender = envelope.sender
        member = self._view.member(sender[0])
        if member is None or member.incarnation < sender[1]:
            return
        if member.incarnation > sender[1]:
            self._answer(envelope, Answer("the sender has started anew meanwhile"))
            return
        if envelope.receiver[1] > self._me[1]:
            # We have the lease, and are not told yet; the request comes again.
            return
        if isinstance(envelope.body, AskBlocks | AskPages) and not member.memory:
            # Its entry says it soon; the request comes again.
            return
        if envelope.receiver != self._me:
            text = f"instance {self._me[0]} has started anew meanwhile"
            self._answer(envelope, Answer(text))
            return
        kept = self._answers.setdefault(sender, {})
        # A request may be late or doubled on its way: what it says is old then.
        former = self._settled.get(sender, 0)
        settled = max(envelope.settled, former)
        self._settled[sender] = settled
        if settled > former:
            for number in [n for n in kept if n < settled]:
                del kept[number]
        if envelope.request < settled:
            return
        known = kept.get(envelope.request)
        if known is None:
            if len(kept) >= _MAX_KEPT:
                text = f"instance {sender[0]} has {len(kept)} requests open"
                self._incidents.note("unsettled", text)
                return
            known = kept[envelope.request] = _Kept(envelope.nonce)
            self._begin(sender, envelope.request, envelope.body, known)
        if known.answer is not None:
            self._answer(envelope, known.answer)

    def _begin(
        self, sender: Incarnation, number: int, body: Body, known: _Kept
    ) -> None:
        """Carry out a request that has come for the first time."""
        try:
            known.answer = self._carry_out(sender, number, body)
        except Exception as error:  # noqa: BLE001 - the owner's thread has to live on
            what = f"a {type(body).__name__} of instance {sender[0]} failed here"
            self._incidents.note("failed", what, error)
            known.answer = _FAILED

    def begin_anew(self, me: Incarnation) -> None:
        """Go on as another incarnation: nothing of before is answered any more."""
        self._me = me
        self._answers.clear()
        self._settled.clear()
        self._servings.forget(lambda peer: False)
        for peer in self._guests.peers:
            what = f"the end of what instance {peer[0]} had"
            self._incidents.guard(what, partial(self._guests.lose, peer))

    def advance(self) -> None:
        """Answer what is done by now."""
        self._servings.advance(self._settle)
        for check in [check for check in self._checks if check.sums.done()]:
            self._checks.remove(check)
            self._store.release(from_wire(check.body.addresses))
            known = self._answers.get(check.sender, {}).get(check.number)
            # Else it was cancelled, or its sender is gone.
            if known is not None and known.answer is None:
                sums = check.sums.result()
                same = sums is not None and to_wire(sums) == check.body.sums
                answer = self._finish(check.sender, check.body) if same else _SPOILED
                self._settle(check.sender, check.number, answer)

    @property
    def num_checks(self) -> int:
        """Arrivals that are being summed up."""
        return len(self._checks)

    def _settle(self, peer: Incarnation, request: int, answer: Answer) -> None:
        known = self._answers.get(peer, {}).get(request)
        if known is not None:
            known.answer = answer
            nonce = known.nonce
            self._channel.send(Envelope(self._me, peer, request, 0, answer, nonce))

    def _answer(self, envelope: Envelope, answer: Answer) -> None:
        to, number, nonce = envelope.sender, envelope.request, envelope.nonce
        self._channel.send(Envelope(self._me, to, number, 0, answer, nonce))

    def _carry_out(self, sender: Incarnation, number: int, body: Body) -> Answer | None:
        """Do what is asked; None if it is answered later."""
        if isinstance(body, AskBlocks):
            return self._lend(sender, number, body)
        if isinstance(body, AskHeld):
            return self._say(body)
        if isinstance(body, AskPages):
            return self._serve(sender, number, body)
        if isinstance(body, FreeBlocks):
            self._guests.free(sender, from_wire(body.addresses))
            return Answer()
        if isinstance(body, Finish):
            return self._check(sender, number, body)
        if isinstance(body, AskDone):
            return self._words.answer(sender, body.incarnation)
        if isinstance(body, Cancel):
            if self._servings.cancel(sender, body.request, number):
                return None
            return self._cancel(sender, body)
        return Answer("an answer is no request")

    def _refusal(self, sender: Incarnation) -> str:
        """Return why pages cannot be exchanged with a peer; else an empty text."""
        info = self._entries.info(sender)
        if info is None:
            return f"the registry does not say how instance {sender[0]} is built"
        try:
            self._info.shape.check_same(info.shape, sender[0])
        except ConfigError as error:
            return str(error)
        return ""

    def _say(self, body: AskHeld) -> Answer:
        tokens = tokens_from_wire(body.tokens)
        if self._reads is not None:
            held = self._reads.held(body.namespace, tokens, body.first_page)
            known = tuple((int(tier), num) for tier, num in held.media.items())
            read_s = min(held.read_s, MAX_TIMEOUT_S)
            return Answer(num_pages=held.num_pages, media=known, read_s=read_s)
        found = self._store.match(body.namespace, tokens)
        media, counts = np.unique(mediums_of(found), return_counts=True)
        by_medium = tuple(zip(media.tolist(), counts.tolist(), strict=True))
        return Answer(num_pages=len(found), media=by_medium)

    def _serve(self, sender: Incarnation, number: int, body: AskPages) -> Answer | None:
        refusal = self._refusal(sender)
        info = self._entries.info(sender)
        if info is not None and not refusal:
            here, there = len(self._info.ranks), len(info.ranks)
            if here != there:
                # KV of other partitions is not the same to the bit, nor in sums.
                refusal = (
                    f"instance {self._me[0]} has {here} ranks and the receiver "
                    f"{there}, and pages are fetched between as many only"
                )
            else:
                refusal = info.refusal(from_wire(body.addresses))
        if not refusal and not self._sums.is_able:
            refusal = "pages of several ranks of one process cannot be fetched"
        if refusal:
            return Answer(refusal)
        return self._servings.begin(sender, number, body)

    def _lend(self, sender: Incarnation, number: int, body: AskBlocks) -> Answer:
        refusal = self._refusal(sender)
        if refusal:
            return Answer(refusal)
        if self._is_draining:
            return Answer(f"instance {self._me[0]} is draining")
        num_blocks, num_known = body.num_blocks, 0
        if num_blocks < 1:
            return Answer(f"{num_blocks} blocks are none")
        if body.only_missing:
            tokens = tokens_from_wire(body.tokens)
            num_known = len(self._store.match(body.namespace, tokens))
            num_blocks -= min(max(num_known - body.first_page, 0), num_blocks)
            if not num_blocks:
                return Answer(num_pages=num_known)
        # Bytes cannot arrive on a disk: they land in the host, ``_finish`` moves them.
        landing = BlockType.HOST if body.type is BlockType.DISK else body.type
        addresses = self._allocators[landing](num_blocks)
        if addresses is None:
            return Answer(f"there is no room for {num_blocks} blocks")
        self._guests.lend(sender, addresses)
        self._answers[sender][number].num_lent = len(addresses)
        return Answer("", to_wire(addresses), 0, num_known)

    def _check(self, sender: Incarnation, number: int, body: Finish) -> Answer | None:
        """Take blocks over, after they were summed up if the sender has done so."""
        if not body.insert and not self._keeps_arrivals:
            return Answer(f"instance {self._me[0]} takes pages for its index only")
        if len(self.arrivals) >= _MAX_ARRIVALS:
            return Answer(f"{_MAX_ARRIVALS} arrivals wait to be taken")
        if not body.sums:
            return self._finish(sender, body)
        if len(self._checks) >= _MAX_CHECKS:
            return Answer(f"{_MAX_CHECKS} arrivals are summed up already")
        addresses = from_wire(body.addresses)
        if not self._guests.has(sender, addresses):
            return Answer(_NOT_YOURS)
        if not self._sums.reaches(addresses).all():
            return Answer("blocks that are not in memory cannot be summed up")
        self._store.hold(addresses)
        sums = self._sums.of(addresses)
        self._checks.append(_Check(sender, number, body, sums))
        return None

    def _finish(self, sender: Incarnation, body: Finish) -> Answer:
        addresses = from_wire(body.addresses)
        if not self._guests.has(sender, addresses):
            return Answer(_NOT_YOURS)
        self._guests.take_back(sender, addresses)
        num_inserted = 0
        # Without blocks it would only open a namespace.
        if body.insert and len(addresses):
            tokens = tokens_from_wire(body.tokens)
            done = self._store.insert(
                body.namespace, tokens, addresses, body.first_page
            )
            self._free(done.duplicates)
            if done.refusal:
                return Answer(done.refusal)
            num_inserted = done.num_inserted
            left = np.isin(addresses, done.duplicates, invert=True)
            addresses = addresses[left]
        if body.type is BlockType.DISK:
            moved = self._store.move(addresses, TierId.DISK)
            # Where that is refused (no room on the disk, say) they stay in the host.
            addresses = addresses if moved is None else moved
        if self._keeps_arrivals:
            arrival = Arrival(sender, addresses, body.private, num_inserted)
            self.arrivals.append(arrival)
        return Answer(num_inserted=num_inserted, addresses=to_wire(addresses))

    def _cancel(self, sender: Incarnation, body: Cancel) -> Answer:
        kept = self._answers[sender]
        former = kept.setdefault(body.request, _Kept(0))
        if former.answer is None:
            # It may come later than its cancellation.
            former.answer = Answer("it was cancelled")
        elif former.num_lent:
            self._guests.free(sender, from_wire(former.answer.addresses))
        self._guests.free(sender, from_wire(body.addresses))
        return Answer()

    def _free(self, addresses: UInt64s) -> None:
        refusal = self._store.free(addresses)
        assert not refusal, refusal
