"""``sgl-tiered bench gpu-report``: a page of a session's folder, whole or broken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sgl_tiered.cli import gpu_report
from sgl_tiered.cli.gpu_copies import cases, widest
from sgl_tiered.cli.gpu_report import make_page
from sgl_tiered.cli.gpu_session import read_session
from sgl_tiered.cli.main import main

Told = dict[str, Any]


def stage(*records: Told, status: str = "ok", why: str = "") -> Told:
    """Return a stage as the session writes it."""
    return {
        "status": status,
        "why": why,
        "seconds": 12.5,
        "limit_s": 60.0,
        "figures": {},
        "records": list(records),
    }


def copy(direction: str, way: str, piece_bytes: int, rate: float, pieces: int) -> Told:
    """Return a record of copies that reach so many GB/s."""
    num_bytes = piece_bytes * pieces
    return {
        "kind": "copy",
        "direction": direction,
        "way": way,
        "piece_bytes": piece_bytes,
        "pieces": pieces,
        "num_bytes": num_bytes,
        "seconds": [num_bytes / rate / 1e9] * 3,
        "queueing_s": [0.0] * 3,
    }


def session_of(*, dry_run: bool = False) -> Told:
    """Return a session with a record of each kind; its numbers are invented."""
    copies: list[Told] = [{"kind": "ways", "batch": "not there", "hicache": "there"}]
    for direction in ("up", "down"):
        for pieces in (16, 1024):
            copies += [
                copy(direction, "plain", 32768, 50.0, pieces),
                copy(direction, "engines", 32768, 10.0, pieces),
                copy(direction, "kernel_16", 32768, 30.0, pieces),
                copy(direction, "kernel_64", 32768, 45.0, pieces),
                copy(direction, "hicache", 32768, 40.0, pieces),
            ]
        product = copy(direction, "product_kernel", 32768, 44.0, 4096)
        copies.append(product | {"plain_s": [4096 * 32768 / 50e9] * 3})
    header = {
        "kind": "header",
        "commit": "0123456789abcdef",
        "dirty": False,
        "source": "feed",
        "versions": {"torch": "2.11"},
        "machine": {
            "processor": "Invented",
            "cores": 8,
            "memory_bytes": 64 << 30,
            "accelerators": [{"name": "A card"}],
        },
        "dry_run": dry_run,
        "began": "2026-01-01T00:00:00Z",
    }
    overlap = {
        "kind": "overlap",
        "way": "kernel",
        "cached_tokens": 2048,
        "forward_s": [0.050],
        "load_s": [0.010],
        "both_s": [0.0561],
        "one_after_the_other_s": [0.060],
        "forward_beside_offload_s": [0.051],
        "first_layer_s": [0.001],
        "load_bytes": 400_000_000,
    }
    layers = {
        "kind": "layers",
        "way": "pinned",
        "stream_bytes": 450_000_000,
        "forward_s": [0.010],
        "link_s": [0.010],
        "both_s": [0.011],
        "down_s": [0.009],
    }
    acts = {
        "kind": "acts",
        "way": "cuda",
        "num_layers": 4,
        "kv_gen_s": [0.001],
        "loads_s": [0.002],
        "both_s": [0.005],
    }
    random = {
        "kind": "random",
        "way": "kernel",
        "lag_s": 0.0,
        "requests": 200,
        "wrong": 0,
        "loads": 20,
        "offloads": 90,
        "idle_share": 0.02,
        "blocked_share": 0.01,
        "host_waits": 3,
    }
    first = {
        "kind": "first_token",
        "way": "kernel",
        "kv_token_bytes": 65536,
        "seconds": {
            "computed_4096": [0.080],
            "host_4096": [0.012],
            "device_4096": [0.006],
        },
    }
    return {
        "header": header,
        "stages": {
            "facts": stage(
                {"kind": "software", "python": "3.12", "torch": "2.11"},
                {"kind": "device", "name": "A card", "total_bytes": 80 << 30},
                {"kind": "link", "generation": 5, "lanes": 16},
                {"kind": "matmul", "flop": 10**12, "seconds": [0.002]},
                {
                    "kind": "pinning",
                    "threads": 4,
                    "is_fresh": True,
                    "num_bytes": 2 << 30,
                    "seconds": 0.5,
                },
            ),
            "gpu_tests": stage(
                {"kind": "file", "file": "a.py", "passed": 3, "failed": 0, "skipped": 1}
            ),
            "mini_engine": stage(
                random,
                first,
                {"kind": "control", "control": "consumer", "wrong": 2, "requests": 60},
            ),
            "copies": stage(*copies),
            "kv_gen": stage(
                {
                    "kind": "kv_gen",
                    "model": "llama8b",
                    "tokens": 4096,
                    "flop": 10**12,
                    "seconds": [0.005],
                    "product_s": [0.004],
                }
            ),
            "overlap": stage(overlap),
            "layerkv": stage(layers, acts),
            "sanitizer": stage(
                {"kind": "sanitizer", "tool": "memcheck", "exit_status": 0}
            ),
            "flashinfer": stage(
                {
                    "kind": "layers",
                    "backend": "fa2",
                    "form": "decode",
                    "worst": 0.001,
                    "without_indices": 1.5,
                }
            ),
            "servers": stage(
                {
                    "kind": "servers",
                    "way": "layerkv",
                    "exact_fraction": 0.9,
                    "layered": [{"mean_ttft_s": 1.0, "total_s": 3.0}],
                    "plain": [{"mean_ttft_s": 2.0, "total_s": 4.0}],
                }
            ),
        },
    }


def write(folder: Path, told: Any, *, log: bool = True) -> Path:
    """Write a session's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    text = told if isinstance(told, str) else json.dumps(told)
    (folder / "session.json").write_text(text)
    if log:
        (folder / "log.txt").write_text("==== facts\n")
    return folder


def page_of(folder: Path) -> str:
    """Return the page's text, without its pictures."""
    return make_page(read_session(folder), ()).text


def test_every_figure_stands_beside_its_roof_and_hicache(tmp_path: Path) -> None:
    """Gaps are numbers: to the link, one plain copy, a product, and HiCache."""
    text = page_of(write(tmp_path, session_of()))
    assert "dry run" not in text.lower()
    assert "- commit 0123456789ab, source feed" in text
    assert "| PCIe generation 5, 16 lanes | 63.0 GB/s |" in text
    assert "| one plain copy, host to device | 50.00 GB/s, 79% of the link |" in text
    assert "| 8192^3 product | 500.0 TFLOP/s |" in text
    assert "pinning fresh memory, 4 threads | 4.00 GiB/s" in text
    assert (
        "| 32 KiB | 1024 | 50.00 | 10.00 | 30.00 | 45.00 | 40.00 | kernel_64 | 90.0% | "
        "71.4% | 1.12 |"
    ) in text
    for gap in (
        "host to device: our best way has 90.0% (32 KiB, kernel_64) of one plain copy",
        "device to host: our best way has 112.5% (32 KiB, kernel_64) of HiCache's "
        "kernel",
        "host to device, 4096 pieces of 32 KiB: the product's pool (product_kernel) "
        "has 44.00 GB/s, 12.0% less than one plain copy (50.00), 10.0% more than "
        "HiCache's kernel (40.00)",
        "mini-engine: 0 wrong answers of 200",
        "mini-engine, 4096 tokens, loads by kernel: the first token comes 6.000 ms "
        "after that of a device hit; the link alone takes 4.260 ms",
        "rebuild, llama8b, 4096 tokens: 200.00 TFLOP/s, 20.0% less than the product of "
        "its sizes (250.00), 40.0% of the 8192^3 product (500.0)",
        "load under a forward, kernel, 2048 tokens: 56.100 ms, 10.0% more than the "
        "longer one and a first layer (51.000 ms); the load alone has 40.00 GB/s, "
        "20.0% less than one plain copy",
        "streamed layers, pinned memory: 11.000 ms, 10.0% more than the longer of "
        "forward and copies (10.000 ms); up 45.00 GB/s, 10.0% less than one plain "
        "copy; down 50.00 GB/s, as much as one plain copy",
        "activations rebuilt beside loads: 5.000 ms, 25.0% more than the longer of "
        "both (4.000 ms)",
        "layer-wise KV on servers: mean TTFT 0.5000, time in all 0.7500 of plain "
        "SGLang's with the same small pool; 90.0% of the answers compared bit for bit",
    ):
        assert f"- {gap}.\n" in text
    assert "| consumer | caught | 2 | 60 |" in text
    assert "| a.py | 3 | 0 | 1 |  |" in text
    assert "| memcheck | 0 |" in text
    assert "| fa2 | decode | 0.00100 | 1.500 |" in text
    assert "- batch: not there." in text


def test_a_dry_run_says_so_at_the_top_and_at_each_figure(tmp_path: Path) -> None:
    """No heading and no gap can be read as one of a GPU."""
    text = page_of(write(tmp_path, session_of(dry_run=True)))
    lines = text.splitlines()
    assert lines[2].startswith("**This is a dry run**")
    gaps = [line for line in lines if line.startswith("- host to device")]
    assert gaps
    assert all(line.endswith("(dry run).") for line in gaps)
    headings = [line for line in lines if line.startswith("## ")]
    assert all(
        "(dry run)" in line
        for line in headings
        if line not in ("## Facts", "## Stages")
    )


def test_each_stage_is_told_with_its_status_and_why(tmp_path: Path) -> None:
    """Also one that was killed, failed, or is not there."""
    told = session_of()
    told["stages"]["kv_gen"] = stage(status="failed", why="exit status 1: it broke")
    told["stages"]["servers"] = stage(status="not there", why="no SGLang")
    told["stages"]["overlap"] |= {"status": "timed out", "why": "killed after 60 s"}
    text = page_of(write(tmp_path, told))
    assert "| kv_gen | failed | 12.5 | 60 | exit status 1: it broke |" in text
    assert "- The stage `kv_gen`: failed, exit status 1: it broke." in text
    assert "- The stage `kv_gen` left no record." in text
    assert "- The stage `servers`: not there, no SGLang." in text
    # What one that was killed had measured is shown, with its status.
    assert "- The stage `overlap`: timed out, killed after 60 s." in text
    assert "load under a forward, kernel" in text


def test_figures_of_a_stage_that_was_wrong_are_withheld(tmp_path: Path) -> None:
    """Bytes or answers were found wrong: no rate of it is told anywhere."""
    told = session_of()
    why = "wrong: engines: other bytes"
    told["stages"]["copies"] |= {"status": "failed", "why": why}
    text = page_of(write(tmp_path, told))
    assert "| copies | failed | 12.5 | 60 | wrong: engines: other bytes |" in text
    assert "What it measured is withheld" in text
    assert "kernel_64" not in text
    assert "one plain copy, host to device" not in text
    # The others are told, without that roof.
    assert "load under a forward, kernel, 2048 tokens" in text


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "session.json is missing."),
        ("", "session.json is empty."),
        ('{"header": {', "session.json is no whole JSON"),
        ("[1]", "session.json holds no object."),
        ("{}", "session.json has no header"),
        ('{"header": 3, "stages": []}', "session.json has no stages."),
    ],
)
def test_a_broken_session_is_a_sentence_on_the_page(
    tmp_path: Path, content: str | None, sentence: str
) -> None:
    """The page is made all the same, from what there is."""
    (tmp_path / "stages").mkdir()
    left = {"figures": {}, "records": session_of()["stages"]["kv_gen"]["records"]}
    (tmp_path / "stages/kv_gen.json").write_text(json.dumps(left))
    (tmp_path / "stages/copies.json").write_text("{")
    if content is not None:
        write(tmp_path, content, log=False)
    text = page_of(tmp_path)
    assert f"- {sentence}" in text
    assert "- log.txt is missing: what the stages printed is lost." in text
    assert "- stages/copies.json is no whole JSON" in text
    assert "It is not known whether this was a dry run." in text
    # The stage that ran when the session was stopped.
    assert "| kv_gen | not finished |" in text
    assert "rebuild, llama8b, 4096 tokens" in text
    assert "The session has no stage `overlap`." in text


def test_records_that_lack_something_lose_their_row_and_no_more(tmp_path: Path) -> None:
    """One sentence for each kind of lack; good records stand."""
    told = session_of()
    stages = told["stages"]
    stages["copies"]["records"] += [
        {"kind": "copy", "way": "engines", "direction": "up", "seconds": [1.0]},
        {"kind": "copy", "way": "odd", "direction": "sideways", "seconds": [1.0]},
        copy("up", "engines", 2048, 5.0, 16) | {"seconds": [0.0]},
        copy("up", "engines", 2048, 5.0, 16) | {"seconds": "fast"},
        7,
    ]
    stages["kv_gen"]["records"].append({"kind": "kv_gen", "model": "x", "flop": True})
    stages["mini_engine"]["records"].append({"kind": "first_token", "seconds": []})
    stages["mini_engine"]["records"].append(
        {"kind": "first_token", "seconds": {"computed_8": [1.0], "host_8": [None]}}
    )
    stages["overlap"] = 5
    stages["layerkv"]["records"] = "none"
    text = page_of(write(tmp_path, told))
    assert "- 1 records of the stage copies are no objects." in text
    assert "- Copies are left out: a record of kind 'copy' has no number" in text
    assert "a record of kind 'copy' has no way or direction" in text
    assert "copies took no time" in text
    assert "a record of kind 'copy' has no list of numbers seconds" in text
    assert "a record of kind 'kv_gen' has no number flop" in text
    assert "A record of first tokens has no seconds." in text
    assert "- The stage overlap of session.json is no object." in text
    assert "- The stage layerkv has no list of records." in text
    assert "rebuild, llama8b, 4096 tokens: 200.00 TFLOP/s" in text
    assert "| 32 KiB | 1024 |" in text


def test_a_section_that_breaks_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is in a record, the page is made."""

    def broken(part: Any, session: Any, **more: Any) -> None:
        raise KeyError("odd")

    monkeypatch.setattr(gpu_report, "_kv_gen", broken)
    text = page_of(write(tmp_path, session_of()))
    assert "- This section cannot be made: 'odd'." in text
    assert "streamed layers, pinned memory" in text


def test_without_hicache_and_link_their_columns_are_left_out(tmp_path: Path) -> None:
    """And why HiCache's kernels are not there is told."""
    told = session_of()
    records = told["stages"]["copies"]["records"]
    records[0]["hicache"] = "not there: no Python module sglang"
    told["stages"]["copies"]["records"] = [
        record for record in records if record.get("way") != "hicache"
    ]
    facts = told["stages"]["facts"]["records"]
    facts[2] |= {"generation": None}
    text = page_of(write(tmp_path, told))
    assert "- hicache: not there: no Python module sglang." in text
    assert "over HiCache's" not in text
    assert "of the link" not in text
    assert "| PCIe generation None, 16 lanes | unknown |" in text


def test_the_case_of_most_pieces_stands_for_a_size() -> None:
    """Ways of the product's pool are apart, each with a plain copy of its own."""
    records = session_of()["stages"]["copies"]["records"]
    problems: list[str] = []
    found = cases(records, problems)
    assert not problems
    (case,) = widest(found, "up", is_product=False)
    assert case.pieces == 1024
    assert case.ours() == ("kernel_64", pytest.approx(45.0))
    assert case.kernel() == ("kernel_64", pytest.approx(45.0))
    assert case.hicache == pytest.approx(40.0)
    (product,) = widest(found, "up", is_product=True)
    assert product.roof == pytest.approx(50.0)


def test_the_command_writes_the_page_and_its_charts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Markdown and PNG files into the folder; equal sessions give equal files."""
    pytest.importorskip("matplotlib")
    folder = write(tmp_path, session_of(dry_run=True))
    assert main(["bench", "gpu-report", str(folder)]) == 0
    assert "This is a dry run" in capsys.readouterr().out
    text = (folder / "report.md").read_text()
    assert "![copies (dry run)](copies.png)" in text
    first = [(folder / f"{name}.png").read_bytes() for name in ("copies", "shares")]
    assert all(png.startswith(b"\x89PNG") for png in first)
    assert main(["bench", "gpu-report", str(folder)]) == 0
    again = [(folder / f"{name}.png").read_bytes() for name in ("copies", "shares")]
    assert first == again


def test_without_matplotlib_the_page_has_no_charts_and_says_so(
    tmp_path: Path,
) -> None:
    """The base package does not bring it."""
    folder = write(tmp_path, session_of())
    program = (
        "import sys\n"
        "sys.modules['matplotlib'] = None\n"
        "from sgl_tiered.cli.main import main\n"
        f"sys.exit(main(['bench', 'gpu-report', {str(folder)!r}]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    text = (folder / "report.md").read_text()
    assert "There are no charts: the Python module matplotlib" in text
    assert not list(folder.glob("*.png"))


def test_no_folder_is_exit_code_2_and_no_stage_is_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence on stderr; an empty folder gets its page."""
    assert main(["bench", "gpu-report", str(tmp_path / "absent")]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("sgl-tiered: DIR: there is no folder")
    assert captured.err.count("\n") == 1
    assert main(["bench", "gpu-report", str(tmp_path)]) == 1
    assert "session.json is missing." in (tmp_path / "report.md").read_text()
    assert "no stage" in capsys.readouterr().err
