"""Who may use the files of a disk tier now: a medium that fails rests and comes back.

Reads and writes have a breaker each. One that is open lets a probe through after a
rest; from the second probe on, or where the directory has vanished, the files are
opened afresh before: so a disk that comes back is used again, with what is still on it.

``health`` and ``forget`` are for the engine's own thread: no lock that they take is
held while the disk is asked for anything. Whether the directory is still there is seen
by a thread of its own; on a mount that hangs that thread hangs, and the age of what it
saw last says so.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.clock import Clock, SystemClock
from sgl_tiered.errors import TierUnavailableError
from sgl_tiered.tiers.base import TierHealth
from sgl_tiered.tiers.breaker import CircuitBreaker
from sgl_tiered.tiers.disk_payload import Batch
from sgl_tiered.tiers.disk_threads import IOEngine
from sgl_tiered.tiers.disk_volume import DiskVolume

__all__ = ["DiskAccess", "OpenVolume"]

logger = logging.getLogger(__name__)
_VANISHED = "the directory has vanished"
_OPENING = "the files are being opened afresh"
LOOK_S = 1.0
"""Seconds between two looks at the directory."""
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
        self.on_opened: Callable[[], None] = lambda: None
        """Called when the files have been opened afresh: records are to be voided."""
        self._open_volume = open_volume
        self._engine = engine
        self._slow_io_s = slow_io_s
        self._device = volume.directory.device
        self._direct = volume.slabs.direct
        # Guards what follows and the change of volumes; never held during I/O.
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._num_running = 0
        self._closed = False
        self._is_opening = False
        # Of the last volume: what is forgotten while there is none is forgotten in it.
        self._book = volume.book
        self._errors: Counter[str] = Counter()
        # Real time: a look takes some.
        self._watch_clock = SystemClock()
        self._vanished, self._looked_at_s = False, self._watch_clock.now()
        self._ends = threading.Event()
        threading.Thread(
            target=self._watch, name="tiered-disk-watch", daemon=True
        ).start()

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
        if self._is_opening:
            return _OPENING
        volume = self.volume
        # Slabs that are open can be read though their directory has gone.
        looks = breaker is self.writes or breaker.is_open
        gone = volume is None or (looks and self.look())
        if gone and not breaker.is_open:
            breaker.record(_VANISHED)
            return _VANISHED
        if gone or breaker.probes_failed:
            problem = self._reopen(gone=gone)
            if problem:
                breaker.record(problem)
                return problem
        return self.volume or _VANISHED

    def record(self, breaker: CircuitBreaker, batch: Batch) -> None:
        """Tell the breaker how an operation ended; a very slow one is a failure."""
        for failure in batch.failures:
            self.count(failure)
        error = batch.error
        if not error and batch.slowest_s >= self._slow_io_s:
            error = f"the disk is slow: an I/O took {batch.slowest_s:.1f} s"
        breaker.record(error)
        if error:
            kind = "write" if batch.writes else "read"
            logger.warning("disk tier: a %s failed: %s", kind, error)

    def count(self, error: BaseException | None) -> None:
        """Count an error of the operating system, for reports; others are not one."""
        if isinstance(error, OSError):
            name = errno.errorcode.get(error.errno or 0, "unknown")
            with self._lock:
                self._errors[name] += 1

    def forget(self, addresses: npt.NDArray[np.int64]) -> bool:
        """Make slots a miss from now on; False once closed. Does not wait for I/O."""
        with self._lock:
            if not self._closed:
                self._book.forget(addresses)
            return not self._closed

    def look(self) -> bool:
        """Look whether the directory has vanished; takes as long as the disk does."""
        volume = self.volume
        if volume is None:
            return True
        vanished = volume.directory.vanished
        if volume is self.volume:
            self._vanished, self._looked_at_s = vanished, self._watch_clock.now()
        return vanished

    def health(self) -> TierHealth:
        """Return usable unless closed, gone, stuck, or resting after read errors.

        As the watching thread saw it last; asks nothing of the disk.
        """
        usable, detail = self._state()
        with self._lock:
            errors = dict(self._errors)
        return TierHealth(usable, detail, age_s=self._age_s(), errors=errors)

    def _state(self) -> tuple[bool, str]:
        """Return whether the disk can be used, and a clause about it."""
        if self._closed:
            return False, "closed"
        volume = self.volume
        if self._is_opening:
            return False, _OPENING
        if volume is None or self._vanished:
            return False, _VANISHED
        if self.reads.is_open:
            return False, self._resting(self.reads)
        stuck = self._stuck()
        if not stuck and self._age_s() >= LOOK_S + self._slow_io_s:
            stuck = f"the directory has not answered for {self._age_s():.0f} s"
        if stuck:
            return False, stuck
        how = "O_DIRECT" if volume.slabs.direct else "buffered: O_DIRECT refused"
        if not self._engine.direct:
            how = self._engine.name
        elif self._engine.name != "threads":
            how = f"{how}, {self._engine.name}"
        if self.writes.is_open:
            how = f"{how}; {self._resting(self.writes)}"
        return True, how

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
        self._ends.set()
        if self.volume is not None:
            self.volume.close()

    def _watch(self) -> None:
        while not self._ends.wait(LOOK_S):
            self.look()

    def _age_s(self) -> float:
        return self._watch_clock.now() - self._looked_at_s

    def _resting(self, breaker: CircuitBreaker) -> str:
        kind = "reads" if breaker is self.reads else "writes"
        return f"{kind} rest after repeated errors: {breaker.last_error}"

    def _stuck(self) -> str:
        oldest_s = self._engine.oldest_s()
        if oldest_s < self._slow_io_s:
            return ""
        return f"the disk is slow: an I/O has been running for {oldest_s:.0f} s"

    def _reopen(self, *, gone: bool) -> str:
        """Open the files afresh, if nobody else uses them; return what is wrong."""
        with self._lock:
            if self._num_running > 1 or self._closed or self._is_opening:
                return _VANISHED if gone else ""
            self._is_opening = True
            former, self.volume = self.volume, None
        try:
            return self._open_anew(former)
        finally:
            self._is_opening = False

    def _open_anew(self, former: DiskVolume | None) -> str:
        """Close a volume and open the next one; nobody else uses either."""
        if former is not None:
            self._direct = former.slabs.direct
            former.close()
        try:
            volume = self._open_volume(self._direct, self._device)
        except TierUnavailableError as error:
            self.count(error.__cause__)
            return str(error)
        try:
            volume.book.recover()
        except OSError as error:
            self.count(error)
            volume.close()
            return error.strerror or str(error)
        with self._lock:
            # With what was forgotten before and meanwhile.
            num_pages = volume.book.keep_as(self._book)
            self._book, self.volume = volume.book, volume
        self._vanished, self._looked_at_s = False, self._watch_clock.now()
        self.on_opened()
        path = volume.directory.path
        logger.info("disk tier: opened %s afresh, with %d pages", path, num_pages)
        return ""
