"""LayerKV's Figures 4 to 8 in the simulator: vLLM, two readings of the paper, and ours.

    python benchmarks/sim/layerkv_tables.py [8 seeds 4 5 6] [--requests 1000]

Prints Markdown, rows as soon as they are known, and the paper's words beside what they
are compared with; the last line is one JSON object. 8 stands for Figures 6, 7 and 8 of
Llama-2-7B, ``seeds`` for its peaks with other draws, 6 for Figures 6 and 7 of the other
models. docs/benchmarks/simulator/layerkv.md has the tables and what they are worth.
"""

from __future__ import annotations

import argparse
import json

import layerkv
from layerkv import SYSTEMS, LengthPoint, RatePoint, System

LLAMA, YI, LARGE = ("Llama-2-7B", 1), ("Yi-34B-200K", 2), ("Llama-3.1-70B", 4)
WIDER = ("Yi-34B-200K", 4), ("Yi-34B-200K", 8)
RATES_8 = (4.0, 5.0, 5.5, 6.0, 7.0)
RATES_6 = (1.0, 2.0, 3.0, 4.0, 5.0)
VLLM = SYSTEMS[0]
BRIEF = tuple(one for one in SYSTEMS if one.name != "stream")
NUM_SEEDS = 2
NUM_LENGTH_REQUESTS = 100
"""The paper's Figure 1 says so of its own; of Figures 4 and 5 it says nothing."""
PAPER = {
    "mean_ttft_gain": "69 at most",
    "p99_ttft_gain": "45 at most",
    "throughput": "above 0.97",
    "violations_less": "17.7 to 28.7 points",
}
"""Section 5.2.3, and 5.2.4 of Llama-2-7B."""
PAPER_LENGTHS = {
    "mean_ttft_gain": "up to an order of magnitude",
    "throughput": "nearly identical",
}
"""Section 5.2.1; 5.2.2 says 'notable' of Figure 5, and 'narrows' of the throughput."""


def lengths(models: tuple[tuple[str, int], ...]) -> dict[str, dict[str, float]]:
    """Print Figure 4, or 5: 1 request/s over context lengths."""
    names = " / ".join(one.name for one in BRIEF)
    print(f"TTFT s, TPOT ms and output tokens/s: {names}\n")
    print("| model (TP) | prompt | TTFT | TPOT | tokens/s |\n|---|---|---|---|---|")
    found: dict[str, dict[str, float]] = {}
    for model, ranks in models:
        points: dict[str, list[LengthPoint]] = {one.name: [] for one in BRIEF}
        for length in layerkv.LENGTHS:
            for system in BRIEF:
                points[system.name] += layerkv.length_sweep(
                    model,
                    ranks,
                    (length,),
                    system=system,
                    num_requests=NUM_LENGTH_REQUESTS,
                )
            row = [mine[-1] for mine in points.values()]
            print(
                f"| {model} ({ranks}) | {length} "
                f"| {' / '.join(f'{one.ttft_s:.2f}' for one in row)} "
                f"| {' / '.join(f'{one.tpot_s * 1e3:.0f}' for one in row)} "
                f"| {' / '.join(f'{one.output_tokens_per_s:.0f}' for one in row)} |",
                flush=True,
            )
        for name, mine in points.items():
            pairs = list(zip(points[VLLM.name], mine, strict=True))
            found[f"{model} ({ranks}), {name}"] = {
                "mean_ttft_gain": max(b.ttft_s / one.ttft_s for b, one in pairs),
                "throughput": min(
                    one.output_tokens_per_s / b.output_tokens_per_s for b, one in pairs
                ),
            }
    return {name: one for name, one in found.items() if not name.endswith(VLLM.name)}


def rates(
    model: tuple[str, int],
    systems: tuple[System, ...],
    grid: tuple[float, ...],
    num_requests: int,
    seed: int = 0,
    *,
    quiet: bool = False,
) -> dict[str, dict[str, float]]:
    """Print Figures 6 to 8: ShareGPT-like lengths over request rates."""
    if not quiet:
        print(
            "| requests/s | system | TTFT s | gain | P99 TTFT s | gain | TPOT s "
            "| violations | tokens/s | of vLLM's |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|")
    found: dict[str, dict[float, RatePoint]] = {one.name: {} for one in systems}
    for rate in grid:
        for system in systems:
            one = layerkv.figure_6(
                num_requests,
                seed,
                system=system,
                model_name=model[0],
                ranks=model[1],
                rates=(rate,),
            )[0]
            found[system.name][rate] = one
            base = found[VLLM.name][rate]
            if quiet:
                continue
            print(
                f"| {rate:g} | {system.name} | {one.ttft_s:.3f} "
                f"| {base.ttft_s / one.ttft_s:.1f} | {one.ttft_p99_s:.2f} "
                f"| {base.ttft_p99_s / one.ttft_p99_s:.1f} | {one.tpot_s:.3f} "
                f"| {one.violations:.1%} | {one.output_tokens_per_s:.0f} "
                f"| {one.output_tokens_per_s / base.output_tokens_per_s:.3f} |",
                flush=True,
            )
    return peaks(found)


def peaks(found: dict[str, dict[float, RatePoint]]) -> dict[str, dict[str, float]]:
    """Return the largest gains over vLLM of each system, and its least throughput."""
    base = found[VLLM.name]
    return {
        name: {
            "mean_ttft_gain": max(base[r].ttft_s / p.ttft_s for r, p in points.items()),
            "p99_ttft_gain": max(
                base[r].ttft_p99_s / p.ttft_p99_s for r, p in points.items()
            ),
            "throughput": min(
                p.output_tokens_per_s / base[r].output_tokens_per_s
                for r, p in points.items()
            ),
            "violations_less": 100.0
            * max(base[r].violations - p.violations for r, p in points.items()),
        }
        for name, points in found.items()
        if name != VLLM.name
    }


def beside(
    paper: dict[str, str], ours: dict[str, dict[str, float]], what: str = ""
) -> None:
    """Print what the paper says beside what was found."""
    print(
        f"\n| {what or 'at most (throughput: at least)'} | paper | {' | '.join(ours)} |"
    )
    print("|---|---|" + "---|" * len(ours))
    for name, said in paper.items():
        values = [f"{one[name]:.3g}" for one in ours.values() if name in one]
        if values:
            print(f"| {name.replace('_', ' ')} | {said} | {' | '.join(values)} |")


def main() -> None:
    """Print what is asked for."""
    known = ["8", "seeds", "4", "5", "6"]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("figures", nargs="*", choices=[*known, []])
    parser.add_argument("--requests", type=int, default=1_000, help="8, seeds, 6")
    args = parser.parse_args()
    report: dict[str, object] = {"paper": PAPER, "paper_lengths": PAPER_LENGTHS}
    for figure in args.figures or known:
        print(f"\n## {figure}\n")
        if figure == "8":
            found = rates(LLAMA, SYSTEMS, RATES_8, args.requests)
            beside(PAPER, found)
        elif figure == "seeds":
            found = {}
            for seed in range(1, NUM_SEEDS + 1):
                one = rates(LLAMA, BRIEF, RATES_8, args.requests, seed, quiet=True)
                found |= {f"{name}, {seed}": peak for name, peak in one.items()}
            beside(PAPER, found)
        elif figure == "6":
            found = {}
            for model in (YI, LARGE):
                print(f"\n{model[0]} on {model[1]}\n")
                one = rates(model, BRIEF, RATES_6, args.requests // 2)
                found |= {f"{model[0]}, {name}": peak for name, peak in one.items()}
            beside({k: PAPER[k] for k in list(PAPER)[:3]}, found)
        else:
            found = lengths((LLAMA, YI, LARGE) if figure == "4" else WIDER)
            beside(PAPER_LENGTHS, found)
        report[figure] = found
    print(json.dumps(report))


if __name__ == "__main__":
    main()
