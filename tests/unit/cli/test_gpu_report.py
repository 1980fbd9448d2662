"""``sgl-tiered bench gpu-report``: a page of a session's folder, whole or broken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
    copies: list[Told] = [
        {"kind": "ways", "batch": "not there", "hicache": "there"},
        {"kind": "chosen", "piece_bytes": 32768, "way": "product_kernel"},
    ]
    ours = {"up": "kernel_by_layer", "down": "gather_pages"}
    for direction in ("up", "down"):
        for pieces in (16, 1024):
            copies += [
                copy(direction, "plain", 32768, 50.0, pieces),
                copy(direction, "engines", 32768, 10.0, pieces),
                copy(direction, "kernel_16", 32768, 30.0, pieces),
                copy(direction, "kernel_64", 32768, 48.0, pieces),
                copy(direction, ours[direction], 32768, 45.0, pieces),
                copy(direction, "hicache", 32768, 40.0, pieces),
            ]
        for way, rate in (("product_kernel", 44.0), ("product_staged", 49.0)):
            product = copy(direction, way, 32768, rate, 4096)
            copies.append(product | {"plain_s": [4096 * 32768 / 50e9] * 3})
        copies.append(copy(direction, "product_hicache", 32768, 55.0, 4096))
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
        "efficiency": 1.1,
        "beside_offload": 1.02,
    }
    layers = {
        "kind": "layers",
        "way": "pinned",
        "stream_bytes": 450_000_000,
        "forward_s": [0.010],
        "link_s": [0.010],
        "both_s": [0.011],
        "down_s": [0.009],
        "efficiency": 1.1,
    }
    acts = {
        "kind": "acts",
        "way": "cuda",
        "num_layers": 4,
        "kv_gen_s": [0.001],
        "loads_s": [0.002],
        "both_s": [0.005],
        "efficiency": 1.25,
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
                {
                    "kind": "pinning",
                    "threads": 4,
                    "node": 1,
                    "is_fresh": True,
                    "num_bytes": 2 << 30,
                    "seconds": 0.25,
                },
            ),
            "gpu_tests": stage(
                {
                    "kind": "tests",
                    "file": "a.py",
                    "passed": 3,
                    "failed": 0,
                    "skipped": 1,
                }
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
                    "of_product": 0.8,
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


def write(folder: Path, told: Any) -> Path:
    """Write a session's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    text = told if isinstance(told, str) else json.dumps(told)
    (folder / "session.json").write_text(text)
    return folder


def page_of(folder: Path) -> str:
    """Return the page's text, without its pictures."""
    return make_page(read_session(folder)).text


def test_every_figure_stands_beside_its_roof_and_hicache(tmp_path: Path) -> None:
    """Gaps are numbers: to the link, one plain copy, a product, and HiCache."""
    text = page_of(write(tmp_path, session_of()))
    assert "dry run" not in text.lower()
    assert "- commit 0123456789ab, source feed" in text
    assert "| PCIe generation 5, 16 lanes | 63.0 GB/s |" in text
    assert "| one plain copy, host to device | 50.00 GB/s, 79% of the link |" in text
    assert "| 8192^3 product | 500.0 TFLOP/s |" in text
    assert "pinning fresh memory, 4 threads | 4.00 GiB/s" in text
    assert "pinning fresh memory, 4 threads, on NUMA node 1 | 8.00 GiB/s" in text
    # What the product does is the way that it takes, not the fastest one.
    assert "| kernel_by_layer | 90.0% | 71.4% | 1.12 |" in text
    assert "| gather_pages | 90.0% | 71.4% | 1.12 |" in text
    for gap in (
        "host to device: kernel_by_layer, the product's way, has 90.0% (32 KiB) of one "
        "plain copy",
        "device to host: gather_pages, the product's way, has 112.5% (32 KiB) of "
        "HiCache's kernels",
        "host to device, 4096 pieces of 32 KiB: the product's pool (product_kernel) "
        "has 44.00 GB/s, 12.0% less than one plain copy (50.00), 20.0% less than "
        "HiCache's kernels (55.00)",
        "mini-engine: 0 wrong answers of 200",
        "mini-engine, 4096 tokens, loads by kernel: the first token comes 6.000 ms "
        "after that of a device hit; the link alone takes 4.260 ms",
        "rebuild, llama8b, 4096 tokens: 200.00 TFLOP/s, 20.0% less than the product of "
        "its sizes (250.00)",
        "load under a forward, kernel, 2048 tokens: 56.100 ms, 10.0% more than the "
        "longer one and a first layer; the load alone has 40.00 GB/s, 20.0% less than "
        "one plain copy",
        "streamed layers, pinned memory: 11.000 ms, 10.0% more than the longer of "
        "forward and copies; up 45.00 GB/s, 10.0% less than one plain copy; down 50.00 "
        "GB/s, as much as one plain copy",
        "activations rebuilt beside loads: 5.000 ms, 25.0% more than the longer of "
        "both",
        "layer-wise KV on servers: mean TTFT 0.5000, time in all 0.7500 of plain "
        "SGLang's with the same small pool; 90.0% of the answers compared bit for bit",
    ):
        assert f"- {gap}.\n" in text
    assert "| consumer | caught | 2 | 60 |" in text
    # Stages that only pass or fail have their line in the table of stages.
    for name in ("gpu_tests", "sanitizer", "flashinfer"):
        assert f"| {name} | ok | 12.5 | 60 |" in text
    assert "batch: not there." in text


def test_a_dry_run_says_so_at_the_top_and_at_each_figure(tmp_path: Path) -> None:
    """No heading and no gap can be read as one of a GPU."""
    text = page_of(write(tmp_path, session_of(dry_run=True)))
    lines = text.splitlines()
    assert lines[4].startswith("**This is a dry run**")
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
    assert (
        "\nThe stage `kv_gen`: failed, exit status 1: it broke. Nothing was measured.\n"
    ) in text
    assert (
        "\nThe stage `servers`: not there, no SGLang. Nothing was measured.\n" in text
    )
    # What one that was killed had measured is shown, with its status.
    assert "\nThe stage `overlap`: timed out, killed after 60 s.\n" in text
    assert "load under a forward, kernel" in text


def test_figures_of_a_stage_that_was_wrong_are_withheld(tmp_path: Path) -> None:
    """Bytes or answers were found wrong: no rate of it is told anywhere."""
    told = session_of()
    why = "wrong: engines: other bytes"
    told["stages"]["copies"] |= {"status": "failed", "why": why}
    text = page_of(write(tmp_path, told))
    assert "| copies | failed | 12.5 | 60 | wrong: engines: other bytes |" in text
    assert "What it measured is withheld" in text
    assert "kernel_by_layer" not in text
    assert "one plain copy, host to device" not in text
    # The others are told, without that roof.
    assert "load under a forward, kernel, 2048 tokens" in text


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "session.json is missing."),
        ('{"header": {', "session.json cannot be read (JSONDecodeError)."),
        ("[1]", "session.json cannot be read (it holds no object)."),
    ],
)
def test_a_session_without_its_file_is_a_sentence_on_the_page(
    tmp_path: Path, content: str | None, sentence: str
) -> None:
    """The page is made all the same, from what there is."""
    (tmp_path / "stages").mkdir()
    left = {"figures": {}, "records": session_of()["stages"]["kv_gen"]["records"]}
    (tmp_path / "stages/kv_gen.json").write_text(json.dumps(left))
    (tmp_path / "stages/copies.json").write_text("{")
    if content is not None:
        write(tmp_path, content)
    text = page_of(tmp_path)
    assert f"- {sentence}" in text
    assert "- copies.json cannot be read (JSONDecodeError)." in text
    assert "It is not known whether this was a dry run." in text
    # The stage that ran when the session was stopped.
    assert "| kv_gen | not finished |" in text
    assert "rebuild, llama8b, 4096 tokens" in text
    assert "The session has no stage `overlap`." in text


def test_records_that_lack_something_lose_their_section_and_no_more(
    tmp_path: Path,
) -> None:
    """What another version wrote says so; the other sections stand."""
    told = session_of()
    del told["stages"]["kv_gen"]["records"][0]["flop"]
    told["stages"]["copies"]["records"].append({"kind": "copy", "seconds": [1.0]})
    text = page_of(write(tmp_path, told))
    assert (
        "\nThis section cannot be made: KeyError, 'flop'. Nothing was measured" in text
    )
    assert "- records of copies cannot be read: KeyError, 'way'." in text
    assert "- rebuild" not in text
    assert "load under a forward, kernel, 2048 tokens" in text


def test_without_hicache_and_link_their_columns_are_left_out(tmp_path: Path) -> None:
    """And why HiCache's kernels are not there is told."""
    told = session_of()
    records = told["stages"]["copies"]["records"]
    records[0]["hicache"] = "not there: no Python module sglang"
    told["stages"]["copies"]["records"] = [
        record for record in records if "hicache" not in record.get("way", "")
    ]
    facts = told["stages"]["facts"]["records"]
    facts[2] |= {"generation": None}
    text = page_of(write(tmp_path, told))
    assert "hicache: not there: no Python module sglang." in text
    assert "over HiCache's" not in text
    assert "of the link" not in text
    assert "| PCIe generation None, 16 lanes | unknown |" in text


def test_the_case_of_most_pieces_stands_for_a_size() -> None:
    """Ways of the product's pool are apart, each with a plain copy of its own."""
    found = cases(session_of()["stages"]["copies"]["records"])
    (case,) = widest(found, "up", is_product=False)
    assert case.pieces == 1024
    assert case.ours is not None
    assert case.hicache is not None
    assert case.ours.median == pytest.approx(45.0)
    assert case.hicache.median == pytest.approx(40.0)
    (product,) = widest(found, "up", is_product=True)
    assert product.roof is not None
    assert product.roof.median == pytest.approx(50.0)
    assert product.hicache is not None
    assert product.hicache.median == pytest.approx(55.0)


def test_hicache_is_compared_on_as_many_pieces_and_bytes_only() -> None:
    """Of another number of pieces, or of bytes, it is another case."""
    mine = copy("up", "product_kernel", 32768, 44.0, 4096)
    mine |= {"plain_s": mine["seconds"]}
    for other in (
        copy("up", "product_hicache", 32768, 60.0, 1024),
        copy("up", "product_hicache", 32768, 60.0, 4096) | {"num_bytes": 7},
    ):
        ours = [one for one in cases([mine, other]) if one.ours is not None]
        assert [case.hicache for case in ours] == [None]


def test_repeated_records_count_together() -> None:
    """Their median with the 20th and 80th percentile; a lucky one is no figure."""
    records = [
        copy("up", "plain", 32768, rate, 16) for rate in (10.0, 20.0, 30.0, 40.0, 90.0)
    ]
    (case,) = cases(records)
    rate = case.roof
    assert rate is not None
    assert rate.median == pytest.approx(30.0)
    assert 10.0 < rate.low <= 20.0
    assert 40.0 <= rate.high < 90.0


def test_the_way_of_the_product_is_the_one_that_it_chose() -> None:
    """By measuring; where that is not told its kernel, and on a CPU the only one."""
    records = session_of()["stages"]["copies"]["records"]

    def chosen(records: list[Told]) -> str:
        (case,) = widest(cases(records), "up", is_product=True)
        return case.chosen

    assert chosen(records) == "product_kernel"
    records[1]["way"] = "product_staged"
    assert chosen(records) == "product_staged"
    del records[1]
    assert chosen(records) == "product_kernel"
    cpu = copy("up", "product_cpu", 8192, 5.0, 16)
    assert chosen([cpu | {"plain_s": cpu["seconds"]}]) == "product_cpu"


def test_the_command_writes_the_page_and_its_charts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Markdown and PNG files into the folder; equal sessions give equal files."""
    pytest.importorskip("matplotlib")
    folder = write(tmp_path, session_of(dry_run=True))
    assert main(["bench", "gpu-report", str(folder)]) == 0
    assert "This is a dry run" in capsys.readouterr().out
    text = (folder / "report.md").read_text()
    assert "![copies](copies.png)" in text
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
