"""MemServe's Figures 8, 13 and 14 in the simulator, the paper's figure beside ours.

Llama-2-13B on two H800 per instance, by data sheet times a share (``sim/hardware.py``).
The paper prints neither rates nor lengths for Figures 8 and 14, so that workloads are
made by its words (``WORKLOADS``) and the rate is swept as a share of what colocated
instances without a cache can take. Equal instance numbers, as in the paper.

    python benchmarks/sim/memserve.py [8 13 14] [--only ShareGPT] [--requests 200]
        [--overhead-ms 2] [--markdown FILE]

Prints Markdown, and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from cluster_model import (
    COLOCATED,
    DECODE,
    PREFILL,
    ClusterConfig,
    ClusterRequest,
    ClusterResult,
    simulate_cluster,
)

from sgl_tiered.policies.routing.registry import make_routing
from sgl_tiered.sim.hardware import LinkSpeed, find_hardware
from sgl_tiered.sim.models import find_model
from sgl_tiered.sim.times import DeviceTimes, times_of_profile

PAGE = 16
HARDWARE, MODEL, TENSOR_PARALLEL = find_hardware("H800"), find_model("Llama-2-13B"), 2
MEMORY_SHARE = 0.9
LINK = LinkSpeed(200e9, 1e-3, "NVLink, one direction; 1 ms a request for NCCL's calls")
WINDOW = 4096
VOCAB = 32_000
LOADS = (0.3, 0.6, 0.9)
"""Shares of the rate at which colocated instances without a cache are just full."""
Rng = np.random.Generator


@dataclass(frozen=True)
class Turn:
    """New tokens of a prompt, and its answer."""

    new: int
    answer: int


@dataclass(frozen=True)
class Workload:
    """How sessions are drawn.

    Attributes:
        front: tokens that begin a session's first prompt, before its first turn.
        is_shared: the front is the same for all sessions.
        turns: draws a session's turns.
        keeps_answers: prompts contain the former answers.
    """

    front: int
    is_shared: bool
    keeps_answers: bool
    turns: Callable[[Rng], list[Turn]]


def _chat(rng: Rng) -> list[Turn]:
    """Multi-turn chat; ShareGPT: median user turn 26 tokens, some of hundreds."""
    num = int(rng.geometric(1 / 4.0))
    return [
        Turn(
            int(np.clip(rng.lognormal(np.log(60), 1.1), 4, 1000)),
            int(np.clip(rng.lognormal(np.log(300), 0.6), 8, 900)),
        )
        for _ in range(num)
    ]


def _questions(rng: Rng) -> list[Turn]:
    """Five questions on 1,000 tokens of a document; answers as in LooGLE's sample."""
    return [
        Turn(
            int(rng.integers(20, 120)),
            int(np.clip(rng.lognormal(np.log(19), 0.5), 4, 96)),
        )
        for _ in range(5)
    ]


def _agent(rng: Rng) -> list[Turn]:
    """Thought, action, observation, behind two examples; each step sees all before."""
    num = int(rng.integers(2, 7))
    return [
        Turn(int(rng.integers(30, 150)), int(rng.integers(60, 200))) for _ in range(num)
    ]


WORKLOADS = {
    "ShareGPT": Workload(0, False, True, _chat),
    "LooGLE": Workload(1000, False, False, _questions),
    "ReAct": Workload(1100, True, True, _agent),
}

PAPER = {
    # Table of section 8.3, in percent: the disaggregated form over PD, and its caching
    # over itself: mean and P99 JCT, mean and P99 TTFT.
    "ShareGPT": {"over": (30.0, 42.0), "cache": (17.0, 29.0, 58.0, 45.0)},
    "LooGLE": {"over": (10.3, 10.8), "cache": (26.9, 22.5, 56.2, 45.2)},
    "ReAct": {"over": (40.8, 53.1), "cache": (26.7, 21.4, 78.5, 84.9)},
}
PAPER_FIGURE_14 = 59.0


def draw_sessions(
    workload: Workload, num_requests: int, rng: Rng, rate: float, copies: int = 1
) -> list[ClusterRequest]:
    """Return requests in the order of sending; one waits for the one before it.

    Poisson arrivals over all requests, sessions interleaved: a session's next turn gets
    a later arrival and is not sent before its former answer is there. ``copies`` of
    every session are the same prompts and answers under another name.
    """
    shared = rng.integers(0, VOCAB, workload.front).astype(np.int32)
    sessions: list[list[tuple[np.ndarray, np.ndarray]]] = []
    num_drawn = 0
    while num_drawn < num_requests:
        history = (
            shared
            if workload.is_shared
            else rng.integers(0, VOCAB, workload.front).astype(np.int32)
        )
        turns: list[tuple[np.ndarray, np.ndarray]] = []
        for turn in workload.turns(rng):
            new = rng.integers(0, VOCAB, turn.new).astype(np.int32)
            answer = rng.integers(0, VOCAB, turn.answer).astype(np.int32)
            prompt = np.concatenate([history, new])
            if len(prompt) + len(answer) > WINDOW:
                break
            turns.append((prompt, answer))
            if workload.keeps_answers:
                history = np.concatenate([prompt, answer])
        if turns:
            sessions.append(turns)
            num_drawn += len(turns)
    every = [(turns, copy) for copy in range(copies) for turns in sessions]
    # So that about eight sessions per request in flight take turns, and none is bound
    # by its own answers alone: sessions begin evenly over the time.
    total = sum(len(turns) for turns, _ in every)
    span_s = total / rate
    begins = np.sort(rng.uniform(0.0, span_s * 0.9, len(every)))
    order = rng.permutation(len(every))
    found: list[ClusterRequest] = []
    for begin_s, at in zip(begins, order.tolist(), strict=True):
        turns, copy = every[at]
        gap_s = span_s * 0.1 / len(turns)
        after, due_s = -1, float(begin_s)
        for prompt, answer in turns:
            name = f"s{at}.{copy}"
            found.append(ClusterRequest(due_s, prompt, answer, name, after))
            after = len(found) - 1
            due_s += float(rng.exponential(gap_s))
    return found


def device(overhead_s: float) -> DeviceTimes:
    """Return the times of an instance."""
    times = times_of_profile(HARDWARE, MODEL, tensor_parallel=TENSOR_PARALLEL)
    extra_s = overhead_s - 2e-3
    return replace(
        times,
        prefill_overhead_s=times.prefill_overhead_s + extra_s,
        decode_overhead_s=times.decode_overhead_s + extra_s,
    )


def config(kinds: Sequence[str], caching: int, times: DeviceTimes) -> ClusterConfig:
    """Return instances of two H800 each."""
    memory = TENSOR_PARALLEL * HARDWARE.memory_bytes * MEMORY_SHARE - MODEL.weight_bytes
    pages = int(memory // (PAGE * MODEL.kv_token_bytes))
    return ClusterConfig(
        tuple(kinds),
        times,
        pages,
        PAGE,
        PAGE * MODEL.kv_token_bytes,
        LINK,
        caching,
    )


FORMS: dict[str, tuple[tuple[str, ...], int]] = {
    "PD x2": ((COLOCATED,) * 2, 0),
    "PD-CC x2": ((COLOCATED,) * 2, 1),
    "1P1D": ((PREFILL, DECODE), 0),
    "1P1D-CC": ((PREFILL, DECODE), 3),
    "PD x3": ((COLOCATED,) * 3, 0),
    "PD-CC x3": ((COLOCATED,) * 3, 1),
    "1P2D": ((PREFILL, DECODE, DECODE), 0),
    "1P2D-CC": ((PREFILL, DECODE, DECODE), 3),
    "2P1D": ((PREFILL, PREFILL, DECODE), 0),
    "2P1D-CC": ((PREFILL, PREFILL, DECODE), 3),
}


def capacity(workload: Workload, times: DeviceTimes) -> float:
    """Return requests/s of one colocated instance without a cache, by its work alone.

    A batch of 32 decodes together, on its mean context.
    """
    requests = draw_sessions(workload, 300, np.random.default_rng(9), 1.0)
    busy_s = 0.0
    for each in requests:
        busy_s += times.prefill_s([(0, len(each.prompt))])
        context = 32 * (len(each.prompt) + len(each.answer) // 2)
        busy_s += len(each.answer) * times.decode_step_s(32, context) / 32
    return len(requests) / busy_s


def gain(better: float, base: float) -> float:
    """Return by how many percent a time is lower."""
    return 100.0 * (1.0 - better / base)


def figures(result: ClusterResult) -> tuple[float, float, float, float, float, float]:
    """Return mean and P99 of TTFT, JCT and TPOT, in milliseconds."""
    rows = []
    for values in (result.ttft_s, result.jct_s, result.tpot_s):
        values = values[~np.isnan(values)] * 1e3
        rows += [float(values.mean()), float(np.percentile(values, 99))]
    return (rows[0], rows[1], rows[2], rows[3], rows[4], rows[5])


def figure_8(
    names: Sequence[str], num_requests: int, times: DeviceTimes, out: list[str]
) -> dict[str, object]:
    """Ten forms on some workloads at three loads."""
    told: dict[str, object] = {}
    out += ["## Figure 8: JCT, TTFT and TPOT", ""]
    head = (
        "| workload | load | req/s per instance | form | TTFT ms | P99 | JCT ms | P99 "
    )
    out += [head + "| TPOT ms | P99 | cached |", "|---" * 11 + "|"]
    compared: list[str] = []
    for name in names:
        workload = WORKLOADS[name]
        most = capacity(workload, times)
        for load in LOADS:
            found: dict[str, tuple[float, ...]] = {}
            for form, (kinds, caching) in FORMS.items():
                rng = np.random.default_rng(1)
                rate = load * most * len(kinds)
                requests = draw_sessions(workload, num_requests, rng, rate)
                made = config(kinds, caching, times)
                result = simulate_cluster(made, requests, make_routing("prompt-tree"))
                found[form] = figures(result)
                cached = result.cached_tokens.sum() / sum(
                    len(each.prompt) for each in requests
                )
                cells = " | ".join(f"{value:.1f}" for value in found[form])
                row = f"| {name} | {load:g} | {load * most:.1f} | {form} | {cells}"
                out.append(f"{row} | {100 * cached:.0f} % |")
            told[f"{name} {load:g}"] = found
            compared += _compared(name, load, found)
    out += ["", "Lower by how much, in percent (negative: higher):", ""]
    out += ["| workload | load | what | mean JCT | P99 JCT | mean TTFT | P99 TTFT |"]
    out += ["|---" * 7 + "|", *compared, ""]
    return told


def _compared(name: str, load: float, found: dict[str, tuple[float, ...]]) -> list[str]:
    rows = []
    if load == LOADS[0]:
        over, cache = PAPER[name]["over"], PAPER[name]["cache"]
        rows.append(
            f"| {name} | paper | disaggregated over PD | {over[0]:g} "
            f"| {over[1]:g} | | |"
        )
        rows.append(
            f"| {name} | paper | caching over none | "
            + " | ".join(f"{value:g}" for value in cache)
            + " |"
        )
    for form in ("1P1D", "1P2D", "2P1D"):
        base = found["PD x2" if form == "1P1D" else "PD x3"]
        for what, new, old in (
            (f"{form} over PD", found[form], base),
            (f"{form}-CC over {form}", found[f"{form}-CC"], found[form]),
        ):
            gains = [gain(new[at], old[at]) for at in (2, 3, 0, 1)]
            cells = " | ".join(f"{value:.1f}" for value in gains)
            rows.append(f"| {name} | {load:g} | {what} | {cells} |")
    return rows


def figure_13(times: DeviceTimes, out: list[str]) -> dict[str, object]:
    """TTFT with a cached share over that without, by length, batch and place."""
    ratios = (0.1, 0.25, 0.5, 0.75, 0.9)
    lengths, batches = (128, 512, 1024, 2048, 4096), (1, 4, 16)
    told: dict[str, object] = {}

    def ttft_s(length: int, ratio: float, batch: int, place: str, page: int) -> float:
        cached = int(length * ratio) // page * page
        pass_s = times.prefill_s([(cached, length - cached)] * batch)
        if place == "host":
            num_bytes = batch * cached * MODEL.kv_token_bytes / TENSOR_PARALLEL
            # Each of the two devices has a host link; a call per block, as the paper.
            calls_s = batch * (cached / page) * 2e-6
            pass_s += num_bytes / HARDWARE.host.bytes_per_s + calls_s
        return pass_s

    def table(title: str, rows: list[tuple[str, tuple[int, int, str, int]]]) -> None:
        out.extend(["", f"### {title}", ""])
        out.append("| | " + " | ".join(f"{ratio:g}" for ratio in ratios) + " |")
        out.append("|---" * (len(ratios) + 1) + "|")
        for label, (length, batch, place, page) in rows:
            base_s = ttft_s(length, 0.0, batch, "device", page)
            gains = [
                gain(ttft_s(length, ratio, batch, place, page), base_s)
                for ratio in ratios
            ]
            told[f"{title}: {label}"] = gains
            out.append(f"| {label} | " + " | ".join(f"{g:.0f}" for g in gains) + " |")

    out += ["## Figure 13: TTFT, percent lower by the share that is cached"]
    table("(a) prompt length", [(f"{n} tokens", (n, 1, "device", 16)) for n in lengths])
    table(
        "(b) batch size, 512 tokens each",
        [(f"batch {n}", (512, n, "device", 16)) for n in batches],
    )
    table(
        "(c) block size, 1,024 tokens",
        [(f"{n} tokens a block", (1024, 1, "host", n)) for n in (8, 16, 32, 128)],
    )
    table(
        "(d) where it is cached",
        [
            (f"{place}, {n} tokens", (n, 1, place, 16))
            for n in (512, 2048)
            for place in ("device", "host")
        ],
    )
    out.append("")
    return told


def figure_14(times: DeviceTimes, out: list[str]) -> dict[str, object]:
    """3P1D, 80 LooGLE sessions of about three questions, each 1 to 4 times."""
    out += ["## Figure 14: policies of the global scheduler (3P1D, LooGLE)", ""]
    out += [
        "| load | share ratio | policy | mean TTFT ms | P99 | cached "
        "| P99 under session |"
    ]
    out += ["|---" * 7 + "|"]
    workload = replace(WORKLOADS["LooGLE"], turns=lambda rng: _questions(rng)[:3])
    most = capacity(workload, times)
    told: dict[str, object] = {}
    kinds = (PREFILL, PREFILL, PREFILL, DECODE)
    for load in LOADS:
        for copies in (1, 2, 3, 4):
            p99: dict[str, float] = {}
            for policy in ("least-load", "session", "prompt-tree"):
                rng = np.random.default_rng(2)
                rate = load * most * len(kinds)
                requests = draw_sessions(workload, 240, rng, rate, copies)
                made = config(kinds, 3, times)
                result = simulate_cluster(made, requests, make_routing(policy))
                ttft, p99[policy], *_ = figures(result)
                share = result.cached_tokens.sum() / sum(
                    len(r.prompt) for r in requests
                )
                below = ""
                if policy == "prompt-tree":
                    below = f"{gain(p99[policy], p99['session']):.1f} %"
                out.append(
                    f"| {load:g} | {copies} | {policy} | {ttft:.1f} "
                    f"| {p99[policy]:.1f} | {100 * share:.0f} % | {below} |"
                )
            told[f"{load:g} x{copies}"] = p99
    out += [
        "",
        f"Paper: {PAPER_FIGURE_14:g} % lower P99 TTFT than session routing.",
        "",
    ]
    return told


def main() -> None:
    """Print the tables that were asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("figures", nargs="*", type=int, default=[8, 13, 14])
    parser.add_argument("--requests", type=int, default=200, help="of Figure 8's runs")
    parser.add_argument("--only", action="append", choices=list(WORKLOADS))
    parser.add_argument("--overhead-ms", type=float, default=2.0)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    times, out = device(args.overhead_ms * 1e-3), list[str]()
    told: dict[str, object] = {}
    if 8 in args.figures:
        told["8"] = figure_8(args.only or list(WORKLOADS), args.requests, times, out)
    if 13 in args.figures:
        told["13"] = figure_13(times, out)
    if 14 in args.figures:
        told["14"] = figure_14(times, out)
    text = "\n".join(out)
    if args.markdown is not None:
        args.markdown.write_text(text)
    print(text)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
