"""The papers' figures from the simulator: the paper's value, ours, and the ratio.

    python benchmarks/sim/figures.py [layerkv-1 layerkv-4 layerkv-6 berkeley car-5 \
        hybridserve]

prints Markdown. Hardware is by data sheet, so shapes are meant, not milliseconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import pairwise

import activations
import berkeley
import car
import layerkv
import numpy as np

PAPER_CROSSING_TOKENS = 1_024
"""LayerKV, section 1: from here on queueing is the dominant part of TTFT."""
PAPER_BREAK_PER_S = 6.0
"""LayerKV, section 5.2.4: vLLM's violations become significant at this rate."""
PAPER_SPEEDUP = 2.0
"""Berkeley report, abstract: throughput over vLLM's."""
PAPER_REDUCTION = {"OPT-13B": 0.6}
PAPER_REDUCTION_OTHERS = 0.3
"""CaR, section IV.A: long contexts; 'even exceeds 60 %' for OPT-13B."""


def layerkv_1() -> None:
    """Print Figure 1."""
    points = layerkv.length_sweep("Llama-2-7B", 1)
    print("| prompt | TTFT s | queue s | prefill s | queue share | TPOT s |")
    print("|---|---|---|---|---|---|")
    for p in points:
        share = p.queue_s / p.ttft_s
        print(
            f"| {p.prompt_tokens} | {p.ttft_s:.3f} | {p.queue_s:.3f} | "
            f"{p.prefill_s:.3f} | {share:.0%} | {p.tpot_s:.4f} |"
        )
    fine = layerkv.length_sweep(
        "Llama-2-7B", 1, (*range(512, 2_048, 64), 15_872), num_requests=100
    )
    ours = next(p.prompt_tokens for p in fine if p.queue_s > p.prefill_s)
    print(
        f"\nQueueing dominates from: paper {PAPER_CROSSING_TOKENS}, ours {ours}, "
        f"ratio {ours / PAPER_CROSSING_TOKENS:.2f}."
    )
    long = [p for p in points if p.prompt_tokens >= PAPER_CROSSING_TOKENS]
    lengths = np.log([p.prompt_tokens for p in long])
    growth = np.polyfit(lengths, np.log([p.ttft_s for p in long]), 1)[0]
    slow = np.polyfit(lengths, np.log([p.tpot_s for p in long]), 1)[0]
    print(
        f"Exponent of TTFT over length from there on: paper 2 (quadratic, in words), "
        f"ours {growth:.2f}; of TPOT: paper 1, ours {slow:.2f}."
    )


def layerkv_4() -> None:
    """Print the vLLM side of Figure 4."""
    systems = (("Llama-2-7B", 1), ("Yi-34B-200K", 2), ("Llama-3.1-70B", 4))
    print("| model (TP) | prompt | TTFT s | output tokens/s |")
    print("|---|---|---|---|")
    for model, ranks in systems:
        points = layerkv.length_sweep(model, ranks)
        for p in points:
            print(
                f"| {model} ({ranks}) | {p.prompt_tokens} | {p.ttft_s:.2f} | "
                f"{p.output_tokens_per_s:.0f} |"
            )
        rises = all(a.ttft_s < b.ttft_s for a, b in pairwise(points))
        speeds = [p.output_tokens_per_s for p in points]
        falls = all(a >= 0.99 * b for a, b in pairwise(speeds))
        print(f"| {model} ({ranks}) | shape | rises: {rises} | falls: {falls} |")


def layerkv_6() -> None:
    """Print the vLLM side of Figure 6, with Figure 8's violations."""
    points = layerkv.figure_6()
    print("| requests/s | TTFT s | p99 TTFT s | SLO violations | output tokens/s |")
    print("|---|---|---|---|---|")
    for p in points:
        print(
            f"| {p.rate_per_s:g} | {p.ttft_s:.3f} | {p.ttft_p99_s:.2f} | "
            f"{p.violations:.1%} | {p.output_tokens_per_s:.0f} |"
        )
    broken = [p.rate_per_s for p in points if p.violations > 0.1]
    ours = broken[0] if broken else float("nan")
    print(
        f"\nMore than 10 % violations from: paper {PAPER_BREAK_PER_S:g}/s, "
        f"ours {ours:g}/s, ratio {ours / PAPER_BREAK_PER_S:.2f}."
    )


def berkeley_throughput() -> None:
    """Print the text-analysis throughput."""
    print("| prefix | order | system | requests/s | over vLLM | miss rate |")
    print("|---|---|---|---|---|---|")
    for prefix in (512, 1_024):
        for order in ("fcfs", "fpf"):
            points = berkeley.figure(prefix, order)
            base = points[0].requests_per_s
            for p in points:
                print(
                    f"| {prefix} | {order} | {p.system} | {p.requests_per_s:.2f} | "
                    f"{p.requests_per_s / base:.2f} | {p.miss_rate:.1%} |"
                )
            speedup = points[-1].requests_per_s / base
            print(
                f"| {prefix} | {order} | all tiers | paper {PAPER_SPEEDUP:g} x | "
                f"ours {speedup:.2f} x | ratio {speedup / PAPER_SPEEDUP:.2f} |"
            )


def car_5() -> None:
    """Print reload against recompute."""
    print(
        "| model | tokens | recompute s | reload s | cut, layer-wise | cut, serial | "
        "paper | ratio (serial) | link at which serial cuts what the paper says |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for p in car.figure_5():
        paper = PAPER_REDUCTION.get(p.model, PAPER_REDUCTION_OTHERS)
        link = car.break_even_bytes_per_s(p, paper) / 1e9
        print(
            f"| {p.model} | {p.num_tokens} | {p.recompute_s:.4f} | {p.reload_s:.4f} | "
            f"{p.reduction:.0%} | {p.serial_reduction:.0%} | {paper:.0%} | "
            f"{p.serial_reduction / paper:.2f} | {link:.1f} GB/s |"
        )


def hybridserve() -> None:
    """Print Figures 12 to 15."""
    activations.tables()


FIGURES: dict[str, Callable[[], None]] = {
    "layerkv-1": layerkv_1,
    "layerkv-4": layerkv_4,
    "layerkv-6": layerkv_6,
    "berkeley": berkeley_throughput,
    "car-5": car_5,
    "hybridserve": hybridserve,
}


def main() -> None:
    """Print the figures that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=" ".join(FIGURES))
    for name in parser.parse_args().figures or FIGURES:
        if name not in FIGURES:
            parser.error(f"{name!r} is none of {', '.join(FIGURES)}")
        started_s = time.process_time()
        print(f"\n## {name}\n")
        FIGURES[name]()
        print(f"\n({time.process_time() - started_s:.1f} s of one core)")


if __name__ == "__main__":
    main()
