"""The choice of an I/O engine: how extents get to and from the slabs.

- ``threads``: preadv and pwritev by a pool of threads, O_DIRECT. Needs nothing.
- ``uring``: io_uring through NIXL, O_DIRECT; see ``disk_uring``.
- ``mmap``: copies to and from mapped slabs, through the page cache; see ``disk_mmap``.
"""

from __future__ import annotations

import logging

from sgl_tiered.core.clock import Clock
from sgl_tiered.errors import ConfigError
from sgl_tiered.tiers.disk_io import SystemCalls
from sgl_tiered.tiers.disk_mmap import MappedCalls, why_not_mapped
from sgl_tiered.tiers.disk_nixl import open_nixl_ring
from sgl_tiered.tiers.disk_threads import IOEngine, ThreadEngine
from sgl_tiered.tiers.disk_uring import UringEngine

__all__ = ["ENGINES", "make_engine"]

logger = logging.getLogger(__name__)
ENGINES = ("auto", "threads", "uring", "mmap")


def make_engine(
    name: str, calls: SystemCalls, clock: Clock, *, num_threads: int
) -> IOEngine:
    """Return the engine of this name, or ``threads`` where it cannot work.

    ``auto`` is ``threads``: benchmarks/disk finds io_uring no faster on the disks seen,
    and it costs a large dependency.

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
    threads = ThreadEngine(calls, clock, num_threads=num_threads)
    if name == "uring":
        ring = open_nixl_ring()
        if not isinstance(ring, str):
            return UringEngine(
                ring, open_nixl_ring, threads, clock, max_in_flight=num_threads
            )
        logger.warning("disk tier: no io_uring, but threads, because %s", ring)
    return threads
