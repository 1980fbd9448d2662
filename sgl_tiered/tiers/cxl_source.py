"""Where the CXL tier's memory comes from: what ``--tiered-cxl`` says, and its size.

auto             the NUMA nodes that have memory and no cores
node:1  node:1,2 these nodes, several interleaved
/dev/dax0.0      a device-DAX node; /dev/dax0.0@32GiB begins at that offset
emulate:memory   a stand-in, marked as such wherever the tier is reported:
emulate:node:0     plain memory, any NUMA node, or a file on tmpfs
emulate:/dev/shm
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sgl_tiered.errors import ConfigError
from sgl_tiered.tiers.devdax import dax_device
from sgl_tiered.tiers.numa import (
    SYSFS,
    check_nodes,
    largest_region_bytes,
    memory_only_nodes,
    nodes_with_cores,
)

__all__ = ["CxlSource", "largest_bytes", "parse_source"]

_SETTING = "--tiered-cxl"
_REMEDY = (
    "use auto, node:1 (or node:1,2), /dev/dax0.0, emulate:memory, emulate:node:0 or "
    "emulate:/dev/shm"
)
_NODES = re.compile(r"node:(\d+(?:,\d+)*)")
_EMULATE = "emulate:"


@dataclass(frozen=True, slots=True)
class CxlSource:
    """A place for the tier; plain memory where neither nodes nor a path are given.

    Attributes:
        nodes: NUMA nodes.
        path: a device-DAX node, or a folder on tmpfs.
        offset_bytes: where to begin in the device.
        emulated: it stands in for CXL memory.
    """

    nodes: tuple[int, ...] = ()
    path: Path | None = None
    offset_bytes: int = 0
    emulated: bool = False

    @property
    def is_machine_memory(self) -> bool:
        """Whether it takes from the memory that the host tier takes from."""
        return self.path is None or self.emulated

    def describe(self) -> str:
        """Return one clause for reports."""
        if self.nodes:
            plural = "s" if len(self.nodes) > 1 else ""
            place = f"NUMA node{plural} {', '.join(map(str, self.nodes))}"
        elif self.path is None:
            place = "plain memory"
        elif self.emulated:
            place = f"a tmpfs file in {self.path}"
        else:
            place = str(self.path)
            if self.offset_bytes:
                place += f" from byte {self.offset_bytes} on"
        return f"CXL is emulated by {place}" if self.emulated else f"CXL is {place}"


def parse_source(
    text: str, parse_size: Callable[[str, object], int], sysfs: Path = SYSFS
) -> CxlSource:
    """Read the flag, and check what it names against the machine.

    Args:
        text: as the module's docstring says.
        parse_size: turns (setting, text) into bytes.
        sysfs: for tests.

    Raises:
        ConfigError: it is not understood, or does not fit the machine.
    """
    if text == "auto":
        nodes = memory_only_nodes(sysfs)
        if not nodes:
            raise ConfigError(
                _SETTING,
                "auto finds no NUMA node that has memory and no cores",
                "sgl-tiered doctor shows what there is; emulate:memory stands in",
            )
        return CxlSource(nodes=nodes)
    emulated = text.startswith(_EMULATE)
    place = text.removeprefix(_EMULATE)
    match = _NODES.fullmatch(place)
    if match:
        nodes = tuple(dict.fromkeys(int(node) for node in match.group(1).split(",")))
        check_nodes(nodes, sysfs)
        near = sorted(set(nodes) & set(nodes_with_cores(sysfs)))
        if near and not emulated:
            raise ConfigError(
                _SETTING,
                f"NUMA node {near[0]} has cores, so it is no CXL memory",
                f"write emulate:{place} to let it stand in",
            )
        return CxlSource(nodes=nodes, emulated=emulated)
    if emulated and place == "memory":
        return CxlSource(emulated=True)
    if not place.startswith("/"):
        raise ConfigError(_SETTING, f"{text!r} is not understood", _REMEDY)
    if emulated:
        return CxlSource(path=Path(place), emulated=True)
    name, _, offset = place.partition("@")
    path = Path(name)
    dax_device(path, sysfs)
    return CxlSource(path=path, offset_bytes=parse_size(_SETTING, offset or 0))


def largest_bytes(source: CxlSource, sysfs: Path = SYSFS) -> int | None:
    """Return how much a real source has to give; None for a stand-in."""
    if source.emulated:
        return None
    if source.path is not None:
        size = dax_device(source.path, sysfs).size_bytes
        return max(0, size - source.offset_bytes)
    return largest_region_bytes(source.nodes, sysfs)
