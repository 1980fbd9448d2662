"""The compared systems: flags, and what else each needs.

All get one model, page size, device pool, memory fraction and attention backend, and
those with host memory as much of it. HiCache is set up as its authors advise: pages of
64 tokens, write-through, ``page_first`` with the kernel, or ``page_first_direct`` with
direct copies. On a CPU it needs the hooks of ``benchmarks/baselines``.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from comparison.settings import Model, Shared
from hicache_cpu.distribution import hicache_env
from sgl_tiered_workloads.processes import Service
from sgl_tiered_workloads.server import ServerSpec, free_port
from sgl_tiered_workloads.systems import (
    CPU_FLAGS,
    MB,
    Device,
    Tiers,
    hicache_spec,
    plain_spec,
    tiered_spec,
)

__all__ = [
    "DEFAULT",
    "DEFAULT_DRY",
    "DISK",
    "GATE",
    "LOADS",
    "NO_REUSE",
    "PLAIN",
    "SYSTEMS",
    "TTFT",
    "UNCAPPED",
    "System",
    "absent",
    "beside",
    "spec_of",
    "store_of",
]

GATE, TTFT, DISK, LOADS, NO_REUSE = "gate", "ttft", "disk", "loads", "noreuse"
_HOST = "127.0.0.1"
_ON_CPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
"""Of a dry run. Torch's threads wait actively for each other, on cores that are busy.
And our CPU platform serves only where torch sees no accelerator."""


@dataclass(frozen=True, slots=True)
class System:
    """One of the compared systems.

    Attributes:
        name: in tables and files.
        parts: what is measured of it, beside the gate.
        tiers: what its answers may call the place below the device that is measured;
            none of plain SGLang.
    """

    name: str
    parts: tuple[str, ...]
    tiers: tuple[str, ...] = ()

    @property
    def has_host(self) -> bool:
        """Whether it has host memory."""
        return bool(self.tiers)

    @property
    def has_disk(self) -> bool:
        """Whether it has a disk."""
        return DISK in self.parts


PLAIN, UNCAPPED = "plain", "plain-uncapped"
_ALL = (NO_REUSE, TTFT, LOADS)
_EVERY = (
    System(PLAIN, _ALL),
    System(UNCAPPED, (NO_REUSE, LOADS)),
    System("tiered", _ALL, ("host",)),
    System("hicache", _ALL, ("host",)),
    System("hicache-direct", _ALL, ("host",)),
    # Its cache tells SGLang of a hit in both words, by whether it was prefetched.
    System("lmcache", _ALL, ("storage", "host")),
    System("tiered-disk", (DISK,), ("disk",)),
    System("hicache-disk", (DISK,), ("storage",)),
)
SYSTEMS = {system.name: system for system in _EVERY}
DEFAULT = tuple(SYSTEMS)
DEFAULT_DRY = tuple(
    name for name in SYSTEMS if name not in (UNCAPPED, "hicache-direct")
)
"""A CPU has one way of copies, and no memory of a device that a pool could fill."""


def absent(name: str, *, dry_run: bool) -> str:
    """Return why a system cannot run here; empty where it can."""
    if dry_run and name == UNCAPPED:
        return "not there: a CPU has no device memory that a pool could fill"
    if name != "lmcache":
        return ""
    if dry_run:
        return "not there: LMCache needs CUDA, and this is a dry run"
    module = "lmcache.integration.sglang.unified_lmcache_mp_connector"
    try:
        version = importlib.metadata.version("lmcache")
        is_there = importlib.util.find_spec(module) is not None
    except (ImportError, importlib.metadata.PackageNotFoundError):
        return "not there: the Python package lmcache is not installed"
    if not is_there:
        return f"not there: lmcache {version} has no {module}, which SGLang asks for"
    if _lmcache_command() is None:
        return f"not there: lmcache {version} brings no command lmcache"
    return ""


def spec_of(
    system: System,
    model: Model,
    shared: Shared,
    host_gb: int,
    out: Path,
    *,
    dry_run: bool,
) -> ServerSpec:
    """Return how to start a system's server.

    Args:
        system: which one.
        model: that it serves.
        shared: what all have in common.
        host_gb: host memory of those that have some.
        out: the comparison's folder; stores and what a server reads are in it.
        dry_run: on our CPU platform.
    """
    flags = list(CPU_FLAGS) if dry_run else []
    if shared.mem_fraction is not None:
        flags += ["--mem-fraction-static", f"{shared.mem_fraction:g}"]
    if shared.attention_backend:
        flags += ["--attention-backend", shared.attention_backend]
    flags += shared.server_flags
    device = Device(model.path, shared.pool_tokens, shared.page_size, tuple(flags))
    spec = _below(system, device, shared, host_gb, out, dry_run=dry_run)
    return replace(spec, env={**spec.env, **_ON_CPU}) if dry_run else spec


def _below(
    system: System,
    device: Device,
    shared: Shared,
    host_gb: int,
    out: Path,
    *,
    dry_run: bool,
) -> ServerSpec:
    """Return a server with what a system has below the device."""
    name = system.name
    store = store_of(system, out) if system.has_disk else None
    if name == PLAIN:
        return plain_spec(device)
    if name == UNCAPPED:
        return plain_spec(device.with_pool(0), name)
    if name.startswith("tiered"):
        tiers = Tiers(host_gb * 1000 * MB, store, shared.disk_gb * 1000 * MB)
        return tiered_spec(device, tiers, name)
    if name == "lmcache":
        config = out / "lmcache.yaml"
        more = ("--enable-lmcache", "--lmcache-config-file", str(config))
        return plain_spec(device, name, more)
    is_direct = dry_run or name == "hicache-direct"
    layout = "page_first_direct" if is_direct else "page_first"
    size = ("--hicache-size", str(host_gb))
    spec = hicache_spec(device, name, size, layout, store)
    if not dry_run:
        return spec
    hooks = hicache_env(out / "plugin", asynchronous=True)
    return replace(spec, env={**spec.env, **hooks})


def store_of(system: System, out: Path) -> Path:
    """Return the folder of a system's disk."""
    return out.resolve() / "store" / system.name


@contextlib.contextmanager
def beside(system: System, host_gb: int, out: Path) -> Iterator[list[Service]]:
    """Run what a system needs beside its server: LMCache's own.

    Raises:
        ServiceError: it did not start.
    """
    command = _lmcache_command() if system.name == "lmcache" else None
    if command is None:
        yield []
        return
    port = free_port()
    # As the example in SGLang's wheel has it.
    (out / "lmcache.yaml").write_text(f"mp_host: {_HOST}\nmp_port: {port}\n")
    arguments = ["server", "--host", _HOST, "--port", str(port)]
    arguments += ["--l1-size-gb", str(host_gb), "--eviction-policy", "LRU"]
    server = Service(
        "lmcache-server",
        [command, *arguments],
        out / "logs",
        is_ready=lambda: _listens(port),
        start_timeout_s=300.0,
    )
    with server:
        yield [server]


def _lmcache_command() -> str | None:
    beside_python = Path(sys.executable).with_name("lmcache")
    return str(beside_python) if beside_python.exists() else shutil.which("lmcache")


def _listens(port: int) -> bool:
    with socket.create_connection((_HOST, port), timeout=1.0):
        return True
