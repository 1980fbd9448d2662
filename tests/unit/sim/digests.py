"""Digests of what the simulator says, so that a rewrite is seen to change no answer.

``digests.json`` keeps, for each run of the cases in ``digest_cases.py``, a digest of
its event log and one of all else that came out. Each digest stays, or the old fault
behind the difference is named: renewing one asks for a sentence, which the file keeps.

Rows are written with ``repr`` of float64 and whole numbers, so they depend on neither a
hash nor an address, a clock or numpy's own types. Short digests after every 64 rows say
where a log begins to differ::

    python -m tests.unit.sim.digests                     # compare all, 30 cases
    python -m tests.unit.sim.digests --show CASE         # rows, to be compared by diff
    python -m tests.unit.sim.digests --write             # new cases only
    python -m tests.unit.sim.digests --write --fault "which one"    # renew
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.unit.sim.digest_cases import CASES, Row, Run

__all__ = ["FILE", "HINT", "compute", "differences", "entry_of", "kept", "line_of"]

FILE = Path(__file__).with_name("digests.json")
HINT = (
    "The simulator answers differently than before. If that is not meant, compare the "
    "rows of both checkouts: python -m tests.unit.sim.digests --show CASE. If an old "
    "fault was behind the old answer, name it: python -m tests.unit.sim.digests "
    '--write --fault "which one".'
)
_RULE = "Each digest stays, or the old fault behind the difference is named."
_MARK_ROWS = 64
_SHOWN_ROWS = 8


def line_of(row: Row) -> str:
    """Return a row as it is digested."""
    time_s, kind, subject, a, b = row
    return f"{float(time_s)!r} {kind} {int(subject)} {float(a)!r} {float(b)!r}\n"


def entry_of(run: Run) -> dict[str, Any]:
    """Return what is kept of a run."""
    state = hashlib.blake2b(digest_size=16)
    marks = []
    for number, row in enumerate(run.rows, 1):
        state.update(line_of(row).encode())
        if not number % _MARK_ROWS:
            marks.append(state.hexdigest()[:8])
    details = json.dumps(run.details, sort_keys=True, default=int)
    entry = {
        "uses": sorted(run.uses),
        "figures": run.figures,
        "kinds": dict(sorted(Counter(row[1] for row in run.rows).items())),
        "rows": state.hexdigest(),
        "details": hashlib.blake2b(details.encode(), digest_size=16).hexdigest(),
        "marks": " ".join(marks),
    }
    found: dict[str, Any] = json.loads(json.dumps(entry, default=int))
    return found


def compute(case: str) -> dict[str, Run]:
    """Run a case; return its runs by the names that the file has for them."""
    with tempfile.TemporaryDirectory() as folder:
        runs = CASES[case](Path(folder))
    return {f"{case}/{run.name}" if run.name else case: run for run in runs}


def kept() -> dict[str, dict[str, Any]]:
    """Return the file's entries."""
    entries: dict[str, dict[str, Any]] = _read()["runs"]
    return entries


def differences(
    case: str, runs: Mapping[str, Run], entries: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Say what of a case is not as it was; empty if all is."""
    there = {name for name in entries if name.split("/")[0] == case}
    told = [f"{name}: no longer run" for name in sorted(there - runs.keys())]
    for name, run in runs.items():
        if name not in entries:
            told.append(f"{name}: not in {FILE.name}")
            continue
        old, new = entries[name], entry_of(run)
        parts = [part for part in new if part != "marks" and new[part] != old.get(part)]
        if not parts:
            continue
        told.append(f"{name}: other {', '.join(parts)}")
        told += [
            f"  {part}: {old.get(part)}\n  now:  {new[part]}"
            for part in parts
            if part in ("uses", "figures", "kinds")
        ]
        if "rows" in parts:
            told.append(_first_other(run, str(old.get("marks", ""))))
    return told


def _first_other(run: Run, marks: str) -> str:
    """Say between which rows a log begins to differ."""
    old, new = marks.split(), entry_of(run)["marks"].split()
    same = 0
    while same < min(len(old), len(new)) and old[same] == new[same]:
        same += 1
    first, stop = same * _MARK_ROWS, (same + 1) * _MARK_ROWS
    shown = "".join(f"    {line_of(row)}" for row in run.rows[first:][:_SHOWN_ROWS])
    where = f"one of {first} to {stop - 1}"
    return f"  the first other row is {where}; now from there:\n{shown}"


# -- The command -----------------------------------------------------------------------


def _read() -> dict[str, Any]:
    if not FILE.exists():
        return {"rule": _RULE, "renewed": [], "runs": {}}
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def _write(cases: Iterable[str], fault: str) -> int:
    """Enter new runs, and, with a fault named, changed ones."""
    content = _read()
    entries: dict[str, Any] = content["runs"]
    renewed: list[str] = []
    for case in cases:
        runs = compute(case)
        changed = [
            name
            for name in entries
            if name.split("/")[0] == case
            and (name not in runs or entries[name] != entry_of(runs[name]))
        ]
        if changed and not fault:
            sys.stderr.write("\n".join(differences(case, runs, entries)) + "\n")
            sys.stderr.write(HINT + "\n")
            return 1
        renewed += changed
        for name in changed:
            del entries[name]
        entries |= {name: entry_of(run) for name, run in runs.items()}
    if renewed:
        content["renewed"].append({"fault": fault, "runs": sorted(renewed)})
    content["runs"] = dict(sorted(entries.items()))
    FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def main() -> int:
    """Compare, show or renew."""
    parser = argparse.ArgumentParser(description=_RULE)
    parser.add_argument("cases", nargs="*", help=f"of: {', '.join(CASES)}")
    parser.add_argument("--show", action="store_true", help="print the rows")
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    parser.add_argument("--fault", default="", help="the old fault behind a difference")
    args = parser.parse_args()
    cases = args.cases or list(CASES)
    if unknown := [case for case in cases if case not in CASES]:
        parser.error(f"there is no case {unknown[0]}")
    if args.write:
        return _write(cases, args.fault)
    failed = False
    for case in cases:
        runs = compute(case)
        if args.show:
            for name, run in runs.items():
                details = json.dumps(run.details, sort_keys=True, indent=1, default=int)
                sys.stdout.write(f"# {name}\n")
                sys.stdout.writelines(map(line_of, run.rows))
                sys.stdout.write(f"{run.figures}\n{details}\n")
            continue
        told = differences(case, runs, kept())
        failed = failed or bool(told)
        sys.stdout.write("\n".join([f"{case}: {'differs' if told else 'same'}", *told]))
        sys.stdout.write("\n")
    if failed:
        sys.stdout.write(HINT + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
