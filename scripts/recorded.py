"""Runs a benchmark, and keeps its last line as a record where ``--record`` asks for it.

    python scripts/recorded.py NAME benchmarks/pool/bench_pool.py [--record DIR] [ARGS]

What follows the name is handed to Python as it is, but for ``--record``. Where the last
line is no JSON, all that was printed is kept. A benchmark whose record holds more than
its last line keeps it itself, with the same flag, file names and facts
(``sgl_tiered_workloads.harness.keeping``).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from sgl_tiered_workloads.harness.keeping import keep_record, run_facts

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("sgl_tiered", "kernels", "platform_dist", "workloads/sgl_tiered_workloads")


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
    try:
        figures = json.loads(lines[-1])
    except (IndexError, json.JSONDecodeError):
        figures = {"printed": lines}
    # A record names no path of the machine.
    told = " ".join(Path(w).name if w.startswith("/") else w for w in program)
    folder = Path(program[0]).resolve().parent
    sources = [*PRODUCT]
    # What measures, or counts, is a part of what the figures are of.
    if folder != ROOT and folder.is_relative_to(ROOT):
        sources.append(str(folder.relative_to(ROOT)))
    facts = run_facts(f"python {told}", ROOT, sources, ())
    record = {**facts, "exit_code": child.returncode, "figures": figures}
    print(f"kept {keep_record(args.record, args.name, record)}", file=sys.stderr)
    return child.returncode


if __name__ == "__main__":
    raise SystemExit(main())
