"""Records that runs of the reuse benchmark keep are what ``--judge`` reads."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from reuse.parts import HitRun
from reuse.schedules import HIT_CACHED_TOKENS, QUICK
from sgl_tiered_workloads.records import RequestRecord

FIGURES = {
    "outputs_identical": True,
    "ttft_speedup_of_bound": 0.96,
    "host_hit_penalty_vs_hicache": 0.5,
    "host_hit_penalty_vs_hicache_interval": [0.3, 0.9],
    "disk_hit_penalty_vs_hicache_file": 0.1,
    "problems": [],
}


@pytest.fixture
def bench(load_script, monkeypatch, tmp_path):
    """The program, whose runs have the figures that they are given, without servers."""
    module = load_script("serving/bench_reuse.py")

    def run(figures, *args: str | Path) -> int:
        async def measured(self):
            return dict(figures)

        monkeypatch.setattr(module.Bench, "run", measured)
        monkeypatch.setattr(module, "exit_on_signals", lambda: None)
        monkeypatch.setattr(module, "draw", lambda *_: None)
        words = ["bench_reuse.py", "--out", str(tmp_path / "out"), *map(str, args)]
        monkeypatch.setattr(sys, "argv", words)
        return module.main()

    return run


def test_three_kept_runs_are_judged_by_their_medians(bench, tmp_path, capsys):
    """One run of three that misses ends with 1, and the medians are good."""
    kept = tmp_path / "kept"
    slow = FIGURES | {"host_hit_penalty_vs_hicache": 0.7}
    codes = [bench(one, "--record", kept) for one in (FIGURES, slow)]
    assert codes == [0, 1]
    assert bench({}, "--judge", kept) == 1
    assert bench(FIGURES, "--record", kept) == 0
    assert bench({}, "--judge", kept) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["runs"], found["host_hit_penalty_vs_hicache"]) == (3, 0.5)


def test_a_record_says_what_it_missed(bench, tmp_path):
    """With the facts of the run and its sizes."""
    bench(FIGURES | {"ttft_speedup_of_bound": 0.5}, "--record", tmp_path / "kept")
    (path,) = (tmp_path / "kept").iterdir()
    record = json.loads(path.read_text())
    assert record["targets_missed"] == ["ttft_speedup_of_bound"]
    assert record["command"] == "make bench-reuse"
    assert record["scale"]["hits"] >= 50
    assert path.name == f"reuse-{record['source']}.json"


@pytest.mark.parametrize("words", [("--quick",), ("--part", "host")])
def test_half_a_run_keeps_no_record(bench, tmp_path, words):
    """Its figures would stand beside those of whole ones."""
    with pytest.raises(SystemExit):
        bench(FIGURES, *words, "--record", tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_a_smoke_run_misses_nothing(bench):
    """Six hits are no figures."""
    assert bench(FIGURES | {"ttft_speedup_of_bound": 0.1}, "--quick") == 0


def answer(seconds: float, cached: int, tier: str) -> RequestRecord:
    """Return the record of one long prompt."""
    tiers = {tier: cached} if cached else {}
    times = {"targeted_s": 0.0, "started_s": 0.0, "token_times_s": (seconds,)}
    found = {"cached_tokens": cached, "cached_by_tier": tiers, "output": (1,)}
    return RequestRecord("host.hit0", 0, (1,) * 6000, **times, **found)


def test_a_series_of_hits_gives_both_ends_of_the_scale(load_script, monkeypatch):
    """Plain SGLang's device hits, and what it had to compute before them."""
    module = load_script("serving/bench_reuse.py")
    monkeypatch.setattr(module.Bench, "_write", lambda *_: None)
    bench = module.Bench(None, QUICK)
    monkeypatch.setattr(bench.reference, "check", lambda *_: None)
    cold = [answer(2.0, 0, "")] * 7
    device = [answer(0.05, HIT_CACHED_TOKENS, "device")] * 6
    host = [answer(0.06, HIT_CACHED_TOKENS, "host")] * 6
    run = HitRun(
        {"plain": cold + device, "tiered": cold[:3] + host},
        {("plain", "host"): device, ("tiered", "host"): host},
    )
    bench._take_hits(None, "host", run)
    assert bench.findings.device_s == [0.05] * 6
    assert bench.findings.recompute_s == [2.0] * 7
    result = module.summary(bench.findings)
    assert result["ttft_speedup_bound"] == 40.0
    assert result["ttft_speedup_of_hits"] == pytest.approx(33.33)
    assert result["ttft_speedup_of_bound"] == pytest.approx(0.833)
    assert result["problems"] == []


def test_rounding_is_measured_over_schedules_that_share_keys(monkeypatch):
    """Working sets of two sizes do: a run ended here, after three minutes."""
    from reuse import reference as module

    class Client:
        def __init__(self, url):
            del url

        async def __aenter__(self):
            return self

        async def __aexit__(self, *error):
            del error

    async def in_parts(client, record, page_size):
        del client, page_size
        return record

    monkeypatch.setattr(module, "StreamingClient", Client)
    monkeypatch.setattr(module, "answer_in_parts", in_parts)
    lines = []
    reference = module.Reference(SimpleNamespace(), lines.append)
    one = RequestRecord(
        key="r0.p0",
        order=0,
        prompt=(1,) * 32,
        targeted_s=0.0,
        started_s=0.0,
        token_times_s=(1.0,),
        output=(5,),
        logprobs=(-0.5,),
        top_logprobs=(((-0.5, 5), (-1.5, 6)),),
    )
    reference.answers = {"4 pools": [one], "8 pools": [replace(one, prompt=(2,) * 32)]}
    server = SimpleNamespace(url="", flush_cache=lambda: None)
    asyncio.run(reference.measure_rounding(server))
    assert "0.0000 at most" in lines[0]
