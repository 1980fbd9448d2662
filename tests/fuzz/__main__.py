"""``python -m tests.fuzz``: all targets and planted faults; ends with one JSON object.

The exit code is 0 only if no input ended in a crash or in something wrong, every target
has taken some inputs and refused others, and every planted fault was found.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from sgl_tiered_workloads.harness.keeping import keep_record, run_facts

from tests.fuzz.targets import TARGETS, end_at_once, run_one

ROOT = Path(__file__).parents[2]
SOURCES = ("sgl_tiered", "workloads/sgl_tiered_workloads", "tests/fuzz")
MIN_TARGETS = 9
MIN_INPUTS = 10_000


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="make fuzz")
    parser.add_argument("--inputs", type=int, default=MIN_INPUTS, help="per target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--targets", nargs="+", choices=sorted(TARGETS))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--record", type=Path, help="folder for the figures as a file")
    args = parser.parse_args()
    names = args.targets or list(TARGETS)
    told = []
    with ProcessPoolExecutor(
        args.processes,
        mp_context=get_context("spawn"),
        initializer=end_at_once,
        max_tasks_per_child=1,
    ) as workers:
        runs = [workers.submit(run_one, name, args.inputs, args.seed) for name in names]
        for each in runs:
            told.append(each.result())
            print(json.dumps(told[-1]), flush=True)
    planted = [num for one in told for num in one["planted"].values()]
    summary = {
        "targets": len(told),
        "inputs_per_target_min": min(one["inputs"] for one in told),
        "inputs": sum(one["inputs"] for one in told),
        "planted": len(planted),
        "planted_found": sum(num > 0 for num in planted),
        "crashes": sum(one["crashes"] for one in told),
        "wrong": sum(one["wrong"] for one in told),
        "one_sided": [
            one["target"] for one in told if not (one["accepted"] and one["refused"])
        ],
        "seed": args.seed,
        **run_facts("make fuzz", ROOT, SOURCES, ()),
    }
    is_whole = args.targets is not None or (
        summary["targets"] >= MIN_TARGETS
        and (args.inputs < MIN_INPUTS or summary["inputs_per_target_min"] >= MIN_INPUTS)
    )
    is_right = (
        not summary["crashes"] + summary["wrong"] + len(summary["one_sided"])
        and summary["planted_found"] == summary["planted"]
        and all(one["planted"] for one in told)
    )
    if args.record is not None:
        keep_record(args.record, "fuzz", {**summary, "told": told})
    print(json.dumps(summary), flush=True)
    return 0 if is_whole and is_right else 1


if __name__ == "__main__":
    sys.exit(main())
