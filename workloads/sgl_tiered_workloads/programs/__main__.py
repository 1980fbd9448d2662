"""Run one program: ``python -m sgl_tiered_workloads.programs NAME --url URL``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from sgl_tiered.core.clock import SystemClock
from sgl_tiered_workloads.programs import few_shot, multi_turn, tree_of_thought
from sgl_tiered_workloads.programs.base import Program, run_program
from sgl_tiered_workloads.programs.frontend import FrontendError

__all__ = ["PROGRAMS", "main"]

PROGRAMS: Mapping[str, tuple[Program, Mapping[str, int]]] = {
    "few-shot": (few_shot.few_shot, few_shot.SIZES),
    "tree-of-thought": (tree_of_thought.tree_of_thought, tree_of_thought.SIZES),
    "multi-turn": (multi_turn.multi_turn, multi_turn.SIZES),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one program; 0 when it ran, 2 when SGLang or its server is missing."""
    args = _parser().parse_args(argv)
    program, defaults = PROGRAMS[args.program]
    given = {name: getattr(args, name) for name in defaults}
    sizes = {k: defaults[k] if v is None else v for k, v in given.items()}
    generator = np.random.default_rng(args.seed)
    try:
        report = run_program(
            args.program, program, args.url, generator, sizes, SystemClock()
        )
    except FrontendError as error:
        print(error, file=sys.stderr)
        return 2
    print(report.describe())
    if args.out is not None:
        facts = {**asdict(report), "seed": args.seed, "sizes": sizes}
        facts["cached_share"] = report.usage.cached_share
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sgl_tiered_workloads.programs", description=__doc__
    )
    commands = parser.add_subparsers(dest="program", required=True)
    for name, (program, sizes) in PROGRAMS.items():
        about = (program.__doc__ or "").partition("\n")[0]
        command = commands.add_parser(name, help=about, description=about)
        command.add_argument("--url", required=True, help="http://host:port")
        command.add_argument("--seed", type=int, default=0, help="of the prompts")
        command.add_argument("--out", type=Path, help="write the report as JSON")
        for size, default in sizes.items():
            flag = "--" + size.replace("_", "-")
            command.add_argument(flag, type=int, help=f"default: {default}")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
