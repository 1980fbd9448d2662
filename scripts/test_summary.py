"""Prints the time of each part of the tests, the slowest tests, and one closing line.

``test_summary.py FOLDER SECONDS [FAILED PARTS...]``; the folder has, for each part,
``PART.time`` (seconds of wall clock, user and system time) and, of pytest's,
``PART.xml``. Where ``TEST_RECORDS`` names a folder, what came of each part is kept
there as a file that names the hash of the product's source, the commit and the machine:
what takes hours need not be run again while that source stands.
"""

from __future__ import annotations

import os
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

from sgl_tiered_workloads.harness.keeping import keep_record, run_facts

ROOT = Path(__file__).parents[1]
PRODUCT = ("sgl_tiered", "kernels", "platform_dist", "workloads/sgl_tiered_workloads")
NUM_SLOWEST = 20


def main() -> None:
    """Read what the parts have left, print it."""
    folder, elapsed_s, failed = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    counts: Counter[str] = Counter()
    slowest: list[tuple[float, str]] = []
    bad: list[str] = []
    parts: dict[str, dict[str, Any]] = {}
    print(f"\n{'part':10} {'wall s':>8} {'CPU s':>8}   tests")
    for timed in sorted(folder.glob("*.time"), key=lambda path: path.stat().st_mtime):
        part = timed.stem
        wall, user, system = map(float, timed.read_text().split()[-3:])
        here: Counter[str] = Counter()
        report = timed.with_suffix(".xml")
        for case in _cases(report):
            name = f"{case.get('classname', '').replace('.', '/')}::{case.get('name')}"
            result = _result(case)
            here[result] += 1
            slowest.append((float(case.get("time", 0)), name))
            if result in ("failed", "error"):
                bad.append(f"{result}: {part}: {name}")
        if part in failed and not here["failed"] + here["error"]:
            # It ended badly without a test that did: the linters, or pytest itself.
            here["error"] += 1
            bad.append(f"error: {part}: see above")
        print(f"{part:10} {wall:8.0f} {user + system:8.0f}   {_line(here)}")
        counts += here
        parts[part] = {"wall_s": wall, "cpu_s": round(user + system, 1), **here}
    print(f"\nThe {NUM_SLOWEST} slowest tests, with what was set up for them:")
    for seconds, name in sorted(slowest, reverse=True)[:NUM_SLOWEST]:
        print(f"{seconds:8.1f} s  {name}")
    print("", *bad, sep="\n")
    if "TEST_RECORDS" in os.environ:
        _keep(Path(os.environ["TEST_RECORDS"]), parts, bad)
    minutes, seconds = divmod(round(elapsed_s), 60)
    closing = f" {_line(counts)} in {elapsed_s:.2f}s (0:{minutes:02d}:{seconds:02d}) "
    print(closing.center(80, "="))


def _keep(folder: Path, parts: dict[str, dict[str, Any]], bad: list[str]) -> None:
    """Write a record of each part, in place of an earlier one on the same source."""
    facts = run_facts("make test-full", ROOT, PRODUCT, ())
    for part, told in parts.items():
        failed = [line for line in bad if f": {part}: " in line]
        (folder / f"{part}-{facts['source']}.json").unlink(missing_ok=True)
        record = {"part": part, **told, "not_green": failed, **facts}
        keep_record(folder, part, record)


def _cases(report: Path) -> list[ET.Element]:
    """Return the test cases of a report; none where pytest ended before it wrote it."""
    try:
        return list(ET.parse(report).iter("testcase"))
    except (OSError, ET.ParseError):
        return []


def _result(case: ET.Element) -> str:
    """Return how a test case ended, in the words of pytest."""
    words = {"error": "error", "failure": "failed", "skipped": "skipped"}
    for tag, word in words.items():
        if case.find(tag) is not None:
            return word
    return "passed"


def _line(counts: Counter[str]) -> str:
    """Return the counts as pytest writes them."""
    if not counts:
        return "no tests ran"
    words = []
    for word in ("failed", "passed", "skipped", "error"):
        if counts[word]:
            many = "s" if word == "error" and counts[word] > 1 else ""
            words.append(f"{counts[word]} {word}{many}")
    return ", ".join(words)


if __name__ == "__main__":
    main()
