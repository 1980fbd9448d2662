"""ReAct agents on HotpotQA: recorded sessions, few-shot prompts and questions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sgl_tiered_workloads.traces.base import TraceError
from sgl_tiered_workloads.traces.files import Row, json_document, json_list
from sgl_tiered_workloads.traces.texts import Question

__all__ = [
    "ReactRun",
    "ReactSession",
    "ReactStep",
    "read_hotpot_questions",
    "read_react_prompts",
    "read_react_sessions",
]


@dataclass(frozen=True, slots=True)
class ReactStep:
    """What the model said (thought and action) and what it saw in return."""

    thought: str
    observation: str


@dataclass(frozen=True, slots=True)
class ReactSession:
    """One question, worked on step by step."""

    question: str
    steps: tuple[ReactStep, ...]


@dataclass(frozen=True, slots=True)
class ReactRun:
    """Sessions that begin with the same instructions and examples.

    Attributes:
        few_shot: instructions and examples.
        sessions: in file order.
    """

    few_shot: str
    sessions: tuple[ReactSession, ...]


def read_react_sessions(path: Path) -> ReactRun:
    """Read ``{few_shot, sessions: [{question, steps: [{llm, obs}]}]}``.

    Raises:
        TraceError: the file is not in this format.
    """
    path = Path(path)
    document = json_document(path)
    if not isinstance(document, dict):
        raise TraceError(path, None, "not a JSON object", "give the sessions file")
    whole = Row(path, None, document)
    sessions = []
    for number, fields in enumerate(whole.rows("sessions")):
        row = Row(path, None, fields.fields, number)
        steps = tuple(
            ReactStep(step.text("llm"), step.text("obs")) for step in row.rows("steps")
        )
        if not steps:
            raise row.wrong("the session has no step", "remove that session")
        sessions.append(ReactSession(row.text("question"), steps))
    if not sessions:
        raise TraceError(path, None, "no sessions", "give a file with sessions")
    return ReactRun(whole.text("few_shot"), tuple(sessions))


def read_react_prompts(path: Path) -> dict[str, str]:
    """Read the ReAct repository's prompts by name, such as ``webthink_simple6``.

    Raises:
        TraceError: the file is not one JSON object of texts.
    """
    path = Path(path)
    document = json_document(path)
    if not isinstance(document, dict) or not document:
        raise TraceError(path, None, "not a JSON object", "give the prompts file")
    row = Row(path, None, document)
    return {name: row.text(name) for name in document}


def read_hotpot_questions(path: Path) -> tuple[Question, ...]:
    """Read HotpotQA questions, ``[{question, answer, ...}]``.

    Raises:
        TraceError: the file is not in this format.
    """
    return tuple(
        Question(row.text("question"), row.text("answer"))
        for row in json_list(Path(path))
    )
