"""The disk tier: slots in slab files, kept over a restart.

Invariants:

- A page is served only if its bytes have the checksum under which it was stored, and
  the one that the caller expects, if any. Everything else is a miss.
- A slot's index record is voided before its payload is overwritten and written again
  after: a kill at any moment loses the pages being written and no others.
- Space is set aside before it is written; a full disk is a failed result.

A medium that fails again and again rests. One operation then probes it, and from the
second probe on, or where the directory has vanished, opens the files afresh before: so
a disk that comes back is used again, with what is still on it.

Threads: ``load``, ``store`` and ``forget`` from any, several at a time. Two transfers
of one slot at a time are the caller's to prevent; at worst the slot becomes a miss.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.background import give_way
from sgl_tiered.core.clock import Clock, SystemClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.layout import ALIGNMENT_BYTES
from sgl_tiered.core.plans import PageRecords, TransferResult
from sgl_tiered.errors import ConfigError, TierUnavailableError
from sgl_tiered.tiers.base import TierHealth, TierIO
from sgl_tiered.tiers.breaker import CircuitBreaker
from sgl_tiered.tiers.checks import check_io
from sgl_tiered.tiers.disk_engines import make_engine
from sgl_tiered.tiers.disk_format import DiskMeta, record_dtype
from sgl_tiered.tiers.disk_io import SystemCalls
from sgl_tiered.tiers.disk_payload import Batch, PayloadIO
from sgl_tiered.tiers.disk_volume import DiskVolume

__all__ = ["DiskTier"]

logger = logging.getLogger(__name__)
SLAB_BYTES = 256 << 20
MAX_SLABS = 256
"""A large tier gets larger slabs: each one costs a file descriptor."""
MAX_IO_BYTES = 2 << 20
"""With 8 threads 1 to 4 MiB read within 8 % of bare preadv; less makes more calls."""
SLOW_IO_S = 5.0
"""An I/O that takes longer counts as a failure, though its pages are good."""


class DiskTier:
    """A ``Tier`` over the files of one directory. Made by ``DiskTier.open``."""

    def __init__(
        self,
        volume: DiskVolume,
        payload: PayloadIO,
        *,
        num_slots: int,
        slow_io_s: float,
        rest_s: float,
        clock: Clock,
        calls: SystemCalls,
    ) -> None:
        self._volume: DiskVolume | None = volume
        self._path = volume.directory.path
        self._device = volume.directory.device
        self._direct = volume.slabs.direct
        self._meta = volume.meta
        self._num_slots = num_slots
        self._payload = payload
        self._slow_io_s = slow_io_s
        self._clock = clock
        self._calls = calls
        self._reads = CircuitBreaker(clock, rest_s=rest_s)
        self._writes = CircuitBreaker(clock, rest_s=rest_s)
        self._voider = ThreadPoolExecutor(1, "tiered-disk-void", initializer=give_way)
        # Guards what follows and the change of volumes.
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._num_running = 0
        self._closed = False

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        slot_bytes: int,
        page_bytes: int,
        page_tokens: int,
        max_bytes: int,
        fingerprint: str,
        io: str = "auto",
        num_threads: int = 8,
        slab_bytes: int = SLAB_BYTES,
        max_io_bytes: int = MAX_IO_BYTES,
        slow_io_s: float = SLOW_IO_S,
        rest_s: float = 5.0,
        clock: Clock | None = None,
        calls: SystemCalls | None = None,
    ) -> DiskTier:
        """Open or make the tier at ``path`` and lock it against other servers.

        Args:
            path: a directory of its own; made if it is not there.
            slot_bytes: bytes of one slot, a multiple of ``ALIGNMENT_BYTES``.
            page_bytes: bytes that a checksum covers, at most ``slot_bytes``.
            page_tokens: tokens in one page.
            max_bytes: what slabs and index may take together.
            fingerprint: identifies all on which the bytes of a page depend.
            io: the I/O engine, one of ``disk_engines.ENGINES``.
            num_threads: I/Os in flight.
            slab_bytes: size of one slab file, for a new directory.
            max_io_bytes: longest single I/O.
            slow_io_s: an I/O that takes longer counts as a failure; while one is in
                flight for that long, others are refused.
            rest_s: how long the tier rests after repeated errors, in seconds.
            clock: times transfers and rests.
            calls: the operating system; tests put failures in here.

        Raises:
            ConfigError: a size or the engine is wrong.
            TierUnavailableError: the directory is in use, foreign or not accessible.
        """
        if slot_bytes % ALIGNMENT_BYTES or not 0 < page_bytes <= slot_bytes:
            raise ConfigError(
                "disk slot size",
                f"{slot_bytes} B for pages of {page_bytes} B",
                f"use a multiple of {ALIGNMENT_BYTES} B that holds a page",
            )
        num_slots = max_bytes // (slot_bytes + record_dtype(page_tokens).itemsize)
        if num_slots < 1:
            raise ConfigError(
                "disk size",
                f"{max_bytes} B cannot hold one page of {slot_bytes} B",
                "ask for more",
            )
        if num_threads < 1:
            raise ConfigError("disk threads", f"{num_threads}", "use at least 1")
        wanted_slab_bytes = max(slab_bytes, num_slots * slot_bytes // MAX_SLABS)
        meta = DiskMeta(
            fingerprint=fingerprint,
            slot_bytes=slot_bytes,
            page_bytes=page_bytes,
            page_tokens=page_tokens,
            slots_per_slab=max(1, wanted_slab_bytes // slot_bytes),
        )
        clock, calls = clock or SystemClock(), calls or SystemCalls()
        engine = make_engine(io, calls, clock, num_threads=num_threads)
        try:
            volume = DiskVolume(
                path,
                meta,
                num_slots=num_slots,
                calls=calls,
                direct=None if engine.direct else False,
            )
        except BaseException:
            engine.close()
            raise
        return cls(
            volume,
            PayloadIO(engine, num_threads=num_threads, max_io_bytes=max_io_bytes),
            num_slots=num_slots,
            slow_io_s=slow_io_s,
            rest_s=rest_s,
            clock=clock,
            calls=calls,
        )

    @property
    def tier_id(self) -> TierId:
        """``TierId.DISK``."""
        return TierId.DISK

    @property
    def slot_bytes(self) -> int:
        """Bytes set aside for one page."""
        return self._meta.slot_bytes

    @property
    def num_slots(self) -> int:
        """Capacity in pages; the index is accounted for."""
        return self._num_slots

    @property
    def direct(self) -> bool:
        """True where payloads bypass the page cache."""
        volume = self._volume
        return self._direct if volume is None else volume.slabs.direct

    @property
    def io(self) -> str:
        """Name of the I/O engine in use."""
        return self._payload.engine.name

    def load(self, io: TierIO) -> TransferResult:
        """Read and verify pages; one never stored, torn or changed is not ok."""
        check_io(io, self._num_slots, self.slot_bytes)
        started_s = self._clock.now()
        if not self._enter():
            return self._refused(io, started_s, "the disk tier is closed")
        try:
            volume = self._admit(self._reads)
            if isinstance(volume, str):
                return self._refused(io, started_s, volume)
            wanted = None if io.records is None else io.records.checksums
            known, sums = volume.book.known(io.addresses, wanted)
            batch = self._payload.batch(
                io, volume.slabs, volume.meta, sums, writes=False
            )
            positions = np.flatnonzero(known)
            self._payload.run(batch, positions)
            # A load of which nothing was read says nothing about the disk.
            if len(positions):
                self._record(self._reads, batch, "read")
            return self._result(batch, started_s, "not stored or not as stored")
        finally:
            self._leave()

    def store(self, io: TierIO) -> TransferResult:
        """Write pages, then their records; pages without records do not survive."""
        check_io(io, self._num_slots, self.slot_bytes)
        started_s = self._clock.now()
        if not self._enter():
            return self._refused(io, started_s, "the disk tier is closed")
        try:
            volume = self._admit(self._writes)
            if isinstance(volume, str):
                return self._refused(io, started_s, volume)
            sums = np.zeros(len(io.addresses), np.uint64)
            batch = self._payload.batch(
                io, volume.slabs, volume.meta, sums, writes=True
            )
            self._payload.run(batch, self._prepare(volume, batch))
            self._commit(volume, batch)
            self._record(self._writes, batch, "write")
            return self._result(batch, started_s, "not written")
        finally:
            self._leave()

    def recover(self) -> list[PageRecords]:
        """Scan the index; payloads are verified when they are loaded.

        Of several copies of one page the newest counts and the others are forgotten.
        Not to be called while a store runs.
        """
        if not self._enter():
            return []
        try:
            return [] if self._volume is None else self._volume.book.recover()
        except OSError as error:
            logger.warning("disk tier: nothing recovered: %s", error)
            self._reads.record(str(error))
            return []
        finally:
            self._leave()

    def forget(self, addresses: npt.NDArray[np.int64]) -> None:
        """Make the slots a miss now, and void their records in the background."""
        if not self._enter():
            return
        try:
            if self._volume is not None:
                self._volume.book.forget(addresses)
                self._voider.submit(self._void_forgotten)
        finally:
            self._leave()

    def health(self) -> TierHealth:
        """Return usable unless closed, gone, stuck, or resting after read errors."""
        if self._closed:
            return TierHealth(usable=False, detail="closed")
        volume = self._volume
        if volume is None or volume.directory.vanished:
            return TierHealth(usable=False, detail="the directory has vanished")
        if self._reads.is_open:
            return TierHealth(usable=False, detail=self._resting(self._reads))
        stuck = self._stuck()
        if stuck:
            return TierHealth(usable=False, detail=stuck)
        how = "O_DIRECT" if volume.slabs.direct else "buffered: O_DIRECT refused"
        if self.io != "threads":
            how = "mmap" if self.io == "mmap" else f"{how}, {self.io}"
        if self._writes.is_open:
            how = f"{how}; {self._resting(self._writes)}"
        return TierHealth(usable=True, detail=how)

    def close(self) -> None:
        """Wait for running transfers, void what was forgotten, release the lock."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            while self._num_running:
                self._idle.wait()
        self._payload.close()
        self._voider.shutdown(wait=True)
        self._void_forgotten()
        if self._volume is not None:
            self._volume.close()

    def _enter(self) -> bool:
        """Count a call in, so that ``close`` waits for it; False once closed."""
        with self._lock:
            if self._closed:
                return False
            self._num_running += 1
            return True

    def _leave(self) -> None:
        with self._lock:
            self._num_running -= 1
            if self._num_running == 0:
                self._idle.notify_all()

    def _admit(self, breaker: CircuitBreaker) -> DiskVolume | str:
        """Return the volume for one operation, or why there is to be none."""
        if not breaker.allows():
            return self._resting(breaker)
        stuck = self._stuck()
        if stuck:
            return stuck
        volume = self._volume
        is_writing = breaker is self._writes
        gone = volume is None or (
            (is_writing or breaker.is_open) and volume.directory.vanished
        )
        if gone and not breaker.is_open:
            breaker.record("the directory has vanished")
            return breaker.last_error
        if gone or breaker.probes_failed:
            problem = self._reopen()
            if problem:
                breaker.record(problem)
                return problem
        return self._volume or "the directory has vanished"

    def _stuck(self) -> str:
        oldest_s = self._payload.engine.oldest_s()
        if oldest_s < self._slow_io_s:
            return ""
        return f"the disk is slow: an I/O has been running for {oldest_s:.0f} s"

    def _reopen(self) -> str:
        """Open the files afresh, if nobody else uses them; return what is wrong."""
        with self._lock:
            gone = self._volume is None or self._volume.directory.vanished
            if self._num_running > 1 or self._closed:
                return "the directory has vanished" if gone else ""
            forgotten = np.zeros(0, np.int64)
            if self._volume is not None:
                forgotten = self._volume.book.forgotten()
                self._direct = self._volume.slabs.direct
                self._volume.close()
                self._volume = None
            try:
                volume = DiskVolume(
                    self._path,
                    self._meta,
                    num_slots=self._num_slots,
                    calls=self._calls,
                    direct=self._direct,
                    device=self._device,
                )
                volume.book.forget(forgotten)
                num_pages = sum(len(group.keys) for group in volume.book.recover())
            except TierUnavailableError as error:
                return str(error)
            except OSError as error:
                volume.close()
                return error.strerror or str(error)
            self._volume = volume
            logger.info(
                "disk tier: opened %s afresh, %d pages are there", self._path, num_pages
            )
            return ""

    def _prepare(self, volume: DiskVolume, batch: Batch) -> npt.NDArray[np.int64]:
        """Set space aside and void old records; return the positions to write."""
        addresses = batch.io.addresses
        slabs = addresses // volume.meta.slots_per_slab
        writable = np.ones(len(addresses), np.bool_)
        for slab in np.unique(slabs).tolist():
            try:
                volume.slabs.ensure(slab)
            except OSError as error:
                batch.errors.append(f"{error.strerror} (slab {slab})")
                writable[slabs == slab] = False
        positions = np.flatnonzero(writable)
        try:
            volume.book.void(addresses[positions])
        except OSError as error:
            batch.errors.append(f"{error.strerror} (index)")
            return positions[:0]
        return positions

    def _commit(self, volume: DiskVolume, batch: Batch) -> None:
        """Write the records of the pages that are whole on disk."""
        positions = np.flatnonzero(batch.ok)
        if len(positions) == 0:
            return
        slots = batch.io.addresses[positions]
        records = batch.io.records
        if records is not None:
            records = PageRecords(
                namespace=records.namespace,
                keys=records.keys[positions],
                parents=records.parents[positions],
                tokens=records.tokens[positions],
                checksums=batch.checksums[positions],
                addresses=slots,
            )
        try:
            volume.book.enter(slots, batch.checksums[positions], records)
        except OSError as error:
            batch.errors.append(f"{error.strerror} (index)")
            batch.ok[positions] = False

    def _void_forgotten(self) -> None:
        try:
            if self._volume is not None:
                self._volume.book.void_forgotten()
        except OSError as error:
            # They stay marked, and are voided by the next attempt.
            self._writes.record(f"{error.strerror} (index)")

    def _record(self, breaker: CircuitBreaker, batch: Batch, what: str) -> None:
        """Tell the breaker how an operation ended; a very slow one is a failure."""
        error = batch.error
        if not error and batch.slowest_s >= self._slow_io_s:
            error = f"the disk is slow: an I/O took {batch.slowest_s:.1f} s"
        breaker.record(error)
        if error:
            logger.warning("disk tier: a %s failed: %s", what, error)

    def _resting(self, breaker: CircuitBreaker) -> str:
        kind = "reads" if breaker is self._reads else "writes"
        return f"{kind} rest after repeated errors: {breaker.last_error}"

    def _refused(self, io: TierIO, started_s: float, error: str) -> TransferResult:
        seconds = self._clock.now() - started_s
        return TransferResult.failed(len(io.addresses), seconds, error)

    def _result(
        self, batch: Batch, started_s: float, unexplained: str
    ) -> TransferResult:
        num_ok = int(batch.ok.sum())
        num_bad = len(batch.ok) - num_ok
        error = ""
        if num_bad:
            reason = batch.error or unexplained
            error = f"{num_bad} of {len(batch.ok)} pages: {reason}"
        return TransferResult(
            ok=batch.ok,
            num_bytes=num_ok * self.slot_bytes,
            seconds=self._clock.now() - started_s,
            checksums=batch.checksums,
            error=error,
        )
