"""HybridServe's Figures 12 to 15 in the simulator: KV, activations, or both.

OPT-6.7B to 66B on an RTX 4090 with PCIe 4.0 x16 and 882 GB of host memory, batches of
32 to 128 equal requests with 128 tokens of answer, weights and context streamed. What
is kept as what is decided by ``policies/activations``; the device is a data sheet times
the shares of ``sim/hardware.py``, which were not fitted to any figure here. Prints
tables in Markdown, the paper's values beside ours, then one JSON object.

    python benchmarks/sim/activations.py

Exits with 1 where the balanced split is slower than KV only or activations only by more
than 2 %: an automatic choice that loses to none would be worse than no choice.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from batch_model import (
    BatchResult,
    BatchSetup,
    Context,
    LayerTimes,
    simulate_batch,
)

from sgl_tiered.sim.hardware import HardwareProfile, find_hardware
from sgl_tiered.sim.models import find_model

__all__ = ["MODELS", "PROMPTS", "Case", "main", "tables"]

DEVICE = "RTX-4090"
HOST_BYTES = 882e9
"""Section 5.1; decimal."""
MODELS = ("OPT-6.7B", "OPT-13B", "OPT-30B", "OPT-66B")
PROMPTS = (128, 256, 512, 1_024, 1_920)
"""Up to the longest that the paper names; its axis cannot be read."""
OUTPUT_TOKENS = 128
BATCHES = (32, 64, 128)
TRAFFIC_MODEL = "OPT-30B"
WITHIN = 0.25
TOLERANCE = 0.02

PAPER_VS_KV, PAPER_VS_ACT, PAPER_ACT_VS_KV = 2.19, 1.35, 1.61
"""Section 5.2, Figure 12."""
PAPER_VS_KV_OF = {"OPT-6.7B": 2.05, "OPT-66B": 2.33}
PAPER_TRAFFIC = {32: 1.27, 64: 1.38}
"""Section 5.3, Figure 13: reductions "up to"."""
PAPER_BUSY = {32: (0.082, 0.356), 128: (0.126, 0.782)}
PAPER_BUSY_RATIO = 7.39
"""Section 5.4, Figure 14: FlexGen's and HybridServe's, and the mean ratio."""
PAPER_EVEN = {"OPT-6.7B": 1.23, "OPT-66B": 1.39}
PAPER_POLICY = {"OPT-30B": 1.60, "OPT-66B": 1.56}
"""Section 5.5, Figure 15: over activations only, prompts of 1,920 tokens."""
PAPER_KV_PER_ACT = {"OPT-30B": 2.0, "OPT-66B": 1.78}


@dataclass(frozen=True)
class Case:
    """A device and the two sizes of the set-up that the paper does not state."""

    hardware: HardwareProfile
    buffer_share: float | None = None

    def run(
        self, model: str, batch: int, prompt_tokens: int, context: Context
    ) -> BatchResult:
        """Simulate one batch."""
        setup = BatchSetup(
            self.hardware,
            find_model(model),
            batch,
            prompt_tokens,
            OUTPUT_TOKENS,
            HOST_BYTES,
        )
        if self.buffer_share is not None:
            setup = replace(setup, buffer_share=self.buffer_share)
        return simulate_batch(setup, context)

    def speeds(
        self, contexts: Iterable[Context], models: Iterable[str] = MODELS
    ) -> dict[tuple[str, int], dict[Context, float]]:
        """Return the tokens per second of Figure 12's points."""
        contexts = list(contexts)
        return {
            (model, prompt): {
                context: self.run(model, max(BATCHES), prompt, context).tokens_per_s
                for context in contexts
            }
            for model in models
            for prompt in PROMPTS
        }


def geomean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def gain(
    speeds: dict[tuple[str, int], dict[Context, float]],
    over: Context,
    of: Context = Context.HYBRID,
    model: str | None = None,
) -> float:
    """Return the geometric mean of one way's speed over another's."""
    return geomean(
        row[of] / row[over]
        for (name, _), row in speeds.items()
        if model in (None, name)
    )


class Comparison:
    """The paper's values beside ours."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, float]] = []

    def add(self, name: str, paper: float, ours: float) -> None:
        self.rows.append((name, paper, ours))

    def within(self, paper: float, ours: float) -> bool:
        return abs(ours / paper - 1.0) <= WITHIN

    def print(self) -> None:
        print("\n## Paper and ours\n")
        print("| | paper | ours | ratio | within 25 % |\n|---|---|---|---|---|")
        for name, paper, ours in self.rows:
            fine = "yes" if self.within(paper, ours) else "no"
            print(
                f"| {name} | {paper:.3g} | {ours:.3g} | {ours / paper:.2f} | {fine} |"
            )

    def figures(self) -> dict[str, Any]:
        return {
            name: {"paper": paper, "ours": ours, "within": self.within(paper, ours)}
            for name, paper, ours in self.rows
        }


def regressions(case: Case) -> None:
    """Print the lines that the policies are given, and what follows at once."""
    print("\n## Regressions of one layer, and the time to load its weights\n")
    print(
        "| model | T_kv_gen us/token | R2 | T_load_kv us/token | R2 | "
        "T_kv_gen / T_load_kv | T_load_w ms |\n|---|---|---|---|---|---|---|"
    )
    for model in MODELS:
        layer = LayerTimes(case.hardware, find_model(model))
        gen, load = layer.kv_gen, layer.load_kv
        print(
            f"| {model} | {1e6 * gen.token_s:.3f} | {gen.quality.r2:.4f} | "
            f"{1e6 * load.token_s:.3f} | {load.quality.r2:.4f} | "
            f"{gen.token_s / load.token_s:.2f} | {1e3 * layer.weights_s:.1f} |"
        )


def figure_12(case: Case, comparison: Comparison) -> dict[str, Any]:
    """Print throughputs; return the gains."""
    contexts = (Context.KV, Context.ACT, Context.HYBRID, Context.BALANCED)
    speeds = case.speeds(contexts)
    print(f"\n## Figure 12: tokens/s, batch of {max(BATCHES)}\n")
    print(
        "| model | prompt | KV only | ACT only | Algorithm 1 | balanced | "
        "Algorithm 1 / KV | / ACT | balanced / KV | / ACT |\n" + "|---" * 10 + "|"
    )
    for (model, prompt), row in speeds.items():
        kv, act, hybrid, best = (row[context] for context in contexts)
        print(
            f"| {model} | {prompt} | {kv:.2f} | {act:.2f} | {hybrid:.2f} | {best:.2f} "
            f"| {hybrid / kv:.2f} | {hybrid / act:.2f} | {best / kv:.2f} "
            f"| {best / act:.2f} |"
        )
    vs_kv, vs_act = gain(speeds, Context.KV), gain(speeds, Context.ACT)
    best_kv = gain(speeds, Context.KV, Context.BALANCED)
    best_act = gain(speeds, Context.ACT, Context.BALANCED)
    print(
        f"\nGeometric means: Algorithm 1 {vs_kv:.2f} over KV only and {vs_act:.2f} "
        f"over ACT only; balanced {best_kv:.2f} and {best_act:.2f}."
    )
    comparison.add("hybrid / KV only (Fig. 12)", PAPER_VS_KV, vs_kv)
    comparison.add("hybrid / ACT only (Fig. 12)", PAPER_VS_ACT, vs_act)
    comparison.add(
        "ACT only / KV only (Fig. 12)",
        PAPER_ACT_VS_KV,
        gain(speeds, Context.KV, Context.ACT),
    )
    for model, paper in PAPER_VS_KV_OF.items():
        comparison.add(
            f"hybrid / KV only, {model}", paper, gain(speeds, Context.KV, model=model)
        )
    worst = min(
        row[Context.BALANCED] / max(row[Context.KV], row[Context.ACT])
        for row in speeds.values()
    )
    share = link_share_for(case, speeds, PAPER_VS_KV)
    link = case.hardware.host.bytes_per_s / 1e9
    print(
        f"\nWith {share:.0%} of the link ({share * link:.1f} of {link:.1f} GB/s) for "
        f"KV only, and all of it for Algorithm 1, the gain would be the paper's "
        f"{PAPER_VS_KV:g}."
    )
    return {
        "vs_kv_only": vs_kv,
        "vs_act_only": vs_act,
        "balanced_vs_kv_only": best_kv,
        "balanced_vs_act_only": best_act,
        "balanced_vs_better_at_least": worst,
        "kv_only_link_share_for_papers_gain": share,
    }


def link_share_for(
    case: Case, speeds: dict[tuple[str, int], dict[Context, float]], wanted: float
) -> float:
    """Return the share of the link at which KV only would be slower by ``wanted``."""
    low, high = 0.05, 1.0
    link = case.hardware.host
    for _ in range(8):
        share = (low + high) / 2
        slow = replace(link, bytes_per_s=share * link.bytes_per_s)
        slower = replace(case, hardware=replace(case.hardware, host=slow))
        rows = slower.speeds([Context.KV])
        found = geomean(
            row[Context.HYBRID] / rows[point][Context.KV]
            for point, row in speeds.items()
        )
        if found > wanted:
            low = share
        else:
            high = share
    return (low + high) / 2


def figure_13(case: Case, comparison: Comparison) -> dict[str, Any]:
    """Print what goes from host to device; return the reductions."""
    print(f"\n## Figure 13: TB of context to the device, {TRAFFIC_MODEL}, generation\n")
    print(
        "| batch | prompt | KV only | Algorithm 1: KV | ACT | reduction | "
        "balanced: KV | ACT | reduction | with weights: Algorithm 1 | balanced |\n"
        + "|---" * 11
        + "|"
    )
    found = {}
    for batch, paper in PAPER_TRAFFIC.items():
        alone = both = 0.0
        for prompt in PROMPTS:
            kv, hybrid, best = (
                case.run(TRAFFIC_MODEL, batch, prompt, context)
                for context in (Context.KV, Context.HYBRID, Context.BALANCED)
            )
            cells, totals = [], []
            for one in (hybrid, best):
                moved = one.kv_bytes + one.act_bytes
                reduction = f"{kv.kv_bytes / moved:.2f}" if moved else "all"
                cells.append(
                    f"{one.kv_bytes / 1e12:.2f} | {one.act_bytes / 1e12:.2f} | "
                    f"{reduction}"
                )
                total = (kv.kv_bytes + kv.weight_bytes) / (moved + one.weight_bytes)
                totals.append(f"{total:.2f}")
                if one is hybrid:
                    both = max(both, total)
                    # Of the longest prompt in the end: with short ones the device
                    # holds nearly all.
                    alone = kv.kv_bytes / moved if moved else 0.0
            print(
                f"| {batch} | {prompt} | {kv.kv_bytes / 1e12:.2f} | "
                f"{' | '.join(cells)} | {' | '.join(totals)} |"
            )
        name = f"traffic, batch {batch} (Fig. 13)"
        comparison.add(f"{name}, weights included, up to", paper, both)
        comparison.add(f"{name}, context alone, longest prompt", paper, alone)
        found[batch] = {"with_weights": both, "context_alone": alone}
    return {"traffic_reduction": found}


def figure_14(case: Case, comparison: Comparison) -> dict[str, Any]:
    """Print how busy the device is; return the mean ratio."""
    print(f"\n## Figure 14: share of generation that the device computes, {DEVICE}\n")
    print(
        f"{TRAFFIC_MODEL}.\n\n| batch | prompt | KV only | Algorithm 1 | ratio | "
        "balanced |\n" + "|---" * 6 + "|"
    )
    ratios = []
    for batch in BATCHES:
        shares: dict[Context, list[float]] = {}
        for prompt in PROMPTS:
            for context in (Context.KV, Context.HYBRID, Context.BALANCED):
                one = case.run(TRAFFIC_MODEL, batch, prompt, context)
                shares.setdefault(context, []).append(one.busy_share)
            kv, hybrid, best = (rows[-1] for rows in shares.values())
            ratios.append(hybrid / kv)
            print(
                f"| {batch} | {prompt} | {kv:.1%} | {hybrid:.1%} | {hybrid / kv:.1f} | "
                f"{best:.1%} |"
            )
        if batch in PAPER_BUSY:
            for context, paper in zip(
                (Context.KV, Context.HYBRID), PAPER_BUSY[batch], strict=True
            ):
                mean = sum(shares[context]) / len(shares[context])
                comparison.add(
                    f"busy, {context.value}, batch {batch} (Fig. 14)", paper, mean
                )
    mean_ratio = sum(ratios) / len(ratios)
    comparison.add("busy, hybrid / KV only (Fig. 14)", PAPER_BUSY_RATIO, mean_ratio)
    return {"busy_ratio": mean_ratio}


def figure_15(case: Case, comparison: Comparison) -> dict[str, Any]:
    """Print what each step adds, and the ratios; return them."""
    prompt = max(PROMPTS)
    print(f"\n## Figure 15: over ACT only, batch {max(BATCHES)}, prompts of {prompt}\n")
    print(
        "| model | 1:1 | Algorithm 1 | balanced | KV:ACT of host memory, Algorithm 1 | "
        "with the device's ACT | KV:ACT, balanced |\n" + "|---" * 7 + "|"
    )
    kv_per_act = {}
    evens = []
    for model in MODELS:
        runs = {c: case.run(model, max(BATCHES), prompt, c) for c in Context}
        base = runs[Context.ACT].tokens_per_s
        even, hybrid, best = (
            runs[c].tokens_per_s / base
            for c in (Context.EVEN, Context.HYBRID, Context.BALANCED)
        )
        evens.append(even)
        found, fitted = runs[Context.HYBRID].ratio, runs[Context.BALANCED].ratio
        kv_per_act[model] = found.kv / found.act
        # Pages that the device could hold; a batch as large as this one fills them.
        both = found.kv / (found.act + runs[Context.HYBRID].device_act)
        print(
            f"| {model} | {even:.2f} | {hybrid:.2f} | {best:.2f} | "
            f"{kv_per_act[model]:.2f} | {both:.2f} | {fitted.kv / fitted.act:.2f} |"
        )
        if model in PAPER_EVEN:
            comparison.add(
                f"1:1 / ACT only, {model} (Fig. 15)", PAPER_EVEN[model], even
            )
        if model in PAPER_POLICY:
            comparison.add(
                f"policies / ACT only, {model} (Fig. 15)", PAPER_POLICY[model], hybrid
            )
    for model, paper in PAPER_KV_PER_ACT.items():
        comparison.add(f"KV:ACT, {model} (sec. 5.5)", paper, kv_per_act[model])
    return {"kv_per_act": kv_per_act, "even_vs_act_only": geomean(evens)}


def sensitivity(case: Case) -> None:
    """Print what the assumed sizes and shares decide."""
    cases = {"as above": case}
    for share in (0.65, 0.75, 0.9):
        fast = replace(case.hardware, compute_share=share)
        cases[f"{share:.0%} of the peak"] = replace(case, hardware=fast)
    free = replace(case.hardware, compute_share=1_000.0)
    cases["products take no time"] = replace(case, hardware=free)
    for share in (0.05, 0.2):
        cases[f"{share:.0%} for buffers"] = replace(case, buffer_share=share)
    print("\n## What the assumptions decide\n")
    print(
        "| | hybrid / KV only | hybrid / ACT only | ACT / KV only | "
        "balanced / KV only | KV:ACT OPT-30B | OPT-66B | "
        "Fig. 15 OPT-30B | OPT-66B |\n" + "|---" * 9 + "|"
    )
    contexts = (Context.KV, Context.ACT, Context.HYBRID, Context.BALANCED)
    for name, one in cases.items():
        speeds = one.speeds(contexts)
        rows = [speeds[model, max(PROMPTS)] for model in PAPER_POLICY]
        ratios = [
            one.run(model, max(BATCHES), max(PROMPTS), Context.HYBRID).ratio
            for model in PAPER_KV_PER_ACT
        ]
        print(
            f"| {name} | {gain(speeds, Context.KV):.2f} | "
            f"{gain(speeds, Context.ACT):.2f} | "
            f"{gain(speeds, Context.KV, Context.ACT):.2f} | "
            f"{gain(speeds, Context.KV, Context.BALANCED):.2f} | "
            + " | ".join(
                [f"{ratio.kv / ratio.act:.2f}" for ratio in ratios]
                + [f"{row[Context.HYBRID] / row[Context.ACT]:.2f}" for row in rows]
            )
            + " |"
        )


def tables() -> dict[str, Any]:
    """Print all tables; return their figures."""
    case = Case(find_hardware(DEVICE))
    comparison = Comparison()
    regressions(case)
    figures = figure_12(case, comparison)
    figures |= figure_13(case, comparison)
    figures |= figure_14(case, comparison)
    figures |= figure_15(case, comparison)
    sensitivity(case)
    comparison.print()
    return {**figures, "paper": comparison.figures()}


def main() -> int:
    """Print the tables; return the exit status."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    figures = tables()
    print(json.dumps(figures))
    return 0 if figures["balanced_vs_better_at_least"] >= 1.0 - TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
