"""Chats with a system prompt, in turns or, as the Berkeley report has it, in one."""

from __future__ import annotations

from sgl_tiered_workloads.generators.base import (
    SIXTEEN_USERS,
    Scene,
    make_arrivals,
    requests_workload,
    sessions_workload,
    think_times,
)
from sgl_tiered_workloads.params import Params
from sgl_tiered_workloads.sessions import PlannedRequest, random_tokens
from sgl_tiered_workloads.traces.lengths import read_sharegpt_lengths
from sgl_tiered_workloads.traces.sampling import by_session
from sgl_tiered_workloads.traces.sharegpt import read_sharegpt_texts
from sgl_tiered_workloads.turns import Turn, TurnSession
from sgl_tiered_workloads.workload import Workload

__all__ = ["chat", "system_chat"]


def chat(params: Params, scene: Scene) -> Workload:
    """Make ``chat``: users with one system prompt who talk in turns.

    Parameters: ``num_sessions``, ``num_turns``, ``system_tokens``, ``first_tokens``
    (a user's opening), ``user_tokens``, ``answer_tokens``, ``think_s`` (mean of the
    exponential pause before a turn).

    Raises:
        WorkloadError: a parameter is wrong.
    """
    num_sessions = params.integer("num_sessions", 32)
    num_turns = params.integer("num_turns", 6)
    first_tokens = params.integer("first_tokens", 256)
    user_tokens = params.integer("user_tokens", 64)
    answer_tokens = params.integer("answer_tokens", 32)
    think_s = params.number("think_s", 0.0)
    draw, vocab = scene.generator, scene.vocab_tokens
    system = random_tokens(draw, params.integer("system_tokens", 128), vocab)
    sessions = []
    for number in range(num_sessions):
        pauses_s = think_times(think_s, num_turns, draw)
        turns = [
            Turn(
                random_tokens(draw, user_tokens if turn else first_tokens, vocab),
                answer_tokens,
                pause_s,
            )
            for turn, pause_s in enumerate(pauses_s)
        ]
        sessions.append(TurnSession(f"s{number}", turns, opening=system))
    arrivals = make_arrivals(params, SIXTEEN_USERS, num_sessions, draw)
    return sessions_workload("chat", sessions, arrivals)


def system_chat(params: Params, scene: Scene) -> Workload:
    """Make ``system_chat``: one system prompt, then one user input each, at random.

    Inputs come from ShareGPT ``texts`` or ShareGPT ``lengths`` (paths), else all have
    ``user_tokens`` and ``answer_tokens``. Further: ``num_requests``, ``system_tokens``.

    Raises:
        WorkloadError: a parameter is wrong.
        TraceError: the file cannot be used.
    """
    num_requests = params.integer("num_requests", 256)
    draw, vocab = scene.generator, scene.vocab_tokens
    system = random_tokens(draw, params.integer("system_tokens", 512), vocab)
    inputs: list[tuple[tuple[int, ...], int]]
    if params.has("texts"):
        texts = read_sharegpt_texts(params.path("texts"))
        chosen = [texts[int(n)] for n in draw.integers(0, len(texts), num_requests)]
        inputs = [
            (tuple(scene.encode(text.prompt)), text.num_output_tokens)
            for text in chosen
        ]
    elif params.has("lengths"):
        groups = by_session(read_sharegpt_lengths(params.path("lengths")))
        firsts = [
            groups[int(n)][0] for n in draw.integers(0, len(groups), num_requests)
        ]
        inputs = [
            (random_tokens(draw, f.num_prompt_tokens, vocab), f.num_output_tokens)
            for f in firsts
        ]
    else:
        user_tokens = params.integer("user_tokens", 128)
        answer_tokens = params.integer("answer_tokens", 64)
        inputs = [
            (random_tokens(draw, user_tokens, vocab), answer_tokens)
            for _ in range(num_requests)
        ]
    requests = [
        PlannedRequest(f"r{number}", system + own, answer_tokens)
        for number, (own, answer_tokens) in enumerate(inputs)
    ]
    arrivals = make_arrivals(params, SIXTEEN_USERS, num_requests, draw)
    return requests_workload("system_chat", requests, arrivals)
