"""The tests marked ``gpu``, each file in a process of its own.

A broken context then spoils one file only. Warnings of other packages turn nothing red.
In a dry run all files are collected in one process: their tests are skipped, and a file
that cannot even be imported is found.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from stages.stage import ROOT, Stage

__all__ = ["run", "test_files"]

_MARK = "mark." + "gpu"
_MOST_PER_FILE_S = 120.0
_TAIL_CHARS = 3000
_MISSING = re.compile(r"ModuleNotFoundError: No module named '(\w+)")
_OURS = ("sgl_tiered", "sgl_tiered_kernels", "sgl_tiered_workloads", "tests")
_NOT_IMPORTED = "collection failure"
_PLUGIN = "stages.pytest_missing"


def run(stage: Stage) -> None:
    """Write one record per file; raises AssertionError where a test failed."""
    files = test_files()
    assert files, "no test is marked gpu"
    if stage.dry_run:
        outcome = _pytest(files, stage.left_s, collect_only=True)
        stage.add("tests", files=[str(file) for file in files], **outcome)
        stage.figure("gpu_tests_collected", outcome["collected"])
        is_right = outcome["exit_status"] == 0 or _is_absent(outcome)
        assert is_right, outcome["tail"][-800:]
        assert outcome["collected"] > 0, "no test was collected"
        return
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    red = []
    for number, file in enumerate(files):
        left_s = stage.left_s
        if left_s < 5.0:
            stage.add("skipped", file=str(file))
            red.append(f"{file}: no time was left")
            continue
        # The first ones compile kernels; nothing of one may eat all the others' time.
        fair_s = 3 * left_s / (len(files) - number)
        outcome = _pytest([file], min(left_s, fair_s, _MOST_PER_FILE_S))
        stage.add("tests", file=str(file), **outcome)
        for name in counts:
            counts[name] += outcome[name]
        # 5: none was collected, of a file that says that it has some.
        if outcome["exit_status"] != 0 and not _is_absent(outcome):
            red.append(f"{file}: {outcome['why'] or outcome['tail'][-300:]}")
        stage.figure("gpu_tests", counts)
    assert not red, "; ".join(red)
    assert counts["passed"], "all tests were skipped"


def test_files() -> list[Path]:
    """Return the files of tests marked ``gpu``, relative to the checkout."""
    found: list[Path] = []
    for folder in ("kernels", "unit/engines", "unit/pipelines", "contract", "property"):
        paths = sorted((ROOT / "tests" / folder).glob("test_*.py"))
        found += [
            path.relative_to(ROOT)
            for path in paths
            if _MARK in path.read_text(encoding="utf-8")
        ]
    return found


def _pytest(
    files: list[Path], limit_s: float, *, collect_only: bool = False
) -> dict[str, Any]:
    """Run pytest; return counts, failures by name, and the end of what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", _PLUGIN]
        # What other packages warn of is not ours to mend there.
        command += ["-o", "filterwarnings=default", "-p", "no:cacheprovider"]
        command += ["--continue-on-collection-errors", f"--junitxml={report}"]
        command += ["--collect-only"] if collect_only else ["--durations=5"]
        command += [str(file) for file in files]
        environment = os.environ.copy()
        # Triton's programs of these tests run on the device.
        environment.pop("TRITON_INTERPRET", None)
        here = str(Path(__file__).parents[1])
        paths = environment.get("PYTHONPATH", "").split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join([*filter(None, paths), here])
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=max(limit_s, 1.0),
                check=False,
            )
            text, status, why = done.stdout, done.returncode, ""
        except subprocess.TimeoutExpired as late:
            text = (late.stdout or b"").decode(errors="replace")
            status, why = -1, f"killed after {limit_s:.0f} s"
        print(text[-_TAIL_CHARS:], flush=True)
        return {
            "exit_status": status,
            **_outcomes(report, text, why),
            "tail": text[-_TAIL_CHARS:],
        }


def _is_absent(outcome: dict[str, Any]) -> bool:
    """Say whether nothing is wrong but a package that is not installed here."""
    return bool(outcome["missing"]) and not outcome["failed"]


def _outcomes(report: Path, text: str, why: str) -> dict[str, Any]:
    """Read the report: numbers of outcomes, and the message of each failure."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    missing = sorted({name for name in _MISSING.findall(text) if name not in _OURS})
    failures: list[str] = []
    skips: list[str] = []
    seconds = 0.0
    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):
            seconds += float(case.get("time") or 0)
            bad = [one for one in case if one.tag in ("failure", "error")]
            skipped = case.find("skipped")
            name = case.get("name")
            if bad and missing and bad[0].get("message") == _NOT_IMPORTED:
                # The file could not be imported: none of its tests was run.
                continue
            if bad:
                counts["failed"] += 1
                failures.append(f"{name}: {(bad[0].get('message') or '')[:300]}")
            elif skipped is not None:
                counts["skipped"] += 1
                skips.append(f"{name}: {skipped.get('message')}")
            else:
                counts["passed"] += 1
    return {
        **counts,
        "collected": sum("::" in line for line in text.splitlines()),
        "failures": failures,
        "missing": missing,
        "skips": skips,
        "test_s": round(seconds, 2),
        "why": why or "; ".join(failures)[:600],
    }
