"""Layer-wise memory on a small CPU server, predicted: what a bench of it should show.

The server is the one of a measurement on plain SGLang: a 40 M-parameter model of 12
layers, a pool of 4,096 tokens (about four prompts), prompts of 900 tokens, answers of
200, Poisson arrivals. Its times are put together by hand so that plain gives about what
was measured at 0.6 requests/s (with the pool: mean TTFT 7.7 s, TPOT 41 ms; without
bound: 0.37 s, 62 ms). The link has the ratio of Llama-2-7B on an L20: a token's KV
crosses it in as many parts of the token's prefill as there.

    python benchmarks/sim/layerkv_cpu.py [--seeds 5] [--requests 60]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import numpy as np

from sgl_tiered.sim.config import LayerSetup, SchedulerConfig, ServerConfig
from sgl_tiered.sim.hardware import LinkSpeed, find_hardware
from sgl_tiered.sim.models import find_model
from sgl_tiered.sim.server import simulate
from sgl_tiered.sim.synthetic import fixed_lengths
from sgl_tiered.sim.times import DeviceTimes, times_of_profile

PAGE = 16
POOL_TOKENS, PROMPT, ANSWER = 4_096, 900, 200
NUM_LAYERS, TOKEN_BYTES = 12, 2 * 2 * 12 * 4 * 64
RATES = (0.30, 0.45, 0.60, 0.75)
TIMES = DeviceTimes(
    prefill_overhead_s=0.015,
    prefill_token_s=2.6e-4,
    prefill_pair_s=1.3e-7,
    decode_overhead_s=0.015,
    decode_request_s=1.0e-3,
    decode_context_token_s=3.7e-6,
)
TTFT_SLO_S, TPOT_SLO_S = 3.0, 0.2


@dataclass(frozen=True)
class Outcome:
    """Means over the seeds; seconds, and tokens per second."""

    ttft_s: float
    p99_ttft_s: float
    tpot_s: float
    p99_tpot_s: float
    tokens_per_s: float
    violations: float
    num_pauses: float


def link() -> LinkSpeed:
    """Return the link that is to this server's prefill what the L20's is to its own."""
    hardware, model = find_hardware("L20"), find_model("Llama-2-7B")
    theirs_s = times_of_profile(hardware, model).prefill_s([(0, PROMPT)])
    moved_s = PROMPT * model.kv_token_bytes / hardware.host.bytes_per_s
    ours_s = TIMES.prefill_s([(0, PROMPT)]) * moved_s / theirs_s
    return LinkSpeed(PROMPT * TOKEN_BYTES / ours_s, 1e-4, "the L20's ratio")


def server(
    system: str, slo: str = "none", *, pool_tokens: int = POOL_TOKENS, **shares: float
) -> ServerConfig:
    """Return ``plain``, ``stream`` or ``pause``."""
    plain = ServerConfig(
        times=TIMES,
        page_tokens=PAGE,
        num_layers=NUM_LAYERS,
        kv_token_bytes=TOKEN_BYTES,
        device_tokens=pool_tokens,
        device_reuse=False,
        scheduler=SchedulerConfig(
            ignore_eos=False,
            slo_admission=slo,
            ttft_slo_s=TTFT_SLO_S,
            tpot_slo_s=TPOT_SLO_S,
        ),
        length_predictor="online",
    )
    if system == "plain":
        return plain
    there = link()
    setup = LayerSetup(1 << 16, 2_048, there, there, system, **shares)
    return replace(plain, layers=setup)


def outcome(config: ServerConfig, rate: float, num: int, seeds: int) -> Outcome:
    """Run a server at a rate."""
    found = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        result = simulate(config, fixed_lengths(num, rate, PROMPT, ANSWER, PAGE, rng))
        ttft = np.array([record.ttft_s for record in result.records])
        tpot = np.array([record.tpot_s for record in result.records])
        start_s = min(record.arrival_s for record in result.records)
        found.append(
            (
                ttft.mean(),
                np.percentile(ttft, 99),
                tpot.mean(),
                np.percentile(tpot, 99),
                num * ANSWER / (result.end_s - start_s),
                ((ttft > TTFT_SLO_S) | (tpot > TPOT_SLO_S)).mean(),
                0 if result.layers is None else result.layers.num_pauses,
            )
        )
    return Outcome(*np.mean(found, axis=0).tolist())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=60)
    args = parser.parse_args()
    print(f"link {link().bytes_per_s / 1e6:.1f} MB/s")
    print(
        "| requests/s | system | mean TTFT s | P99 | mean TPOT ms | P99 | tokens/s "
        "| violations | pauses |\n|---|---|---|---|---|---|---|---|---|"
    )
    systems = {
        "unlimited": server("plain", pool_tokens=1 << 17),
        "plain": server("plain"),
        "stream": server("stream"),
        "stream, SLO": server("stream", "slo"),
        "pause": server("pause"),
        "pause, SLO": server("pause", "slo"),
        "join": server("join"),
        "join, SLO": server("join", "slo"),
    }
    for rate in RATES:
        for name, config in systems.items():
            one = outcome(config, rate, args.requests, args.seeds)
            print(
                f"| {rate:g} | {name} | {one.ttft_s:.2f} | {one.p99_ttft_s:.2f} "
                f"| {one.tpot_s * 1e3:.0f} | {one.p99_tpot_s * 1e3:.0f} "
                f"| {one.tokens_per_s:.1f} | {one.violations:.1%} "
                f"| {one.num_pauses:.0f} |"
            )


if __name__ == "__main__":
    main()
