"""LayerKV's curves, Figures 1 and 4 to 8, on modelled L20 servers: vLLM and LayerKV."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sgl_tiered.sim.config import LayerSetup, SchedulerConfig, ServerConfig
from sgl_tiered.sim.hardware import find_hardware
from sgl_tiered.sim.models import find_model
from sgl_tiered.sim.records import SimResult
from sgl_tiered.sim.server import simulate
from sgl_tiered.sim.summary import SimSummary, Slo, summarize
from sgl_tiered.sim.synthetic import fixed_lengths, of_lengths
from sgl_tiered.sim.times import times_of_profile

__all__ = [
    "LENGTHS",
    "RATES",
    "SLO",
    "SYSTEMS",
    "LengthPoint",
    "RatePoint",
    "System",
    "figure_6",
    "length_sweep",
]

PAGE = 16
GB = 1e9
UTILIZATION = 0.9
"""vLLM 0.5.5's default part of the device's memory."""
LENGTHS = (128, 256, 512, 1_024, 2_048, 4_096, 8_192, 15_872)
"""The paper: 128 to 16k. The last leaves room for 512 tokens of answer in 16k."""
ANSWER = 512
RATES = (1.0, 2.0, 3.0, 4.0, 5.0, 5.5, 6.0, 7.0, 8.0)
SLO = Slo(ttft_s=3.0, tpot_s=0.2)
"""The paper's, of Figure 8."""
HOST_BYTES = 1e12
"""Half of the testbed's host memory, for the KV of running requests."""
_ACTIVATION_BYTES_PER_TOKEN = 2 * 2
"""vLLM profiles a pass of the longest prompt; its largest activations are the gate and
up projections of the feed-forward part, 16 bits each."""


@dataclass(frozen=True)
class System:
    """What serves: vLLM, or layer-wise memory above it.

    Attributes:
        name: in tables.
        decode: of ``LayerSetup``; empty for vLLM.
        slo_admission: of ``SchedulerConfig``; the targets are the paper's.
    """

    name: str
    decode: str = ""
    slo_admission: str = "none"


SYSTEMS = (
    System("vLLM"),
    System("stream", "stream", "slo"),
    System("join, no SLO", "join"),
    System("join", "join", "slo"),
    System("pause, no SLO", "pause"),
    System("pause", "pause", "slo"),
)
"""``stream`` and ``join`` are two readings of the paper; ``pause`` is ours."""


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
    violations: float


@dataclass(frozen=True)
class RatePoint:
    """One request rate of Figure 6."""

    rate_per_s: float
    ttft_s: float
    ttft_p99_s: float
    violations: float
    output_tokens_per_s: float
    tpot_s: float


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


def server(
    system: System, model_name: str, ranks: int, max_tokens: int
) -> ServerConfig:
    """Return vLLM, or LayerKV in its place: two L20s share one link to the host.

    All-reduces go over the same link; that they hinder each other is not modelled.
    """
    config = vllm_server(model_name, ranks, max_tokens)
    if not system.decode:
        return config
    hardware = find_hardware("L20")
    sharers = min(ranks, hardware.host_link_sharers)
    link = replace(hardware.host, bytes_per_s=hardware.host.bytes_per_s / sharers)
    host_tokens = int(HOST_BYTES / find_model(model_name).kv_token_bytes)
    return replace(
        config,
        layers=LayerSetup(host_tokens, max_tokens, link, link, system.decode),
        length_predictor="online",
        scheduler=replace(
            config.scheduler,
            slo_admission=system.slo_admission,
            ttft_slo_s=SLO.ttft_s,
            tpot_slo_s=SLO.tpot_s,
        ),
    )


def length_sweep(
    model_name: str,
    ranks: int,
    lengths: tuple[int, ...] = LENGTHS,
    *,
    system: System = SYSTEMS[0],
    num_requests: int = 100,
    seed: int = 0,
) -> list[LengthPoint]:
    """Return a point per length: 1 request/s, 512 tokens of answer."""
    points = []
    for length in lengths:
        # vLLM sets memory aside for the longest prompt that it is told to expect.
        config = server(system, model_name, ranks, LENGTHS[-1] + ANSWER)
        workload = fixed_lengths(
            num_requests, 1.0, length, ANSWER, PAGE, np.random.default_rng(seed)
        )
        result = simulate(config, workload)
        summary = summarize(result, SLO)
        points.append(_length_point(length, result, summary))
    return points


def figure_6(
    num_requests: int = 1_000,
    seed: int = 0,
    *,
    system: System = SYSTEMS[0],
    model_name: str = "Llama-2-7B",
    ranks: int = 1,
    rates: tuple[float, ...] = RATES,
) -> list[RatePoint]:
    """Return a point per rate for ShareGPT-like lengths (Figures 6, 7 and 8).

    The lengths stand in for ShareGPT: log-normal with the means that the vLLM paper
    gives (161 tokens of prompt, 338 of answer), cut to the 4-2.3k of LayerKV.
    """
    points = []
    for rate in rates:
        rng = np.random.default_rng(seed)
        prompts = _log_normal(161, 1.2, num_requests, rng)
        outputs = _log_normal(338, 0.9, num_requests, rng)
        config = server(system, model_name, ranks, 4_096)
        result = simulate(config, of_lengths(prompts, outputs, rate, PAGE, rng))
        summary = summarize(result, SLO)
        points.append(
            RatePoint(
                rate,
                summary.ttft.mean,
                summary.ttft.p99,
                1.0 - summary.slo_attainment,
                summary.output_tokens_per_s,
                summary.tpot.mean,
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
        violations=1.0 - summary.slo_attainment,
    )


def _log_normal(
    mean: float, sigma: float, num: int, rng: np.random.Generator
) -> np.ndarray:
    values = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, size=num)
    return np.clip(values, 4, 2_300).astype(int)
