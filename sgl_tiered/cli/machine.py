"""Facts about the machine: memory, cores, NUMA nodes, huge pages.

Small functions of the paths that they read, so that tests hand in trees of their own.
What cannot be read is reported as absent, never guessed. All sizes are in bytes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "CpuFacts",
    "HugePageFacts",
    "MemoryFacts",
    "NumaNode",
    "cpu_facts",
    "huge_page_facts",
    "memory_facts",
    "numa_nodes",
]

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_NODES = Path("/sys/devices/system/node")
_MM = Path("/sys/kernel/mm")
_NO_LIMIT_BYTES = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2**63; no machine has 2**60 bytes."""


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Main memory.

    Attributes:
        total_bytes: of the machine.
        available_bytes: what can still be taken, within the cgroup's limit.
        limit_bytes: the tightest limit of the cgroups that we are in; None for none.
    """

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None


@dataclass(frozen=True, slots=True)
class CpuFacts:
    """Cores that this process may use.

    Attributes:
        num_cores: in its affinity mask.
        quota_cores: what the cgroup allows, in cores; None for no limit.
    """

    num_cores: int
    quota_cores: float | None


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One memory node; ``cpus`` is empty where it has memory only, as CXL has."""

    node_id: int
    cpus: str
    total_bytes: int
    free_bytes: int

    @property
    def is_memory_only(self) -> bool:
        """Whether it has memory and no cores."""
        return not self.cpus and self.total_bytes > 0


@dataclass(frozen=True, slots=True)
class HugePageFacts:
    """Huge pages.

    Attributes:
        transparent: always, madvise, never, or unknown.
        reserved: for each page size in bytes: pages reserved, pages free.
    """

    transparent: str
    reserved: dict[int, tuple[int, int]]


def memory_facts(proc: Path = _PROC, cgroup: Path = _CGROUP) -> MemoryFacts:
    """Read ``meminfo`` and the memory limits of this process's cgroups (v1 and v2)."""
    info = _meminfo(proc / "meminfo")
    total, available = info.get("MemTotal", 0), info.get("MemAvailable", 0)
    limit: int | None = None
    for group_limit, group_used in _memory_limits(proc, cgroup):
        limit = group_limit if limit is None else min(limit, group_limit)
        available = min(available, group_limit - group_used)
    return MemoryFacts(total, max(available, 0), limit)


def cpu_facts(proc: Path = _PROC, cgroup: Path = _CGROUP) -> CpuFacts:
    """Count the cores of the affinity mask and read the cgroups' CPU quota."""
    quotas = list(_cpu_quotas(proc, cgroup))
    return CpuFacts(len(os.sched_getaffinity(0)), min(quotas) if quotas else None)


def numa_nodes(root: Path = _NODES) -> list[NumaNode]:
    """List the memory nodes by number; empty where the kernel knows none."""
    nodes = []
    for folder in root.glob("node[0-9]*"):
        node_id = int(folder.name.removeprefix("node"))
        info = _meminfo(folder / "meminfo", prefix=f"Node {node_id} ")
        nodes.append(
            NumaNode(
                node_id,
                _text(folder / "cpulist") or "",
                info.get("MemTotal", 0),
                info.get("MemFree", 0),
            )
        )
    return sorted(nodes, key=lambda node: node.node_id)


def huge_page_facts(mm: Path = _MM) -> HugePageFacts:
    """Read the state of transparent huge pages and the reserved ones of each size."""
    state = re.search(r"\[(\w+)\]", _text(mm / "transparent_hugepage/enabled") or "")
    reserved = {}
    for folder in (mm / "hugepages").glob("hugepages-*kB"):
        size = int(folder.name.removeprefix("hugepages-").removesuffix("kB")) * 1024
        reserved[size] = (
            _number(folder / "nr_hugepages") or 0,
            _number(folder / "free_hugepages") or 0,
        )
    return HugePageFacts(
        state.group(1) if state else "unknown", dict(sorted(reserved.items()))
    )


def _memory_limits(proc: Path, cgroup: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, bytes in use that cannot be reclaimed) of each limiting group."""
    for folder in _groups(proc, cgroup, ""):
        limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
        if limit is not None and used is not None:
            yield limit, used - _inactive_file(folder, "inactive_file")
    for folder in _groups(proc, cgroup, "memory"):
        limit = _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.usage_in_bytes")
        if limit is not None and used is not None and limit < _NO_LIMIT_BYTES:
            yield limit, used - _inactive_file(folder, "total_inactive_file")


def _inactive_file(folder: Path, key: str) -> int:
    """Bytes of page cache in the group that the kernel gives back when asked."""
    for line in (_text(folder / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


def _cpu_quotas(proc: Path, cgroup: Path) -> Iterator[float]:
    for folder in _groups(proc, cgroup, ""):
        quota, _, period = (_text(folder / "cpu.max") or "max").partition(" ")
        if quota != "max":
            yield int(quota) / int(period)
    for folder in _groups(proc, cgroup, "cpu"):
        quota_us = _number(folder / "cpu.cfs_quota_us")
        period_us = _number(folder / "cpu.cfs_period_us")
        if quota_us is not None and quota_us > 0 and period_us:
            yield quota_us / period_us


def _groups(proc: Path, cgroup: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of our group and of all groups above it; "" means v2.

    A container often sees its own group as the root, so folders of the path that are
    not there are passed over.
    """
    for line in (_text(proc / "self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller not in controllers.split(","):
            continue
        root = cgroup / controller if controller else cgroup
        folder = root / path.lstrip("/")
        while folder != root:
            if folder.is_dir():
                yield folder
            folder = folder.parent
        yield root


def _meminfo(path: Path, prefix: str = "") -> dict[str, int]:
    """Read lines such as ``MemTotal:  12 kB`` into bytes by name."""
    values = {}
    for line in (_text(path) or "").splitlines():
        name, _, rest = line.removeprefix(prefix).partition(":")
        number, _, unit = rest.strip().partition(" ")
        if unit == "kB":
            values[name] = int(number) * 1024
    return values


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text and text.lstrip("-").isdigit() else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
