"""Memory on chosen NUMA nodes, bound, pre-faulted and verified.

CXL memory in the mode ``system-ram`` is a node with memory and without cores. High
bandwidth memory on some processors and the memory of some GPUs look alike: where a
machine has either, name the nodes.

A region is whole when its constructor returns: every page is there (faulted in by
several threads; a start waits for it), and the kernel was asked where. Binding without
that is a wish: a cpuset cuts the set of nodes without a word, and interleaving passes a
full node over. Once bound, the kernel's NUMA balancing leaves the pages alone.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sgl_tiered.errors import ConfigError
from sgl_tiered.tiers.memory import populate
from sgl_tiered.tiers.numa_calls import (
    BIND,
    INTERLEAVE,
    WEIGHTED_INTERLEAVE,
    NumaCalls,
)
from sgl_tiered.tiers.pinning import Pinning, Register

__all__ = [
    "SYSFS",
    "NumaRegion",
    "Placement",
    "check_nodes",
    "free_node_bytes",
    "largest_region_bytes",
    "memory_only_nodes",
    "nodes_with_cores",
    "parse_ids",
    "placement_of",
]

SYSFS = Path("/sys")
_SETTING = "--tiered-cxl"
_MAX_CHECKED_PAGES = 1 << 18
"""All pages of 1 GiB; of a larger region as many at random. Asking took 14 to 66 ms."""
_MAX_ABSENT_SHARE = 0.01
"""A page that the kernel moves or swaps at this moment has no node."""
_HUGE_PAGE_BYTES = 2 << 20
_MAX_THREADS = 8
_SPARE_SHARE = 0.02
"""Of a node, left to the kernel: binding to a node that runs out kills a process."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where pages of memory lie, as the kernel says.

    Attributes:
        pages_by_node: pages found on each node.
        num_absent: pages without a node (not there, or on their way).
        num_checked: pages asked about.
        num_pages: pages in all.
    """

    pages_by_node: Mapping[int, int]
    num_absent: int
    num_checked: int
    num_pages: int

    def describe(self) -> str:
        """Return one clause, e.g. ``16384 of 16384 pages checked: node 1 100%``."""
        shares = ", ".join(
            f"node {node} {pages / self.num_checked:.0%}"
            for node, pages in sorted(self.pages_by_node.items())
        )
        absent = f", {self.num_absent} absent" if self.num_absent else ""
        return (
            f"{self.num_checked} of {self.num_pages} pages checked: "
            f"{shares or 'none there'}{absent}"
        )

    def check(self, nodes: Sequence[int]) -> None:
        """Raise ConfigError unless all pages are on these nodes, and on all of them."""
        astray = sorted(set(self.pages_by_node) - set(nodes))
        empty = sorted(set(nodes) - set(self.pages_by_node))
        if astray or self.num_absent > _MAX_ABSENT_SHARE * self.num_checked:
            problem = "the kernel placed its memory elsewhere"
        elif empty:
            problem = f"the kernel placed nothing on node {empty[0]}"
        else:
            return
        raise ConfigError(
            _SETTING,
            f"{problem} ({self.describe()})",
            "ask for less, or check the free memory of the nodes and this process's "
            "cpuset (Mems_allowed_list in /proc/self/status)",
        )


def parse_ids(text: str) -> tuple[int, ...]:
    """Return the numbers of a kernel list such as ``0-2,8``; else ValueError."""
    ids: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        ids.extend(range(int(first), int(last if dash else first) + 1))
    return tuple(ids)


def memory_only_nodes(sysfs: Path = SYSFS) -> tuple[int, ...]:
    """Return the nodes that have memory and no cores, in order."""
    cores = set(nodes_with_cores(sysfs))
    return tuple(node for node in _node_set("has_memory", sysfs) if node not in cores)


def nodes_with_cores(sysfs: Path = SYSFS) -> tuple[int, ...]:
    """Return the nodes that have cores, in order."""
    return _node_set("has_cpu", sysfs)


def check_nodes(nodes: Sequence[int], sysfs: Path = SYSFS) -> None:
    """Raise ConfigError unless every node has memory."""
    known = _node_set("has_memory", sysfs)
    for node in nodes:
        if node not in known:
            raise ConfigError(
                _SETTING,
                f"NUMA node {node} has no memory or does not exist (nodes with memory: "
                f"{', '.join(map(str, known)) or 'none'})",
                "sgl-tiered doctor lists the nodes",
            )


def free_node_bytes(node: int, sysfs: Path = SYSFS) -> int:
    """Return what can be taken from a node; 0 where nobody says."""
    total = free = 0
    for line in _lines(sysfs / f"devices/system/node/node{node}/meminfo"):
        name, _, value = line.removeprefix(f"Node {node} ").partition(":")
        if name == "MemTotal":
            total = int(value.split()[0]) << 10
        elif name == "MemFree":
            free = int(value.split()[0]) << 10
    return max(0, free - int(_SPARE_SHARE * total))


def largest_region_bytes(nodes: Sequence[int], sysfs: Path = SYSFS) -> int:
    """Return how much fits on these nodes, each giving the share that is its own."""
    shares = _shares(nodes, sysfs).items()
    return min(int(free_node_bytes(node, sysfs) / share) for node, share in shares)


def placement_of(
    address: int,
    num_bytes: int,
    calls: NumaCalls,
    *,
    max_checked: int = _MAX_CHECKED_PAGES,
) -> Placement:
    """Ask on which nodes a range of memory lies.

    Args:
        address: page aligned.
        num_bytes: of the range.
        calls: whom to ask.
        max_checked: of more pages than these, so many are picked at random (always
            the same ones): evenly spaced ones would all hit the same interleaved node.
    """
    num_pages = -(-num_bytes // mmap.PAGESIZE)
    picks: npt.NDArray[np.int64] = np.arange(min(num_pages, max_checked))
    if num_pages > max_checked:
        picks = np.random.default_rng(0).integers(0, num_pages, max_checked)
    addresses = (address + picks * mmap.PAGESIZE).astype(np.uint64)
    nodes, counts = np.unique(calls.nodes_of(addresses), return_counts=True)
    found = dict(zip(nodes.tolist(), counts.tolist(), strict=True))
    return Placement(
        pages_by_node={node: count for node, count in found.items() if node >= 0},
        num_absent=sum(count for node, count in found.items() if node < 0),
        num_checked=len(picks),
        num_pages=num_pages,
    )


class NumaRegion:
    """A ``Region`` of anonymous memory on these nodes and no others.

    Several nodes are interleaved, by their weights where the kernel knows any (Linux
    6.9+, ``/sys/kernel/mm/mempolicy/weighted_interleave``), else evenly.

    Args:
        num_rows, row_bytes: shape of ``array``.
        nodes: at least one.
        register: pins the region for a device, in parts, once it is placed.
        calls: the kernel's calls; found by itself if None.
        sysfs: for tests.

    Raises:
        ConfigError: a node has no memory or too little, or the kernel would not place
            the memory there.
    """

    def __init__(
        self,
        num_rows: int,
        row_bytes: int,
        nodes: Sequence[int],
        *,
        register: Register | None = None,
        calls: NumaCalls | None = None,
        sysfs: Path = SYSFS,
    ) -> None:
        num_bytes = num_rows * row_bytes
        check_nodes(nodes, sysfs)
        _check_room(nodes, num_bytes, sysfs)
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Refused by kernels without huge pages; the region works all the same.
        with suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(mapping, np.uint8).reshape(
            num_rows, row_bytes
        )
        self.pinning: Pinning | None = None
        try:
            calls = calls or NumaCalls.find()
            address = self.array.ctypes.data
            self.policy = _bind(calls, address, num_bytes, nodes)
            _populate(self.array)
            self.placement = placement_of(address, num_bytes, calls)
        except OSError as error:
            raise ConfigError(
                _SETTING,
                f"the kernel does not place memory on {_names(nodes)} "
                f"({error.strerror})",
                "check that they are allowed to this process (Mems_allowed_list in "
                "/proc/self/status), and in a container that it has the capability "
                "SYS_NICE",
            ) from None
        self.placement.check(nodes)
        if register is not None:
            self.pinning = Pinning(register, address, num_rows, row_bytes)

    def close(self) -> None:
        """Unpin; may be called twice."""
        if self.pinning is not None:
            self.pinning.close()


def _bind(calls: NumaCalls, address: int, num_bytes: int, nodes: Sequence[int]) -> str:
    """Bind a range; return the policy in words."""
    if len(nodes) == 1:
        calls.bind(address, num_bytes, BIND, nodes)
        return "bound"
    try:
        calls.bind(address, num_bytes, WEIGHTED_INTERLEAVE, nodes)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        calls.bind(address, num_bytes, INTERLEAVE, nodes)
        return "interleaved"
    return "interleaved by weight"


def _populate(array: npt.NDArray[np.uint8]) -> None:
    """Fault every page in, on several threads; OSError where the kernel cannot."""
    address, num_bytes = array.ctypes.data, array.nbytes
    num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
    part = -(-num_bytes // num_threads)
    part = -(-part // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    starts = range(0, num_bytes, part)
    with ThreadPoolExecutor(num_threads) as threads:
        codes = set(
            threads.map(
                lambda start: populate(address + start, min(part, num_bytes - start)),
                starts,
            )
        )
    if codes == {errno.EINVAL}:
        # Linux before 5.14: touching does the same, more slowly.
        array.reshape(-1)[:: mmap.PAGESIZE] = 0
        return
    for code in codes - {0}:
        raise OSError(code, os.strerror(code))


def _check_room(nodes: Sequence[int], num_bytes: int, sysfs: Path) -> None:
    for node, share in _shares(nodes, sysfs).items():
        wanted, free = num_bytes * share, free_node_bytes(node, sysfs)
        if wanted > free:
            raise ConfigError(
                _SETTING + "-size",
                f"{wanted / 2**30:.2f} GiB would go to NUMA node {node}, which has "
                f"{free / 2**30:.2f} GiB free",
                "ask for less",
            )


def _shares(nodes: Sequence[int], sysfs: Path) -> dict[int, float]:
    """Return which part of a region each node gets."""
    weights = {node: _weight(node, sysfs) for node in nodes}
    total = sum(weights.values())
    return {node: weight / total for node, weight in weights.items()}


def _weight(node: int, sysfs: Path) -> int:
    lines = _lines(sysfs / f"kernel/mm/mempolicy/weighted_interleave/node{node}")
    return int(lines[0]) if lines else 1


def _node_set(name: str, sysfs: Path) -> tuple[int, ...]:
    return parse_ids("".join(_lines(sysfs / "devices/system/node" / name)))


def _names(nodes: Sequence[int]) -> str:
    return f"NUMA node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}"


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
