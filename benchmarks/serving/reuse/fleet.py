"""The compared systems.

Every system gets the same model, attention backend, device pool and page size, and
HiCache the same bytes of host memory as we (a multiple of the device pool). All sleep
when idle, so those that wait cost nothing while one is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hicache_cpu.distribution import hicache_env
from sgl_tiered_workloads.server import ServerSpec
from sgl_tiered_workloads.systems import (
    CPU_FLAGS,
    Device,
    Tiers,
    hicache_spec,
    plain_spec,
    tiered_spec,
)

__all__ = ["Sizes", "Stores", "system_specs"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the systems may use.

    Attributes:
        kv_token_bytes: KV of one token.
        pool_tokens: the device pool.
        host_pools: host memory, in device pools, of the systems that end at the host.
        small_host_pools: host memory of the systems with a disk.
        disk_bytes: size of our disk tier; HiCache's file backend has no limit.
        reference_tokens: device pool of the reference, which holds everything.
    """

    kv_token_bytes: int
    pool_tokens: int
    host_pools: int
    small_host_pools: int
    disk_bytes: int
    reference_tokens: int

    def host_bytes(self, pools: int) -> int:
        """Return ``pools`` device pools in bytes."""
        return pools * self.pool_tokens * self.kv_token_bytes


@dataclass(frozen=True, slots=True)
class Stores:
    """Folders of the two stores on disk."""

    tiered: Path
    hicache: Path


def system_specs(
    model: Path, sizes: Sizes, stores: Stores, plugin_folder: Path, layout: str
) -> dict[str, ServerSpec]:
    """Return how to start every system.

    Args:
        model: folder of the model.
        sizes: of device pool, host memory and disk.
        stores: where the disk systems write.
        plugin_folder: where HiCache's baseline may write its entry point.
        layout: of HiCache's host memory.
    """
    device = Device(model, sizes.pool_tokens, flags=CPU_FLAGS)

    def hicache(
        name: str, pools: int, asynchronous: bool, store: Path | None = None
    ) -> ServerSpec:
        size = ("--hicache-ratio", str(pools))
        spec = hicache_spec(device, name, size, layout, store)
        hooks = hicache_env(plugin_folder, asynchronous)
        return replace(spec, env={**spec.env, **hooks})

    large, small = sizes.host_pools, sizes.small_host_pools
    disk = Tiers(sizes.host_bytes(small), stores.tiered, sizes.disk_bytes)
    specs = (
        plain_spec(device.with_pool(sizes.reference_tokens), "reference"),
        plain_spec(device),
        hicache("hicache-sync", large, False),
        hicache("hicache-async", large, True),
        tiered_spec(device, Tiers(sizes.host_bytes(large))),
        hicache("hicache-file", small, True, stores.hicache),
        tiered_spec(device, disk, "tiered-disk"),
    )
    return {spec.name: spec for spec in specs}
