"""Summary and Chrome trace of a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from sgl_tiered.sim.chrome import write_chrome_trace
from sgl_tiered.sim.config import ServerConfig
from sgl_tiered.sim.requests import SimWorkload
from sgl_tiered.sim.server import simulate
from sgl_tiered.sim.summary import Percentiles, Slo, summarize

Make = Callable[..., ServerConfig]
MakeChats = Callable[..., SimWorkload]


def test_the_summary_follows_from_the_records(
    make_config: Make, make_chats: MakeChats
) -> None:
    """Percentiles, throughput, hits and goodput, counted again by hand."""
    workload = make_chats()
    result = simulate(make_config(device=80, host=100), workload)
    ttft = sorted(record.ttft_s for record in result.records)
    limit = ttft[len(ttft) // 2]
    summary = summarize(result, Slo(ttft_s=limit, tpot_s=10.0))
    assert summary.ttft.mean == pytest.approx(np.mean(ttft))
    assert summary.slo_attainment == pytest.approx((len(ttft) // 2 + 1) / len(ttft))
    assert summary.goodput_per_s == pytest.approx(
        summary.slo_attainment * summary.requests_per_s
    )
    prompt = sum(request.num_prompt_tokens for request in workload.requests)
    computed = sum(record.computed_tokens for record in result.records)
    assert summary.total_hit_ratio == pytest.approx(1 - computed / prompt)
    assert summary.hit_ratio["host"] > 0
    outputs = sum(request.num_output_tokens for request in workload.requests)
    assert summary.output_tokens_per_s * summary.duration_s == pytest.approx(outputs)
    assert 0 < summary.busy <= 1
    assert summary.itl.p50 <= summary.itl.p99


def test_tokens_of_a_pass_are_not_computed_twice(
    make_config: Make, make_chats: MakeChats
) -> None:
    """Passes compute exactly the prompt tokens that no tier had."""
    result = simulate(make_config(device=80, host=100, disk=500), make_chats())
    assert result.num_retractions == 0
    assert sum(done.num_tokens for done in result.passes) == sum(
        record.computed_tokens for record in result.records
    )


def test_no_values_have_no_percentiles() -> None:
    """They are NaN, not zero: zero would be a fast answer."""
    assert np.isnan(Percentiles.of(np.array([np.nan])).p99)


def test_the_chrome_trace_holds_passes_and_requests(
    make_config: Make, make_chats: MakeChats, tmp_path: Path
) -> None:
    """Slices of the device do not overlap, and each request begins and ends."""
    result = simulate(make_config(device=80, host=100, disk=300), make_chats())
    path = tmp_path / "trace.json"
    write_chrome_trace(path, result)
    events = json.loads(path.read_text())["traceEvents"]
    slices = sorted((e["ts"], e["dur"]) for e in events if e["ph"] == "X")
    assert len(slices) == len(result.passes) + len(result.segments)
    for (start, length), (after, _) in pairwise(slices):
        assert start + length <= after + 1e-3
    begun = [e["id"] for e in events if e["ph"] == "b" and e["name"] == "queue"]
    ended = [e["id"] for e in events if e["ph"] == "e" and e["name"] == "decode"]
    assert sorted(begun) == sorted(ended) == list(range(len(result.records)))
