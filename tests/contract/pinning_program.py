"""Builds a rank's tiers where the device pins no memory, or a part after the other.

    pinning_program.py

As on CUDA: the pool says that it is there, and what pins memory refuses to, or waits.
Played are the pool's device, its copies, and layer-wise KV's placing. The last line is
one JSON object: the bytes that were refused, by where they are, and the counter; and
the slots of each tier while the first part alone is pinned, and when all are.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from runtime_program import context

LAYER_BYTES, BUFFER_BYTES = 1 << 40, 1 << 50
"""Of layer-wise KV, and of the device pool; beyond all that a tier here has."""


class OnCuda(torch.Tensor):
    """A tensor that says that CUDA has it."""

    is_cuda = True


def build(layered: bool) -> dict[str, Any]:
    """Build the tiers; return what was refused and what was counted."""
    from sgl_tiered.engines.device.pools import CpuDevicePool
    from sgl_tiered.engines.sglang import factory
    from sgl_tiered.engines.sglang.layered import build as layers
    from sgl_tiered.engines.sglang.layered import cache as layered_cache
    from sgl_tiered.engines.sglang.runtime import TieredRuntime
    from sgl_tiered.errors import ConfigError
    from sgl_tiered.serving.option_reader import read_options

    facts = context()
    pool = facts.params.token_to_kv_pool_allocator.get_kvcache()
    pool.k_buffer[0] = pool.k_buffer[0].as_subclass(OnCuda)
    asked: list[int] = []

    def register(setting: str, device: torch.device) -> Callable[[int, int], Any]:
        def refuse(address: int, num_bytes: int) -> Any:
            asked.append(num_bytes)
            raise ConfigError(setting, "no memory is locked here", "give less")

        return refuse

    def copies(
        pool: Any, layout: Any, stream: Any, refused: Any, **settings: Any
    ) -> Any:
        refused(BUFFER_BYTES)
        return CpuDevicePool(pool, layout)

    def placed(pool: Any, *settings: Any) -> Any:
        pool.pinning_refused_bytes = LAYER_BYTES
        plan = SimpleNamespace(kv_gen=None, act_page_bytes=0, act_refusal="")
        layout = factory.page_layout(pool, facts.params.page_size)
        return SimpleNamespace(
            device=CpuDevicePool(pool, layout), plan=plan, driver=None
        )

    factory.cuda_register = register
    factory.use_device_in_threads = lambda device: None
    factory.numa_node = lambda device: None
    factory.make_device_pool = copies
    layers.place_layers = placed
    layered_cache.LayeredRuntime = lambda parts, driver: TieredRuntime(
        parts, wait_whole=True
    )
    facts.server_args.disaggregation_mode = "null"
    settings = {"host_size": "4MB"}
    if layered:
        settings |= {"layerkv": "on"}
    runtime = factory._build_runtime(facts, read_options(settings))
    counters = runtime.metrics_snapshot()["counters"]
    runtime.close(runtime.pump)
    elsewhere = LAYER_BYTES if layered else BUFFER_BYTES
    return {
        "host": sum(asked),
        "elsewhere": elsewhere,
        "counted": int(counters.get("pinning_refused_bytes", 0)),
    }


def build_in_parts() -> dict[str, Any]:
    """Build memory tiers of four parts each, of which the first one is pinned."""
    from sgl_tiered.core.ids import TierId
    from sgl_tiered.engines.device.pools import CpuDevicePool
    from sgl_tiered.engines.sglang import factory
    from sgl_tiered.serving.option_reader import read_options
    from sgl_tiered.tiers import pinning

    facts = context()
    pool = facts.params.token_to_kv_pool_allocator.get_kvcache()
    pool.k_buffer[0] = pool.k_buffer[0].as_subclass(OnCuda)
    go, starting = threading.Event(), threading.current_thread()
    settings_asked: set[str] = set()

    def register(setting: str, device: torch.device) -> Callable[[int, int], Any]:
        def pin(address: int, num_bytes: int) -> Any:
            if threading.current_thread() is not starting:
                go.wait()
            settings_asked.add(setting)
            return lambda: None

        return pin

    factory.cuda_register = register
    factory.make_device_pool = lambda pool, layout, *more, **named: CpuDevicePool(
        pool, layout
    )
    pinning.PIN_BYTES = 1 << 20
    settings = {"host_size": "4MiB", "cxl": "emulate:memory", "cxl_size": "4MiB"}
    runtime = factory._build_runtime(facts, read_options(settings))

    def slots() -> list[int]:
        runtime.pump()
        found = map(runtime.cache.occupancy, (TierId.HOST, TierId.CXL))
        return [occupancy.capacity_slots for occupancy in found]

    def shares() -> list[float]:
        """Return how much of each medium is pinned, as ``/tiered/stats`` has it."""
        media = runtime.stats()["media"].values()
        return [medium["pinned_bytes"] / medium["num_bytes"] for medium in media]

    tiers = (runtime.parts.host, runtime.parts.cxl)
    told: dict[str, Any] = {"whole": [tier.num_slots for tier in tiers if tier]}
    told |= {"first": slots(), "shares at first": shares()}
    go.set()
    give_up_at_s = time.monotonic() + 30.0
    while slots() != told["whole"] and time.monotonic() < give_up_at_s:
        time.sleep(0.01)
    told |= {"last": slots(), "settings": sorted(settings_asked)}
    told["shares at last"] = shares()
    runtime.close(runtime.pump)
    return told


def main() -> None:
    """Print one line of JSON behind everything else."""
    told = {"pages": build(False), "layers": build(True), "parts": build_in_parts()}
    print("\n" + json.dumps(told))


if __name__ == "__main__":
    main()
