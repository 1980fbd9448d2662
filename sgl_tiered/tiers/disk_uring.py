"""io_uring: one thread keeps the disk's queue full, others compute checksums.

A ring is not thread-safe and moves on only while it is polled, so one thread owns it.
Where an I/O failed, a ring is retired: no more polls, a wait until the kernel has ended
all that it was given, and the extents in flight are moved again by threads, whose
errors tell the pages apart.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from sgl_tiered.core.clock import Clock
from sgl_tiered.tiers.disk_io import Extent
from sgl_tiered.tiers.disk_threads import ThreadEngine, Work

__all__ = ["Ring", "UringEngine"]

logger = logging.getLogger(__name__)
POLL_S = 30e-6
"""Pause between polls that found nothing; a 256 KiB read takes 150 us."""
MAX_WRITES = 3
"""Writes in flight: nobody waits for them, and reads queue behind them."""
MAX_RINGS = 3
"""Rings opened, in all, before the threads take over for good."""


class Ring(Protocol):
    """Submissions to the kernel; used by one thread."""

    def submit(
        self, fd: int, views: list[memoryview], offset: int, *, writes: bool
    ) -> object:
        """Start an I/O and return its handle, or raise OSError."""
        ...

    def ended(self, handle: object) -> bool:
        """Return whether it has ended well, or raise OSError: the ring has failed."""
        ...

    def num_running(self) -> int:
        """Return how many I/Os the kernel has not ended, without moving the ring on."""
        ...


@dataclass(slots=True, eq=False)
class _Batch:
    """One call of ``run``."""

    work: Work
    num_left: int
    ended: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count_down(self) -> None:
        with self.lock:
            self.num_left -= 1
            if self.num_left == 0:
                self.ended.set()


class UringEngine:
    """Moves extents by a ring, and by threads once rings have failed.

    Args:
        ring: the first ring.
        open_ring: makes the next one after a failure.
        threads: moves what a ring failed on; closed with the engine.
        clock: times what is in flight.
        max_in_flight: I/Os that the kernel has at a time.
    """

    name = "uring"
    direct = True

    def __init__(
        self,
        ring: Ring,
        open_ring: Callable[[], Ring | str],
        threads: ThreadEngine,
        clock: Clock,
        *,
        max_in_flight: int,
    ) -> None:
        self._ring: Ring | None = ring
        self._open_ring = open_ring
        self._threads = threads
        self._clock = clock
        self._max_in_flight = max_in_flight
        self._num_rings = 1
        self._retired: list[Ring] = []
        self._incoming: queue.SimpleQueue[tuple[Extent, _Batch] | None] = (
            queue.SimpleQueue()
        )
        self._reads: deque[tuple[Extent, _Batch]] = deque()
        self._writes: deque[tuple[Extent, _Batch]] = deque()
        self._in_flight: dict[object, tuple[Extent, _Batch, float]] = {}
        self._verifiers = ThreadPoolExecutor(2, "tiered-disk-verify")
        self._closed = False
        self._thread = threading.Thread(
            target=self._loop, name="tiered-disk-ring", daemon=True
        )
        self._thread.start()

    def run(self, extents: Sequence[Extent], work: Work) -> None:
        """Hand all extents to the ring's thread and wait for the last one."""
        if not extents:
            return
        batch = _Batch(work, len(extents))
        for extent in extents:
            self._incoming.put((extent, batch))
        batch.ended.wait()

    def oldest_s(self) -> float:
        """Return the age of the oldest I/O in flight, in seconds."""
        started = [started_s for _, _, started_s in list(self._in_flight.values())]
        ring_s = self._clock.now() - min(started) if started else 0.0
        return max(ring_s, self._threads.oldest_s())

    def close(self) -> None:
        """Wait for the threads; may be called twice."""
        if not self._closed:
            self._closed = True
            self._incoming.put(None)
            self._thread.join()
            self._verifiers.shutdown(wait=True)
        self._threads.close()

    def _loop(self) -> None:
        while True:
            idle = not (self._in_flight or self._reads or self._writes)
            if self._take(wait=idle):
                return
            self._fill()
            if not self._reap():
                threading.Event().wait(POLL_S)

    def _take(self, *, wait: bool) -> bool:
        """Sort what has come in; return True at the end of it all."""
        while True:
            try:
                item = self._incoming.get(block=wait)
            except queue.Empty:
                return False
            if item is None:
                return True
            wait = False
            waiting = self._writes if item[1].work.writes else self._reads
            waiting.append(item)

    def _fill(self) -> None:
        """Give the kernel what it has room for, reads first."""
        num_writes = sum(b.work.writes for _, b, _ in self._in_flight.values())
        while len(self._in_flight) < self._max_in_flight:
            if self._reads:
                extent, batch = self._reads.popleft()
            elif self._writes and num_writes < MAX_WRITES:
                extent, batch = self._writes.popleft()
                num_writes += 1
            else:
                return
            self._submit(extent, batch)

    def _submit(self, extent: Extent, batch: _Batch) -> None:
        if self._ring is None:
            self._move_by_threads(extent, batch)
            return
        work = batch.work
        try:
            fd, views = work.target(extent)
        except OSError as error:
            work.failed(extent, error)
            batch.count_down()
            return
        try:
            handle = self._ring.submit(fd, views, extent.offset, writes=work.writes)
        except OSError as error:
            self._retire(error)
            self._move_by_threads(extent, batch)
            return
        self._in_flight[handle] = (extent, batch, self._clock.now())

    def _reap(self) -> bool:
        """Take what has ended; return whether there was anything."""
        found = False
        for handle in list(self._in_flight):
            assert self._ring is not None, "I/Os in flight without a ring"
            try:
                if not self._ring.ended(handle):
                    continue
            except OSError as error:
                self._retire(error)
                return True
            extent, batch, started_s = self._in_flight.pop(handle)
            seconds = self._clock.now() - started_s
            self._verifiers.submit(self._finish, extent, batch, seconds)
            found = True
        return found

    def _finish(self, extent: Extent, batch: _Batch, seconds: float) -> None:
        try:
            if batch.work.writes:
                batch.work.checksum(extent)
            _, views = batch.work.target(extent)
            num_bytes = sum(len(view) for view in views)
            batch.work.moved(extent, num_bytes, seconds)
        except OSError as error:
            batch.work.failed(extent, error)
        finally:
            batch.count_down()

    def _move_by_threads(self, extent: Extent, batch: _Batch) -> None:
        def move() -> None:
            self._threads.move(extent, batch.work)
            batch.count_down()

        self._verifiers.submit(move)

    def _retire(self, error: OSError) -> None:
        """Let the ring run dry, move its extents by threads, and open another."""
        ring, self._ring = self._ring, None
        assert ring is not None
        self._retired.append(ring)  # destroying it would poll it
        while ring.num_running():
            threading.Event().wait(0.001)
        for extent, batch, _ in self._in_flight.values():
            self._move_by_threads(extent, batch)
        self._in_flight.clear()
        what = "threads take over"
        if self._num_rings < MAX_RINGS:
            self._num_rings += 1
            fresh = self._open_ring()
            if not isinstance(fresh, str):
                self._ring = fresh
                what = "another ring takes over"
        logger.warning("disk tier: an io_uring failed (%s); %s", error.strerror, what)
