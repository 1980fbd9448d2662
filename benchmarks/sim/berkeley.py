"""The Berkeley report's text analysis: 128 prefixes, GPU 8 / CPU 32 / disk 128.

The report prints neither the lengths nor the throughput; it claims twice vLLM's. The
device is the RTX 3090 of its text with Llama-2-7B.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sgl_tiered.core.ids import TierId
from sgl_tiered.sim.config import SchedulerConfig, ServerConfig, TierSetup
from sgl_tiered.sim.hardware import NVME, find_hardware
from sgl_tiered.sim.models import find_model
from sgl_tiered.sim.server import simulate
from sgl_tiered.sim.summary import summarize
from sgl_tiered.sim.synthetic import shared_prefixes
from sgl_tiered.sim.times import times_of_profile

__all__ = ["SYSTEMS", "ThroughputPoint", "figure"]

PAGE = 16
BODY, OUTPUT = 64, 32
NUM_PREFIXES, GPU_PREFIXES, CPU_PREFIXES = 128, 8, 32
CLIENTS = 32
"""Requests waiting or running at any time; the report does not say."""
SYSTEMS = ("vLLM (no prefix cache)", "GPU", "GPU + CPU", "GPU + CPU + disk")


@dataclass(frozen=True)
class ThroughputPoint:
    """One system: throughput and the prefix tokens that no tier had."""

    system: str
    order: str
    prefix_tokens: int
    requests_per_s: float
    miss_rate: float


def figure(
    prefix_tokens: int, order: str, num_requests: int = 2_000, seed: int = 0
) -> list[ThroughputPoint]:
    """Return a point per system.

    The report streams requests into the queue; here ``CLIENTS`` are always in it, so
    that an order has something to choose from and not everything.
    """
    points = []
    workload = shared_prefixes(
        num_requests,
        float("inf"),
        NUM_PREFIXES,
        prefix_tokens,
        BODY,
        OUTPUT,
        PAGE,
        np.random.default_rng(seed),
        num_clients=CLIENTS,
        keep_bodies=False,
    )
    total = num_requests * prefix_tokens
    for system, name in enumerate(SYSTEMS):
        result = simulate(_server(system, prefix_tokens, order), workload)
        reused = sum(
            record.device_tokens + record.host_tokens + record.disk_tokens
            for record in result.records
        )
        points.append(
            ThroughputPoint(
                name,
                order,
                prefix_tokens,
                summarize(result).requests_per_s,
                1.0 - reused / total,
            )
        )
    return points


def _server(system: int, prefix_tokens: int, order: str) -> ServerConfig:
    hardware, model = find_hardware("RTX-3090"), find_model("Llama-2-7B")
    prefix_bytes = prefix_tokens * model.kv_token_bytes
    # Room for eight prefixes, and for the bodies and answers of as many requests.
    own = -(-(BODY + OUTPUT + PAGE) // PAGE) * PAGE
    tiers = []
    if system >= 2:
        size = CPU_PREFIXES * prefix_bytes
        tiers.append(TierSetup(TierId.HOST, size, hardware.host, hardware.host))
    if system >= 3:
        size = NUM_PREFIXES * prefix_bytes
        tiers.append(TierSetup(TierId.DISK, size, NVME["read"], NVME["write"]))
    config = ServerConfig(
        times=times_of_profile(hardware, model),
        page_tokens=PAGE,
        num_layers=model.num_layers,
        kv_token_bytes=model.kv_token_bytes,
        device_tokens=GPU_PREFIXES * (prefix_tokens + own),
        tiers=tuple(tiers),
        # Reading all that waits at arrival would stage the whole queue.
        prefetch="none",
        scheduler=SchedulerConfig(
            max_running=GPU_PREFIXES, ignore_eos=True, order=order, chunk_tokens=2_048
        ),
    )
    if system == 0:
        scheduler = replace(config.scheduler, order="fcfs")
        config = replace(config, device_reuse=False, scheduler=scheduler)
    return config
