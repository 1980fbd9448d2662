"""Recorded conversations as causal sessions: tau-bench agents, MT-bench questions."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_tiered_workloads.generators.base import (
    SIXTEEN_USERS,
    Encode,
    Scene,
    make_arrivals,
    sessions_workload,
)
from sgl_tiered_workloads.params import Params
from sgl_tiered_workloads.traces.mt_bench import read_mt_bench
from sgl_tiered_workloads.traces.tau_bench import read_tau_bench
from sgl_tiered_workloads.traces.texts import Conversation, Message
from sgl_tiered_workloads.turns import Session, Turn, TurnSession
from sgl_tiered_workloads.workload import Workload

__all__ = ["mt_bench", "tau_bench"]


def tau_bench(params: Params, scene: Scene) -> Workload:
    """Make ``tau_bench`` from the trajectories ``path``.

    The model speaks where the assistant spoke, for as many tokens. ``think_s`` is the
    pause before a turn that a user's message opens, ``tool_s`` before one that a
    tool's answer opens; ``num_sessions`` keeps the first ones.

    Raises:
        WorkloadError: a parameter is wrong.
        TraceError: the file cannot be used.
    """
    think_s = params.number("think_s", 0.0)
    tool_s = params.number("tool_s", 0.0)
    conversations = read_tau_bench(params.path("path"))
    kept = conversations[: params.integer("num_sessions", len(conversations))]
    sessions = [
        TurnSession(talk.name, _agent_turns(talk, scene.encode, think_s, tool_s))
        for talk in kept
    ]
    return _workload("tau_bench", sessions, params, scene)


def mt_bench(params: Params, scene: Scene) -> Workload:
    """Make ``mt_bench`` from the questions ``path``, with ``answer_tokens`` each.

    Raises:
        WorkloadError: a parameter is wrong.
        TraceError: the file cannot be used.
    """
    answer_tokens = params.integer("answer_tokens", 128)
    sessions = [
        TurnSession(
            talk.name,
            [
                Turn(tuple(scene.encode(_rendered([message]))), answer_tokens)
                for message in talk.messages
            ],
        )
        for talk in read_mt_bench(params.path("path"))
    ]
    return _workload("mt_bench", sessions, params, scene)


def _workload(
    name: str, sessions: Sequence[Session], params: Params, scene: Scene
) -> Workload:
    arrivals = make_arrivals(params, SIXTEEN_USERS, len(sessions), scene.generator)
    return sessions_workload(name, sessions, arrivals)


def _agent_turns(
    talk: Conversation, encode: Encode, think_s: float, tool_s: float
) -> list[Turn]:
    turns: list[Turn] = []
    heard: list[Message] = []
    for message in talk.messages:
        if message.role != "assistant":
            heard.append(message)
            continue
        by_user = bool(heard) and heard[-1].role == "user"
        pause_s = (think_s if by_user else tool_s) if turns else 0.0
        length = max(1, len(encode(message.text)))
        turns.append(Turn(tuple(encode(_rendered(heard))), length, pause_s))
        heard = []
    return turns


def _rendered(messages: Sequence[Message]) -> str:
    return "".join(f"\n{message.role}: {message.text}" for message in messages) + "\n"
