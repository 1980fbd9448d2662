"""The end of a test run says what ran, what failed, and how long it took."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
REPORT = """<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="tests.e2e.test_a" name="test_slow[x]" time="12.5"/>
<testcase classname="tests.e2e.test_a" name="test_quick" time="0.1"/>
<testcase classname="tests.e2e.test_a" name="test_left" time="0"><skipped/></testcase>
{more}</testsuite></testsuites>
"""
FAILED = """<testcase classname="tests.e2e.test_b" name="test_wrong" time="1">
<failure message="no"/></testcase>
<testcase classname="tests.e2e.test_b" name="test_set_up" time="1"><error/></testcase>
"""


def summary(folder: Path, *failed: str) -> list[str]:
    command = [sys.executable, str(ROOT / "scripts/test_summary.py"), str(folder)]
    done = subprocess.run(
        [*command, "84", *failed], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "lint.time").write_text("30.5 29.0 1.0\n")
    (tmp_path / "e2e.time").write_text("50.5 60.0 2.0\n")
    (tmp_path / "e2e.xml").write_text(REPORT.format(more=""))
    return tmp_path


def test_the_last_line_counts_all_tests(folder: Path) -> None:
    """It reads like pytest's own; before it come the parts and the slowest tests."""
    lines = summary(folder)
    assert lines[-1].strip("= ") == "2 passed, 1 skipped in 84.00s (0:01:24)"
    parts = {
        line.split()[0]: line.split()[1:3]
        for line in lines
        if " s " not in line
        if line[:4] in ("lint", "e2e ")
    }
    assert parts == {"lint": ["30", "30"], "e2e": ["50", "62"]}
    slowest = [line.split()[-1] for line in lines if " s  tests" in line]
    assert slowest[:2] == [
        "tests/e2e/test_a::test_slow[x]",
        "tests/e2e/test_a::test_quick",
    ]


def test_what_failed_is_named_at_the_end(folder: Path) -> None:
    """Failed tests and errors are listed and counted."""
    (folder / "e2e.xml").write_text(REPORT.format(more=FAILED))
    lines = summary(folder, "e2e")
    assert "failed: e2e: tests/e2e/test_b::test_wrong" in lines
    assert "error: e2e: tests/e2e/test_b::test_set_up" in lines
    assert "1 failed, 2 passed, 1 skipped, 1 error in" in lines[-1]


@pytest.mark.parametrize("report", [None, "<testsuites>"])
def test_a_part_without_a_report_is_an_error(folder: Path, report: str | None) -> None:
    """The linters have no report, and pytest that crashed has none or half of one."""
    (folder / "e2e.xml").unlink()
    if report is not None:
        (folder / "e2e.xml").write_text(report)
    assert "2 errors in" in summary(folder, "lint", "e2e")[-1]


def test_nothing_ran(tmp_path: Path) -> None:
    """Arguments may leave no test."""
    assert "no tests ran in" in summary(tmp_path)[-1]


def test_a_record_of_a_part_is_of_its_last_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that was run again on the same source has one record, the newer one."""
    kept = folder / "records"
    monkeypatch.setenv("TEST_RECORDS", str(kept))
    summary(folder, "lint")
    summary(folder)
    records = {path.name: json.loads(path.read_text()) for path in kept.iterdir()}
    assert sorted(record["part"] for record in records.values()) == ["e2e", "lint"]
    for name, record in records.items():
        assert name == f"{record['part']}-{record['source']}.json"
        assert record["not_green"] == []
