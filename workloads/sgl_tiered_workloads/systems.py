"""The servers that benches, demo and tests compare: flags as data.

Every system gets the same model, page size and device pool, so that what differs
is only what is kept below the device. Nothing here imports SGLang or the plugin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sgl_tiered_workloads.server import ServerSpec

__all__ = [
    "CPU_FLAGS",
    "Device",
    "Tiers",
    "faulty_spec",
    "hicache_spec",
    "plain_spec",
    "tiered_spec",
]

MB = 1_000_000
CPU_FLAGS = ("--sleep-on-idle", "--disable-overlap-schedule")
"""What serves best without an accelerator. An idle scheduler otherwise spins a core.
And a forward ends there where it is launched, so SGLang's overlap schedule hides
nothing and holds every token back for one more forward."""


@dataclass(frozen=True, slots=True)
class Device:
    """What all compared systems share.

    Attributes:
        model: folder of the model.
        pool_tokens: most tokens of the device pool; 0 for what the memory holds.
        page_size: tokens per page.
        flags: further flags that every system gets.
    """

    model: Path
    pool_tokens: int
    page_size: int = 16
    flags: tuple[str, ...] = ()

    def with_pool(self, pool_tokens: int) -> Device:
        """Return the same with another pool, for a reference that holds all."""
        return Device(self.model, pool_tokens, self.page_size, self.flags)


@dataclass(frozen=True, slots=True)
class Tiers:
    """What lies below the device. Sizes in bytes; no disk where it has no path."""

    host_bytes: int
    disk_path: Path | None = None
    disk_bytes: int = 0

    @property
    def flags(self) -> tuple[str, ...]:
        """The plugin's flags."""
        flags = (
            "--radix-cache-backend",
            "tiered",
            "--tiered-host-size",
            f"{self.host_bytes // MB}MB",
        )
        if self.disk_path is None:
            return flags
        disk = f"{self.disk_bytes // MB}MB"
        return (
            *flags,
            "--tiered-disk-path",
            str(self.disk_path),
            "--tiered-disk-size",
            disk,
        )


def _shared_flags(device: Device) -> tuple[str, ...]:
    most = ("--max-total-tokens", str(device.pool_tokens))
    return (
        "--page-size",
        str(device.page_size),
        *(most if device.pool_tokens else ()),
        *device.flags,
    )


def plain_spec(
    device: Device, name: str = "plain", flags: Sequence[str] = ()
) -> ServerSpec:
    """Return plain SGLang: its radix cache on the device, nothing below."""
    return ServerSpec(name, device.model, (*_shared_flags(device), *flags))


def tiered_spec(
    device: Device,
    tiers: Tiers,
    name: str = "tiered",
    flags: Sequence[str] = (),
    env: Mapping[str, str | None] | None = None,
) -> ServerSpec:
    """Return SGLang with tiers below the device."""
    every = (*_shared_flags(device), *tiers.flags, *flags)
    return ServerSpec(name, device.model, every, env or {})


def hicache_spec(
    device: Device,
    name: str,
    size: Sequence[str],
    layout: str,
    store: Path | None = None,
) -> ServerSpec:
    """Return SGLang with HiCache, write-through.

    Args:
        device: as for the others.
        name: of the server.
        size: the flag of its host memory and the flag's value.
        layout: of its host memory: ``page_first`` is copied by its kernel, all others
            by the copy engines.
        store: folder of its file backend; None for none. A request waits until all
            that the backend has of its prompt is in host memory.
    """
    flags = [
        "--enable-hierarchical-cache",
        *size,
        "--hicache-write-policy",
        "write_through",
        "--hicache-mem-layout",
        layout,
        "--hicache-io-backend",
        "kernel" if layout == "page_first" else "direct",
    ]
    env: dict[str, str | None] = {}
    if store is not None:
        flags += ["--hicache-storage-backend", "file"]
        flags += ["--hicache-storage-prefetch-policy", "wait_complete"]
        env["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(store)
    return ServerSpec(name, device.model, (*_shared_flags(device), *flags), env)


def faulty_spec(device: Device, tiers: Tiers, corruption: str) -> ServerSpec:
    """Return a tiered server that loads one wrong page, for the negative control.

    Args:
        device: as for the server under test.
        tiers: as for the server under test.
        corruption: ``zero`` (one page of KV zeroed) or ``swap`` (another prompt's).
    """
    return tiered_spec(
        device,
        tiers,
        name=f"faulty-{corruption}",
        flags=("--tiered-fault-corrupt", corruption),
        env={"SGL_TIERED_ALLOW_FAULTS": "1"},
    )
