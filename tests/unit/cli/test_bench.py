"""``sgl-tiered bench`` turns refusals into one sentence and an exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sgl_tiered_workloads.records import RequestRecord, make_header, write_records

from sgl_tiered.cli.main import main


def side(folder: Path, name: str, delay_s: float, gate: str = "green") -> Path:
    """Write a record file of one system."""
    path = folder / f"{name}.jsonl"
    records = [
        RequestRecord(
            key=f"s{i}",
            order=i,
            prompt=(1, 2),
            targeted_s=float(i),
            started_s=float(i),
            token_times_s=(i + delay_s,),
            output=(3,),
        )
        for i in range(8)
    ]
    write_records(path, make_header(name, {"gate": gate}, "abc"), records)
    return path


def test_compare_prints_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command is the function with files."""
    base, other = side(tmp_path, "base", 0.5), side(tmp_path, "other", 0.25)
    assert main(["bench", "compare", str(base), str(other)]) == 0
    assert (
        "| TTFT p50 ms | 500.00 | 250.00 | -250.00 (-50.0%)" in capsys.readouterr().out
    )


def test_a_red_gate_is_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failed gate is a finding, not a wrong argument."""
    red = side(tmp_path, "red", 0.5, gate="red")
    assert main(["bench", "compare", str(red), str(red)]) == 1
    assert "red" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["compare", "absent.jsonl", "absent.jsonl"],
        ["run", "absent.toml", "--out", "x"],
        ["report", "no/such/folder"],
        ["gpu-report", "no/such/folder"],
    ],
)
def test_a_wrong_argument_is_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence on stderr, no traceback."""
    assert main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("sgl-tiered: ")
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_an_unknown_workload_is_found_before_a_server_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The registry's own sentence is shown."""
    spec = tmp_path / "spec.toml"
    spec.write_text(
        'name = "x"\nseed = 1\n[model]\npreset = "demo"\n'
        '[workload]\nname = "no-such-work"\n[systems.plain]\n'
    )
    code = main(["bench", "run", str(spec), "--out", str(tmp_path / "out")])
    assert code == 2
    assert "no-such-work" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


SPEC = """
name = "x"
seed = 1
[model]
preset = "demo"
[workload]
name = "chat"
[systems.plain]
"""


@pytest.mark.parametrize(
    ("change", "words", "complaint"),
    [
        (("seed = 1", "seed = -1"), [], "seed"),
        (("[workload]", "[window]\nwarmup_s = nan\n[workload]"), [], "warmup_s"),
        (("[workload]", "[slo]\nttft_s = inf\n[workload]"), [], "ttft_s"),
        (('name = "chat"', 'name = "chat"\nparams.think_s = inf'), [], "think_s"),
        (
            (
                'name = "chat"',
                'name = "chat"\n[arrivals]\nprocess = "poisson"\nrate_per_s = 0',
            ),
            [],
            "rate_per_s",
        ),
        (('preset = "demo"', 'path = "no/model"\nvocab_tokens = 9'), [], "model.path"),
        (("", ""), ["--first-port", "70000"], "--first-port"),
        (("", ""), ["--first-port", "-1"], "--first-port"),
        (("", ""), ["--out", "/dev/null/x"], "--out"),
        (
            ("[systems.plain]", '[systems.far]\nurl = "http://127.0.0.1:9"\n'
             '[gate]\nkind = "off"\nbecause = "foreign"'),
            [],
            "systems.far.url",
        ),
    ],
)  # fmt: skip
def test_every_value_is_checked_before_a_server_starts(
    change: tuple[str, str],
    words: list[str],
    complaint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One sentence that names the entry or the flag, exit code 2, and no process."""

    def start(*_: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr("sgl_tiered_workloads.server.SglangServer.start", start)
    spec = tmp_path / "spec.toml"
    spec.write_text(SPEC.replace(*change) if change[0] else SPEC)
    out = ["--out", str(tmp_path / "out"), "--models", str(tmp_path / "models")]
    assert main(["bench", "run", str(spec), *out, *words]) == 2
    said = capsys.readouterr()
    assert complaint in said.err
    assert said.err.count("\n") == 1


def test_a_report_of_no_folder_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Not that a file in it is missing."""
    assert main(["bench", "report", "no/such/folder"]) == 2
    assert "no/such/folder is no folder" in capsys.readouterr().err


def test_the_command_line_starts_without_the_extra_packages() -> None:
    """Other commands do not pay for, or need, what only bench needs."""
    program = (
        "import sys\n"
        "import sgl_tiered.cli.main\n"
        "heavy = {'aiohttp', 'openai', 'matplotlib', 'tqdm', 'transformers'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_command_line_needs_the_base_packages_only() -> None:
    """What ``pip install sgl-tiered`` brings along: all else is asked for by name.

    It was msgspec, for ``pool``, without which no command began.
    """
    program = (
        "import sys\n"
        "absent = ('msgspec', 'zmq', 'httpx', 'aiohttp', 'rich', 'matplotlib', 'torch',"
        " 'sglang', 'transformers', 'tokenizers', 'safetensors', 'prometheus_client',"
        " 'tqdm', 'numba', 'openai')\n"
        "for name in absent: sys.modules[name] = None\n"
        "from sgl_tiered.cli.main import main\n"
        "assert main([*'simulate --rate 2 --num-requests 2'.split()]) == 0\n"
        "assert main(['completion', 'bash']) == 0\n"
        "assert main(['pool', 'list', '--registry', 'file:/nowhere/x']) == 2\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "pool: needs msgspec; pip install" in done.stderr
