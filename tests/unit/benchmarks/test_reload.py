"""The reload bench's figures follow from what was seen; its arms are what they say."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from reload.arms import (
    ALLOW,
    ARMS,
    COMPARED,
    LOAD_SHARE,
    ModelFacts,
    device_of,
    link_bytes_per_s,
    link_flag,
    spec_of,
)
from reload.measure import Options, Reloads, arms_of_repeat
from reload.picture import draw
from reload.results import Block, Findings, block_of, summary, table
from reload.run import measure_reloads
from reload.schedule import NORMAL, PAGE, QUICK, Schedule
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.server import ServerStartError

PREFIX_BYTES = 1_000


def record(host=32, cached=32, error=None, ttft_s=0.5):
    """An answer whose prefix of 32 tokens came from somewhere."""
    return RequestRecord(
        key="hit.p0.t1",
        order=0,
        prompt=(1,) * 40,
        targeted_s=0.0,
        started_s=1.0,
        token_times_s=(1.0 + ttft_s,),
        output=(1,),
        cached_tokens=cached,
        cached_by_tier={"host": host, "device": cached - host},
        error=error,
    )


@pytest.fixture
def findings():
    """Two servers of each of three arms; the second ones in a slow moment."""
    blocks = []
    for repeat, slow in ((0, 1.0), (1, 2.0)):
        for arm, seconds, share in (
            ("dense", 1.0, 1.0),
            ("at_50", 0.5, 0.5),
            ("int4", 0.4, 0.25),
        ):
            times = tuple(slow * seconds * (1 + n / 1000) for n in range(20))
            loaded = int(20 * share * PREFIX_BYTES)
            blocks.append(Block(arm, repeat, times, 0, loaded))
    return Findings(
        blocks=blocks,
        identical={"off": True, "refuse": True},
        device_share={"at_50": 0.51},
        dense_bytes=PREFIX_BYTES,
        facts={"emulated_links": "host:bandwidth=1KB", "computed_ttft_s": 1.5},
    )


def test_figures_by_hand(findings):
    """Ratios of medians over all servers, and of each pair; bytes against dense."""
    result = summary(findings, 40)
    assert result["ttft_speedup_at_50"] == pytest.approx(2.0)
    assert result["ttft_speedup_at_50_by_repeat"] == pytest.approx([2.0, 2.0])
    low, high = result["ttft_speedup_at_50_interval"]
    assert low <= 2.0 <= high
    assert result["ttft_speedup_int4"] == pytest.approx(2.5)
    assert result["device_kv_share_at_50"] == 0.51
    row = result["reloads"]["at_50"]
    assert row["hits"] == 40
    assert row["bytes_per_request"] == 500
    assert row["bytes_share"] == 0.5
    assert row["ttft_p50_s"] < row["ttft_p90_s"]
    assert (result["missed"], result["problems"]) == ([], [])
    assert result["emulated_links"] == "host:bandwidth=1KB"
    json.dumps(result, allow_nan=False)


@pytest.mark.parametrize("identical", [{"off": True, "refuse": False}, {"off": True}])
def test_no_speed_where_answers_were_not_shown_to_be_equal(findings, identical):
    """One comparison that is red, or was not made."""
    findings.identical = identical
    result = summary(findings, 40)
    assert not [key for key in result if "speedup" in key or "share" in key]
    assert "reloads" not in result
    assert any("no speed" in problem for problem in result["problems"])
    assert "ttft_speedup_at_50" in result["missed"]
    assert "no speed" in table(result)


def test_targets_that_are_missed_are_named(findings):
    """A speed-up below 1.8, and a device that holds more than was kept."""
    findings.blocks = [
        replace(block, ttft_s=tuple(0.6 / 0.5 * s for s in block.ttft_s))
        if block.arm == "at_50"
        else block
        for block in findings.blocks
    ]
    findings.device_share = {"at_50": 0.9}
    result = summary(findings, 40)
    assert result["ttft_speedup_at_50"] == pytest.approx(1.667, abs=1e-3)
    assert result["missed"] == ["ttft_speedup_at_50", "device_kv_share_at_50"]


def test_too_few_reloads_give_no_figure(findings):
    """And are a problem."""
    findings.blocks = [b for b in findings.blocks if (b.arm, b.repeat) != ("at_50", 1)]
    result = summary(findings, 40)
    assert "ttft_speedup_at_50" not in result
    assert result["ttft_speedup_int4"] == pytest.approx(2.5)
    assert result["problems"] == ["serving: at_50 has 20 reloads of 40 asked"]


def test_a_dense_reload_that_is_none_is_a_problem(findings):
    """Its bytes are known beforehand."""
    findings.blocks[0] = replace(findings.blocks[0], loaded_bytes=10)
    (problem,) = summary(findings, 40)["problems"]
    assert "the prefix has 1000" in problem


def test_only_whole_hits_of_the_host_count():
    """Parts of a prefix, other tiers and errors are told apart, and counted."""
    others = [record(host=16), record(host=16, cached=16), record(error="broken")]
    block = block_of("dense", 1, [record(ttft_s=0.25), *others], 32, 99)
    assert block == Block("dense", 1, (0.25,), 3, 99)


def test_table_and_picture(findings, tmp_path):
    """Each arm has its line, and a picture is drawn."""
    result = summary(findings, 40)
    lines = table(result).splitlines()
    assert len(lines) == 5
    assert lines[3].startswith("| at_50 | 40 |")
    assert "| 2.00 |" in lines[3]
    assert "| 51.0% |" in lines[3]
    draw(tmp_path / "a.png", result)
    assert (tmp_path / "a.png").stat().st_size > 5_000


def test_every_arm_gets_the_same_prompts_and_no_tail_comes_twice():
    """Prefixes come again, whole pages; kinds share none of them."""
    schedule = Schedule(3_072)
    requests = schedule.turns("hit", 4, 12)
    assert requests == Schedule(3_072).turns("hit", 4, 12)
    assert schedule.prefix_tokens % PAGE == 0
    prefixes = {request.prompt[: schedule.prefix_tokens] for request in requests}
    tails = {request.prompt[schedule.prefix_tokens :] for request in requests}
    assert (len(prefixes), len(tails)) == (4, 12)
    assert requests[4:] == schedule.turns("hit", 4, 8, first=4)
    gate = schedule.request("gate", 0, 0)
    assert gate.prompt[: schedule.prefix_tokens] not in prefixes
    assert len({request.key for request in requests}) == 12
    assert max(max(request.prompt) for request in requests) < 3_072
    with pytest.raises(ValueError, match="no whole pages"):
        Schedule(3_072, prefix_tokens=100)


def test_the_second_repeat_goes_back():
    """So that who comes late in one comes early in the other."""
    first, second = arms_of_repeat(0), arms_of_repeat(1)
    assert [arm.name for arm in first] == ["dense", "at_50", "at_25", "int4"]
    assert second == first[::-1]
    assert NORMAL.hits * NORMAL.repeats >= NORMAL.min_hits >= 40


@pytest.fixture
def model(tmp_path):
    """The folder of a model, without weights."""
    config = {
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 256,
        "vocab_size": 3_072,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("changed", [{}, {"head_dim": 32}])
def test_a_models_folder_tells_the_bytes_of_a_token(model, changed):
    """Keys and values of two bytes, of all layers and KV heads."""
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    facts = ModelFacts.of(model)
    head_dim = changed.get("head_dim", 64)
    assert facts == ModelFacts(6, 2 * 2 * 6 * 2 * head_dim, 3_072)


def test_arms_differ_in_what_they_are_named_after(model):
    """All have the same link and policy; only the dense one has the feature off."""
    facts = ModelFacts.of(model)
    specs = {a.name: spec_of(a, device_of(model), facts, 2e6).flags for a in ARMS}
    for flags in specs.values():
        assert "--tiered-emulate=host:bandwidth=2000KB" in flags
        assert "--tiered-load-policy=always" in flags
    assert not [f for f in specs["dense"] if "sparsity" in f or "encoding" in f]
    assert "--tiered-sparsity-keep=0.5" in specs["at_50"]
    assert "--tiered-sparsity-keep=0.25" in specs["at_25"]
    assert "--tiered-encoding=int4" in specs["int4"]
    wishes = {arm.name: arm.wishes for arm in ARMS}
    assert wishes == {"dense": None, "at_50": ALLOW, "at_25": ALLOW, "int4": ALLOW}
    assert set(COMPARED) == {"dense", "at_50"}


def test_a_reload_over_the_link_is_shorter_than_computing():
    """By the share that is said."""
    bandwidth = link_bytes_per_s(6_000, 2.0)
    assert 6_000 / bandwidth == pytest.approx(LOAD_SHARE * 2.0)
    assert LOAD_SHARE < 1.0
    assert link_flag(1_234_567.0) == "host:bandwidth=1235KB"


def test_a_server_that_does_not_start_is_a_problem(model, tmp_path, monkeypatch):
    """The other part's figures are still to be printed."""

    async def run(self):
        raise ServerStartError("server reload-plain ended with code 1", 1, "tail")

    monkeypatch.setattr(Reloads, "run", run)
    monkeypatch.setattr("reload.run.exit_on_signals", lambda: None)
    result = measure_reloads(Options(model, tmp_path / "out", QUICK), lambda _: None)
    assert result["problems"] == ["serving: server reload-plain ended with code 1"]
    assert result["missed"] == ["ttft_speedup_at_50"]


def test_figures_and_files_come_from_what_was_seen(
    model, tmp_path, monkeypatch, findings
):
    """Result, table and picture are in the folder; the result is returned."""

    async def run(self):
        return findings

    monkeypatch.setattr(Reloads, "run", run)
    monkeypatch.setattr("reload.run.exit_on_signals", lambda: None)
    out = tmp_path / "out"
    result = measure_reloads(Options(model, out, NORMAL), lambda _: None)
    assert {path.name for path in out.iterdir()} == {
        "table.md",
        "result.json",
        "ttft.png",
    }
    assert json.loads((out / "result.json").read_text()) == result


@pytest.fixture
def bench(load_script, monkeypatch):
    """The program, with parts that measure nothing."""
    module = load_script("quality/bench_sparsity.py")
    serving = {"ttft_speedup_at_50": 1.9, "missed": [], "problems": ["serving: x"]}
    quality = {"ppl_increase_at_50": 0.1, "missed": ["ppl"], "problems": []}
    monkeypatch.setattr(module, "measure_serving", lambda args: serving)
    monkeypatch.setattr(module, "measure_quality", lambda args: quality)
    return module


@pytest.mark.parametrize(
    ("parts", "keys", "status"),
    [
        ((), {"ttft_speedup_at_50", "ppl_increase_at_50"}, 1),
        (("serving",), {"ttft_speedup_at_50"}, 1),
        (("quality",), {"ppl_increase_at_50"}, 0),
    ],
)
def test_the_last_line_has_all_keys_of_the_parts_asked_for(
    bench, monkeypatch, capsys, tmp_path, parts, keys, status
):
    """With what both missed and their problems, which decide the exit status."""
    flags = [flag for part in parts for flag in ("--part", part)]
    flags += ["--model", str(tmp_path), "--out", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["bench_sparsity.py", *flags])
    assert bench.main() == status
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(last) == keys | {"missed", "problems"}
    assert json.loads((tmp_path / "out" / "result.json").read_text()) == last


def test_both_parts_are_measured_unless_one_is_named(bench, monkeypatch):
    """Quality of the demo model, unless another is given."""
    monkeypatch.setattr("sys.argv", ["bench_sparsity.py"])
    args = bench.arguments()
    assert args.part == ["serving", "quality"]
    assert args.model.parts[-2:] == ("models", "demo")
    monkeypatch.setattr("sys.argv", ["bench_sparsity.py", "--part", "serving"])
    assert bench.arguments().part == ["serving"]
