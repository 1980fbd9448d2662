"""Pages that another instance holds, brought here: the receiver's side, and hints.

The receiver lends blocks of its own to the holder, which writes the pages to them and
says what each sums to; the receiver sums up what arrived before anybody may use it
(and marks the blocks before it lends them, so that no sum fits what did not arrive). A
loan is over when the holder has answered that all was written, or, after a failure, has
answered a ``Cancel``: then nothing of it writes any more; and where its incarnation or
ours is over, when its ``Fence`` has passed. Until then the blocks are held, whatever
their owner does. A holder that is stopped does not answer: one that has yet to say that
it is done with a fetch that failed is lent no more than half of the blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from sgl_tiered.core.clock import Clock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import UInt64s
from sgl_tiered.pool.base import BlockStore
from sgl_tiered.pool.fences import Fence, Fences
from sgl_tiered.pool.messages import (
    AskHeld,
    AskPages,
    Incarnation,
    from_wire,
)
from sgl_tiered.pool.requests import NO_ANSWER, Request, Requests
from sgl_tiered.pool.sums import Sums, SumsOf
from sgl_tiered.transport.base import TransferStatus

__all__ = ["Fetch", "Fetches", "Held", "Search"]

_MEDIA = frozenset(TierId)
"""Those that this version knows."""
_GONE_WRONG = "the bytes that arrived are not those that were sent"


@dataclass(frozen=True, slots=True)
class Held:
    """What an instance has of a prompt: a hint, which any eviction makes old.

    Attributes:
        num_pages: the first so many pages.
        media: how many of them it would read from which medium.
        read_s: how long its disk is predicted to take for those that only it has.
    """

    num_pages: int
    media: Mapping[TierId, int]
    read_s: float = 0.0


class Search:
    """Instances being asked what they hold of a prompt; the pool's ``poll`` hears.

    Attributes:
        held: what those that have answered hold, by instance; 0 pages included.
    """

    def __init__(self, pump: Callable[[], None]) -> None:
        self._pump = pump
        self._open: list[Request] = []
        self.held: dict[int, Held] = {}

    @property
    def is_over(self) -> bool:
        """Whether no more answers will come."""
        return not self._open

    def ask(
        self, requests: Requests, peers: list[Incarnation], body: AskHeld, wait_s: float
    ) -> None:
        """Ask these instances."""
        self._open += [
            requests.ask(peer, body, wait_s, is_question=True) for peer in peers
        ]

    def wait(self) -> Mapping[int, Held]:
        """Move the pool along until it is over; its deadline bounds that."""
        while not self.is_over:
            self._pump()
        return self.held

    def advance(self) -> None:
        """Take note of what has been answered."""
        for request in [r for r in self._open if r.answer is not None]:
            self._open.remove(request)
            answer = request.answer
            if answer is not None and not answer.refusal:
                media = {TierId(m): num for m, num in answer.media if m in _MEDIA}
                self.held[request.peer[0]] = Held(
                    answer.num_pages, media, answer.read_s
                )


class Fetch:
    """Pages on their way here; the pool's ``poll`` moves it along.

    Attributes:
        peer: who sends them.
        addresses: uint64 [n], the blocks that they are written to.
        error: why it failed, in one clause; else empty.
        num_blocks: of the first so many blocks the bytes are right, once it is DONE;
            the others hold nothing of use.
        num_read, read_s: blocks that the holder read from its disk first, and how long
            that took.
        status: RUNNING, or how it ended. Whoever owns the blocks may free them at any
            end; nobody gets them while somebody may still write to them.
    """

    def __init__(
        self, peer: Incarnation, addresses: UInt64s, pump: Callable[[], None]
    ) -> None:
        self.peer = peer
        self.addresses = addresses
        self.error = ""
        self.num_blocks = 0
        self.num_read, self.read_s = 0, 0.0
        self.status = TransferStatus.RUNNING
        self._pump = pump
        self.request: Request | None = None
        self.expected: UInt64s = np.zeros(0, np.uint64)
        self.sums: Sums | None = None

    def wait(self) -> TransferStatus:
        """Move the pool along until this ends; its deadline bounds that."""
        while self.status is TransferStatus.RUNNING:
            self._pump()
        return self.status

    def fail(self, error: str) -> None:
        """End it; whoever does not want the pages any more may call this too."""
        if self.status is TransferStatus.RUNNING:
            late = error == NO_ANSWER
            self.error = error
            self.status = TransferStatus.TIMED_OUT if late else TransferStatus.FAILED


@dataclass(slots=True, eq=False)
class _Loan:
    """Blocks that an instance may still write to after a fetch has failed.

    Attributes:
        cancel: whose answer ends it.
        fence: that ends it, where nobody can be asked any more.
        until_s: when it ends, where that is known.
    """

    peer: Incarnation
    addresses: UInt64s
    cancel: Request | None = None
    fence: Fence | None = None
    until_s: float = field(default=math.inf)

    @property
    def is_open(self) -> bool:
        """Whether it is not known when it ends."""
        return math.isinf(self.until_s)


class Fetches:
    """All fetches of this instance, and the blocks lent for them. One thread calls it.

    Args:
        store: the blocks.
        clock: for grace times.
        grace_s: how long blocks stay unused in which other bytes have arrived than
            those that were sent.
        sums: sums up what arrived.
        fences: say when those who are gone write no more.
    """

    def __init__(
        self,
        store: BlockStore,
        clock: Clock,
        grace_s: float,
        sums: SumsOf,
        fences: Fences,
    ) -> None:
        self._store = store
        self._clock = clock
        self._grace_s = grace_s
        self._fences = fences
        self._sums = sums
        self._running: list[Fetch] = []
        self._loans: list[_Loan] = []
        # By block: the instance that may write to it.
        self._lent: dict[int, int] = {}

    @property
    def num_running(self) -> int:
        """Fetches that have not ended, or whose end is not taken note of yet."""
        return len(self._running)

    @property
    def num_lent(self) -> int:
        """Blocks of ours that another instance may write to."""
        return len(self._lent)

    def refusal(self, holder: int, addresses: UInt64s) -> str:
        """Return why blocks cannot be lent to it, in a clause; else an empty text."""
        if not len(addresses):
            return "there are no blocks to write to"
        if len(set(addresses.tolist())) < len(addresses):
            return "a block is named twice"
        if not self._lent.keys().isdisjoint(addresses.tolist()):
            return "another fetch may still write to a block"
        if not self._sums.reaches(addresses).all():
            return "a block lies where no bytes can arrive"
        if any(loan.peer[0] == holder and loan.is_open for loan in self._loans):
            num_lent = sum(each == holder for each in self._lent.values())
            if num_lent + len(addresses) > self._store.num_blocks // 2:
                return f"instance {holder} does not end what it was lent before"
        return self._store.refusal(addresses)

    def begin(
        self, fetch: Fetch, requests: Requests, body: AskPages, timeout_s: float
    ) -> None:
        """Lend the blocks, and ask for the pages."""
        self._store.hold(fetch.addresses)
        self._sums.mark(fetch.addresses)
        self._lent |= dict.fromkeys(fetch.addresses.tolist(), fetch.peer[0])
        fetch.request = requests.ask(fetch.peer, body, timeout_s)
        self._running.append(fetch)

    def advance(self, requests: Requests, is_there: Callable[..., bool]) -> None:
        """Take note of answers and checksums; give back what nobody writes to.

        Args:
            requests: to the holders.
            is_there: whether an incarnation is a member.
        """
        for fetch in list(self._running):
            self._advance(fetch, requests, is_there)
        now_s = self._clock.now()
        for loan in list(self._loans):
            if loan.cancel is not None and loan.cancel.answer is not None:
                if loan.cancel.answer.refusal:
                    # Who cannot say that it is done may still be at it.
                    loan.fence = self._fences.open(loan.peer)
                else:
                    loan.until_s = now_s
                loan.cancel = None
            has_passed = loan.fence is not None and loan.fence.has_passed
            if has_passed or loan.until_s <= now_s:
                self._loans.remove(loan)
                self._take_back(loan.addresses)

    def end_all(self, error: str) -> None:
        """Fail all: the conversations of this incarnation are over."""
        for fetch in self._running:
            if fetch.sums is None:
                fetch.fail(error)
                self._loans.append(_Loan(fetch.peer, fetch.addresses))
        self._running = [fetch for fetch in self._running if fetch.sums is not None]
        for loan in self._loans:
            loan.cancel = None
            if loan.fence is None and loan.is_open:
                loan.fence = self._fences.open(loan.peer)

    def _advance(
        self, fetch: Fetch, requests: Requests, is_there: Callable[..., bool]
    ) -> None:
        request = fetch.request
        assert request is not None, "it was begun"
        if fetch.sums is not None:
            if fetch.sums.done():
                self._running.remove(fetch)
                self._compare(fetch, fetch.sums.result())
            return
        if fetch.status is not TransferStatus.RUNNING:
            # Whoever wanted the pages has given up.
            requests.give_up(request, fetch.error)
        answer = request.answer
        if answer is None:
            return
        fetch.expected = from_wire(answer.sums)
        fetch.num_read, fetch.read_s = answer.num_read, answer.read_s
        num = len(fetch.expected)
        if not answer.refusal and num <= len(fetch.addresses) and num:
            fetch.sums = self._sums.of(fetch.addresses[:num])
            self._advance(fetch, requests, is_there)
            return
        fetch.fail(answer.refusal or "the answer names no pages")
        self._running.remove(fetch)
        loan = _Loan(fetch.peer, fetch.addresses, request.cancel)
        if not is_there(*fetch.peer):
            loan.fence = self._fences.open(fetch.peer)
        elif loan.cancel is None:
            loan.cancel = requests.cancel(request)
        self._loans.append(loan)

    def _compare(self, fetch: Fetch, sums: UInt64s | None) -> None:
        if sums is not None and (sums == fetch.expected).all():
            if fetch.status is TransferStatus.RUNNING:
                fetch.num_blocks = len(sums)
                fetch.status = TransferStatus.DONE
            self._take_back(fetch.addresses)
            return
        fetch.fail(_GONE_WRONG)
        # Somebody else may have written there.
        until_s = self._clock.now() + self._grace_s
        self._loans.append(_Loan(fetch.peer, fetch.addresses, until_s=until_s))

    def _take_back(self, addresses: UInt64s) -> None:
        for address in addresses.tolist():
            del self._lent[address]
        self._store.release(addresses)
