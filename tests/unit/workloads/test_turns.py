"""Sessions play their scripts in causal order."""

from __future__ import annotations

import numpy as np
import pytest
from sgl_tiered_workloads.sessions import PlannedRequest
from sgl_tiered_workloads.traces.base import TraceRequest
from sgl_tiered_workloads.turns import RequestSession, Session, TraceSession, Turn
from sgl_tiered_workloads.turns import TurnSession as Script

TURNS = [Turn((1, 2), 3), Turn((4,), 5, think_s=2.5)]


def traced(tokens: int, think_s: float = float("nan")) -> TraceRequest:
    return TraceRequest(0.0, tokens, 7, np.array([5]), 0, think_s)


def test_a_chat_carries_its_opening_and_the_models_own_answers() -> None:
    """The second prompt is the first, its answer, and the new message."""
    session = Script("s", TURNS, opening=(9, 9))
    assert session.next_request() == PlannedRequest("s.t0", (9, 9, 1, 2), 3)
    session.record_answer([7, 8])
    assert session.think_s == 2.5
    assert session.next_request() == PlannedRequest("s.t1", (9, 9, 1, 2, 7, 8, 4), 5)
    session.record_answer([7])
    assert session.finished
    assert session.think_s == 0.0


def test_questions_on_a_document_do_not_carry_answers() -> None:
    """Each prompt is the document and its own question."""
    session = Script("d", TURNS, opening=(9, 9), carries_answers=False)
    assert session.next_request().prompt == (9, 9, 1, 2)
    session.record_answer([7, 8])
    assert session.next_request().prompt == (9, 9, 4)


def test_a_trace_session_makes_each_prompt_when_it_is_due() -> None:
    """Prompts come from the trace's ids, pauses from its think times, stretched."""
    asked: list[TraceRequest] = []

    def tokens(request: TraceRequest) -> np.ndarray:
        asked.append(request)
        return np.arange(request.num_prompt_tokens)

    requests = [traced(2), traced(3, think_s=1.5), traced(1)]
    session = TraceSession("t", requests, tokens, slowdown=2.0)
    assert asked == []
    assert session.next_request() == PlannedRequest("t.t0", (0, 1), 7)
    session.record_answer([1])
    assert session.think_s == 3.0
    assert session.next_request().prompt == (0, 1, 2)
    session.record_answer([1])
    assert session.think_s == 0.0
    assert len(asked) == 2


@pytest.mark.parametrize(
    "session",
    [
        Script("s", TURNS[:1]),
        TraceSession("s", [traced(1)], lambda _: np.zeros(1, dtype=np.int64)),
        RequestSession(PlannedRequest("s", (1,), 1)),
    ],
)
def test_no_session_runs_ahead_of_the_model(session: Session) -> None:
    """A turn needs the answer before it, an answer needs a turn, an end is an end."""
    assert session.num_turns == 1
    with pytest.raises(RuntimeError, match="no turn is waiting"):
        session.record_answer([1])
    session.next_request()
    with pytest.raises(RuntimeError, match="unanswered"):
        session.next_request()
    session.record_answer([1])
    with pytest.raises(RuntimeError, match="finished"):
        session.next_request()
