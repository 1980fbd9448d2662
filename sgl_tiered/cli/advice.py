"""From facts to advice: can this machine serve, and with which flags.

Pure functions of the facts, so that each rule has a test.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from sgl_tiered.cli.engine import (
    PLATFORM,
    PLUGIN,
    AcceleratorFacts,
    EngineFacts,
    left_out_plugins,
)
from sgl_tiered.cli.machine import (
    CpuFacts,
    HugePageFacts,
    MemoryFacts,
    NumaNode,
)
from sgl_tiered.cli.storage import DiskFacts, IoUringFacts
from sgl_tiered.cli.transports import TransportFacts
from sgl_tiered.tiers.devdax import DaxDevice

__all__ = [
    "CxlAdvice",
    "Facts",
    "Suggestion",
    "cxl_advice",
    "disk_size_bytes",
    "host_size_bytes",
    "obstacles",
    "remarks",
    "suggest",
]

GB = 10**9
MIN_MEMORY_BYTES = 4 * GB
"""SGLang's processes take about 3 GB on a CPU before any model and any tier."""
_HOST_SHARE = 0.5
_HOST_SHARE_ON_CPU = 0.25
"""Without an accelerator the model and the device pool lie in the same memory."""
_DISK_SHARE = 0.5
"""Both halves are what the server takes by itself (``auto``), so that the doctor says
no other sizes than those; a quarter is said to be another one (``remarks``)."""
_DISK_SPARE_BYTES = 10 * GB
_CXL_SHARE = 0.9
"""Of a NUMA node: its memory is also the system's, for which some must be left."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that was found."""

    accelerator: AcceleratorFacts
    cpu: CpuFacts
    memory: MemoryFacts
    numa_nodes: list[NumaNode]
    dax_devices: list[DaxDevice]
    huge_pages: HugePageFacts
    disk: DiskFacts
    io_uring: IoUringFacts
    transports: tuple[TransportFacts, ...]
    engine: EngineFacts


@dataclass(frozen=True, slots=True)
class CxlAdvice:
    """What ``--tiered-cxl`` could name, and with which size; 0 for all there is."""

    source: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A command line that fits the machine; sizes are of a rank, as in the flags."""

    host_bytes: int
    disk_bytes: int
    command: str


def host_size_bytes(facts: Facts, num_ranks: int = 1) -> int:
    """Return a rank's host tier: a share of free memory in whole GB, or 0.

    Memory without cores is left out: it would be the CXL tier's.
    """
    on_cpu = facts.accelerator.kind is None
    share = _HOST_SHARE_ON_CPU if on_cpu else _HOST_SHARE
    far = sum(node.free_bytes for node in facts.numa_nodes if node.is_memory_only)
    free = facts.memory.available_bytes - far
    return max(0, int(free * share) // num_ranks) // GB * GB


def cxl_advice(facts: Facts) -> CxlAdvice | None:
    """Return the candidate for a CXL tier: nodes without cores, else devdax."""
    nodes = [node for node in facts.numa_nodes if node.is_memory_only]
    if nodes:
        # Interleaved evenly, so the fullest node sets the share of each.
        free = len(nodes) * min(node.free_bytes for node in nodes)
        size = int(free * _CXL_SHARE) // GB * GB
        names = ",".join(str(node.node_id) for node in nodes)
        return CxlAdvice(f"node:{names}", size) if size else None
    for device in facts.dax_devices:
        if not device.is_system_ram:
            return CxlAdvice(str(device.path), 0)
    return None


def disk_size_bytes(disk: DiskFacts, num_ranks: int = 1) -> int:
    """Return a rank's disk tier in whole GB; 0 where it would be none."""
    if not disk.writable or disk.is_memory:
        return 0
    free = disk.free_bytes
    room = min(int(free * _DISK_SHARE), free - _DISK_SPARE_BYTES)
    return max(room, 0) // num_ranks // GB * GB


def suggest(
    facts: Facts, model: str = "MODEL", num_ranks: int = 1
) -> Suggestion | None:
    """Return a complete command line, or None where not even a host tier fits."""
    host = host_size_bytes(facts, num_ranks)
    disk = disk_size_bytes(facts.disk, num_ranks)
    if host == 0:
        return None
    words = ["python", "-m", "sglang.launch_server", "--model-path", model]
    if num_ranks > 1:
        words += ["--tp", str(num_ranks)]
    words += ["--radix-cache-backend", "tiered", "--page-size", "16"]
    words += ["--tiered-host-size", f"{host // GB}GB"]
    if facts.accelerator.kind is None:
        # A forward ends there where it is launched: nothing to overlap with.
        words += ["--sleep-on-idle", "--disable-overlap-schedule"]
    cxl = cxl_advice(facts)
    if cxl is not None:
        words += ["--tiered-cxl", cxl.source]
        if cxl.num_bytes:
            words += ["--tiered-cxl-size", f"{cxl.num_bytes // GB}GB"]
    if disk:
        words += ["--tiered-disk-path", facts.disk.path]
        words += ["--tiered-disk-size", f"{disk // GB}GB"]
    return Suggestion(host, disk, shlex.join(words))


def obstacles(facts: Facts, environment: Mapping[str, str]) -> list[str]:
    """Return why serving is not possible here, one sentence each; empty if it is."""
    engine, found = facts.engine, []
    if engine.detail:
        found.append(f"{engine.detail}.")
    missing = [seam for seam in engine.seams if not seam.found]
    if missing:
        remedy = "check its installation"
        if engine.version != engine.tested_version:
            remedy = f"install sglang=={engine.tested_version}"
        found.append(
            f"SGLang {engine.version} lacks {len(missing)} of {len(engine.seams)} "
            f"things that the plugin needs (first: {missing[0].detail}); {remedy}."
        )
    if not engine.plugin_registered:
        found.append("The plugin is not installed: pip install sgl-tiered.")
    left_out = left_out_plugins(environment)
    if PLUGIN in left_out:
        found.append(f"SGLANG_PLUGINS leaves the plugin out: add {PLUGIN} to it.")
    if facts.accelerator.kind is None:
        if not engine.platform_registered:
            found.append(
                "There is no accelerator, and SGLang needs a CPU platform then: "
                "pip install sgl-tiered-platform."
            )
        elif PLATFORM in left_out:
            found.append(
                f"SGLANG_PLUGINS leaves the CPU platform out: add {PLATFORM} to it."
            )
    if facts.memory.available_bytes < MIN_MEMORY_BYTES:
        found.append(
            f"Only {facts.memory.available_bytes / GB:.1f} GB of memory are free; "
            f"{MIN_MEMORY_BYTES // GB} GB are the least for SGLang and a host tier."
        )
    return found


def remarks(facts: Facts) -> list[str]:
    """Return what is worth knowing and stops nothing, one sentence each."""
    found = []
    engine, disk = facts.engine, facts.disk
    if facts.accelerator.kind is None:
        found.append(
            "Without an accelerator the model and its KV pool lie in the same memory: "
            "the host size suggested is a quarter of what is free; the server's own "
            "default, auto, is half of it."
        )
    if engine.version not in (None, engine.tested_version):
        found.append(
            f"SGLang {engine.version} is installed; {engine.tested_version} is tested."
        )
    if disk.is_memory:
        found.append(
            f"{disk.path} lies in main memory ({disk.file_system}): pick a real disk "
            "with --path."
        )
    elif not disk.writable:
        found.append(f"{disk.path} cannot be written to: pick another with --path.")
    elif not disk.direct_io:
        found.append(
            "Without O_DIRECT the page cache holds the disk tier's pages a second time."
        )
    memory_only = [node.node_id for node in facts.numa_nodes if node.is_memory_only]
    if memory_only:
        found.append(
            f"NUMA nodes without cores: {', '.join(map(str, memory_only))}. CXL "
            "memory looks so, and also high-bandwidth memory of some processors and "
            "the memory of some GPUs: name only CXL memory in --tiered-cxl."
        )
    return found
