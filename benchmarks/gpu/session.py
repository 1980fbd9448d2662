"""All that has to be seen on a GPU, in one command and within a budget of seconds.

    python benchmarks/gpu/session.py --out out/gpu --budget 540   # one GPU
    python benchmarks/gpu/session.py --out out/gpu --dry-run      # on a CPU, tiny

Each stage is a process of its own with a time limit out of the budget. What it finds is
in its file at once, and in ``session.json`` as soon as it has ended; ``log.txt`` has
what all of them printed. One that fails, hangs or crashes is told of, with the end of
what it printed, and stops nothing else. One that has not shown all that it is for is
not ok, whatever it says of itself. The last line is one JSON object: ``stages`` by name
(ok, failed, not there, timed out) and the figures. The exit status is 0 where every
stage ran or was told not to be there.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from stages.stage import ROOT, NotThereError, Stage, add_stand_ins, use_checkout

OK, FAILED, NOT_THERE, TIMED_OUT = "ok", "failed", "not there", "timed out"
SOURCES = ("sgl_tiered", "kernels", "benchmarks/gpu", "tests")
_TAIL_CHARS = 6000
_RESERVE_S = 5.0
"""Of the budget, for what comes behind the last stage."""
_LEAST_S = 3.0
"""A stage with less than this is not begun."""
_TRACE_S = 2.0
"""Before its limit a stage prints where its threads are."""
_KILLED_WITHIN_S = 10.0
_SKIPPED = "skipped"
"""Kind of the records of what there was no time for."""
_OURS = ("stages", "movement", "engine", "tests", "sgl_tiered", "sgl_tiered_kernels")
_OURS += ("sgl_tiered_workloads",)
"""Modules that are there, or something is wrong."""
_THREADS = {"OMP_NUM_THREADS": "2"}
"""Of a dry run: torch's threads wait actively for each other, on cores that are
busy."""


@dataclass(frozen=True)
class Entry:
    """A stage of the session.

    Attributes:
        name: of it, and of its module in ``stages``.
        share: of the budget that is left, in parts.
        most_s: it gets no more than this.
        shows: kinds of records of which it has to write one at least.
        command: what is run instead of the module, for tests; it is given the path of
            the stage's file and the seconds that it has.
    """

    name: str
    share: float
    most_s: float
    shows: tuple[str, ...] = ()
    command: tuple[str, ...] = ()


ENTRIES = (
    Entry("facts", 5, 60, ("software", "numa", "pinning")),
    Entry("gpu_tests", 20, 200, ("tests",)),
    Entry("mini_engine", 14, 150, ("random", "first_token", "control")),
    Entry("copies", 12, 120, ("copy",)),
    Entry("kv_gen", 4, 45, ("kv_gen",)),
    Entry("overlap", 6, 60, ("overlap",)),
    Entry("layerkv", 7, 75, ("layers", "acts")),
    Entry("sanitizer", 8, 100, ("sanitizer",)),
    # It imports FlashInfer's 800 modules, loads kernels or has nvcc compile them.
    Entry("flashinfer", 14, 240, ("layers", "tiers", "acts")),
    Entry("servers", 8, 240, ("servers",)),
)


def main(argv: list[str] | None = None) -> int:
    """Run the session, or one stage of it; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/gpu"))
    parser.add_argument("--budget", type=float, default=540.0, help="seconds")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU")
    parser.add_argument("--only", nargs="+", metavar="STAGE", help="these stages")
    parser.add_argument("--stage", help="run this one in this process")
    args = parser.parse_args(argv)
    if args.stage:
        return run_stage(args.stage, args.out, args.budget, dry_run=args.dry_run)
    names = [entry.name for entry in ENTRIES]
    for name in args.only or []:
        if name not in names:
            parser.error(f"no stage {name!r}; there are {', '.join(names)}")
    entries = [one for one in ENTRIES if not args.only or one.name in args.only]
    summary = run_session(entries, args.out, args.budget, dry_run=args.dry_run)
    print(json.dumps(summary), flush=True)
    return 0 if set(summary["stages"].values()) <= {OK, NOT_THERE} else 1


def run_session(
    entries: Sequence[Entry], out: Path, budget_s: float, *, dry_run: bool
) -> dict[str, Any]:
    """Run the stages one after the other; return the last line.

    Args:
        entries: the stages.
        out: gets ``session.json`` and ``log.txt``, and a stage's file while it runs.
        budget_s: for all of them.
        dry_run: tiny, on a CPU.
    """
    began_s = time.perf_counter()
    use_checkout()
    out.mkdir(parents=True, exist_ok=True)
    log = out / "log.txt"
    log.write_text("", encoding="utf-8")
    told: dict[str, Any] = {"header": _header(budget_s, dry_run=dry_run), "stages": {}}
    figures: dict[str, Any] = {}
    for number, entry in enumerate(entries):
        left_s = budget_s - _RESERVE_S - (time.perf_counter() - began_s)
        shares = sum(one.share for one in entries[number:])
        # What a stage leaves of its time is for those behind it.
        limit_s = min(entry.most_s, left_s * entry.share / shares)
        record = _run_entry(entry, out, limit_s, log, dry_run=dry_run)
        told["stages"][entry.name] = record
        figures |= record["figures"]
        print(_line(entry.name, record), flush=True)
        _write(out / "session.json", told)
    # The stages' own files are in session.json now.
    with contextlib.suppress(OSError):
        (out / "stages").rmdir()
    return {
        "stages": {name: one["status"] for name, one in told["stages"].items()},
        "seconds": round(time.perf_counter() - began_s, 1),
        "dry_run": dry_run,
        "device": told["stages"].get("facts", {}).get("figures", {}).get("device", ""),
        "figures": figures,
        "why": {name: one["why"] for name, one in told["stages"].items() if one["why"]},
    }


def run_stage(name: str, path: Path, limit_s: float, *, dry_run: bool) -> int:
    """Run a stage in this process; its last line says how it ended.

    Args:
        name: of the stage.
        path: of its file.
        limit_s: after which the session kills it.
        dry_run: tiny, on a CPU.
    """
    faulthandler.enable()
    if limit_s > 2 * _TRACE_S:
        faulthandler.dump_traceback_later(limit_s - _TRACE_S)
    use_checkout()
    missing = add_stand_ins()
    if missing:
        print(f"stand-ins for what is not installed: {', '.join(missing)}")
    if dry_run:
        # Read when Triton is imported: its programs then run on the CPU.
        os.environ["TRITON_INTERPRET"] = "1"
    stage = Stage(path, limit_s, dry_run=dry_run)
    end: dict[str, Any] = {}
    try:
        importlib.import_module(f"stages.{name}").run(stage)
    except NotThereError as absent:
        end["not_there"] = str(absent)
    except ModuleNotFoundError as absent:
        why = not_installed(absent)
        if why is None:
            raise
        end["not_there"] = why
    except AssertionError as problem:
        # Figures of a stage that found something wrong are not told.
        stage.figures.clear()
        end["wrong"] = f"wrong: {problem}"
    stage.write()
    faulthandler.cancel_dump_traceback_later()
    print(json.dumps({**end, "figures": stage.figures}, default=str), flush=True)
    # Threads of copies that never end must not keep the process.
    os._exit(1 if "wrong" in end else 0)


def not_installed(absent: ModuleNotFoundError) -> str | None:
    """Return what a machine lacks; None where it is a part of the checkout."""
    if (absent.name or "").partition(".")[0] in _OURS:
        return None
    return f"the Python module {absent.name} is not installed"


def _run_entry(
    entry: Entry, out: Path, limit_s: float, log: Path, *, dry_run: bool
) -> dict[str, Any]:
    """Run a stage's process and return its record."""
    path = out / "stages" / f"{entry.name}.json"
    record: dict[str, Any] = {
        "status": TIMED_OUT,
        "why": "",
        "seconds": 0.0,
        "limit_s": round(limit_s, 1),
        "figures": {},
        "records": [],
    }
    if limit_s < _LEAST_S:
        return record | {"why": "no time was left of the budget"}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    command = _command(entry, path, limit_s, dry_run=dry_run)
    began_s = time.perf_counter()
    with tempfile.TemporaryFile("w+b") as output:
        code = _run_process(command, limit_s, output, dry_run=dry_run)
        record["seconds"] = round(time.perf_counter() - began_s, 2)
        output.seek(0)
        text = output.read().decode(errors="replace")
    with log.open("a", encoding="utf-8") as file:
        file.write(f"==== {entry.name}: {record['seconds']} s\n{text}\n")
    told = _read(path)
    record |= {"records": told.get("records", [])}
    path.unlink(missing_ok=True)
    end = _last_json(text)
    if code is None:
        record["why"] = f"killed after {limit_s:.0f} s"
        # Not results of the stage: it had not come to its end.
        record["figures_so_far"] = told.get("figures", {})
    elif code == 0 and end is not None and "not_there" in end:
        record |= {"status": NOT_THERE, "why": end["not_there"]}
    elif code == 0 and end is not None:
        record |= _shown(entry, record["records"])
        if record["status"] != FAILED:
            record["figures"] = end.get("figures", {})
    else:
        record["status"] = FAILED
        record["why"] = (end or {}).get("wrong") or _reason(code, text)
    if record["status"] in (FAILED, TIMED_OUT):
        record["tail"] = text[-_TAIL_CHARS:]
    return record


def _shown(entry: Entry, records: list[dict[str, Any]]) -> dict[str, str]:
    """Return the status of a stage that ended well, and why it is not ok."""
    kinds = {record["kind"] for record in records}
    missing = [kind for kind in entry.shows if kind not in kinds]
    if not missing:
        return {"status": OK}
    if _SKIPPED in kinds:
        return {"status": TIMED_OUT, "why": f"no time was left for {missing}"}
    return {"status": FAILED, "why": f"it says that it is well, and shows no {missing}"}


def _command(entry: Entry, path: Path, limit_s: float, *, dry_run: bool) -> list[str]:
    if entry.command:
        return [*entry.command, str(path), str(limit_s)]
    command = [sys.executable, "-u", str(Path(__file__)), "--stage", entry.name]
    command += ["--out", str(path), "--budget", str(limit_s)]
    return [*command, "--dry-run"] if dry_run else command


def _run_process(
    command: list[str], limit_s: float, output: Any, *, dry_run: bool
) -> int | None:
    """Return the exit status; None where the process and all of its were killed."""
    environment = os.environ | (_THREADS if dry_run else {})
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env=environment,
        start_new_session=True,
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # Also what a stage has left behind.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            # A process in the driver may not end; the session goes on.
            process.wait(_KILLED_WITHIN_S)


def _read(path: Path) -> dict[str, Any]:
    """Return a stage's file; empty where it has written none."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def _last_json(text: str) -> dict[str, Any] | None:
    """Return the object of the last line; None where it is none."""
    lines = text.strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _reason(code: int, text: str) -> str:
    if code == 0:
        return "it printed no JSON object at its end"
    lines = [line for line in text.strip().splitlines() if line.strip()]
    last = lines[-1].strip()[:300] if lines else "nothing was printed"
    if code < 0:
        return f"it was ended by signal {-code}: {last}"
    return f"exit status {code}: {last}"


def _line(name: str, record: dict[str, Any]) -> str:
    told = f"{name:12} {record['status']:10} {record['seconds']:7.1f} s"
    return f"{told}  {record['why']}" if record["why"] else told


def _write(path: Path, told: dict[str, Any]) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(told, indent=1), encoding="utf-8")
    os.replace(fresh, path)


def _header(budget_s: float, *, dry_run: bool) -> dict[str, Any]:
    """Return what ran and where: commit, hash of the source, versions, machine."""
    from sgl_tiered_workloads.harness import machine

    return {
        "kind": "header",
        "bench": "gpu session",
        "commit": machine.commit(),
        "dirty": machine.is_dirty(),
        "source": machine.source_hash(ROOT, SOURCES),
        "versions": machine.versions(),
        "machine": machine.machine_facts(),
        "budget_s": budget_s,
        "dry_run": dry_run,
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


if __name__ == "__main__":
    sys.exit(main())
