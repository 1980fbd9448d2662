"""SLO admission off and on in the simulator: violations and throughput over rates.

Lengths come from traces (ShareGPT and arXiv lengths, Azure's conversation and code
traces), the machine is modelled. The targets are LayerKV's (Figure 8: 3 s and 200 ms)
or multiples of what one request alone takes: 30 times for TTFT, 8 times for TPOT, each
of the median request. Arrivals are Poisson for lengths without times, else the trace's
own, stretched to the rate. Prompts share nothing.

    python benchmarks/sim/slo.py sharegpt_8k_llama2_lengths.csv.gz \
        azure_llm_2023_conv.csv.gz azure_llm_2023_code.csv.gz [--markdown FILE]

Prints Markdown, and one JSON object as the last line. The rate that the object speaks
of is, per trace, the one at which the server without admission violates nearest to 45 %
of its requests (between 30 and 60 % if there is one).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from sgl_tiered_workloads.traces.azure import read_azure
from sgl_tiered_workloads.traces.base import Trace
from sgl_tiered_workloads.traces.lengths import read_sharegpt_lengths

from sgl_tiered.policies.admission.registry import ADMISSIONS
from sgl_tiered.sim.config import SchedulerConfig, ServerConfig
from sgl_tiered.sim.hardware import find_hardware
from sgl_tiered.sim.models import find_model
from sgl_tiered.sim.records import SimResult
from sgl_tiered.sim.requests import SimWorkload, WorkloadBuilder
from sgl_tiered.sim.server import simulate
from sgl_tiered.sim.times import times_of_profile

PAGE = 16
MAX_TOKENS = 8_192
"""Prompt and answer together; longer requests are left out."""
MEMORY_SHARE = 0.88
TTFT_FACTOR, TPOT_FACTOR = 30.0, 8.0
LAYERKV = (3.0, 0.2)
RATES = (2.0, 4.0, 8.0, 12.0, 16.0, 20.0, 24.0)
WANTED = (0.30, 0.60)
MIDDLE = 0.45
WORTH_A_LINE = 0.02


@dataclass(frozen=True)
class Lengths:
    """Requests of a trace: token counts, and arrivals at a mean rate of 1/s."""

    name: str
    prompts: npt.NDArray[np.int64]
    outputs: npt.NDArray[np.int64]
    arrivals_s: npt.NDArray[np.float64]

    def workload(self, rate: float) -> SimWorkload:
        """Return them at a rate."""
        builder = WorkloadBuilder(PAGE)
        for at_s, prompt, output in zip(
            self.arrivals_s / rate, self.prompts, self.outputs, strict=True
        ):
            builder.add(float(at_s), int(prompt), int(output))
        return builder.build(f"{self.name} at {rate:g}/s")


@dataclass(frozen=True)
class Outcome:
    """One run, as shares of all requests and tokens per second."""

    ttft: float
    tpot: float
    either: float
    tokens_per_s: float
    mean_ttft_s: float
    p99_ttft_s: float
    mean_tpot_s: float


def read_lengths(path: Path, num: int, seed: int) -> Lengths:
    """Read the first requests of a trace that fit the model's context."""
    is_azure = "azure" in path.name
    trace: Trace = read_azure(path) if is_azure else read_sharegpt_lengths(path)
    kept = [
        request
        for request in trace.requests
        if request.num_prompt_tokens + request.num_output_tokens <= MAX_TOKENS
    ][:num]
    if is_azure:
        times = np.array([request.arrival_s for request in kept])
        times = (times - times[0]) * (len(times) / max(times[-1] - times[0], 1e-9))
    else:
        times = np.cumsum(np.random.default_rng(seed).exponential(1.0, len(kept)))
    return Lengths(
        path.name.split(".")[0],
        np.array([request.num_prompt_tokens for request in kept]),
        np.array([request.num_output_tokens for request in kept]),
        times,
    )


def server(
    policy: str, ttft_s: float, tpot_s: float, predictor: str = "online"
) -> ServerConfig:
    """Return SGLang with Llama-3.1-8B on one H800, without reuse."""
    hardware, model = find_hardware("H800"), find_model("Llama-3.1-8B")
    pool_bytes = hardware.memory_bytes * MEMORY_SHARE - model.weight_bytes
    scheduler = SchedulerConfig(
        chunk_tokens=2_048,
        slo_admission=policy,
        ttft_slo_s=ttft_s,
        tpot_slo_s=tpot_s,
    )
    return ServerConfig(
        times=times_of_profile(hardware, model),
        page_tokens=PAGE,
        num_layers=model.num_layers,
        kv_token_bytes=model.kv_token_bytes,
        device_tokens=int(pool_bytes / model.kv_token_bytes),
        device_reuse=False,
        scheduler=scheduler,
        length_predictor=predictor,
    )


def unloaded(lengths: Lengths) -> tuple[float, float]:
    """Return TTFT and TPOT of the median request alone on the server."""
    times = server("none", 0.0, 0.0).times
    prompt = int(np.median(lengths.prompts))
    context = prompt + int(np.median(lengths.outputs)) // 2
    return times.prefill_s([(0, prompt)]), times.decode_step_s(1, context)


def judged(result: SimResult, slo: tuple[float, float]) -> Outcome:
    """Return the figures of a run under these targets."""
    ttft = np.array([record.ttft_s for record in result.records])
    tpot = np.array([record.tpot_s for record in result.records])
    late, slow = ttft > slo[0], tpot > slo[1]
    tokens = sum(
        record.num_prompt_tokens + record.num_output_tokens for record in result.records
    )
    span_s = result.end_s - min(record.arrival_s for record in result.records)
    return Outcome(
        float(late.mean()),
        float(slow.mean()),
        float((late | slow).mean()),
        tokens / span_s,
        float(ttft.mean()),
        float(np.percentile(ttft, 99)),
        float(np.nanmean(tpot)),
    )


def row(rate: float, found: dict[str, Outcome]) -> list[str]:
    """Return the lines of a table for one rate, without admission first."""
    base = found["none"]
    return [
        f"| {rate:g} | {name} | {one.tpot:.1%} | {one.ttft:.1%} | {one.either:.1%} "
        f"| {one.mean_ttft_s:.2f} | {one.p99_ttft_s:.2f} | {one.mean_tpot_s * 1e3:.0f} "
        f"| {one.tokens_per_s / base.tokens_per_s:.3f} |"
        for name, one in found.items()
    ]


HEAD = (
    "| requests/s | admission | miss TPOT | miss TTFT | miss either | mean TTFT s "
    "| P99 TTFT s | mean TPOT ms | throughput |\n"
    "|---|---|---|---|---|---|---|---|---|"
)

Row = tuple[float, dict[str, Outcome]]


def table(
    lengths: Lengths,
    slo: tuple[float, float],
    off: dict[float, SimResult],
    admissions: Sequence[str],
    predictor: str,
    lines: list[str],
) -> list[Row]:
    """Write one table; return its rows.

    Args:
        lengths: the requests.
        slo: targets for TTFT and TPOT, seconds.
        off: runs without admission by rate: no target changes these.
        admissions: the others.
        predictor: of the answers' lengths.
        lines: gets the table, without the rates at which all targets are met.
    """
    ttft_s, tpot_s = slo
    targets = f"TTFT {ttft_s:.3g} s, TPOT {tpot_s * 1e3:.3g} ms"
    lines += ["", f"{targets}; predictor {predictor}", "", HEAD]
    rows = []
    for rate, without in off.items():
        found = {"none": judged(without, slo)}
        for name in admissions:
            config = server(name, ttft_s, tpot_s, predictor)
            found[name] = judged(simulate(config, lengths.workload(rate)), slo)
        rows.append((rate, found))
        if max(one.either for one in found.values()) >= WORTH_A_LINE:
            lines += row(rate, found)
    return rows


def chosen(rows: Sequence[Row]) -> Row:
    """Return the row whose violations without admission are nearest to the middle."""
    within = [r for r in rows if WANTED[0] <= r[1]["none"].either <= WANTED[1]]
    return min(within or rows, key=lambda r: abs(r[1]["none"].either - MIDDLE))


def main() -> int:
    """Print the tables; always 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--requests", type=int, default=1_000)
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument(
        "--predictors", nargs="+", default=["online", "oracle", "constant:1"]
    )
    parser.add_argument("--admissions", nargs="+", default=list(ADMISSIONS[1:]))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", type=Path, help="write the tables here too")
    args = parser.parse_args()
    lines: list[str] = []
    found: dict[str, dict[str, float]] = {}
    for path in args.traces:
        lengths = read_lengths(path, args.requests, args.seed)
        alone = unloaded(lengths)
        lines += ["", f"## {lengths.name}, {len(lengths.prompts)} requests"]
        off = {
            rate: simulate(server("none", 0.0, 0.0), lengths.workload(rate))
            for rate in args.rates
        }
        multiples = (TTFT_FACTOR * alone[0], TPOT_FACTOR * alone[1])
        for slo, name in ((LAYERKV, "layerkv"), (multiples, "multiples")):
            for predictor in args.predictors:
                rows = table(lengths, slo, off, args.admissions, predictor, lines)
                rate, at_rate = chosen(rows)
                before = at_rate["none"]
                for admission in args.admissions:
                    after = at_rate[admission]
                    found[f"{lengths.name} {name} {predictor} {admission}"] = {
                        "rate_per_s": rate,
                        "slo_violation_off": before.either,
                        "slo_violation_on": after.either,
                        "tpot_violation_off": before.tpot,
                        "tpot_violation_on": after.tpot,
                        "ttft_violation_off": before.ttft,
                        "ttft_violation_on": after.ttft,
                        "throughput_vs_off": after.tokens_per_s / before.tokens_per_s,
                    }
    text = "\n".join(lines)
    print(text)
    if args.markdown is not None:
        args.markdown.write_text(text.lstrip() + "\n", encoding="utf-8")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
