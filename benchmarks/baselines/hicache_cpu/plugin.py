"""Entry point: the hooks that let HiCache run on a CPU. README.md says which and why.

SGLang calls ``activate`` in every process of a server; a server without
``--enable-hierarchical-cache`` is not touched by the hooks.
"""

from __future__ import annotations

import os
import sys
from typing import Any

__all__ = ["ASYNC_ENV", "activate"]

ASYNC_ENV = "HICACHE_CPU_ASYNC"

_HOST_POOL = "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost"
_RESERVE_BYTES = 2**30


def activate() -> None:
    """Register the hooks with SGLang."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name, hook, kind in (
        ("__init__", _without_pinning, HookType.BEFORE),
        ("load_to_device_per_layer", _load_to_device, HookType.REPLACE),
        ("backup_from_device_all_layer", _backup_from_device, HookType.REPLACE),
    ):
        HookRegistry.register(f"{_HOST_POOL}.{name}", hook, kind)
    # Copies happen in the scheduler's process only.
    if "sglang.srt.managers.scheduler" in sys.modules:
        from sglang.srt.mem_cache.pool_host import base

        base.HICACHE_HOST_MEMORY_RESERVE_BYTES = _RESERVE_BYTES
        if os.environ.get(ASYNC_ENV) == "1":
            from hicache_cpu.asynchronous import install

            install()


def _without_pinning(pool: Any, *args: Any, **kwargs: Any) -> Any:
    kwargs["pin_memory"] = False
    return (pool, *args), kwargs


def _load_to_device(
    pool: Any,
    device_pool: Any,
    host_indices: Any,
    device_indices: Any,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    from hicache_cpu.copies import load_layer

    if is_draft or 0 <= layer_id < pool.target_layer_num:
        load_layer(pool, host_indices, device_indices, layer_id)


def _backup_from_device(
    pool: Any,
    device_pool: Any,
    host_indices: Any,
    device_indices: Any,
    io_backend: str,
) -> None:
    from hicache_cpu.copies import store_layers

    store_layers(pool, host_indices, device_indices)
