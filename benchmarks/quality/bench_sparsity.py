"""Dropping and encoding KV: what it costs a model that learned, and what it gains.

    python benchmarks/quality/bench_sparsity.py [--model FOLDER] [--quick]

Parts (both by default; ``--part`` picks):

- ``serving``: TTFT of reloads over a throttled link, on real servers one at a time
  (../serving/reload/README.md);
- ``quality``: no server. A prefix of 2,048 tokens or more is computed densely, its KV
  is compressed before anything behind it is seen, and only what follows is scored:
  perplexity of held-out text, and the share of questions about pairs 1,000 to 4,000
  tokens back that are answered right.

Writes records, tables and pictures; the last line is one JSON object (the READMEs have
its keys). Exit status 1: answers differed where they must not, or a whole prefix was
not as good as the dense one, so that the measurement is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from offline.cases import Case, CaseSource, RandomCases
from offline.curves import measure_curves
from offline.llama import Llama
from offline.measure import DENSE, Codec, Method, grid, measure
from offline.picture import draw
from offline.report import figures_of, headline, problems_of, table

from sgl_tiered.policies.sparsity.base import Selection
from sgl_tiered.policies.sparsity.car import CarSelection
from sgl_tiered.policies.sparsity.registry import SELECTIONS, make_selection
from sgl_tiered.policies.sparsity.solver import HeldCurves

MODEL = Path(__file__).resolve().parents[2] / "workloads/models/demo"
"""The demo model, which this repository has trained."""
SHARES = (1.0, 0.75, 0.5, 0.35, 0.25, 0.15)
ENCODINGS = ("fp8", "int8", "int4")
COMPOSED = (("car", 0.5, "int8"), ("car", 0.5, "int4"), ("car", 0.25, "int4"))
PARTS = ("serving", "quality")
"""In this order: the servers are measured while this process has done nothing yet."""
DISTANCES = (1024, 2048, 3072, 4096)
NUM_PREFIX = 2048
NUM_AFTER = 512


def methods_of(
    selections: Sequence[str], shares: Sequence[float], encodings: Sequence[str]
) -> list[Method]:
    """Return dense, all selections at all shares, encodings, and some of both."""
    methods = [DENSE, *grid(selections, shares)]
    methods += [Method(DENSE.selection, 1.0, name) for name in encodings]
    methods += [
        Method(*composed)
        for composed in COMPOSED
        if composed[0] in selections and composed[2] in encodings
    ]
    return methods


def records_of(
    model: Llama,
    cases: Sequence[Case],
    methods: Sequence[Method],
    selections: Mapping[str, Selection],
    curves: HeldCurves,
    codecs: Mapping[str, Codec],
    num_dense_only: int = 0,
) -> Iterator[dict[str, Any]]:
    """Yield a record per case and method; the last cases are scored densely only."""
    for number, case in enumerate(cases):
        about = {"kind": case.kind, "case": number, "num_prefix": case.num_prefix}
        if case.kind == "recall":
            about["distance"] = case.distance
        if number < len(cases) - num_dense_only:
            scores = measure(model, case, methods, selections, curves, codecs)
        else:
            about["is_dense_only"] = True
            scores = measure(model, case, [DENSE], {})
        for method, score in scores:
            yield about | dataclasses.asdict(method) | score.to_json()
        print(f"{number + 1} of {len(cases)} cases", file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, default=MODEL, help="a checkpoint, for quality"
    )
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--out", type=Path, default=Path("out/bench-sparsity"))
    parser.add_argument(
        "--serving-model", type=Path, help="a checkpoint; a preset unless given"
    )
    parser.add_argument("--models", type=Path, default=Path("out/models"))
    parser.add_argument(
        "--serving-minutes",
        type=float,
        default=20.0,
        help="after which only dense and 50 %% go on",
    )
    parser.add_argument("--first-port", type=int, help="default: any free ports")
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--questions", type=int, default=25, help="per distance")
    parser.add_argument(
        "--dense-questions",
        type=int,
        default=120,
        help="per distance, those included; the others are asked of the dense prefix",
    )
    parser.add_argument(
        "--split", choices=("development", "evaluation"), default="evaluation"
    )
    parser.add_argument("--selections", nargs="+", default=list(SELECTIONS))
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES))
    parser.add_argument("--encodings", nargs="*", default=list(ENCODINGS))
    parser.add_argument("--page-tokens", type=int, default=16, help="encoded at once")
    parser.add_argument(
        "--profile", type=Path, help="of sgl-tiered profile; measured here unless given"
    )
    parser.add_argument("--random-cases", action="store_true", help="any vocabulary")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    args = parser.parse_args()
    args.part = args.part or list(PARTS)
    if args.quick:
        args.texts, args.questions = min(args.texts, 2), min(args.questions, 1)
        args.dense_questions = min(args.dense_questions, 2)
    return args


def main() -> int:
    """Measure and report; return the exit status."""
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    measures = {"serving": measure_serving, "quality": measure_quality}
    found: dict[str, dict[str, Any]] = {}
    for part in [part for part in PARTS if part in args.part]:
        found[part] = measures[part](args)
        # After each: what the one found is not lost with the other.
        last = merged(found)
        (args.out / "result.json").write_text(json.dumps(last, indent=1) + "\n")
    print(json.dumps(last))
    return 1 if last["problems"] else 0


def merged(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return all keys of all parts, what was missed and the problems of all."""
    both = ("missed", "problems")
    last = {
        key: value
        for part in parts.values()
        for key, value in part.items()
        if key not in both
    }
    return last | {key: [one for p in parts.values() for one in p[key]] for key in both}


def measure_serving(args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of reloads on real servers."""
    # Benches of servers share a folder beside this one.
    sys.path.append(str(Path(__file__).parents[1] / "serving"))
    from reload.measure import Options
    from reload.run import measure_reloads, model_of
    from reload.schedule import FULL, NORMAL, QUICK

    scale = FULL if os.environ.get("FULL") == "1" else NORMAL
    options = Options(
        model=model_of(args.serving_model, args.models),
        out=args.out / "serving",
        scale=QUICK if args.quick else scale,
        minutes=args.serving_minutes,
        first_port=args.first_port,
    )
    return measure_reloads(options, lambda text: print(text, flush=True))


def measure_quality(args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of the methods, and write records, table and picture."""
    model = Llama.load(args.model)
    source = source_of(args)
    texts = source.texts(args.split, args.texts, NUM_PREFIX, NUM_AFTER)
    num_asked = max(args.questions, args.dense_questions)
    asked = source.recalls(args.split, num_asked, NUM_PREFIX, DISTANCES)
    cases: list[Case] = [*texts, *asked]
    num_dense_only = (num_asked - args.questions) * len(DISTANCES)
    rng = np.random.default_rng(0)
    selections = {name: make_selection(name, rng) for name in args.selections}
    curves = curves_of(args, model, source)
    codecs: dict[str, Codec] = {}
    if args.encodings:
        from offline.codecs import make_codecs

        codecs = make_codecs(tuple(args.encodings), model.shape, args.page_tokens)
    methods = methods_of(args.selections, args.shares, args.encodings)
    records = []
    with (args.out / "records.jsonl").open("w") as file:
        for record in records_of(
            model, cases, methods, selections, curves, codecs, num_dense_only
        ):
            file.write(json.dumps(record) + "\n")
            records.append(record)
    figures = figures_of(records)
    (args.out / "table.md").write_text(table(figures) + "\n")
    draw(figures, args.out / "pareto.png")
    print(table(figures))
    return headline(figures) | {
        "split": args.split,
        "num_texts": len(texts),
        "num_questions": len(cases) - len(texts) - num_dense_only,
        "num_dense_questions": len(cases) - len(texts),
        "problems": problems_of(figures),
    }


def source_of(args: argparse.Namespace) -> CaseSource:
    """Return where cases come from."""
    if args.random_cases:
        config = json.loads((args.model / "config.json").read_text())
        return RandomCases(config["vocab_size"])
    from offline.trained import TrainedCases

    return TrainedCases(args.model)


def curves_of(args: argparse.Namespace, model: Llama, source: CaseSource) -> HeldCurves:
    """Return a profile's curves, or measure them on cases of the profile's split."""
    if args.profile is not None:
        from sgl_tiered.policies.sparsity.profile import SparsityProfile

        return HeldCurves.of_profile(SparsityProfile.load(args.profile))
    count = 1 if args.quick else 4
    cases: list[Case] = [*source.texts("profile", count, NUM_PREFIX, NUM_AFTER)]
    cases += source.recalls("profile", count, NUM_PREFIX, DISTANCES[:2])
    return measure_curves(model, cases, CarSelection())


if __name__ == "__main__":
    raise SystemExit(main())
