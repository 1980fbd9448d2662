"""The disk benchmark reads fio rightly, and its figures follow from the runs."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks/disk"
MIB = 1 << 20


@pytest.fixture
def bench(monkeypatch):
    """The script as a module."""
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location(
        "bench_disk", FOLDER / "bench_disk.py"
    )
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_disk", module)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("fio_runs", None)


def fio_output(*, io_bytes=512 * MIB, error=0):
    side = {"io_bytes": io_bytes, "runtime": 250}
    job = {
        "error": error,
        "read": side,
        "write": {"io_bytes": 0, "runtime": 0},
        "usr_cpu": 2.0,
        "sys_cpu": 8.0,
        "job_runtime": 2000,
    }
    return "note: something\n" + json.dumps({"jobs": [job]})


def test_fio_output(bench):
    """Bandwidth is of the wall time, processor time of all threads."""
    found = bench.fio_runs.parse(fio_output(), writes=False, size=512 * MIB)
    assert found.bytes_per_s == pytest.approx(512 * MIB / 0.25)
    assert found.cpu_s_per_gb == pytest.approx(0.2 / (512 * MIB / 1e9))


@pytest.mark.parametrize("wrong", [{"io_bytes": 511 * MIB}, {"error": 5}])
def test_a_failed_fio_run_is_no_figure(bench, wrong):
    """A run that failed, or moved other bytes than asked for, is refused."""
    with pytest.raises(ValueError, match="fio moved"):
        bench.fio_runs.parse(fio_output(**wrong), writes=False, size=512 * MIB)


def test_both_engines_have_as_many_ios_in_flight(bench):
    """psync by threads over parts of the file, io_uring by its queue."""
    settings = {"writes": True, "block_bytes": MIB, "depth": 8, "size": 512 * MIB}
    psync = bench.fio_runs.command(Path("f"), engine="psync", **settings)
    assert {"--numjobs=8", "--iodepth=1", f"--size={64 * MIB}"} < set(psync)
    assert f"--offset_increment={64 * MIB}" in psync
    uring = bench.fio_runs.command(Path("f"), engine="io_uring", **settings)
    assert {"--numjobs=1", "--iodepth=8", f"--size={512 * MIB}"} < set(uring)
    for command in (psync, uring):
        assert {"--direct=1", "--rw=write", f"--bs={MIB}"} < set(command)


def samples(bench, tier, psync, uring):
    def runs(speeds):
        return [bench.Measured(speed * 1e9, 0.1) for speed in speeds]

    return {"tier": runs(tier), "psync": runs(psync), "io_uring": runs(uring)}


def test_ratios_are_paired_and_against_the_faster_engine(bench):
    """Each run is compared with the run of its own round."""
    found = bench.compare(
        samples(
            bench,
            tier=[0.9, 1.8, 0.9, 1.8, 0.9, 1.8, 0.9],
            psync=[1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0],
            uring=[0.8] * 7,
        )
    )
    assert found["engine"] == "psync"
    assert found["ratio"] == found["low"] == found["high"] == 0.9


def test_the_summary_takes_the_worst_from_one_mib_on(bench):
    """Smaller pages are shown and do not count; reads and writes are apart."""
    found = [
        {
            "page_bytes": size,
            "op": op,
            "ratio": ratio,
            "low": ratio - 0.1,
            "high": ratio + 0.1,
            "engine": "psync",
            "io": "threads",
            "direct": True,
            "gb_per_s": {"tier": 1.0, "bare": 2.0, "psync": 1.0, "io_uring": 1.0},
            "cpu_s_per_gb": {"tier": 0.3, "psync": 0.2, "io_uring": 0.1},
        }
        for op, size, ratio in [
            ("read", MIB // 4, 0.5),
            ("read", MIB, 0.98),
            ("read", 4 * MIB, 0.96),
            ("write", MIB, 0.91),
            ("write", 4 * MIB, 1.2),
        ]
    ]
    args = argparse.Namespace(pairs=15, depth=8, bytes=MIB)
    result = bench.summary(found, args)
    assert result["read_vs_fio"] == 0.96
    assert result["read_vs_fio_page_bytes"] == 4 * MIB
    assert result["write_vs_fio"] == 0.91
    assert result["read_ratios"] == {"256KiB": 0.5, "1024KiB": 0.98, "4096KiB": 0.96}
    assert result["read_vs_bare"] == 0.5
    assert result["write_cpu_s_per_gb"] == 0.3
    assert result["write_fio_cpu_s_per_gb"] == 0.2


def test_recovery_is_timed_on_what_is_there(bench, tmp_path):
    """The tier that is timed finds every page that was stored."""
    assert bench.recover_s(tmp_path / "tier", 100) > 0
