"""The choice of an I/O engine: how extents get to and from the slabs.

- ``threads``: preadv and pwritev by a pool of threads, O_DIRECT. Needs nothing.
- ``bounce``: the same, and reads go by way of a buffer of 1 MiB per thread. Where a
  hypervisor emulates the disk by copying, its copies into memory that is in the cache
  are so much faster that a second copy pays: 3.0 instead of 2.3 GB/s, for 0.21 instead
  of 0.10 s of processor per GB. A real disk writes to memory by itself.
- ``uring``: io_uring through NIXL, O_DIRECT; see ``disk_uring``.
- ``mmap``: copies to and from mapped slabs, through the page cache; see ``disk_mmap``.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from sgl_tiered.core.clock import Clock
from sgl_tiered.errors import ConfigError
from sgl_tiered.tiers.disk_io import SystemCalls
from sgl_tiered.tiers.disk_mmap import MappedCalls, why_not_mapped
from sgl_tiered.tiers.disk_nixl import open_nixl_ring
from sgl_tiered.tiers.disk_threads import IOEngine, ThreadEngine
from sgl_tiered.tiers.disk_uring import UringEngine

__all__ = ["ENGINES", "is_virtual_disk", "make_engine"]

logger = logging.getLogger(__name__)
ENGINES = ("auto", "threads", "bounce", "uring", "mmap")


def make_engine(
    name: str, path: Path, calls: SystemCalls, clock: Clock, *, num_threads: int
) -> IOEngine:
    """Return the engine of this name, or ``threads`` where it cannot work.

    ``auto`` is ``bounce`` on a virtual disk and ``threads`` on every other: io_uring
    was no faster on the disks seen, and it costs a large dependency.

    Args:
        name: one of ``ENGINES``.
        path: where the tier is to be; need not exist.
        calls: the operating system.
        clock: times what is in flight.
        num_threads: I/Os in flight.

    Raises:
        ConfigError: there is no such engine.
    """
    if name not in ENGINES:
        raise ConfigError(
            "disk io", f"{name!r} is unknown", f"use {', '.join(ENGINES)}"
        )
    if name == "mmap":
        reason = why_not_mapped()
        if not reason:
            mapped = MappedCalls(calls)
            return ThreadEngine(
                mapped, clock, num_threads=num_threads, name="mmap", direct=False
            )
        logger.warning("disk tier: no mmap, but threads, because %s", reason)
    if name == "bounce" or (name == "auto" and is_virtual_disk(path)):
        return ThreadEngine(
            calls, clock, num_threads=num_threads, name="bounce", bounces=True
        )
    threads = ThreadEngine(calls, clock, num_threads=num_threads)
    if name == "uring":
        ring = open_nixl_ring()
        if not isinstance(ring, str):
            return UringEngine(
                ring, open_nixl_ring, threads, clock, max_in_flight=num_threads
            )
        logger.warning("disk tier: no io_uring, but threads, because %s", ring)
    return threads


def is_virtual_disk(path: Path, devices: Path = Path("/sys/dev/block")) -> bool:
    """Return whether the file system of a path lies on a disk of virtio.

    Args:
        path: the nearest folder above it that exists counts.
        devices: where the kernel links device numbers to devices; for tests.
    """
    while not path.exists():
        path = path.parent
    number = path.stat().st_dev
    link = devices / f"{os.major(number)}:{os.minor(number)}"
    return any(part.startswith("virtio") for part in link.resolve().parts)
