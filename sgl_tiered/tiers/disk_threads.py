"""What an I/O engine of the disk tier is, and the one that needs nothing: threads.

Whatever fails, ``run`` returns only when nothing touches the batch's buffer any more.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Protocol

from sgl_tiered.core.background import give_way
from sgl_tiered.core.clock import Clock
from sgl_tiered.tiers.disk_io import (
    Extent,
    SystemCalls,
    read_extent,
    read_through,
    write_extent,
)
from sgl_tiered.tiers.memory import MemoryRegion

__all__ = ["IOEngine", "ThreadEngine", "Work"]

_NUM_WRITERS = 3
"""Requests wait for reads and nobody waits for writes. One writer reaches 0.90 of fio
at 1 MiB, two 1.11, three 1.15, four 1.25: two keep a disk busy while another computes
checksums."""

BOUNCE_BYTES = 1 << 20
"""As long as the longest I/O of small pages; one per thread fits the second cache."""


class Work(Protocol):
    """One batch, as an engine sees it. Called from any thread."""

    @property
    def writes(self) -> bool:
        """True for a store, False for a load."""
        ...

    def target(self, extent: Extent) -> tuple[int, list[memoryview]]:
        """Return the descriptor and the pieces of the buffer, or raise OSError."""
        ...

    def checksum(self, extent: Extent) -> None:
        """Compute what a store has to record; may run while the bytes are written."""
        ...

    def moved(self, extent: Extent, num_bytes: int, seconds: float) -> None:
        """Take the end of an I/O: bytes moved and time; a load verifies them."""
        ...

    def failed(self, extent: Extent, error: OSError) -> None:
        """Take the failure of an I/O."""
        ...


class IOEngine(Protocol):
    """Moves extents. ``run`` may be called by several threads at a time."""

    @property
    def name(self) -> str:
        """One of ``ENGINES``, for reports."""
        ...

    @property
    def direct(self) -> bool:
        """True if the slabs are to be opened with O_DIRECT where it works."""
        ...

    def run(self, extents: Sequence[Extent], work: Work) -> None:
        """Move all of them; every one ends in ``work.moved`` or ``work.failed``."""
        ...

    def oldest_s(self) -> float:
        """Return for how long the oldest I/O in flight has been running; 0 for none."""
        ...

    def close(self) -> None:
        """Wait for the threads; may be called twice."""
        ...


class ThreadEngine:
    """A pool of threads; each moves an extent and computes the checksums of it.

    Args:
        calls: the operating system, or the mapped slabs.
        clock: times what is in flight.
        num_threads: reads in flight, over all batches.
        name, direct: see ``IOEngine``.
        bounces: read by way of small buffers.
    """

    def __init__(
        self,
        calls: SystemCalls,
        clock: Clock,
        *,
        num_threads: int,
        name: str = "threads",
        direct: bool = True,
        bounces: bool = False,
    ) -> None:
        self.name = name
        self.direct = direct
        self._calls = calls
        self._clock = clock
        self._num_threads = num_threads
        self._readers = ThreadPoolExecutor(num_threads, "tiered-disk-read")
        self._num_writers = min(num_threads, _NUM_WRITERS)
        self._writers = ThreadPoolExecutor(
            self._num_writers, "tiered-disk-write", initializer=give_way
        )
        # Thread -> when its I/O began. A plain dict: one key per thread.
        self._started_s: dict[int, float] = {}
        self._memory = MemoryRegion(num_threads, BOUNCE_BYTES) if bounces else None
        self._free_buffers: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        if self._memory is not None:
            for row in self._memory.array:
                self._free_buffers.put(row.data)

    def run(self, extents: Sequence[Extent], work: Work) -> None:
        """Work the extents off with as many threads as there is use for."""
        threads, count = self._readers, self._num_threads
        if work.writes:
            threads, count = self._writers, self._num_writers
        left = deque(extents)

        def work_off() -> None:
            while left:
                try:
                    extent = left.popleft()
                except IndexError:
                    return  # another thread took the last one
                self.move(extent, work)

        if len(left) <= 1:
            work_off()
            return
        count = min(count, len(left))
        futures = [threads.submit(work_off) for _ in range(count)]
        wait(futures)
        for future in futures:
            future.result()

    def move(self, extent: Extent, work: Work) -> None:
        """Move one extent on the calling thread."""
        me = threading.get_ident()
        started_s = self._clock.now()
        self._started_s[me] = started_s
        try:
            fd, views = work.target(extent)
            if work.writes:
                work.checksum(extent)
                write_extent(self._calls, fd, views, extent.offset)
                num_bytes = sum(len(view) for view in views)
            else:
                num_bytes = self._read(fd, views, extent.offset)
            work.moved(extent, num_bytes, self._clock.now() - started_s)
        except OSError as error:
            work.failed(extent, error)
        finally:
            self._started_s.pop(me, None)

    def oldest_s(self) -> float:
        """Return the age of the oldest I/O in flight, in seconds."""
        # A copy in one step: other threads change the dict.
        started = list(self._started_s.values())
        return self._clock.now() - min(started) if started else 0.0

    def close(self) -> None:
        """Wait for the threads; may be called twice."""
        self._readers.shutdown(wait=True)
        self._writers.shutdown(wait=True)
        self._calls.close()
        if self._memory is not None:
            self._memory.close()

    def _read(self, fd: int, views: list[memoryview], offset: int) -> int:
        if self._memory is None:
            return read_extent(self._calls, fd, views, offset)
        buffer = self._free_buffers.get()
        try:
            return read_through(self._calls, fd, buffer, views, offset)
        finally:
            self._free_buffers.put(buffer)
