"""Who may use the files of a disk tier now: a medium that fails rests and comes back.

Reads and writes have a breaker each. One that is open lets a probe through after a
rest; from the second probe on, or where the directory has vanished, the files are
opened afresh before: so a disk that comes back is used again, with what is still on it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from sgl_tiered.core.clock import Clock
from sgl_tiered.errors import TierUnavailableError
from sgl_tiered.tiers.base import TierHealth
from sgl_tiered.tiers.breaker import CircuitBreaker
from sgl_tiered.tiers.disk_payload import Batch
from sgl_tiered.tiers.disk_threads import IOEngine
from sgl_tiered.tiers.disk_volume import DiskVolume

__all__ = ["DiskAccess", "OpenVolume"]

logger = logging.getLogger(__name__)
_VANISHED = "the directory has vanished"
OpenVolume = Callable[[bool, int], DiskVolume]
"""Opens the files afresh, with O_DIRECT or not, on the file system of that number."""


class DiskAccess:
    """Hands out the volume for one operation at a time, or says why not. Thread-safe.

    Args:
        volume: open; closed with this.
        open_volume: opens it again.
        engine: tells what is in flight; closed by its owner.
        slow_io_s: an I/O that takes longer counts as a failure.
        rest_s: how long reads or writes rest after repeated errors.
        clock: times rests.
    """

    def __init__(
        self,
        volume: DiskVolume,
        open_volume: OpenVolume,
        engine: IOEngine,
        *,
        slow_io_s: float,
        rest_s: float,
        clock: Clock,
    ) -> None:
        self.volume: DiskVolume | None = volume
        """The files; None while they cannot be opened."""
        self.reads = CircuitBreaker(clock, rest_s=rest_s)
        self.writes = CircuitBreaker(clock, rest_s=rest_s)
        self._open_volume = open_volume
        self._engine = engine
        self._slow_io_s = slow_io_s
        self._device = volume.directory.device
        self._direct = volume.slabs.direct
        # Guards what follows and the change of volumes.
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._num_running = 0
        self._closed = False

    @property
    def direct(self) -> bool:
        """True where payloads bypass the page cache."""
        volume = self.volume
        return self._direct if volume is None else volume.slabs.direct

    @contextmanager
    def running(self) -> Iterator[bool]:
        """Count an operation in, so that ``finish`` waits for it; False once closed."""
        with self._lock:
            is_open = not self._closed
            self._num_running += is_open
        try:
            yield is_open
        finally:
            with self._lock:
                self._num_running -= is_open
                if self._num_running == 0:
                    self._idle.notify_all()

    def admit(self, breaker: CircuitBreaker) -> DiskVolume | str:
        """Return the volume for one operation, or why there is to be none."""
        if not breaker.allows():
            return self._resting(breaker)
        stuck = self._stuck()
        if stuck:
            return stuck
        volume = self.volume
        # Slabs that are open can be read though their directory has gone.
        looks = breaker is self.writes or breaker.is_open
        gone = volume is None or (looks and volume.directory.vanished)
        if gone and not breaker.is_open:
            breaker.record(_VANISHED)
            return _VANISHED
        if gone or breaker.probes_failed:
            problem = self._reopen()
            if problem:
                breaker.record(problem)
                return problem
        return self.volume or _VANISHED

    def record(self, breaker: CircuitBreaker, batch: Batch) -> None:
        """Tell the breaker how an operation ended; a very slow one is a failure."""
        error = batch.error
        if not error and batch.slowest_s >= self._slow_io_s:
            error = f"the disk is slow: an I/O took {batch.slowest_s:.1f} s"
        breaker.record(error)
        if error:
            kind = "write" if batch.writes else "read"
            logger.warning("disk tier: a %s failed: %s", kind, error)

    def health(self) -> TierHealth:
        """Return usable unless closed, gone, stuck, or resting after read errors."""
        if self._closed:
            return TierHealth(usable=False, detail="closed")
        volume = self.volume
        if volume is None or volume.directory.vanished:
            return TierHealth(usable=False, detail=_VANISHED)
        if self.reads.is_open:
            return TierHealth(usable=False, detail=self._resting(self.reads))
        stuck = self._stuck()
        if stuck:
            return TierHealth(usable=False, detail=stuck)
        how = "O_DIRECT" if volume.slabs.direct else "buffered: O_DIRECT refused"
        if not self._engine.direct:
            how = self._engine.name
        elif self._engine.name != "threads":
            how = f"{how}, {self._engine.name}"
        if self.writes.is_open:
            how = f"{how}; {self._resting(self.writes)}"
        return TierHealth(usable=True, detail=how)

    def finish(self) -> bool:
        """Let no more operations in and wait for the last; False if that was done."""
        with self._lock:
            if self._closed:
                return False
            self._closed = True
            while self._num_running:
                self._idle.wait()
            return True

    def close(self) -> None:
        """Close the files, after ``finish``."""
        if self.volume is not None:
            self.volume.close()

    def _resting(self, breaker: CircuitBreaker) -> str:
        kind = "reads" if breaker is self.reads else "writes"
        return f"{kind} rest after repeated errors: {breaker.last_error}"

    def _stuck(self) -> str:
        oldest_s = self._engine.oldest_s()
        if oldest_s < self._slow_io_s:
            return ""
        return f"the disk is slow: an I/O has been running for {oldest_s:.0f} s"

    def _reopen(self) -> str:
        """Open the files afresh, if nobody else uses them; return what is wrong."""
        with self._lock:
            gone = self.volume is None or self.volume.directory.vanished
            if self._num_running > 1 or self._closed:
                return _VANISHED if gone else ""
            forgotten = np.zeros(0, np.int64)
            if self.volume is not None:
                forgotten = self.volume.book.forgotten()
                self._direct = self.volume.slabs.direct
                self.volume.close()
                self.volume = None
            try:
                volume = self._open_volume(self._direct, self._device)
            except TierUnavailableError as error:
                return str(error)
            try:
                volume.book.forget(forgotten)
                num_pages = len(volume.book.recover())
            except OSError as error:
                volume.close()
                return error.strerror or str(error)
            self.volume = volume
            path = volume.directory.path
            logger.info("disk tier: opened %s afresh, with %d pages", path, num_pages)
            return ""
