"""Trees that look like /sys of machines with CXL memory; what this machine allows."""

import errno
import mmap
from pathlib import Path

import numpy as np
import pytest

from sgl_tiered.tiers.numa import SYSFS, parse_ids
from sgl_tiered.tiers.numa_calls import BIND, NumaCalls

GIB = 2**30
UNIT = 2 << 20


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def add_node(sysfs: Path, node: int, total: int = 8 * GIB, free: int = 4 * GIB) -> None:
    """Describe the memory of a node."""
    write(
        sysfs / f"devices/system/node/node{node}/meminfo",
        f"Node {node} MemTotal:  {total >> 10} kB\n"
        f"Node {node} MemFree:   {free >> 10} kB\n"
        f"Node {node} HugePages_Total:     0\n",
    )


def add_nodes(sysfs: Path, *, cores: str, memory: str) -> Path:
    """Say which nodes have cores and which have memory; each has 4 GiB free."""
    root = sysfs / "devices/system/node"
    write(root / "has_cpu", cores + "\n")
    write(root / "has_memory", memory + "\n")
    for part in filter(None, memory.split(",")):
        first, _, last = part.partition("-")
        for node in range(int(first), int(last or first) + 1):
            add_node(sysfs, node)
    return sysfs


def set_weight(sysfs: Path, node: int, weight: int) -> None:
    """Give a node a weight for interleaving."""
    folder = sysfs / "kernel/mm/mempolicy/weighted_interleave"
    write(folder / f"node{node}", f"{weight}\n")


def add_dax(
    sysfs: Path,
    name: str = "dax0.0",
    *,
    size: int = 8 * UNIT,
    target_node: int = 1,
    driver: str = "device_dax",
) -> Path:
    """Describe a device-DAX instance, in the spelling of the kernel."""
    folder = sysfs / "bus/dax/devices" / name
    write(folder / "size", f"{size}\n")
    write(folder / "align", f"{UNIT:#x}\n")
    write(folder / "target_node", f"{target_node}\n")
    drivers = sysfs / "bus/dax/drivers" / driver
    drivers.mkdir(parents=True, exist_ok=True)
    (folder / "driver").symlink_to(drivers)
    return sysfs


def dax_file(folder: Path, name: str = "dax0.0", size: int = 8 * UNIT) -> Path:
    """Make a file that is mapped like a device node."""
    path = folder / name
    with path.open("wb") as file:
        file.truncate(size)
    return path


def first_node() -> int:
    """Return a node of this machine with memory; skip where none may be asked for."""
    has_memory = SYSFS / "devices/system/node/has_memory"
    if not has_memory.exists():
        pytest.skip("this kernel knows no NUMA nodes")
    node = parse_ids(has_memory.read_text())[0]
    page = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)
    try:
        calls = NumaCalls.find()
        calls.bind(page.ctypes.data, page.nbytes, BIND, (node,))
        calls.nodes_of(np.array([page.ctypes.data], np.uint64))
    except OSError as error:
        # What a container without the capability SYS_NICE says.
        if error.errno not in (errno.EPERM, errno.ENOSYS):
            raise
        pytest.skip(f"this process may not place memory ({error.strerror})")
    return node
