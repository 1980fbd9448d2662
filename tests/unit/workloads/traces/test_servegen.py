"""The ServeGen reader and the requests drawn from its clients."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sgl_tiered_workloads.generators.servegen import servegen_trace
from sgl_tiered_workloads.traces.base import Trace, TraceError
from sgl_tiered_workloads.traces.servegen import read_servegen

from tests.unit.workloads.sample_support import (
    SERVEGEN_LENGTHS,
    SERVEGEN_TRACE,
    write_servegen,
)


def drawn(path: Path, seed: int = 1, **changes: float) -> Trace:
    window = {"start_s": 0.0, "duration_s": 1800.0, "rate_scale": 1.0, **changes}
    generator = np.random.default_rng(seed)
    return servegen_trace(read_servegen(path), generator=generator, **window)


def test_clients_have_their_windows_and_histograms(tmp_path: Path) -> None:
    """Rates, families and lengths are the file's; silent windows have no lengths."""
    one, two = read_servegen(write_servegen(tmp_path / "s.tgz"))
    assert (one.number, two.number) == (0, 1)
    assert one.window_s == 600.0
    assert [w.rate_per_s for w in one.rates] == [0.0, 0.5, 1.5]
    assert [w.family for w in one.rates] == ["", "Gamma", "Weibull"]
    assert [w.start_s for w in one.lengths] == [0.0, 1200.0]
    assert one.lengths_at(1100.0).input_tokens.tolist() == [10, 30]
    assert one.lengths_at(1200.0).input_tokens.tolist() == [99]


def test_an_unpacked_folder_is_as_good_as_the_archive(tmp_path: Path) -> None:
    """Both give the same requests."""
    archive = write_servegen(tmp_path / "s.tgz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path / "folder", filter="data")
    one, two = drawn(archive), drawn(tmp_path / "folder")
    assert [r.arrival_s for r in one.requests] == [r.arrival_s for r in two.requests]


def test_each_window_sends_at_its_rate_with_its_lengths(tmp_path: Path) -> None:
    """Counts follow the rates of both clients, lengths the window's histogram."""
    trace = drawn(write_servegen(tmp_path / "s.tgz"))
    times = np.array([r.arrival_s for r in trace.requests])
    assert np.all(np.diff(times) >= 0)
    counts = np.histogram(times, [0, 600, 1200, 1800])[0].tolist()
    assert counts == [0, 600, 1800]
    early = {r.num_prompt_tokens for r in trace.requests if r.arrival_s < 1200}
    late = {r.num_prompt_tokens for r in trace.requests if r.arrival_s >= 1200}
    assert (early, late) == ({10, 30}, {99})
    assert {r.num_output_tokens for r in trace.requests} == {1, 7, 5}


def test_a_stretch_of_the_day_is_cut_and_scaled(tmp_path: Path) -> None:
    """Half a window at a tenth of the rate sends a twentieth, from time 0."""
    path = write_servegen(tmp_path / "s.tgz")
    trace = drawn(path, start_s=1500.0, duration_s=600.0, rate_scale=0.1)
    assert len(trace.requests) == 90
    assert trace.requests[-1].arrival_s < 300.0
    assert drawn(path, duration_s=600.0).requests == ()


def test_gaps_are_as_bursty_as_the_family_says(tmp_path: Path) -> None:
    """A Gamma window of shape a quarter has gaps of CV two, within a fifth."""
    rows = "0,20,2.0,Gamma,0.25,1.0\n600,0,0,,0,0\n"
    path = write_servegen(tmp_path / "s.tgz", trace=rows, num_clients=1)
    gaps = np.diff([r.arrival_s for r in drawn(path).requests])
    assert gaps.std() / gaps.mean() == pytest.approx(2.0, rel=0.2)


@pytest.mark.parametrize(
    ("trace", "lengths", "problem"),
    [
        ("0,1,1,Pareto,1,1\n600,0,0,,0,0\n", None, "line 1: .* is no window"),
        ("0,1,1,Gamma,0,1\n600,0,0,,0,0\n", None, "is no window"),
        ("0,1,1\n", None, "is no window"),
        ("600,0,0,,0,0\n0,0,0,,0,0\n", None, "not in order"),
        (SERVEGEN_TRACE, {"0": {}}, "no histograms"),
        (SERVEGEN_TRACE, [], "no histograms"),
        (
            SERVEGEN_TRACE,
            {"0": {**SERVEGEN_LENGTHS["0"], "input_tokens": "{-3: 1.0}"}},
            "no histograms",
        ),
        (
            SERVEGEN_TRACE,
            {"0": SERVEGEN_LENGTHS["21600"]},
            "sends requests but has no histogram",
        ),
    ],
)
def test_bad_clients_are_named(
    tmp_path: Path, trace: str, lengths: Any, problem: str
) -> None:
    """Each fault names the client's file."""
    with pytest.raises(TraceError, match=problem):
        read_servegen(write_servegen(tmp_path / "s.tgz", trace, lengths))


def test_unusable_archives_are_named(tmp_path: Path) -> None:
    """Absent, foreign, empty and half archives are trace errors."""
    with pytest.raises(TraceError, match="cannot be read"):
        read_servegen(tmp_path / "absent")
    text = tmp_path / "text"
    text.write_text("no archive")
    with pytest.raises(TraceError, match="cannot be read"):
        read_servegen(text)
    with pytest.raises(TraceError, match="no chunk-N"):
        read_servegen(tmp_path)
    (tmp_path / "chunk-4-trace.csv").write_text(SERVEGEN_TRACE)
    with pytest.raises(TraceError, match="client 4 has only one"):
        read_servegen(tmp_path)
