"""``sgl-tiered simulate``: traces in, tables and files out."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sgl_tiered.cli.main import main
from sgl_tiered.cli.simulate_workload import (
    from_trace,
    make_workload,
    read_trace,
)
from sgl_tiered.cost.calibration import write_calibration
from sgl_tiered.sim.models import find_model
from sgl_tiered.sim.spec import SimSpec
from tests.unit.cost.calibration_support import CALIBRATION

MOONCAKE = [
    {"timestamp": 0, "input_length": 1000, "output_length": 20, "hash_ids": [1, 2]},
    {"timestamp": 500, "input_length": 1500, "output_length": 9, "hash_ids": [1, 3, 4]},
    {"timestamp": 9000, "input_length": 600, "output_length": 5, "hash_ids": [1, 5]},
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace of three requests that share their first block."""
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(
        gzip.compress("".join(json.dumps(row) + "\n" for row in MOONCAKE).encode())
    )
    return path


def run(*words: str) -> int:
    return main(["simulate", *words])


def test_a_trace_gives_a_table_and_files(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shared block is a device hit, and every file can be read."""
    out = tmp_path / "out"
    assert run(str(trace), "--page-size", "512", "--out", str(out)) == 0
    text = capsys.readouterr().out
    assert "3 requests" in text
    assert "device 33.0%" in text
    lines = (out / "records.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["device_tokens"] for record in records] == [0, 512, 512]
    assert [len(record["token_times_s"]) for record in records] == [20, 9, 5]
    assert json.loads((out / "trace.json").read_text())["traceEvents"]
    assert json.loads((out / "summary.json").read_text())["event_log_hash"]
    assert len((out / "events.jsonl").read_text().splitlines()) > 9


def test_each_request_is_explained(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line per request, named by its place in the trace, with sources and waits."""
    out = tmp_path / "explained.jsonl"
    words = (str(trace), "--page-size", "512")
    assert run(*words, "--explain", str(out)) == 0
    told = [json.loads(line) for line in out.read_text().splitlines()]
    assert [one["rid"] for one in told] == ["0", "1", "2"]
    assert [one["tokens"].get("device", 0) for one in told] == [0, 512, 512]
    assert all(one["ttft"]["real_s"] > 0 for one in told)
    assert run(*words, "--explain", str(tmp_path)) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_flags_go_over_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A spec's values are kept where no flag says otherwise."""
    spec = tmp_path / "spec.toml"
    spec.write_text(
        "[workload]\nrate = 50.0\nnum_requests = 7\nprompt_tokens = 64\n"
        "output_tokens = 3\n"
    )
    assert run(str(spec), "--json", "--output-tokens", "5") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["num_requests"] == 7
    assert summary["output_tokens_per_s"] * summary["duration_s"] == pytest.approx(35)


def test_a_capacity_plan_has_a_row_and_a_point_per_size(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the timeless bounds beside, the price, and a picture."""
    out = tmp_path / "plan"
    code = run(
        str(trace), "--capacity-plan", "--page-size", "512", "--out", str(out),
        "--host-sizes", "0,1", "--disk-sizes", "0,2", "--host-price", "3",
        "--disk-price", "0.5",
    )  # fmt: skip
    assert code == 0
    assert "OPT" in capsys.readouterr().out
    plan = json.loads((out / "capacity.json").read_text())
    points = plan["points"]
    assert plan["currency"] == "$"
    assert plan["reason"] in (out / "capacity.txt").read_text()
    assert [(p["host_gb"], p["disk_gb"], p["cost"]) for p in points] == [
        (0.0, 0.0, 0.0),
        (1.0, 0.0, 3.0),
        (1.0, 2.0, 4.0),
    ]
    for point in points:
        assert point["device_hits"] <= point["lru_hits"] + 1e-9
        assert point["lru_hits"] <= point["opt_hits"] + 1e-9
    assert (out / "capacity.png").read_bytes()[1:4] == b"PNG"


def test_a_trace_keeps_its_shape_at_every_page_size(trace: Path) -> None:
    """Pages shared by two prompts cover the tokens of their shared blocks."""
    for page in (16, 512):
        spec = SimSpec(trace=str(trace), page_size=page)
        first, second, _ = from_trace(read_trace(spec), spec).requests
        shared = set(first.page_ids.tolist()) & set(second.page_ids.tolist())
        assert len(shared) == 512 // page


def test_arrivals_scale_by_slowdown_or_to_a_rate(trace: Path) -> None:
    """A slowdown stretches the times; a rate is the mean of the whole trace."""
    spec = SimSpec(trace=str(trace), slowdown=3.0)
    arrivals = [r.arrival_s for r in from_trace(read_trace(spec), spec).requests]
    assert arrivals == [0.0, 1.5, 27.0]
    spec = replace(spec, rate=0.5)
    arrivals = [r.arrival_s for r in from_trace(read_trace(spec), spec).requests]
    assert arrivals[-1] == pytest.approx(3 / 0.5)


def test_a_workload_of_the_harness_is_played_with_its_answers() -> None:
    """A turn's prompt begins with the pages of the turn before and its answer."""
    arrivals = {"process": "closed", "concurrency": 2}
    params = {"num_sessions": 5, "num_turns": 3, "arrivals": arrivals}
    spec = SimSpec(workload="chat", params=json.dumps(params), page_size=16)
    workload = make_workload(spec)
    assert len(workload.requests) == 15
    assert workload.num_clients == 2
    first, second = workload.requests[:2]
    known = first.num_prompt_tokens + first.num_output_tokens - 1
    assert (first.after, second.after) == (-1, 0)
    assert second.num_prompt_tokens > known
    assert len(first.page_ids) == known // 16
    assert second.page_ids[: known // 16].tolist() == first.page_ids.tolist()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--workload", "chess"], "chess"),
        (["--workload", "chat", "--params", "[1]"], "JSON object"),
        (["--workload", "chat", "--params", '{"num_turnips": 3}'], "num_turnips"),
        (["no such file"], "cannot be read"),
        (["--rate", "1", "--hardware", "Z80"], "Z80"),
        ([], "no arrivals"),
        (["--rate", "2", "--host-gb", "-3"], "--host-gb"),
        (["--rate", "nan"], "--rate"),
        (["--rate", "0"], "--rate"),
        (["--rate", "2", "--prefix-tokens", "9000"], "--prefix-tokens"),
        (
            ["--rate", "2", "--num-prefixes", "4", "--prefix-tokens", "9000"],
            "--prefix-tokens",
        ),
        (["--rate", "2", "--eviction", "xyz"], "--eviction"),
        (["--rate", "2", "--load-policy", "xyz"], "--load-policy"),
        (["--rate", "2", "--write-policy", "wt"], "--write-policy"),
        (["--hardware", "H1OO"], "--hardware"),
        (["--rate", "2", "--model", "no/such/model"], "config.json"),
        (["--rate", "2", "--slowdown", "3"], "--slowdown"),
        (["--rate", "1", "--capacity-plan", "--host-sizes", "nan"], "--host-sizes"),
        (["--rate", "1", "--capacity-plan", "--host-sizes", "-1"], "--host-sizes"),
        (
            [
                "--rate",
                "1",
                "--capacity-plan",
                "--host-sizes",
                "0",
                "--disk-sizes",
                "9",
            ],
            "--host-sizes",
        ),
        (["--rate", "1", "--capacity-plan", "--host-price", "nan"], "--host-price"),
        (["--rate", "1", "--capacity-plan", "--disk-price", "-1"], "--disk-price"),
        (["--rate", "1", "--capacity-plan", "--host-gb", "9"], "--host-gb"),
        (["--rate", "1", "--capacity-plan", "--explain", "x"], "--explain"),
        (["--rate", "1", "--host-sizes", "1,2"], "--host-sizes"),
        (["--workload", "chat", "--rate", "2"], "--rate"),
        (["--rate", "2", "--params", "{}"], "--params"),
        (["--rate", "2", "--calibration", "no such file"], "no such file"),
        (["--rate", "2", "--out", "/dev/null/x"], "--out"),
        (["--rate", "2", "--explain", "/dev/null/x"], "--explain"),
        (["--rate", "1", "--capacity-plan", "--host-sizes", "much"], "much"),
    ],
)
def test_a_wrong_setting_is_one_sentence_and_code_2(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Never a traceback, and nothing that looks like a result."""
    assert run(*words) == 2
    said = capsys.readouterr()
    assert complaint in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_a_flag_of_the_wrong_kind_is_one_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Not the whole usage before it."""
    with pytest.raises(SystemExit) as ended:
        run("--rate", "fast")
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "--rate" in said
    assert said.count("\n") == 1


def test_when_no_request_can_run_it_is_said_and_the_json_is_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Percentiles of nothing are null, and the exit code tells."""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    words = ("--rate", "2", "--num-requests", "3", "--prompt-tokens", "900000")
    assert run(*words, "--json") == 1
    said = capsys.readouterr()
    summary = json.loads(said.out, parse_constant=refuse)
    assert summary["ttft"]["mean"] is None
    assert summary["num_aborted"] == 3
    assert "none of the 3 requests could run" in said.err


def test_nobody_reading_is_no_traceback() -> None:
    """``simulate ... | head`` ends quietly, with the code of the signal."""
    program = (
        "import os, sys\n"
        "read, write = os.pipe()\n"
        "os.close(read)\n"
        "os.dup2(write, 1)\n"
        "from sgl_tiered.cli.main import main\n"
        "sys.exit(main(['simulate', '--rate', '2', '--num-requests', '2']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.returncode == 141


def test_a_calibration_of_links_says_what_was_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The heading names the data sheet that prefill and decode still come from."""
    shape = find_model("Llama-3.1-8B")
    path = tmp_path / "links.json"
    write_calibration(
        path,
        replace(
            CALIBRATION,
            method="process",
            prefill=None,
            decode=None,
            model=replace(
                CALIBRATION.model,
                num_layers=shape.num_layers,
                attention_width=shape.attention_width,
            ),
        ),
    )
    words = ("--rate", "2", "--num-requests", "2", "--calibration", str(path))
    assert run(*words, "--device-gb", "1") == 0
    head = capsys.readouterr().out.splitlines()[0]
    assert "prefill and decode NOT measured" in head
    assert "H800" in head


def test_help_has_groups_choices_units_defaults_and_examples(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What a person looks for in it."""
    with pytest.raises(SystemExit):
        run("--help")
    text = capsys.readouterr().out
    for word in ("tiers below the device:", "{lru,fifo", "--host-gb GB", "examples:"):
        assert word in text
    assert "(default: 200)" in text
    assert "%%" not in text


def test_an_unknown_trace_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The known formats are named."""
    path = tmp_path / "other.jsonl"
    path.write_text('{"prompt": "hello"}\n')
    assert run(str(path)) == 2
    assert "Mooncake" in capsys.readouterr().err
