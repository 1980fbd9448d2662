"""Requests under way to other instances: sent again until answered, or given up.

What a peer may have done for a request that nobody waits for any more is undone by a
``Cancel``, which is sent until it is answered or the peer's incarnation is over. So no
block stays allocated at a peer because a message was lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sgl_tiered.core.clock import Clock
from sgl_tiered.pool.messages import (
    Answer,
    Body,
    Cancel,
    Channel,
    Envelope,
    Finish,
    Incarnation,
    misfit,
)
from sgl_tiered.transport.incidents import Incidents

__all__ = ["NO_ANSWER", "Request", "Requests"]

NO_ANSWER = "no answer came in time"


@dataclass(slots=True, eq=False)
class Request:
    """One request.

    Attributes:
        number, peer, body: which, to whom, what.
        deadline_s: until when an answer is waited for.
        due_s: when it is sent again.
        is_question: the peer does nothing for it, so that nothing has to be undone.
        answer: None while it is under way.
        cancel: what was sent when it was given up, if anything was.
    """

    number: int
    peer: Incarnation
    body: Body
    deadline_s: float
    due_s: float
    is_question: bool = False
    answer: Answer | None = None
    cancel: Request | None = None


class Requests:
    """The requests of one incarnation. One thread calls it.

    Args:
        me: this incarnation.
        channel: carries them.
        clock: for deadlines.
        retry_s: pause before a request is sent again.
        incidents: counts answers that are none.
    """

    def __init__(
        self,
        me: Incarnation,
        channel: Channel,
        clock: Clock,
        retry_s: float,
        incidents: Incidents,
    ) -> None:
        self._incidents = incidents
        self._me = me
        self._channel = channel
        self._clock = clock
        self._retry_s = retry_s
        self._next = 1
        self._under_way: dict[int, Request] = {}

    @property
    def num_under_way(self) -> int:
        """Requests that no answer has come for."""
        return len(self._under_way)

    def ask(
        self,
        peer: Incarnation,
        body: Body,
        timeout_s: float = math.inf,
        *,
        is_question: bool = False,
    ) -> Request:
        """Send a request; without a timeout it goes on until the peer is gone."""
        now_s = self._clock.now()
        until_s = now_s + timeout_s
        request = Request(self._next, peer, body, until_s, now_s, is_question)
        self._next += 1
        self._under_way[request.number] = request
        self._send(request)
        return request

    def give_up(self, request: Request, reason: str) -> None:
        """Stop waiting for a request; the peer shall undo what it did for it."""
        if self._under_way.pop(request.number, None) is None:
            return
        request.answer = Answer(refusal=reason)
        if not request.is_question:
            request.cancel = self.cancel(request)

    def cancel(self, request: Request) -> Request:
        """Let the peer undo what it did for a request, or stop doing it."""
        body = request.body
        addresses = body.addresses if isinstance(body, Finish) else b""
        return self.ask(request.peer, Cancel(request.number, addresses))

    def lose(self, peer: Incarnation, reason: str) -> None:
        """End all requests to a peer whose incarnation is over."""
        for request in [r for r in self._under_way.values() if r.peer == peer]:
            del self._under_way[request.number]
            request.answer = Answer(refusal=reason)

    def begin_anew(self, me: Incarnation) -> None:
        """Go on as another incarnation; nobody waits for what was asked before."""
        self._me = me
        self._under_way.clear()

    def take(self, envelope: Envelope) -> None:
        """Take note of an answer; one that nobody waits for is dropped."""
        assert isinstance(envelope.body, Answer)
        request = self._under_way.get(envelope.request)
        if request is None or request.peer[0] != envelope.sender[0]:
            return
        # A later incarnation of the peer can only refuse.
        if request.peer == envelope.sender or envelope.body.refusal:
            wrong = misfit(envelope.body, request.body, request.peer)
            if wrong:
                text = f"the answer of instance {request.peer[0]} is wrong: {wrong}"
                self._incidents.note("answer", text)
                self.give_up(request, text)
                return
            del self._under_way[request.number]
            request.answer = envelope.body

    def poll(self) -> None:
        """Send again what is due, and give up what is late."""
        now_s = self._clock.now()
        for request in list(self._under_way.values()):
            if request.deadline_s <= now_s:
                self.give_up(request, NO_ANSWER)
            elif request.due_s <= now_s:
                self._send(request)

    def _send(self, request: Request) -> None:
        request.due_s = self._clock.now() + self._retry_s
        self._channel.send(
            Envelope(
                self._me,
                request.peer,
                request.number,
                self._settled(request.peer),
                request.body,
            )
        )

    def _settled(self, peer: Incarnation) -> int:
        """Return the lowest number that a peer is asked about; all below are settled.

        Others do not count: one that never answers would make all keep their answers.
        """
        lowest = self._next
        for number, request in self._under_way.items():
            if request.peer != peer:
                continue
            body = request.body
            # A cancelled request has to be known until the cancellation is answered.
            about = body.request if isinstance(body, Cancel) else number
            lowest = min(lowest, about)
        return lowest
