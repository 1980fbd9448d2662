"""Sessions as scripts of turns, for any workload in which answers matter.

A session gives its next request only after the previous answer was recorded. Whether
the answer enters the next prompt is the session's affair: a chat carries it, questions
on one document do not, and a trace of block ids cannot (its ids stand for the answers
of the original service).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sgl_tiered_workloads.sessions import PlannedRequest
from sgl_tiered_workloads.traces.base import Int64s, TraceRequest

__all__ = ["RequestSession", "Session", "TraceSession", "Turn", "TurnSession"]

Tokens = tuple[int, ...]


class Session(Protocol):
    """One user's work: request, answer, pause, next request."""

    @property
    def name(self) -> str:
        """Names it within its workload; request keys begin with it."""

    @property
    def num_turns(self) -> int:
        """Requests that it will send in all."""

    @property
    def finished(self) -> bool:
        """Whether every turn is answered."""

    @property
    def think_s(self) -> float:
        """Seconds between the last answer and the next request."""

    def next_request(self) -> PlannedRequest:
        """Return the next turn's request; an error while one is unanswered."""

    def record_answer(self, answer: Sequence[int]) -> None:
        """Take the answer to the last request."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a script.

    Attributes:
        message: tokens that the user adds.
        answer_tokens: length of the answer.
        think_s: pause before it, after the previous answer.
    """

    message: Tokens
    answer_tokens: int
    think_s: float = 0.0


class _Progress:
    """Whose turn it is; refuses to run ahead of the model."""

    def __init__(self, name: str, num_turns: int) -> None:
        self._name = name
        self._num_turns = num_turns
        self._turn = 0
        self._waiting = False

    @property
    def name(self) -> str:
        """Names the session within its workload."""
        return self._name

    @property
    def num_turns(self) -> int:
        """Requests that it will send in all."""
        return self._num_turns

    @property
    def finished(self) -> bool:
        """Whether every turn is answered."""
        return self._turn == self._num_turns

    def _begin(self) -> int:
        if self._waiting:
            raise RuntimeError(f"session {self.name}: turn {self._turn} is unanswered")
        if self.finished:
            raise RuntimeError(f"session {self.name} is finished")
        self._waiting = True
        return self._turn

    def _end(self) -> None:
        if not self._waiting:
            raise RuntimeError(f"session {self.name}: no turn is waiting")
        self._turn += 1
        self._waiting = False


class TurnSession(_Progress):
    """A session that plays given turns.

    Args:
        name: names it within its workload.
        turns: its script.
        opening: tokens that every prompt begins with.
        carries_answers: each prompt holds all earlier messages and the model's own
            answers; otherwise it is the opening and the turn's message only.
    """

    def __init__(
        self,
        name: str,
        turns: Sequence[Turn],
        opening: Tokens = (),
        carries_answers: bool = True,
    ) -> None:
        super().__init__(name, len(turns))
        self._turns = tuple(turns)
        self._history = opening
        self._carries_answers = carries_answers

    @property
    def think_s(self) -> float:
        """Seconds between the last answer and the next request."""
        return 0.0 if self.finished else self._turns[self._turn].think_s

    def next_request(self) -> PlannedRequest:
        """Return the next turn's request."""
        number = self._begin()
        turn = self._turns[number]
        prompt = self._history + turn.message
        if self._carries_answers:
            self._history = prompt
        return PlannedRequest(f"{self.name}.t{number}", prompt, turn.answer_tokens)

    def record_answer(self, answer: Sequence[int]) -> None:
        """Take the answer; where answers are carried, it enters the next prompt."""
        self._end()
        if self._carries_answers:
            self._history = self._history + tuple(answer)


class TraceSession(_Progress):
    """The requests of one conversation of a trace, prompts as the trace has them.

    Prompts are made when they are due, so that a day of trace needs little memory. A
    pause that the trace does not record counts as none.

    Args:
        name: names it within its workload.
        requests: of the conversation, in order of arrival.
        tokens: gives the prompt of a request.
        slowdown: of the recorded pauses.
    """

    def __init__(
        self,
        name: str,
        requests: Sequence[TraceRequest],
        tokens: Callable[[TraceRequest], Int64s],
        slowdown: float = 1.0,
    ) -> None:
        super().__init__(name, len(requests))
        self._requests = tuple(requests)
        self._tokens = tokens
        self._slowdown = slowdown

    @property
    def think_s(self) -> float:
        """Seconds between the last answer and the next request."""
        if self.finished:
            return 0.0
        think_s = self._requests[self._turn].think_s
        return 0.0 if math.isnan(think_s) else think_s * self._slowdown

    def next_request(self) -> PlannedRequest:
        """Return the next turn's request, its prompt made now."""
        number = self._begin()
        request = self._requests[number]
        prompt = tuple(self._tokens(request).tolist())
        key = f"{self.name}.t{number}"
        return PlannedRequest(key, prompt, request.num_output_tokens)

    def record_answer(self, answer: Sequence[int]) -> None:
        """Take the answer; the next prompt is the trace's own."""
        self._end()


class RequestSession(_Progress):
    """A planned request as a session of one turn."""

    def __init__(self, request: PlannedRequest) -> None:
        super().__init__(request.key, 1)
        self._request = request

    @property
    def think_s(self) -> float:
        """No pause: there is one turn only."""
        return 0.0

    def next_request(self) -> PlannedRequest:
        """Return the request."""
        self._begin()
        return self._request

    def record_answer(self, answer: Sequence[int]) -> None:
        """Take the answer."""
        self._end()
