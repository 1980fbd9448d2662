"""Orders of the waiting queue against fcfs, in the simulator.

Runs every order on loads with and without real traces and prints, in Markdown, mean and
99th percentile of TTFT relative to fcfs; the last line is one JSON object. Exits with 1
where ``cost`` is more than 2 % worse than fcfs in either, on any load. ``--shakes``
runs fcfs so many times again with arrivals moved by less than a millisecond, which
shows how much of a difference is chance.

    python benchmarks/sim/orders.py [--mooncake FILE] [--weka FILE] [--only NAME]
        [--orders cost,car] [--scale 0.1] [--shakes 2]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from order_cases import Case, shaken, synthetic_cases, trace_cases

from sgl_tiered.policies.order.registry import ORDERS
from sgl_tiered.sim.server import simulate

ALLOWED = 1.02


@dataclass(frozen=True)
class Figures:
    """One order on one load, all seeds together; seconds."""

    mean_s: float
    p50_s: float
    p99_s: float
    requests_per_s: float
    device_share: float


def run(case: Case, order: str, shake: int = 0) -> Figures:
    """Simulate a load under one order; ``shake`` numbers small changes of arrivals."""
    ttft_s: list[float] = []
    seconds = tokens = on_device = 0.0
    for seed in range(case.num_seeds):
        config, load = case.make(seed)
        if shake:
            load = shaken(load, shake)
        scheduler = replace(config.scheduler, order=order)
        result = simulate(replace(config, scheduler=scheduler), load)
        ran = [record for record in result.records if not record.aborted]
        ttft_s += [record.ttft_s for record in ran]
        seconds += result.end_s
        tokens += sum(record.num_prompt_tokens for record in ran)
        on_device += sum(record.device_tokens for record in ran)
    times = np.array(ttft_s)
    p50, p99 = np.percentile(times, [50, 99]).tolist()
    return Figures(
        float(times.mean()), p50, p99, len(times) / seconds, on_device / tokens
    )


def table(
    cases: Sequence[Case], orders: Sequence[str], num_shakes: int
) -> dict[str, object]:
    """Print one table per load; return the figures that are asked for."""
    runs = [(order, order, 0) for order in orders if order != "fcfs"]
    runs += [(f"fcfs, shaken {n}", "fcfs", n) for n in range(1, num_shakes + 1)]
    mean_ratio: dict[str, dict[str, float]] = {}
    p99_ratio: dict[str, dict[str, float]] = {}
    for case in cases:
        started_s = time.process_time()
        base = run(case, "fcfs")
        chosen = "parameters chosen on it" if case.chosen_on else "not used to choose"
        print(f"\n### {case.name} ({chosen})\n")
        print(
            f"fcfs: mean {base.mean_s:.3f} s, p50 {base.p50_s:.3f} s, p99 "
            f"{base.p99_s:.3f} s, {base.requests_per_s:.2f} requests/s, "
            f"{base.device_share:.1%} of prompt tokens on the device\n"
        )
        print("| order | mean TTFT | p50 | p99 | requests/s | from the device |")
        print("|---|---|---|---|---|---|")
        for title, order, shake in runs:
            found = run(case, order, shake)
            mean_ratio.setdefault(title, {})[case.name] = found.mean_s / base.mean_s
            p99_ratio.setdefault(title, {})[case.name] = found.p99_s / base.p99_s
            print(
                f"| {title} | {found.mean_s / base.mean_s:.3f} | "
                f"{found.p50_s / base.p50_s:.3f} | {found.p99_s / base.p99_s:.3f} | "
                f"{found.requests_per_s / base.requests_per_s:.3f} | "
                f"{found.device_share:.1%} |"
            )
        print(f"\n({time.process_time() - started_s:.0f} s of one core)", flush=True)
    cost_mean, cost_p99 = mean_ratio.get("cost", {}), p99_ratio.get("cost", {})
    return {
        "worst_mean_ttft_vs_fcfs": max(cost_mean.values(), default=None),
        "worst_p99_ttft_vs_fcfs": max(cost_p99.values(), default=None),
        "cost_mean_ttft_gain": {n: 1.0 - ratio for n, ratio in cost_mean.items()},
        "mixes_tiers": [case.name for case in cases if case.mixes_tiers],
        "mean_ttft_vs_fcfs": mean_ratio,
        "p99_ttft_vs_fcfs": p99_ratio,
    }


def main() -> int:
    """Print the tables; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mooncake", type=Path)
    parser.add_argument("--weka", type=Path)
    parser.add_argument("--only", default="", help="loads whose names contain this")
    parser.add_argument("--orders", default=",".join(ORDERS))
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--shakes", type=int, default=0)
    args = parser.parse_args()
    cases = synthetic_cases(args.scale)
    cases += trace_cases(args.mooncake, args.weka, args.scale)
    chosen = [case for case in cases if args.only in case.name]
    figures = table(chosen, args.orders.split(","), args.shakes)
    print(json.dumps(figures))
    worst = [figures["worst_mean_ttft_vs_fcfs"], figures["worst_p99_ttft_vs_fcfs"]]
    return int(any(isinstance(w, float) and w > ALLOWED for w in worst))


if __name__ == "__main__":
    sys.exit(main())
