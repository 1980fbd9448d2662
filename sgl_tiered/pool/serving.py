"""Pages that others have asked for: the holder's side of a fetch.

The holder brings what only its disk has to memory, where it can (`disk_reads.py`),
matches, keeps what it found, pushes it to the blocks named in the request, and answers
with what the pages sum to. A ``Cancel`` is answered when nothing of it is written any
more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sgl_tiered.core.clock import Clock
from sgl_tiered.core.plans import UInt64s
from sgl_tiered.pool.base import BlockStore, BlockType
from sgl_tiered.pool.disk_reads import DiskRead, DiskReads
from sgl_tiered.pool.layouts import Way
from sgl_tiered.pool.messages import (
    MAX_TIMEOUT_S,
    Answer,
    AskPages,
    Incarnation,
    from_wire,
    to_wire,
    tokens_from_wire,
)
from sgl_tiered.pool.sums import Sums, SumsOf
from sgl_tiered.pool.transfer import Job, Step, Transfer

__all__ = ["MAX_SERVED", "Servings"]

MAX_SERVED = 64
"""Fetches served at once; more are refused, and recomputed where they are wanted."""
_READ_SHARE = 0.5
"""Of the time that a receiver waits, so much may be spent on the disk: the rest is for
the way, and pages that have come by then go alone."""
Settle = Callable[[Incarnation, int, Answer], None]
"""Answers a request of a peer, by its number."""


@dataclass(frozen=True, slots=True, eq=False)
class _Reading:
    """One request whose pages are being read from the disk; nothing is written yet.

    Attributes:
        peer, number: whose, and which.
        body: what it wants.
        read: from the disk.
        until_s: when what has come by then is sent.
    """

    peer: Incarnation
    number: int
    body: AskPages
    read: DiskRead
    until_s: float


@dataclass(slots=True, eq=False)
class _Serving:
    """One request under way.

    Attributes:
        peer, number: whose, and which.
        num_read, read_s: pages that the disk was read for, and for how long.
        sources: the pages; held until they are summed up.
        transfer: pushes them.
        sums: of them; None once taken note of.
        answered: the request has been.
        cancels: numbers of requests that want to know when nothing is written.
        found: the sums, once they are there; None where they cannot be made.
    """

    peer: Incarnation
    number: int
    sources: UInt64s
    transfer: Transfer
    sums: Sums | None
    num_read: int
    read_s: float
    answered: bool = False
    cancels: list[int] = field(default_factory=list)
    found: bytes | None = None


class Servings:
    """All fetches that others do from this instance. One thread calls it.

    Args:
        store: the blocks.
        sums: sums pages up.
        in_memory: returns these blocks, with copies for those that cannot be reached;
            None without room.
        launch: begins a transfer.
        timeout_s: of a push, at most.
        clock: bounds the reading.
        reads: what the disk is read for others; None where the blocks are all there is.
    """

    def __init__(
        self,
        store: BlockStore,
        sums: SumsOf,
        in_memory: Callable[[UInt64s], UInt64s | None],
        launch: Callable[[Job, UInt64s], Transfer],
        timeout_s: float,
        clock: Clock,
        reads: DiskReads | None = None,
    ) -> None:
        self._store = store
        self._sums = sums
        self._in_memory = in_memory
        self._launch = launch
        self._timeout_s = timeout_s
        self._clock = clock
        self._reads = reads
        self._reading: list[_Reading] = []
        self._under_way: list[_Serving] = []

    @property
    def num_under_way(self) -> int:
        """Requests of which something is still to be done here."""
        return len(self._under_way) + len(self._reading)

    def begin(self, peer: Incarnation, number: int, body: AskPages) -> Answer | None:
        """Begin to write pages to a peer; an answer says why not."""
        if self.num_under_way >= MAX_SERVED:
            return Answer(f"{MAX_SERVED} fetches are served already")
        read = None
        if self._reads is not None:
            read = self._reads.begin(
                body.namespace,
                tokens_from_wire(body.tokens),
                body.first_page,
                len(from_wire(body.addresses)),
            )
        if read is None:
            return self._push(peer, number, body)
        wait_s = _READ_SHARE * min(body.timeout_s, self._timeout_s)
        until_s = self._clock.now() + wait_s
        self._reading.append(_Reading(peer, number, body, read, until_s))
        return None

    def _push(
        self,
        peer: Incarnation,
        number: int,
        body: AskPages,
        num_read: int = 0,
        read_s: float = 0.0,
    ) -> Answer | None:
        """Send what memory has now; an answer says why nothing."""
        targets = from_wire(body.addresses)
        found = self._match(body, len(targets))
        if not len(found):
            return Answer("it has none of these pages in memory, or can read none now")
        sources = self._in_memory(found)
        if sources is None:
            away = ~self._sums.reaches(found)
            found = sources = found[: int(away.argmax())]
            if not len(sources):
                return Answer("there is no room in the host for pages that lie on disk")
        self._store.hold(sources)
        job = Job(
            peer,
            sources,
            targets[: len(sources)],
            BlockType.MIXED,
            Way.BY_REQUEST_AGG,
            None,
            None,
            max(min(body.timeout_s, self._timeout_s) - read_s, 0.0),
        )
        transfer = self._launch(job, found)
        sums = self._sums.of(sources)
        self._under_way.append(
            _Serving(peer, number, sources, transfer, sums, num_read, read_s)
        )
        return None

    def _match(self, body: AskPages, num_pages: int) -> UInt64s:
        tokens = tokens_from_wire(body.tokens)
        if self._reads is not None:
            return self._reads.match(body.namespace, tokens, body.first_page, num_pages)
        found = self._store.match(body.namespace, tokens)
        return found[body.first_page : body.first_page + num_pages]

    def cancel(self, peer: Incarnation, number: int, cancel: int) -> bool:
        """Stop serving a request; False if nothing is written for it.

        Else the cancellation, request ``cancel``, is answered when nothing is.
        """
        for reading in self._reading:
            if (reading.peer, reading.number) == (peer, number):
                # The read goes on: the pages are the cache's own.
                self._reading.remove(reading)
                return False
        for serving in self._under_way:
            if (serving.peer, serving.number) == (peer, number):
                serving.transfer.fail("the receiver does not want it any more")
                serving.cancels.append(cancel)
                return True
        return False

    def forget(self, is_there: Callable[[Incarnation], bool]) -> None:
        """Send nothing more to incarnations that are over, or know us as another.

        What is being sent is ended by who sends it.
        """
        self._reading = [r for r in self._reading if is_there(r.peer)]

    def advance(self, settle: Settle) -> None:
        """Send what has been read; answer what can be answered."""
        now_s = self._clock.now()
        for reading in list(self._reading):
            read = reading.read
            if not read.done and now_s < reading.until_s:
                continue
            self._reading.remove(reading)
            took_s = now_s - read.began_s
            facts = (reading.peer, reading.number)
            refusal = self._push(*facts, reading.body, read.num_read, took_s)
            if refusal is not None:
                settle(*facts, refusal)
        for serving in list(self._under_way):
            if serving.sums is not None and serving.sums.done():
                found = serving.sums.result()
                serving.found = None if found is None else to_wire(found)
                serving.sums = None
                self._store.release(serving.sources)
            transfer = serving.transfer
            if transfer.step is not Step.OVER or serving.sums is not None:
                continue
            if not serving.answered:
                serving.answered = True
                answer = Answer(transfer.error or "its pages cannot be summed up")
                if not transfer.error and serving.found is not None:
                    num = len(serving.sources)
                    answer = Answer(
                        num_pages=num,
                        sums=serving.found,
                        num_read=serving.num_read,
                        read_s=min(serving.read_s, MAX_TIMEOUT_S),
                    )
                settle(serving.peer, serving.number, answer)
            if transfer.is_settled:
                self._under_way.remove(serving)
                for cancel in serving.cancels:
                    settle(serving.peer, cancel, Answer())
