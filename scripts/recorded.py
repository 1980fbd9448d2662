"""Runs a benchmark, and keeps its last line as a record where ``--record`` asks for it.

    python scripts/recorded.py NAME benchmarks/pool/bench_pool.py [--record DIR] [ARGS]

What follows the name is handed to Python as it is, but for ``--record``. A record has
the last line as ``figures`` (empty where it is no JSON) and all that was printed before
it as ``printed``. A benchmark whose record holds more than that keeps it itself, with
the same flag, file names and facts (``sgl_tiered_workloads.harness.keeping``).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from sgl_tiered_workloads.harness.keeping import keep_record, run_facts

__all__ = ["main", "sources_of"]

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("sgl_tiered", "kernels", "platform_dist", "workloads/sgl_tiered_workloads")
_FOLDERS = re.compile(r"(?<![^\s='\"`(])/(?:[^/\s]+/)+")
"""Of a path from the root, but for its last part."""


def sources_of(program: str) -> tuple[str, ...]:
    """Return the folders whose source decides what a program measures or counts.

    Args:
        program: its path, from the root of the checkout; else no program of ours.
    """
    folder = (ROOT / program).resolve().parent
    if folder == ROOT or not folder.is_relative_to(ROOT):
        return PRODUCT
    return (*PRODUCT, folder.relative_to(ROOT).as_posix())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    # The program has a --help of its own, and flags that begin alike.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--record", type=Path)
    parser.add_argument("name")
    args, program = parser.parse_known_args(arguments)
    command = [sys.executable, *program]
    if args.record is None:
        os.execv(command[0], command)
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as child:
        signal.signal(signal.SIGTERM, lambda *_: child.terminate())
        assert child.stdout is not None
        for line in child.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    # A record names no path of the machine.
    lines = [_FOLDERS.sub("", line) for line in lines]
    try:
        figures, lines = json.loads(lines[-1]), lines[:-1]
    except (IndexError, json.JSONDecodeError):
        figures = {}
    told = " ".join(_FOLDERS.sub("", word) for word in program)
    facts = run_facts(f"python {told}", ROOT, sources_of(program[0]), ())
    ended = {"exit_code": child.returncode, "figures": figures, "printed": lines}
    record = {**facts, **ended}
    print(f"kept {keep_record(args.record, args.name, record)}", file=sys.stderr)
    return child.returncode


if __name__ == "__main__":
    raise SystemExit(main())
