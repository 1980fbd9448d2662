"""Small simulated servers and workloads, with round numbers to count with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from sgl_tiered.core.ids import TierId
from sgl_tiered.sim.config import SchedulerConfig, ServerConfig, TierSetup
from sgl_tiered.sim.hardware import LinkSpeed
from sgl_tiered.sim.requests import SimWorkload, WorkloadBuilder
from sgl_tiered.sim.times import DeviceTimes

PAGE = 4
PAGE_BYTES = 4_096
TIMES = DeviceTimes(
    prefill_overhead_s=1e-3,
    prefill_token_s=1e-4,
    prefill_pair_s=1e-7,
    decode_overhead_s=1e-3,
    decode_request_s=1e-4,
    decode_context_token_s=1e-6,
)
FAST = LinkSpeed(1e9, 1e-6, "made up")
MEDIUM = LinkSpeed(5e8, 2e-6, "made up")
SLOW = LinkSpeed(1e8, 1e-5, "made up")


@pytest.fixture
def make_config() -> Callable[..., ServerConfig]:
    """Return a maker of servers: pages per tier, then settings of ServerConfig."""

    def make(
        device: int = 100,
        host: int = 0,
        disk: int = 0,
        cxl: int = 0,
        **settings: object,
    ) -> ServerConfig:
        tiers = []
        if host:
            tiers.append(TierSetup(TierId.HOST, host * PAGE_BYTES, FAST, FAST))
        if cxl:
            tiers.append(TierSetup(TierId.CXL, cxl * PAGE_BYTES, MEDIUM, MEDIUM))
        if disk:
            tiers.append(TierSetup(TierId.DISK, disk * PAGE_BYTES, SLOW, SLOW))
        config = ServerConfig(
            times=TIMES,
            page_tokens=PAGE,
            num_layers=4,
            kv_token_bytes=PAGE_BYTES // PAGE,
            device_tokens=device * PAGE,
            tiers=tuple(tiers),
            scheduler=SchedulerConfig(chunk_tokens=64, max_prefill_tokens=128),
        )
        return replace(config, **settings)  # type: ignore[arg-type]

    return make


@pytest.fixture
def make_chats() -> Callable[..., SimWorkload]:
    """Return a maker of Poisson requests over shared prefixes."""

    def make(
        num_requests: int = 60,
        rate_per_s: float = 20.0,
        num_prefixes: int = 8,
        seed: int = 0,
    ) -> SimWorkload:
        rng = np.random.default_rng(seed)
        builder = WorkloadBuilder(PAGE)
        now_s = 0.0
        for _ in range(num_requests):
            now_s += float(rng.exponential(1.0 / rate_per_s))
            prefix = builder.prefix(int(rng.integers(num_prefixes)), 10)
            prompt = 40 + int(rng.integers(1, 30))
            builder.add(now_s, prompt, int(rng.integers(1, 40)), prefix=prefix)
        return builder.build("chats")

    return make
