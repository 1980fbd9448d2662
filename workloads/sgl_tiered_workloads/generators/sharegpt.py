"""ShareGPT chats by their lengths: random words, real sizes, own answers."""

from __future__ import annotations

from sgl_tiered_workloads.generators.base import (
    SIXTEEN_USERS,
    Scene,
    make_arrivals,
    sessions_workload,
    think_times,
)
from sgl_tiered_workloads.params import Params
from sgl_tiered_workloads.sessions import random_tokens
from sgl_tiered_workloads.traces.base import TraceRequest
from sgl_tiered_workloads.traces.lengths import read_sharegpt_lengths
from sgl_tiered_workloads.traces.sampling import by_session
from sgl_tiered_workloads.turns import Turn, TurnSession
from sgl_tiered_workloads.workload import Workload

__all__ = ["sharegpt"]


def sharegpt(params: Params, scene: Scene) -> Workload:
    """Make ``sharegpt``: sessions drawn from the lengths file ``lengths`` (a path).

    Parameters: ``num_sessions`` drawn without repeats, ``max_turns``, ``max_tokens``
    (a session ends before its context is longer), ``think_s`` (mean pause). With
    ``max_turns = 1`` it is LayerKV's ShareGPT at a request rate.

    Raises:
        WorkloadError: a parameter is wrong, or no session is short enough.
        TraceError: the file cannot be used.
    """
    groups = by_session(read_sharegpt_lengths(params.path("lengths")))
    max_turns = params.integer("max_turns", max(len(group) for group in groups))
    max_tokens = params.integer("max_tokens", 1 << 30)
    scripts = [kept for group in groups if (kept := _fitting(group, max_tokens))]
    if not scripts:
        raise params.wrong("max_tokens", "long enough for a session", max_tokens)
    think_s = params.number("think_s", 0.0)
    draw = scene.generator
    wanted = params.integer("num_sessions", min(256, len(scripts)))
    if wanted > len(scripts):
        raise params.wrong("num_sessions", f"at most {len(scripts)}", wanted)
    sessions = [
        _session(int(number), scripts[int(number)][:max_turns], think_s, scene)
        for number in draw.permutation(len(scripts))[:wanted]
    ]
    arrivals = make_arrivals(params, SIXTEEN_USERS, len(sessions), draw)
    return sessions_workload("sharegpt", sessions, arrivals)


def _fitting(
    group: tuple[TraceRequest, ...], max_tokens: int
) -> tuple[TraceRequest, ...]:
    for turn, request in enumerate(group):
        if request.num_prompt_tokens + request.num_output_tokens > max_tokens:
            return group[:turn]
    return group


def _session(
    number: int, group: tuple[TraceRequest, ...], think_s: float, scene: Scene
) -> TurnSession:
    pauses_s = think_times(think_s, len(group), scene.generator)
    context = 0
    turns = []
    for request, pause_s in zip(group, pauses_s, strict=True):
        fresh = request.num_prompt_tokens - context
        message = random_tokens(scene.generator, fresh, scene.vocab_tokens)
        turns.append(Turn(message, request.num_output_tokens, pause_s))
        context = request.num_prompt_tokens + request.num_output_tokens
    return TurnSession(f"s{number}", turns)
