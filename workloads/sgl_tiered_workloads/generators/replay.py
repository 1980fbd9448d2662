"""Traces as work: requests at their own times, or conversations in causal order."""

from __future__ import annotations

from functools import partial

from sgl_tiered_workloads.generators.base import (
    SIXTEEN_USERS,
    Scene,
    make_arrivals,
    sessions_workload,
)
from sgl_tiered_workloads.params import Params
from sgl_tiered_workloads.traces.azure import read_azure
from sgl_tiered_workloads.traces.base import Trace
from sgl_tiered_workloads.traces.lengths import read_arxiv_lengths
from sgl_tiered_workloads.traces.mooncake import read_mooncake
from sgl_tiered_workloads.traces.sampling import by_session, sample_sessions, shrink
from sgl_tiered_workloads.traces.tokens import prompt_tokens
from sgl_tiered_workloads.traces.weka import read_weka
from sgl_tiered_workloads.turns import TraceSession
from sgl_tiered_workloads.workload import Workload

__all__ = ["replay_trace", "trace"]

_FORMATS = ("mooncake", "weka", "azure", "arxiv")


def trace(params: Params, scene: Scene) -> Workload:
    """Make ``trace`` from the file ``path`` in a ``format``.

    Formats: mooncake, weka, azure, arxiv. ``max_prompt_tokens`` (weka) stops a
    conversation at its first longer request, ``keep_one_in`` samples sessions,
    ``num_requests`` keeps the first ones, ``block_tokens`` shrinks blocks and with them
    all lengths, ``causal`` sends a turn only after the previous answer of its session
    and the recorded pause; by default each request leaves at its own time, stretched
    by ``arrivals.slowdown``. Azure and arXiv have no repeated tokens.

    Raises:
        WorkloadError: a parameter is wrong.
        TraceError: the file cannot be used.
    """
    kind = params.choice("format", _FORMATS, "")
    path = params.path("path")
    if kind == "mooncake":
        found = read_mooncake(path)
    elif kind == "weka":
        limit = None
        if params.has("max_prompt_tokens"):
            limit = params.integer("max_prompt_tokens")
        found = read_weka(path, max_prompt_tokens=limit)
    else:
        found = read_azure(path) if kind == "azure" else read_arxiv_lengths(path)
    keep_one_in = params.integer("keep_one_in", 1)
    if keep_one_in > 1:
        found = sample_sessions(found, keep_one_in, scene.seed)
    if params.has("num_requests"):
        kept = found.requests[: params.integer("num_requests")]
        found = Trace(found.name, found.block_tokens, kept)
    if params.has("block_tokens"):
        block_tokens = params.integer("block_tokens")
        if block_tokens > found.block_tokens:
            wanted = f"at most the trace's own {found.block_tokens}"
            raise params.wrong("block_tokens", wanted, block_tokens)
        found = shrink(found, block_tokens)
    if not found.requests:
        raise params.wrong("max_prompt_tokens", "longer than some request", "shorter")
    return replay_trace("trace", found, params, scene, timed=kind != "arxiv")


def replay_trace(
    name: str, found: Trace, params: Params, scene: Scene, timed: bool
) -> Workload:
    """Return a trace's requests as work, with the parameters ``causal`` and arrivals.

    Args:
        name: of the workload.
        found: the trace.
        params: of the workload.
        scene: seeds the tokens.
        timed: whether the trace's times mean anything.

    Raises:
        WorkloadError: a parameter is wrong.
    """
    default = {"process": "trace"} if timed else SIXTEEN_USERS
    causal = params.flag("causal", False)
    groups = by_session(found) if causal else [(each,) for each in found.requests]
    slowdown = params.table("arrivals", default).number("slowdown", 1.0, above=True)
    tokens = partial(
        prompt_tokens,
        block_tokens=found.block_tokens,
        vocab_tokens=scene.vocab_tokens,
        seed=scene.seed,
    )
    prefix = "s" if causal else "r"
    sessions = [
        TraceSession(f"{prefix}{number}", group, tokens, slowdown)
        for number, group in enumerate(groups)
    ]
    times_s = [group[0].arrival_s for group in groups] if timed else None
    arrivals = make_arrivals(params, default, len(groups), scene.generator, times_s)
    return sessions_workload(name, sessions, arrivals)
