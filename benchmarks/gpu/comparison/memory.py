"""The memory of a system: what it was given, what it says, and what is measured."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
from comparison.settings import Shared
from comparison.systems import System
from sgl_tiered_workloads.server import ServerSpec, SglangServer

__all__ = ["given_memory", "gpu_memory", "measured_memory", "told_flags"]

_GIB = 1 << 30
_ASK_S = 20.0


def given_memory(
    system: System, server: SglangServer, shared: Shared, host_gb: int
) -> dict[str, Any]:
    """Return the memory that a system was given, and what its server says of it.

    Args:
        system: which one.
        server: its server.
        shared: what was asked for.
        host_gb: that it was given.
    """
    info = server.server_info()
    usage = info["internal_states"][0]["memory_usage"]
    ours = system.name.startswith("tiered")
    disk = f"{shared.disk_gb} GB" if ours else "no limit"
    return {
        "pool_tokens": int(usage["token_capacity"]),
        "pool_gib": usage["kvcache"],
        "weights_gib": usage["weight"],
        "graphs_gib": round(sum(usage["graph"].values()), 3),
        "host_gb": host_gb if system.has_host else 0,
        "disk": disk if system.has_disk else "",
        "attention_backend": info.get("attention_backend") or "",
        "page_size": info.get("page_size"),
        "mem_fraction": info.get("mem_fraction_static"),
        "start_s": round(server.start_s, 1),
        "flags": told_flags(server.spec),
    }


def told_flags(spec: ServerSpec) -> list[str]:
    """Return a server's flags as they may be written down: no path of the machine."""
    return [Path(flag).name if flag.startswith("/") else flag for flag in spec.flags]


def measured_memory(pids: Iterable[int]) -> dict[str, float | None]:
    """Return GiB in use: of the GPU and the host by whoever, and by some processes.

    Args:
        pids: of the processes, whose children count too. A page that several share
            counts once. What a driver allocates for them counts for the host only.
    """
    host_bytes = 0
    for pid in pids:
        try:
            root = psutil.Process(pid)
            for process in (root, *root.children(recursive=True)):
                host_bytes += process.memory_full_info().pss
        except (psutil.Error, OSError):
            # It ended just now.
            continue
    gpu = gpu_memory()
    return {
        "gpu_used_gib": None if gpu is None else round(gpu / _GIB, 2),
        "processes_gib": round(host_bytes / _GIB, 2),
        "host_used_gib": round(psutil.virtual_memory().used / _GIB, 2),
    }


def gpu_memory() -> int | None:
    """Return the bytes in use on the first visible GPU; None if unknown.

    By nvidia-smi: CUDA in this process would take memory itself.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    query = "--query-gpu=memory.used"
    command = ["nvidia-smi", "-i", visible, query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_ASK_S
        )
        return int(done.stdout) << 20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
