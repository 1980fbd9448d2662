"""Smaller, slower and coarser versions of a trace, all deterministic."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sgl_tiered_workloads.traces.base import Trace, TraceRequest

__all__ = ["by_session", "coarsen", "sample_sessions", "shrink", "slow_down"]


def by_session(trace: Trace) -> list[tuple[TraceRequest, ...]]:
    """Return the requests of each session, sessions in order of first arrival.

    A request without a session is one of its own.
    """
    groups: dict[int, list[TraceRequest]] = {}
    for place, request in enumerate(trace.requests):
        alone = -1 - place
        key = request.session if request.session >= 0 else alone
        groups.setdefault(key, []).append(request)
    return [tuple(group) for group in groups.values()]


def sample_sessions(trace: Trace, keep_one_in: int, seed: int) -> Trace:
    """Keep one in ``keep_one_in`` sessions, whole, at their own times.

    With a cache of 1/k of the capacity, the hit ratios stay close to the whole
    trace's, for what is reused is reused within a session.

    Raises:
        ValueError: ``keep_one_in`` is below 1.
    """
    if keep_one_in < 1:
        raise ValueError(f"keep_one_in must be at least 1, not {keep_one_in}")
    groups = by_session(trace)
    num_kept = max(1, round(len(groups) / keep_one_in))
    drawn = np.random.default_rng(seed).permutation(len(groups))[:num_kept]
    kept = [request for place in drawn for request in groups[int(place)]]
    kept.sort(key=lambda request: (request.arrival_s, request.serial))
    name = f"{trace.name} 1/{keep_one_in} seed {seed}"
    return Trace(name, trace.block_tokens, tuple(kept))


def slow_down(trace: Trace, factor: float) -> Trace:
    """Stretch arrivals and pauses; 2 halves the rate.

    Raises:
        ValueError: the factor is not positive.
    """
    if not factor > 0:
        raise ValueError(f"a slow-down must be positive, not {factor:g}")
    requests = tuple(
        replace(
            request,
            arrival_s=request.arrival_s * factor,
            think_s=request.think_s * factor,
        )
        for request in trace.requests
    )
    return replace(trace, requests=requests)


def coarsen(trace: Trace, num_blocks: int) -> Trace:
    """Join ``num_blocks`` blocks into one, as a cache with larger pages sees it.

    An id stands for its whole prefix, so a group is named by its last id. Blocks
    behind the last whole group lose their id.

    Raises:
        ValueError: ``num_blocks`` is below 1.
    """
    if num_blocks < 1:
        raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
    requests = tuple(
        replace(request, block_ids=request.block_ids[num_blocks - 1 :: num_blocks])
        for request in trace.requests
    )
    return Trace(trace.name, trace.block_tokens * num_blocks, requests)


def shrink(trace: Trace, block_tokens: int) -> Trace:
    """Scale a trace of block ids down to smaller blocks, for small models.

    Prompts and answers shrink by the same factor; which blocks repeat stays as it is.

    Raises:
        ValueError: the trace has no ids, or the new block is empty or larger.
    """
    if not 1 <= block_tokens <= trace.block_tokens:
        raise ValueError(
            f"blocks of {trace.block_tokens} tokens cannot shrink to {block_tokens}"
        )
    old, new = trace.block_tokens, block_tokens
    requests = tuple(
        replace(
            request,
            # Rounded up, so that a partial last block keeps at least one token.
            num_prompt_tokens=-(-request.num_prompt_tokens * new // old),
            num_output_tokens=max(1, round(request.num_output_tokens * new / old)),
        )
        for request in trace.requests
    )
    return Trace(f"{trace.name} in blocks of {new}", new, requests)
