"""LayerKV's Figures 4 to 8 in the simulator: vLLM, the paper's form, and ours.

    python benchmarks/sim/layerkv_tables.py [8 4 5 6] [--requests 1000]

Prints Markdown, rows as soon as they are known; the last line is one JSON object. 8
stands for Figures 6, 7 and 8 of Llama-2-7B, 6 for Figures 6 and 7 of the other models.
LAYERKV.md has the tables and what they are worth.
"""

from __future__ import annotations

import argparse
import json

import layerkv
from layerkv import SYSTEMS, RatePoint

LLAMA, YI, LARGE = ("Llama-2-7B", 1), ("Yi-34B-200K", 2), ("Llama-3.1-70B", 4)
RATES_8 = (4.0, 5.0, 5.5, 6.0, 7.0, 8.0)
RATES_6 = (1.0, 2.0, 3.0, 4.0)
BRIEF = tuple(one for one in SYSTEMS if one.name in ("vLLM", "stream", "pause"))
PAPER = {"mean_ttft_gain": 69.0, "p99_ttft_gain": 45.0, "throughput_loss": 0.03}
"""Section 5.2.3; violations are 17.7 to 28.7 points lower by section 5.2.4."""


def lengths(systems: tuple[tuple[str, int], ...]) -> None:
    """Print Figure 4, or 5: 1 request/s over context lengths."""
    print("| model (TP) | prompt | system | TTFT s | vLLM's / it | TPOT s | tokens/s |")
    print("|---|---|---|---|---|---|---|")
    for model, ranks in systems:
        sweeps = [layerkv.length_sweep(model, ranks, system=one) for one in BRIEF]
        for points in zip(*sweeps, strict=True):
            for system, point in zip(BRIEF, points, strict=True):
                print(
                    f"| {model} ({ranks}) | {point.prompt_tokens} | {system.name} "
                    f"| {point.ttft_s:.2f} | {points[0].ttft_s / point.ttft_s:.1f} "
                    f"| {point.tpot_s:.3f} | {point.output_tokens_per_s:.0f} |",
                    flush=True,
                )


def rates(
    model: tuple[str, int],
    systems: tuple[layerkv.System, ...],
    grid: tuple[float, ...],
    num_requests: int,
) -> dict[str, dict[float, RatePoint]]:
    """Print Figures 6 to 8: ShareGPT-like lengths over request rates."""
    print(
        "| requests/s | system | TTFT s | gain | P99 TTFT s | gain | TPOT s "
        "| violations | tokens/s | of vLLM's |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    found: dict[str, dict[float, RatePoint]] = {one.name: {} for one in systems}
    for rate in grid:
        base: RatePoint | None = None
        for system in systems:
            one = layerkv.figure_6(
                num_requests,
                system=system,
                model_name=model[0],
                ranks=model[1],
                rates=(rate,),
            )[0]
            base = base or one
            found[system.name][rate] = one
            print(
                f"| {rate:g} | {system.name} | {one.ttft_s:.3f} "
                f"| {base.ttft_s / one.ttft_s:.1f} | {one.ttft_p99_s:.2f} "
                f"| {base.ttft_p99_s / one.ttft_p99_s:.1f} | {one.tpot_s:.3f} "
                f"| {one.violations:.1%} | {one.output_tokens_per_s:.0f} "
                f"| {one.output_tokens_per_s / base.output_tokens_per_s:.3f} |",
                flush=True,
            )
    return found


def peaks(found: dict[str, dict[float, RatePoint]]) -> dict[str, dict[str, float]]:
    """Return the largest gains over vLLM of each system."""
    base = found["vLLM"]
    return {
        name: {
            "mean_ttft_gain": max(base[r].ttft_s / p.ttft_s for r, p in points.items()),
            "p99_ttft_gain": max(
                base[r].ttft_p99_s / p.ttft_p99_s for r, p in points.items()
            ),
            "least_throughput": min(
                p.output_tokens_per_s / base[r].output_tokens_per_s
                for r, p in points.items()
            ),
            "violations_less": max(
                base[r].violations - p.violations for r, p in points.items()
            ),
        }
        for name, points in found.items()
        if name != "vLLM"
    }


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("figures", nargs="*", choices=["8", "4", "5", "6", []])
    parser.add_argument("--requests", type=int, default=1_000)
    args = parser.parse_args()
    report: dict[str, object] = {"paper": PAPER}
    for figure in args.figures or ["8", "4", "5", "6"]:
        print(f"\n## {figure}\n")
        if figure == "8":
            found = rates(LLAMA, SYSTEMS, RATES_8, args.requests)
            report["sharegpt"] = peaks(found)
        elif figure == "4":
            lengths((LLAMA, YI, LARGE))
        elif figure == "5":
            lengths((("Yi-34B-200K", 4), ("Yi-34B-200K", 8)))
        else:
            for model in (YI, LARGE):
                print(f"\n{model[0]} on {model[1]}\n")
                found = rates(model, BRIEF, RATES_6, args.requests // 2)
                report[model[0]] = peaks(found)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
