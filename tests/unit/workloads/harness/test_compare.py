"""Two record files are compared pair by pair, if they are of one experiment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from sgl_tiered_workloads.harness import compare
from sgl_tiered_workloads.harness.compare import compare_files, format_differences
from sgl_tiered_workloads.harness.errors import GateRedError, RecordsError
from sgl_tiered_workloads.harness.statistics import paired_interval
from sgl_tiered_workloads.records import RequestRecord, make_header, write_records

from tests.unit.workloads.harness.harness_support import record


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw a tenth of the resamples for each interval: these tests make hundreds.

    As many as users get are drawn by ``unit/cli/test_bench.py``, whose command compares
    two files, and below where ``paired_interval`` is called by itself.
    """
    few = partial(paired_interval, num_resamples=200)
    monkeypatch.setattr(compare, "paired_interval", few)


def side(
    ttft_s: Callable[[int], float],
    num: int = 40,
    repeats: int = 2,
    cached: int = 0,
) -> list[RequestRecord]:
    """Return records whose TTFT is a function of the request's number."""
    return [
        record(
            f"s{i}",
            float(i),
            [i + ttft_s(i), i + ttft_s(i) + 0.02],
            repeat=repeat,
            cached={"host": cached},
        )
        for repeat in range(repeats)
        for i in range(num)
    ]


def write(
    folder: Path,
    name: str,
    records: Sequence[RequestRecord],
    spec_hash: str = "abc",
    gate: str = "green",
    warmup_s: float | None = None,
) -> Path:
    """Write a record file and return its path."""
    path = folder / f"{name}.jsonl"
    facts: dict[str, object] = {"gate": gate}
    if warmup_s is not None:
        facts["spec"] = {"window": {"warmup_s": warmup_s, "cooldown_s": 0.0}}
    write_records(path, make_header(name, facts, spec_hash), records)
    return path


def test_a_constant_gain_is_found_in_every_figure(tmp_path: Path) -> None:
    """Each request is 50 ms faster, so mean and percentiles are, for sure."""
    base = write(tmp_path, "base", side(lambda i: 0.2 + i / 100))
    other = write(tmp_path, "other", side(lambda i: 0.15 + i / 100, cached=30))
    found = compare_files(base, other)
    assert (found.num_pairs, found.num_left_out, found.num_repeats) == (80, 0, 2)
    by_name = {item.name: item for item in found.differences}
    for name in ("TTFT mean", "TTFT p50", "TTFT p90", "TTFT p99", "E2E p50"):
        change = by_name[name].change
        assert change.value == pytest.approx(-50.0)
        # Pairs are drawn together, so a common shift has no spread at all.
        assert change.low == pytest.approx(-50.0)
        assert change.high == pytest.approx(-50.0)
        assert by_name[name].shown
    assert by_name["cached share mean"].change.value == pytest.approx(30.0)
    assert "| TTFT p50 ms |" in format_differences(found)


def test_noise_is_not_shown_as_a_difference(tmp_path: Path) -> None:
    """Equal distributions, shuffled: the interval holds zero."""
    generator = np.random.default_rng(3)
    first, second = generator.permutation(40) / 100, generator.permutation(40) / 100
    base = write(tmp_path, "base", side(lambda i: 0.1 + first[i]))
    other = write(tmp_path, "other", side(lambda i: 0.1 + second[i]))
    by_name = {d.name: d for d in compare_files(base, other).differences}
    change = by_name["TTFT mean"].change
    assert change.low < 0 < change.high
    assert not by_name["TTFT mean"].shown


def test_equal_files_differ_by_nothing(tmp_path: Path) -> None:
    """And a comparison made twice is the same."""
    base = write(tmp_path, "base", side(lambda i: 0.1 + i / 50))
    found = compare_files(base, base)
    assert all(item.change.value == 0.0 for item in found.differences)
    assert found == compare_files(base, base)


def test_different_specifications_are_refused_unless_told(tmp_path: Path) -> None:
    """The work may differ too, so the user must know."""
    base = write(tmp_path, "base", side(lambda i: 0.1), "abc")
    other = write(tmp_path, "other", side(lambda i: 0.1), "def")
    with pytest.raises(RecordsError, match="abc and def"):
        compare_files(base, other)
    assert compare_files(base, other, different_specs=True).num_pairs == 80


def test_a_red_side_is_refused(tmp_path: Path) -> None:
    """Speed of wrong answers is no speed."""
    base = write(tmp_path, "base", side(lambda i: 0.1))
    other = write(tmp_path, "other", side(lambda i: 0.1), gate="red")
    with pytest.raises(GateRedError, match="other"):
        compare_files(base, other)


def test_only_answered_requests_pair(tmp_path: Path) -> None:
    """What one side failed or lacks is left out and counted."""
    records = side(lambda i: 0.1, repeats=1)
    records[0] = record("s0", 0.0, [], error="HTTP 503")
    base = write(tmp_path, "base", side(lambda i: 0.1, repeats=1))
    other = write(tmp_path, "other", records[:-1])
    found = compare_files(base, other)
    assert (found.num_pairs, found.num_left_out) == (38, 2)
    assert "One repeat" in format_differences(found)


def test_only_the_steady_state_is_compared(tmp_path: Path) -> None:
    """A cold start of one side is no difference of the two."""
    base = write(tmp_path, "base", side(lambda i: 0.1), warmup_s=10.0)
    cold = side(lambda i: 5.0 if i < 10 else 0.1)
    other = write(tmp_path, "other", cold, warmup_s=10.0)
    found = compare_files(base, other)
    assert (found.num_pairs, found.num_left_out) == (2 * 29, 2 * 11)
    assert found.differences[0].change.value == pytest.approx(0.0, abs=1e-9)


def test_nothing_in_common_is_refused(tmp_path: Path) -> None:
    """Two schedules share no request."""
    base = write(tmp_path, "base", [record("a", 0.0, [0.1])])
    other = write(tmp_path, "other", [record("b", 0.0, [0.1])])
    with pytest.raises(RecordsError, match="nothing pairs"):
        compare_files(base, other)


def test_a_key_that_comes_twice_is_refused(tmp_path: Path) -> None:
    """Which of the two would pair?"""
    twice = write(tmp_path, "twice", [record("a", 0.0, [0.1])] * 2)
    with pytest.raises(RecordsError, match="a twice"):
        compare_files(twice, twice)


def test_repeats_that_disagree_widen_the_interval() -> None:
    """One repeat gained, one lost: nothing is sure, however many requests each had."""
    base = [np.zeros(500), np.zeros(500)]
    other = [np.full(500, 1.0), np.full(500, -1.0)]
    found = paired_interval(
        base, other, lambda values: float(values.mean()), np.random.default_rng(1)
    )
    assert found.value == 0.0
    assert (found.low, found.high) == (-1.0, 1.0)


def test_sides_that_do_not_pair_are_refused() -> None:
    """A pair needs two."""
    with pytest.raises(ValueError, match="do not pair"):
        paired_interval(
            [np.zeros(2)],
            [np.zeros(3)],
            lambda values: 0.0,
            np.random.default_rng(1),
        )
