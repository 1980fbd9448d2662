"""Small simulated servers and workloads, with round numbers to count with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from sgl_tiered.core.ids import TierId
from sgl_tiered.sim.config import SchedulerConfig, ServerConfig, TierSetup
from sgl_tiered.sim.hardware import LinkSpeed
from sgl_tiered.sim.requests import SimWorkload
from sgl_tiered.sim.times import DeviceTimes
from tests.unit.sim.sim_loads import PAGE, chats

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
    return chats
