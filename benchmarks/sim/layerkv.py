"""LayerKV's vLLM-side curves: Figures 1, 4 and 6, on a modelled L20 server."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sgl_tiered.sim.config import SchedulerConfig, ServerConfig
from sgl_tiered.sim.hardware import find_hardware
from sgl_tiered.sim.models import find_model
from sgl_tiered.sim.records import SimResult
from sgl_tiered.sim.server import simulate
from sgl_tiered.sim.summary import SimSummary, Slo, summarize
from sgl_tiered.sim.synthetic import fixed_lengths, of_lengths
from sgl_tiered.sim.times import times_of_profile

__all__ = ["LENGTHS", "RATES", "LengthPoint", "RatePoint", "figure_6", "length_sweep"]

PAGE = 16
GB = 1e9
UTILIZATION = 0.9
"""vLLM 0.5.5's default part of the device's memory."""
LENGTHS = (128, 256, 512, 1_024, 2_048, 4_096, 8_192, 15_872)
"""The paper: 128 to 16k. The last leaves room for 512 tokens of answer in 16k."""
RATES = (1.0, 2.0, 3.0, 4.0, 5.0, 5.5, 6.0, 7.0, 8.0)
_ACTIVATION_BYTES_PER_TOKEN = 2 * 2
"""vLLM profiles a pass of the longest prompt; its largest activations are the gate and
up projections of the feed-forward part, 16 bits each."""


@dataclass(frozen=True)
class LengthPoint:
    """Means of one context length."""

    prompt_tokens: int
    ttft_s: float
    queue_s: float
    prefill_s: float
    tpot_s: float
    output_tokens_per_s: float
    num_retractions: int


@dataclass(frozen=True)
class RatePoint:
    """One request rate of Figure 6."""

    rate_per_s: float
    ttft_s: float
    ttft_p99_s: float
    violations: float
    output_tokens_per_s: float


def vllm_server(model_name: str, ranks: int, max_tokens: int) -> ServerConfig:
    """Return vLLM 0.5.5 on L20s: whole prompts, no prefix cache, no reservation."""
    hardware, model = find_hardware("L20"), find_model(model_name)
    widest = max_tokens * model.ffn_size * _ACTIVATION_BYTES_PER_TOKEN / ranks
    pool = hardware.memory_bytes * UTILIZATION - model.weight_bytes / ranks - widest
    token_bytes = model.kv_token_bytes // ranks
    return ServerConfig(
        times=times_of_profile(hardware, model, tensor_parallel=ranks),
        page_tokens=PAGE,
        num_layers=model.num_layers,
        kv_token_bytes=token_bytes,
        device_tokens=int(pool / token_bytes),
        device_reuse=False,
        scheduler=SchedulerConfig(
            admission="vllm",
            chunk_tokens=0,
            max_prefill_tokens=max_tokens,
            max_running=256,
        ),
    )


def length_sweep(
    model_name: str,
    ranks: int,
    lengths: tuple[int, ...] = LENGTHS,
    *,
    num_requests: int = 100,
    seed: int = 0,
) -> list[LengthPoint]:
    """Return a point per length: 1 request/s, 512 tokens of answer (Figures 1, 4)."""
    points = []
    for length in lengths:
        config = vllm_server(model_name, ranks, max(lengths) + 512)
        workload = fixed_lengths(
            num_requests, 1.0, length, 512, PAGE, np.random.default_rng(seed)
        )
        result = simulate(config, workload)
        summary = summarize(result)
        points.append(_length_point(length, result, summary))
    return points


def figure_6(num_requests: int = 1_000, seed: int = 0) -> list[RatePoint]:
    """Return a point per rate for ShareGPT-like lengths on Llama-2-7B.

    The lengths stand in for ShareGPT: log-normal with the means that the vLLM paper
    gives (161 tokens of prompt, 338 of answer), cut to the 4-2.3k of LayerKV.
    """
    points = []
    for rate in RATES:
        rng = np.random.default_rng(seed)
        prompts = _log_normal(161, 1.2, num_requests, rng)
        outputs = _log_normal(338, 0.9, num_requests, rng)
        config = vllm_server("Llama-2-7B", 1, 4_096)
        result = simulate(config, of_lengths(prompts, outputs, rate, PAGE, rng))
        summary = summarize(result, Slo(ttft_s=3.0, tpot_s=0.2))
        points.append(
            RatePoint(
                rate,
                summary.ttft.mean,
                summary.ttft.p99,
                1.0 - summary.slo_attainment,
                summary.output_tokens_per_s,
            )
        )
    return points


def _length_point(length: int, result: SimResult, summary: SimSummary) -> LengthPoint:
    return LengthPoint(
        prompt_tokens=length,
        ttft_s=summary.ttft.mean,
        queue_s=summary.queue.mean,
        prefill_s=summary.ttft.mean - summary.queue.mean,
        tpot_s=summary.tpot.mean,
        output_tokens_per_s=summary.output_tokens_per_s,
        num_retractions=result.num_retractions,
    )


def _log_normal(
    mean: float, sigma: float, num: int, rng: np.random.Generator
) -> np.ndarray:
    values = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, size=num)
    return np.clip(values, 4, 2_300).astype(int)
