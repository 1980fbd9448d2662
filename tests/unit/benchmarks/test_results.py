"""Table and result say what was found, and nothing on a red gate."""

import json

import pytest
from reuse.parts import pair_ratios, rotated, sources
from reuse.picture import draw
from reuse.results import Findings, good_hits, markdown, summary
from reuse.schedules import (
    HIT_CACHED_TOKENS,
    HitSchedule,
    fresh_run,
    set_rounds,
)
from reuse.targets import judged, missed
from sgl_tiered_workloads.records import RequestRecord


def record(cached, **tiers):
    return RequestRecord(
        key="host.hit0",
        order=0,
        prompt=(1,) * 6000,
        targeted_s=0.0,
        started_s=0.0,
        token_times_s=(0.25,),
        output=(1,),
        cached_tokens=cached,
        cached_by_tier=tiers,
    )


@pytest.fixture
def findings():
    return Findings(
        sets={
            "4 pools": {"plain": [1.0, 1.2], "tiered": [0.1, 0.1]},
            "16 pools": {"plain": [1.0, 1.0], "tiered": [0.05, 0.05]},
        },
        sources={"4 pools": {"plain": {"computed": 10}, "tiered": {"host": 10}}},
        device_s=[0.05] * 50,
        hits_s={
            "tiered": [0.06] * 50,
            "hicache-sync": [0.09] * 50,
            "hicache-async": [0.07] * 50,
            "tiered-disk cold": [0.08] * 50,
            "hicache-file cold": [0.10] * 50,
        },
        recompute_s=[0.9] * 7,
    )


def test_the_lower_speedup_and_the_better_peer_count(findings):
    """Of two sets the lower speed-up counts, of two HiCache forms the faster.

    A set that the device holds is none of them, and one beyond host memory is the
    disk's.
    """
    findings.sets["0.5 pools"] = {"plain": [1.0], "tiered": [1.0]}
    findings.sets["beyond host"] = {"plain": [1.0], "tiered-disk": [0.5]}
    result = summary(findings)
    assert result["ttft_p50_speedup_vs_plain"] == pytest.approx(11.0)
    assert result["better_hicache_form"] == "hicache-async"
    assert result["host_hit_penalty_vs_hicache"] == pytest.approx(0.5)
    assert result["disk_hit_penalty_vs_hicache_file"] == pytest.approx(0.6)
    assert result["penalties_ms"]["tiered"]["hits"] == 50
    assert result["problems"] == []


def test_the_bound_is_the_device_hit(findings):
    """No hit is faster: 50 of 60 ms are five sixths of the best speed-up."""
    result = summary(findings)
    assert result["ttft_speedup_of_hits"] == pytest.approx(15.0)
    assert result["ttft_speedup_bound"] == pytest.approx(18.0)
    assert result["ttft_speedup_of_bound"] == pytest.approx(15 / 18, abs=1e-3)
    assert result["ttft_speedup_of_bound_disk"] == pytest.approx(0.05 / 0.08)
    low, high = result["ttft_speedup_of_bound_interval"]
    assert low <= result["ttft_speedup_of_bound"] <= high


def test_red_gate_claims_nothing(findings):
    """On a red gate neither result nor table holds a figure."""
    findings.outputs_identical = False
    result = summary(findings)
    assert set(result) == {"outputs_identical", "problems"}
    assert "no speed" in markdown(findings, result)


def test_peer_without_penalty_fails_the_run(findings):
    """A peer penalty of zero or less is a problem, not a figure."""
    findings.hits_s["hicache-file cold"] = [0.05] * 50
    result = summary(findings)
    assert result["disk_hit_penalty_vs_hicache_file"] is None
    assert any("hicache-file" in problem for problem in result["problems"])


def test_result_is_json_without_infinity(findings):
    """An unbounded interval is written as null."""
    findings.hits_s["hicache-file cold"] = [0.01, 0.09] * 25 + [0.051]
    text = json.dumps(summary(findings))
    assert "Infinity" not in text


def test_table_and_picture(findings, tmp_path):
    """Every system has its line, and a picture is drawn."""
    result = summary(findings)
    text = markdown(findings, result)
    for part in ("| 4 pools | tiered | 100.0 |", "hicache-file cold"):
        assert part in text
    draw(tmp_path / "a.png", findings, result)
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_only_whole_hits_of_the_tier_count():
    """A hit counts if all its KV came from the tier in question."""
    whole = record(HIT_CACHED_TOKENS, host=HIT_CACHED_TOKENS, device=0)
    mixed = record(HIT_CACHED_TOKENS, host=HIT_CACHED_TOKENS - 2048, device=2048)
    part = record(2048, host=2048)
    assert good_hits([whole, mixed, part], "host") == [0.25]


def test_a_disk_hit_counts_once():
    """What is reported under two names is counted under one."""
    ours = record(5984, device=1000, disk=4984, storage=4984)
    assert sources([ours]) == {"device": 1000, "disk": 4984, "new": 16}


def test_turns_and_pairs():
    """Everyone begins once in turn; ratios pair runs of equal number."""
    assert [rotated("abc", turn)[0] for turn in range(4)] == ["a", "b", "c", "a"]
    rates = {"plain": [10.0, 20.0], "tiered": [5.0, 20.0]}
    assert pair_ratios(rates, "tiered") == [0.5, 1.0]


def test_schedules_repeat_and_fresh_runs_do_not():
    """Rounds hold the same prompts; runs without reuse share none."""
    rounds = set_rounds(8192, 1.5, 3)
    prompts = [[request.prompt for request in requests] for requests in rounds]
    assert prompts[0] == prompts[1] == prompts[2]
    keys = [request.key for requests in rounds for request in requests]
    assert len(set(keys)) == len(keys)
    fresh = [request for number in range(3) for request in fresh_run(number, 2)]
    assert len({request.prompt for request in fresh}) == len(fresh)
    assert len({request.key for request in fresh}) == len(fresh)


def test_hits_take_turns_so_that_each_finds_the_device_empty():
    """Two prompts larger than the pool together pass between two uses of one."""
    schedule = HitSchedule(6, "host")
    prompts = [request.prompt for request in schedule.every()]
    assert len(set(prompts)) == 3
    assert all(len(set(prompts[i : i + 3])) == 3 for i in range(len(prompts) - 2))
    assert schedule.hit(4, same=True).prompt == prompts[0]


GOOD = {
    "outputs_identical": True,
    "ttft_speedup_of_bound": 0.96,
    "host_hit_penalty_vs_hicache": 0.5,
    "host_hit_penalty_vs_hicache_interval": [0.3, 0.9],
    "disk_hit_penalty_vs_hicache_file": 0.1,
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("outputs_identical", False),
        ("ttft_speedup_of_bound", 0.94),
        ("host_hit_penalty_vs_hicache", 0.61),
        ("host_hit_penalty_vs_hicache_interval", [0.3, 1.0]),
        ("host_hit_penalty_vs_hicache_interval", [0.3, None]),
        ("disk_hit_penalty_vs_hicache_file", None),
    ],
)
def test_a_figure_that_is_not_as_wanted_is_named(key, value):
    """Also one that could not be told, and an interval without an upper end."""
    assert missed(GOOD) == []
    assert missed(GOOD | {key: value}) == [key]


def test_a_part_that_was_not_run_misses_nothing():
    """A run of one part is judged by what it has measured."""
    assert missed({"outputs_identical": True}) == []


def test_medians_of_three_records_are_judged():
    """One bad run of three does not count, two do."""
    bad = GOOD | {"host_hit_penalty_vs_hicache": 0.9}
    found = judged([GOOD, bad, GOOD])
    assert (found["runs"], found["targets_missed"]) == (3, [])
    assert found["host_hit_penalty_vs_hicache"] == 0.5
    assert judged([bad, GOOD, bad])["targets_missed"] == ["host_hit_penalty_vs_hicache"]


def test_too_few_records_prove_nothing():
    """And neither does one that lacks a figure, or had other answers."""
    assert judged([GOOD, GOOD])["targets_missed"] == ["runs"]
    assert "runs" in judged([])["targets_missed"]
    part = {"outputs_identical": True}
    assert "ttft_speedup_of_bound" in judged([GOOD, GOOD, part])["targets_missed"]
    red = {"outputs_identical": False}
    assert "outputs_identical" in judged([GOOD, GOOD, red])["targets_missed"]
