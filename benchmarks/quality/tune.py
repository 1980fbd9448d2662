"""Variants of our own selection on the development split: how its defaults were chosen.

    python benchmarks/quality/tune.py --model FOLDER [--texts 8] [--questions 6]

prints a table by variant and share. The evaluation split is never looked at here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench_sparsity import DISTANCES, NUM_AFTER, NUM_PREFIX
from offline.cases import Case, CaseSource
from offline.curves import measure_curves
from offline.llama import Llama
from offline.measure import DENSE, grid, measure
from offline.report import figures_of, table
from offline.trained import TrainedCases

from sgl_tiered.policies.sparsity.base import KeepSets, PrefixFacts
from sgl_tiered.policies.sparsity.car import CarSelection
from sgl_tiered.policies.sparsity.car_uniform import CarUniformSelection
from sgl_tiered.policies.sparsity.solver import HeldCurves

POOLINGS = ("mean", "max", "normalised", "lift")


class ProfiledCar(CarSelection):
    """As ``car``, with the curves that were measured under its own ranking."""

    curves: HeldCurves

    def keep(self, facts: PrefixFacts) -> KeepSets:
        """Choose as ``car`` does."""
        fields = {name: getattr(facts, name) for name in PrefixFacts.__slots__}
        return super().keep(PrefixFacts(**fields | {"curves": self.curves}))


def variants(
    model: Llama, profile: list[Case], neighbours: list[int]
) -> dict[str, CarSelection | CarUniformSelection]:
    """Return the variants by a label."""
    found = {}
    for power in (1, 2):
        for pooling in POOLINGS:
            for width in neighbours:
                options = pooling, width, power
                label = f"p{power} {pooling} {width}"
                profiled = ProfiledCar(*options)
                profiled.curves = measure_curves(model, profile, profiled)
                found[f"{label} profile"] = profiled
                found[f"{label} prefix"] = CarSelection(*options)
                found[f"{label} uniform"] = CarUniformSelection(*options)
    return found


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--questions", type=int, default=6, help="per distance")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.5, 0.25])
    parser.add_argument("--neighbours", nargs="+", type=int, default=[1, 3])
    args = parser.parse_args()
    model = Llama.load(args.model)
    source: CaseSource = TrainedCases(args.model)
    profile: list[Case] = [*source.texts("profile", 3, NUM_PREFIX, NUM_AFTER)]
    profile += source.recalls("profile", 3, NUM_PREFIX, DISTANCES[:2])
    selections = variants(model, profile, args.neighbours)
    methods = [DENSE, *grid([*selections], args.shares)]
    cases: list[Case] = [
        *source.texts("development", args.texts, NUM_PREFIX, NUM_AFTER),
        *source.recalls("development", args.questions, NUM_PREFIX, DISTANCES),
    ]
    records = []
    for number, case in enumerate(cases):
        about = {"kind": case.kind, "case": number}
        about["distance"] = getattr(case, "distance", 0)
        for method, score in measure(model, case, methods, selections):
            key = {
                "selection": method.selection,
                "keep_share": method.keep_share,
                "encoding": method.encoding,
            }
            records.append(about | key | score.to_json())
        print(f"{number + 1} of {len(cases)} cases", file=sys.stderr, flush=True)
    figures = figures_of(records)
    print(f"dense: perplexity {figures.dense_ppl:.3f}, recall {figures.dense_recall}")
    print(table(figures))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
