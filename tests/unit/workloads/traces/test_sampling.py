"""Sampled, slowed, coarser and smaller traces keep what they promise to keep."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sgl_tiered_workloads.traces.base import Trace, TraceRequest
from sgl_tiered_workloads.traces.sampling import (
    by_session,
    coarsen,
    sample_sessions,
    shrink,
    slow_down,
)


def request(
    arrival_s: float, session: int, serial: int, ids: list[int] | None = None
) -> TraceRequest:
    array = np.array(ids or [serial], dtype=np.int64)
    tokens = 4 * len(array) - 1
    return TraceRequest(arrival_s, tokens, 8, array, session, 2.0, serial)


def trace_of(num_sessions: int) -> Trace:
    requests = tuple(
        request(float(turn * num_sessions + session), session, turn)
        for turn in range(3)
        for session in range(num_sessions)
    )
    return Trace("t", 4, requests)


def test_a_sample_keeps_whole_sessions_at_their_own_times() -> None:
    """One session in four stays, with all its turns, in order of arrival."""
    sample = sample_sessions(trace_of(40), 4, seed=2)
    kept = {r.session for r in sample.requests}
    assert len(kept) == 10
    assert len(sample.requests) == 30
    times = [r.arrival_s for r in sample.requests]
    assert times == sorted(times)
    assert times[0] == min(kept)


def test_a_sample_is_a_function_of_its_seed() -> None:
    """Equal seeds keep the same sessions; another seed others."""
    one, same, other = (
        {r.session for r in sample_sessions(trace_of(60), 3, seed).requests}
        for seed in (1, 1, 2)
    )
    assert one == same
    assert one != other


def test_requests_without_session_are_sampled_one_by_one() -> None:
    """Standing alone is no session that all such requests share."""
    lone = Trace("t", 4, tuple(request(float(n), -1, n) for n in range(20)))
    assert len(by_session(lone)) == 20
    assert len(sample_sessions(lone, 2, seed=1).requests) == 10


def test_slowing_down_stretches_arrivals_and_pauses() -> None:
    """Lengths and ids stay; unknown pauses stay unknown."""
    trace = Trace("t", 4, (TraceRequest(3.0, 4, 8, np.array([1])), request(5, 0, 1)))
    slow = slow_down(trace, 2.0)
    assert [r.arrival_s for r in slow.requests] == [6.0, 10.0]
    assert math.isnan(slow.requests[0].think_s)
    assert slow.requests[1].think_s == 4.0
    assert slow.requests[1].block_ids.tolist() == [1]


def test_a_coarse_block_is_named_by_its_last_id() -> None:
    """Whole groups keep an id for their prefix, the rest loses it."""
    trace = Trace("t", 4, (request(0, 0, 0, [5, 6, 7, 8, 9]),))
    coarse = coarsen(trace, 2)
    assert coarse.block_tokens == 8
    assert coarse.requests[0].block_ids.tolist() == [6, 8]
    assert coarse.requests[0].num_prompt_tokens == 19


def test_a_shrunk_trace_has_the_same_ids_for_its_smaller_blocks() -> None:
    """Lengths shrink by the factor; as many blocks cover each prompt as before."""
    long = TraceRequest(0.0, 1025, 100, np.array([1, 2, 3]))
    short = TraceRequest(0.0, 1, 1, np.array([1]))
    shrunk = shrink(Trace("t", 512, (long, short)), 16)
    assert shrunk.block_tokens == 16
    assert [r.num_prompt_tokens for r in shrunk.requests] == [33, 1]
    assert [r.num_output_tokens for r in shrunk.requests] == [3, 1]
    for r in shrunk.requests:
        assert -(-r.num_prompt_tokens // 16) == len(r.block_ids)


def test_impossible_transforms_are_refused() -> None:
    """Factors below one, or below or at zero, are errors."""
    trace = trace_of(2)
    for make in (
        lambda: sample_sessions(trace, 0, 1),
        lambda: slow_down(trace, 0.0),
        lambda: coarsen(trace, 0),
        lambda: shrink(trace, 5),
        lambda: shrink(Trace("lengths", 0, ()), 1),
    ):
        with pytest.raises(ValueError, match=r"must be|cannot shrink"):
            make()
