"""ReAct agents: few-shot prompt and question, then steps of thought and observation.

Each step carries the model's own earlier steps and what the tool returned. Recorded
sessions give the real observations and lengths; without a file the shape is that of
103 recorded HotpotQA sessions with six examples: a prompt of 1.6k tokens, 3.7 steps, 41
tokens per step.
"""

from __future__ import annotations

from sgl_tiered_workloads.generators.base import (
    SIXTEEN_USERS,
    Scene,
    make_arrivals,
    sessions_workload,
)
from sgl_tiered_workloads.params import Params
from sgl_tiered_workloads.sessions import random_tokens
from sgl_tiered_workloads.traces.react import read_react_sessions
from sgl_tiered_workloads.turns import Turn, TurnSession
from sgl_tiered_workloads.workload import Workload

__all__ = ["few_shots", "react"]

_EXAMPLE = "\nQuestion:"
_MEAN_STEPS = 3.7


def react(params: Params, scene: Scene) -> Workload:
    """Make ``react``.

    With ``sessions`` (a path): ``num_shots`` examples are kept (MemServe: 2; all by
    default). Without: ``num_sessions``, ``few_shot_tokens``, ``question_tokens``,
    ``thought_tokens``, ``observation_tokens``; steps are geometric around 3.7. Both:
    ``tool_s``, how long a tool takes.

    Raises:
        WorkloadError: a parameter is wrong.
        TraceError: the file cannot be used.
    """
    tool_s = params.number("tool_s", 0.0)
    if params.has("sessions"):
        sessions = _recorded(params, scene, tool_s)
    else:
        sessions = _invented(params, scene, tool_s)
    arrivals = make_arrivals(params, SIXTEEN_USERS, len(sessions), scene.generator)
    return sessions_workload("react", sessions, arrivals)


def few_shots(prompt: str, num_shots: int) -> str:
    """Return the instructions with the first ``num_shots`` examples."""
    instructions, *examples = prompt.split(_EXAMPLE)
    return _EXAMPLE.join([instructions, *examples[:num_shots]])


def _recorded(params: Params, scene: Scene, tool_s: float) -> list[TurnSession]:
    run = read_react_sessions(params.path("sessions"))
    prompt = run.few_shot
    if params.has("num_shots"):
        prompt = few_shots(prompt, params.integer("num_shots", minimum=0))
    opening = tuple(scene.encode(prompt))
    sessions = []
    for number, session in enumerate(run.sessions):
        seen = f"{_EXAMPLE} {session.question}\n"
        turns: list[Turn] = []
        for step in session.steps:
            length = max(1, len(scene.encode(step.thought)))
            pause_s = tool_s if turns else 0.0
            turns.append(Turn(tuple(scene.encode(seen)), length, pause_s))
            seen = f"\n{step.observation}\n"
        sessions.append(TurnSession(f"s{number}", turns, opening))
    return sessions


def _invented(params: Params, scene: Scene, tool_s: float) -> list[TurnSession]:
    draw, vocab = scene.generator, scene.vocab_tokens
    question_tokens = params.integer("question_tokens", 30)
    thought_tokens = params.integer("thought_tokens", 41)
    observation_tokens = params.integer("observation_tokens", 130)
    opening = random_tokens(draw, params.integer("few_shot_tokens", 1600), vocab)
    sessions = []
    for number in range(params.integer("num_sessions", 64)):
        num_steps = int(draw.geometric(1.0 / _MEAN_STEPS))
        turns = [
            Turn(
                random_tokens(
                    draw, observation_tokens if step else question_tokens, vocab
                ),
                thought_tokens,
                tool_s if step else 0.0,
            )
            for step in range(num_steps)
        ]
        sessions.append(TurnSession(f"s{number}", turns, opening))
    return sessions
