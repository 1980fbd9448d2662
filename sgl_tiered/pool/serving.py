"""Pages that others have asked for: the holder's side of a fetch.

The holder matches, keeps what it found, pushes it to the blocks named in the request,
and answers with what the pages sum to. A ``Cancel`` is answered when nothing of it is
written any more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sgl_tiered.core.plans import UInt64s
from sgl_tiered.pool.base import BlockStore, BlockType
from sgl_tiered.pool.layouts import Way
from sgl_tiered.pool.messages import (
    Answer,
    AskPages,
    Incarnation,
    PoolInfo,
    from_wire,
    to_wire,
    tokens_from_wire,
)
from sgl_tiered.pool.sums import Sums, SumsOf
from sgl_tiered.pool.transfer import Job, Step, Transfer

__all__ = ["MAX_SERVED", "Servings"]

MAX_SERVED = 64
"""Fetches served at once; more are refused, and recomputed where they are wanted."""
Settle = Callable[[Incarnation, int, Answer], None]
"""Answers a request of a peer, by its number."""


@dataclass(slots=True, eq=False)
class _Serving:
    """One request under way.

    Attributes:
        peer, number: whose, and which.
        sources: the pages; held until they are summed up.
        transfer: pushes them.
        sums: of them; None once taken note of.
        answered: the request has been.
        cancels: numbers of requests that want to know when nothing is written.
    """

    peer: Incarnation
    number: int
    sources: UInt64s
    transfer: Transfer
    sums: Sums | None
    answered: bool = False
    cancels: list[int] = field(default_factory=list)
    found: bytes = b""


class Servings:
    """All fetches that others do from this instance. One thread calls it.

    Args:
        store: the blocks.
        sums: sums pages up.
        in_memory: returns these blocks, with copies for those that cannot be reached;
            None without room.
        launch: begins a transfer.
        timeout_s: of a push, at most.
    """

    def __init__(
        self,
        store: BlockStore,
        sums: SumsOf,
        in_memory: Callable[[UInt64s], UInt64s | None],
        launch: Callable[[Job, UInt64s, PoolInfo], Transfer],
        timeout_s: float,
    ) -> None:
        self._store = store
        self._sums = sums
        self._in_memory = in_memory
        self._launch = launch
        self._timeout_s = timeout_s
        self._under_way: list[_Serving] = []

    @property
    def num_under_way(self) -> int:
        """Requests of which something is still to be done here."""
        return len(self._under_way)

    def begin(self, peer: Incarnation, number: int, body: AskPages) -> Answer | None:
        """Begin to write pages to a peer; an answer says why not."""
        if len(self._under_way) >= MAX_SERVED:
            return Answer(f"{MAX_SERVED} fetches are served already")
        targets = from_wire(body.addresses)
        found = self._store.match(body.namespace, tokens_from_wire(body.tokens))
        found = found[body.first_page : body.first_page + len(targets)]
        if not len(found):
            return Answer("it has none of these pages")
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
            min(body.timeout_s, self._timeout_s),
        )
        transfer = self._launch(job, found, body.info)
        sums = self._sums.of(sources)
        self._under_way.append(_Serving(peer, number, sources, transfer, sums))
        return None

    def cancel(self, peer: Incarnation, number: int, cancel: int) -> bool:
        """Stop serving a request; False if nothing is written for it.

        Else the cancellation, request ``cancel``, is answered when nothing is.
        """
        for serving in self._under_way:
            if (serving.peer, serving.number) == (peer, number):
                serving.transfer.fail("the receiver does not want it any more")
                serving.cancels.append(cancel)
                return True
        return False

    def advance(self, settle: Settle) -> None:
        """Answer what can be answered."""
        for serving in list(self._under_way):
            if serving.sums is not None and serving.sums.done():
                serving.found = to_wire(serving.sums.result())
                serving.sums = None
                self._store.release(serving.sources)
            transfer = serving.transfer
            if transfer.step is not Step.OVER or serving.sums is not None:
                continue
            if not serving.answered:
                serving.answered = True
                answer = Answer(transfer.error)
                if not transfer.error:
                    num = len(serving.sources)
                    answer = Answer(num_pages=num, sums=serving.found)
                settle(serving.peer, serving.number, answer)
            if transfer.is_settled:
                self._under_way.remove(serving)
                for cancel in serving.cancels:
                    settle(serving.peer, cancel, Answer())
