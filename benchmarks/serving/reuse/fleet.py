"""The compared systems and their running servers.

Every system gets the same model, attention backend, device pool and page size, and
HiCache the same bytes of host memory as we (a multiple of the device pool). All sleep
when idle, so those that wait cost nothing while one is measured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from hicache_cpu.distribution import hicache_env
from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.server import ServerSpec, SglangServer
from sgl_tiered_workloads.sessions import PlannedRequest
from sgl_tiered_workloads.systems import (
    CPU_FLAGS,
    Device,
    Tiers,
    plain_spec,
    tiered_spec,
)

__all__ = ["Fleet", "Sizes", "Stores", "system_specs"]

Say = Callable[[str], None]

_STARTS = 2


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
        name: str, pools: int, asynchronous: bool, more: tuple[str, ...] = ()
    ) -> ServerSpec:
        flags = (
            "--enable-hierarchical-cache",
            "--hicache-ratio",
            str(pools),
            "--hicache-write-policy",
            "write_through",
            "--hicache-mem-layout",
            layout,
            "--hicache-io-backend",
            "kernel" if layout == "page_first" else "direct",
            *more,
        )
        plain = plain_spec(device, name, flags)
        env: dict[str, str | None] = dict(hicache_env(plugin_folder, asynchronous))
        if more:
            env["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(stores.hicache)
        return ServerSpec(name, model, plain.flags, env)

    file_flags = (
        "--hicache-storage-backend",
        "file",
        "--hicache-storage-prefetch-policy",
        "wait_complete",
    )
    large, small = sizes.host_pools, sizes.small_host_pools
    disk = Tiers(sizes.host_bytes(small), stores.tiered, sizes.disk_bytes)
    specs = (
        plain_spec(device.with_pool(sizes.reference_tokens), "reference"),
        plain_spec(device),
        hicache("hicache-sync", large, False),
        hicache("hicache-async", large, True),
        tiered_spec(device, Tiers(sizes.host_bytes(large))),
        hicache("hicache-file", small, True, file_flags),
        tiered_spec(device, disk, "tiered-disk"),
    )
    return {spec.name: spec for spec in specs}


class Fleet:
    """Running servers by name; a context manager that stops them all.

    Args:
        specs: how to start each.
        logs: folder of the logs.
        first_port: of the ports to use; None for any free ones.
        say: takes progress lines.
    """

    def __init__(
        self,
        specs: Mapping[str, ServerSpec],
        logs: Path,
        first_port: int | None,
        say: Say,
    ) -> None:
        self._specs = specs
        self._logs = logs
        self._ports = {
            name: None if first_port is None else first_port + place
            for place, name in enumerate(specs)
        }
        self._say = say
        self.servers: dict[str, SglangServer] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop(list(self.servers))

    async def only(self, names: Iterable[str], warm_up: PlannedRequest) -> None:
        """Let exactly these servers run; new ones are warmed up and emptied.

        Raises:
            ServerStartError: one did not start.
        """
        wanted = list(names)
        await asyncio.to_thread(
            self._stop, [name for name in self.servers if name not in wanted]
        )
        fresh = [name for name in wanted if name not in self.servers]
        # A start is mostly imports on one core; two at a time fill two cores.
        turn = asyncio.Semaphore(_STARTS)

        async def start(name: str) -> None:
            server = SglangServer(
                self._specs[name], self._logs, self._ports[name], 600.0, self._say
            )
            async with turn:
                await asyncio.to_thread(server.start)
            self.servers[name] = server

        ended = await asyncio.gather(
            *(start(name) for name in fresh), return_exceptions=True
        )
        for error in ended:
            if error is not None:
                raise error
        for name in fresh:
            server = self.servers[name]
            # Compute, hit and decode once each before anything counts.
            async with StreamingClient(server.url) as client:
                await client.run_sequential([warm_up] * 3)
            await asyncio.to_thread(server.flush_cache)

    def _stop(self, names: Iterable[str]) -> None:
        for name in names:
            self.servers.pop(name).stop()
