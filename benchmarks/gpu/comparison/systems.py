"""The compared systems: flags, what else each needs, and the memory that it has.

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
from typing import Any

from comparison.settings import Model, Shared
from hicache_cpu.distribution import hicache_env
from sgl_tiered_workloads.processes import Service
from sgl_tiered_workloads.server import ServerSpec, SglangServer, free_port
from sgl_tiered_workloads.systems import (
    CPU_FLAGS,
    MB,
    Device,
    Tiers,
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
    "TIERED",
    "TTFT",
    "System",
    "absent",
    "beside",
    "memory",
    "spec_of",
    "store_of",
    "told_flags",
]

GATE, TTFT, DISK, LOADS, NO_REUSE = "gate", "ttft", "disk", "loads", "noreuse"
_HOST = "127.0.0.1"
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Of a dry run: torch's threads wait actively for each other, on cores that are
busy."""


@dataclass(frozen=True, slots=True)
class System:
    """One of the compared systems.

    Attributes:
        name: in tables and files.
        parts: what is measured of it.
        tier: what answers call the place below the device that is measured.
        about: one line for people.
        has_host: whether it has host memory.
    """

    name: str
    parts: tuple[str, ...]
    tier: str
    about: str
    has_host: bool = True

    @property
    def has_disk(self) -> bool:
        """Whether it has a disk."""
        return DISK in self.parts


PLAIN, TIERED = "plain", "tiered"
_BOTH = (GATE, TTFT, LOADS)
_EVERY = (
    System(PLAIN, (*_BOTH, NO_REUSE), "", "SGLang's radix cache", has_host=False),
    System(TIERED, (*_BOTH, NO_REUSE), "host", "sgl-tiered, host memory"),
    System("hicache", _BOTH, "host", "HiCache, page_first, copies by its kernel"),
    System(
        "hicache-direct", _BOTH, "host", "HiCache, page_first_direct, direct copies"
    ),
    System(
        "lmcache", _BOTH, "storage", "LMCache's server, by SGLang's --enable-lmcache"
    ),
    System("tiered-disk", (GATE, DISK), "disk", "sgl-tiered, host memory and disk"),
    System("hicache-disk", (GATE, DISK), "storage", "HiCache with its file backend"),
)
SYSTEMS = {system.name: system for system in _EVERY}
DEFAULT = tuple(SYSTEMS)
DEFAULT_DRY = tuple(name for name in SYSTEMS if name != "hicache-direct")
"""A CPU has one way of copies."""


def absent(name: str, *, dry_run: bool) -> str:
    """Return why a system cannot run here; empty where it can."""
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
    spec = _spec(system, model, shared, host_gb, out, dry_run=dry_run)
    return replace(spec, env={**spec.env, **_ONE_THREAD}) if dry_run else spec


def _spec(
    system: System,
    model: Model,
    shared: Shared,
    host_gb: int,
    out: Path,
    *,
    dry_run: bool,
) -> ServerSpec:
    flags = list(CPU_FLAGS) if dry_run else []
    if shared.mem_fraction is not None:
        flags += ["--mem-fraction-static", f"{shared.mem_fraction:g}"]
    if shared.attention_backend:
        flags += ["--attention-backend", shared.attention_backend]
    flags += shared.server_flags
    device = Device(model.path, shared.pool_tokens, shared.page_size, tuple(flags))
    if system.name == PLAIN:
        return plain_spec(device)
    if system.name.startswith("tiered"):
        store = store_of(system, out) if system.has_disk else None
        tiers = Tiers(host_gb * 1000 * MB, store, shared.disk_gb * 1000 * MB)
        return tiered_spec(device, tiers, system.name)
    if system.name == "lmcache":
        config = out / "lmcache.yaml"
        more = ("--enable-lmcache", "--lmcache-config-file", str(config))
        return plain_spec(device, system.name, more)
    return _hicache(system, device, host_gb, out, dry_run=dry_run)


def _hicache(
    system: System, device: Device, host_gb: int, out: Path, *, dry_run: bool
) -> ServerSpec:
    is_direct = dry_run or system.name == "hicache-direct"
    flags = [
        "--enable-hierarchical-cache",
        "--hicache-size",
        str(host_gb),
        "--hicache-write-policy",
        "write_through",
        "--hicache-mem-layout",
        "page_first_direct" if is_direct else "page_first",
        "--hicache-io-backend",
        "direct" if is_direct else "kernel",
    ]
    env: dict[str, str | None] = {}
    if dry_run:
        env |= hicache_env(out / "plugin", asynchronous=True)
    if system.has_disk:
        flags += ["--hicache-storage-backend", "file"]
        flags += ["--hicache-storage-prefetch-policy", "wait_complete"]
        env["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(store_of(system, out))
    return replace(plain_spec(device, system.name, flags), env=env)


def store_of(system: System, out: Path) -> Path:
    """Return the folder of a system's disk."""
    return out.resolve() / "store" / system.name


@contextlib.contextmanager
def beside(system: System, host_gb: int, out: Path) -> Iterator[None]:
    """Run what a system needs beside its server: LMCache's own.

    Raises:
        ServiceError: it did not start.
    """
    command = _lmcache_command() if system.name == "lmcache" else None
    if command is None:
        yield
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
        yield


def _lmcache_command() -> str | None:
    beside_python = Path(sys.executable).with_name("lmcache")
    return str(beside_python) if beside_python.exists() else shutil.which("lmcache")


def _listens(port: int) -> bool:
    with socket.create_connection((_HOST, port), timeout=1.0):
        return True


def told_flags(spec: ServerSpec) -> list[str]:
    """Return a server's flags as they may be written down: no path of the machine."""
    return [Path(flag).name if flag.startswith("/") else flag for flag in spec.flags]


def memory(
    system: System, server: SglangServer, shared: Shared, host_gb: int
) -> dict[str, Any]:
    """Return the memory that a running system has, and what it resolved.

    Args:
        system: which one.
        server: its server.
        shared: what was asked for.
        host_gb: that it was given.
    """
    info = server.server_info()
    state = info["internal_states"][0]
    usage = state["memory_usage"]
    return {
        "pool_tokens": int(usage["token_capacity"]),
        "pool_gib": usage["kvcache"],
        "weights_gib": usage["weight"],
        "graphs_gib": round(sum(usage["graph"].values()), 3),
        "host_gb": host_gb if system.has_host else 0,
        "disk": _disk(system, shared),
        "attention_backend": info.get("attention_backend") or "",
        "page_size": info.get("page_size"),
        "mem_fraction": info.get("mem_fraction_static"),
        "start_s": round(server.start_s, 1),
        "flags": told_flags(server.spec),
    }


def _disk(system: System, shared: Shared) -> str:
    if not system.has_disk:
        return ""
    if system.name.startswith("tiered"):
        return f"{shared.disk_gb} GB"
    return "no limit"
