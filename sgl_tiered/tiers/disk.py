"""The disk tier: slots in slab files, kept over a restart.

Invariants:

- A page is served only if its bytes have the checksum under which it was stored, and
  the one that the caller expects, if any. Everything else is a miss.
- A slot's index record is voided before its payload is overwritten and written again
  after: a kill at any moment loses the pages being written and no others.
- Space is set aside before it is written; a full disk is a failed result.

A medium that fails again and again rests and is probed; see ``disk_access``.

Threads: ``load``, ``store`` and ``forget`` from any, several at a time. Two transfers
of one slot at a time are the caller's to prevent; at worst the slot becomes a miss.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.background import give_way
from sgl_tiered.core.clock import Clock, SystemClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.layout import ALIGNMENT_BYTES
from sgl_tiered.core.plans import FoundPages, TransferResult
from sgl_tiered.errors import ConfigError
from sgl_tiered.tiers.base import TierHealth, TierIO
from sgl_tiered.tiers.checks import check_io
from sgl_tiered.tiers.disk_access import DiskAccess
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
MAX_IO_BYTES = 1 << 20
"""With 8 threads 1 MiB reads 9 % faster than 2 or 4 MiB, for 0.11 s of processor per GB
instead of 0.09; 12 threads are no faster, 512 KiB is not either."""
_CLOSED = "the disk tier is closed"
SLOW_IO_S = 5.0
"""An I/O that takes longer counts as a failure, though its pages are good."""


class WantedMeta:
    """What a directory is asked for whenever it is opened.

    Attributes:
        meta: of the last opening, with the fingerprint in force.
    """

    def __init__(self, meta: DiskMeta) -> None:
        self.meta = meta

    def relabel(self, fingerprint: str) -> None:
        """Ask for another fingerprint from now on."""
        self.meta = replace(self.meta, fingerprint=fingerprint)


class DiskTier:
    """A ``Tier`` over the files of one directory. Made by ``DiskTier.open``."""

    def __init__(
        self,
        access: DiskAccess,
        payload: PayloadIO,
        wanted: WantedMeta,
        *,
        num_slots: int,
        clock: Clock,
    ) -> None:
        self._access = access
        self._payload = payload
        self._wanted = wanted
        self._num_slots = num_slots
        self._clock = clock
        self._voider = ThreadPoolExecutor(1, "tiered-disk-void", initializer=give_way)
        # Set while a run of it is queued and has not begun.
        self._voids = threading.Event()
        # Set while the directory is marked otherwise than is asked for.
        self._is_mark_due = threading.Event()
        access.on_opened = self._void_soon

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
        wanted = WantedMeta(
            DiskMeta(
                fingerprint=fingerprint,
                slot_bytes=slot_bytes,
                page_bytes=page_bytes,
                page_tokens=page_tokens,
                slots_per_slab=max(1, wanted_slab_bytes // slot_bytes),
            )
        )
        clock, calls = clock or SystemClock(), calls or SystemCalls()
        engine = make_engine(io, path, calls, clock, num_threads=num_threads)

        def open_volume(direct: bool | None, device: int | None) -> DiskVolume:
            return DiskVolume(
                path,
                wanted.meta,
                num_slots=num_slots,
                calls=calls,
                direct=direct,
                device=device,
            )

        try:
            volume = open_volume(None if engine.direct else False, None)
        except BaseException:
            engine.close()
            raise
        # The slab size of what is there stays in force.
        wanted.meta = volume.meta
        access = DiskAccess(
            volume,
            open_volume,
            engine,
            slow_io_s=slow_io_s,
            rest_s=rest_s,
            clock=clock,
        )
        payload = PayloadIO(engine, num_threads=num_threads, max_io_bytes=max_io_bytes)
        return cls(access, payload, wanted, num_slots=num_slots, clock=clock)

    @property
    def tier_id(self) -> TierId:
        """``TierId.DISK``."""
        return TierId.DISK

    @property
    def slot_bytes(self) -> int:
        """Bytes set aside for one page."""
        return self._wanted.meta.slot_bytes

    @property
    def num_slots(self) -> int:
        """Capacity in pages; the index is accounted for."""
        return self._num_slots

    @property
    def direct(self) -> bool:
        """True where payloads bypass the page cache."""
        return self._access.direct

    @property
    def io(self) -> str:
        """Name of the I/O engine in use."""
        return self._payload.engine.name

    def load(self, io: TierIO) -> TransferResult:
        """Read and verify pages; one never stored, torn or changed is not ok."""
        check_io(io, self._num_slots, self.slot_bytes)
        started_s = self._clock.now()
        with self._access.running() as is_open:
            if not is_open:
                return self._refused(io, started_s, _CLOSED)
            volume = self._access.admit(self._access.reads)
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
                self._access.record(self._access.reads, batch)
            return self._result(batch, started_s, "not stored or not as stored")

    def store(self, io: TierIO) -> TransferResult:
        """Write pages, then their records; pages without records do not survive."""
        check_io(io, self._num_slots, self.slot_bytes)
        started_s = self._clock.now()
        with self._access.running() as is_open:
            if not is_open:
                return self._refused(io, started_s, _CLOSED)
            volume = self._access.admit(self._access.writes)
            if isinstance(volume, str):
                return self._refused(io, started_s, volume)
            sums = np.zeros(len(io.addresses), np.uint64)
            batch = self._payload.batch(
                io, volume.slabs, volume.meta, sums, writes=True
            )
            self._payload.run(batch, self._prepare(volume, batch))
            self._commit(volume, batch)
            self._access.record(self._access.writes, batch)
            return self._result(batch, started_s, "not written")

    def recover(self) -> FoundPages:
        """Scan the index; payloads are verified when they are loaded.

        Of several copies of one page the newest counts and the others are forgotten.
        Not to be called while a store runs.
        """
        with self._access.running() as is_open:
            volume = self._access.volume
            if not is_open or volume is None:
                return FoundPages.of([])
            try:
                return volume.book.recover()
            except OSError as error:
                logger.warning("disk tier: nothing recovered: %s", error)
                self._access.count(error)
                self._access.reads.record(str(error))
                return FoundPages.of([])

    def holds(self, addresses: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Look into the index; all of them where that cannot be read."""
        volume = self._access.volume
        try:
            if volume is not None:
                return volume.book.holds(addresses)
        except OSError as error:
            self._access.reads.record(str(error))
        return np.ones(len(addresses), np.bool_)

    def forget(self, addresses: npt.NDArray[np.int64]) -> None:
        """Make the slots a miss now, and void their records in the background."""
        if self._access.forget(addresses):
            self._void_soon()

    def look(self) -> None:
        """Bring ``health`` up to date now; takes as long as the disk does."""
        self._access.look()

    def relabel(self, fingerprint: str) -> None:
        """Mark the directory with another fingerprint, in the background.

        A kill at any moment leaves nothing wrong to be found: records name what they
        belong to as well, and those of before are forgotten sooner or later.
        """
        with self._access.running() as is_open:
            if is_open:
                # Also for a directory that has to be opened afresh.
                self._wanted.relabel(fingerprint)
                self._is_mark_due.set()
                self._void_soon()

    def health(self) -> TierHealth:
        """Return usable unless closed, gone, stuck, or resting after read errors.

        As last known; nothing is asked of the disk.
        """
        return self._access.health()

    def close(self) -> None:
        """Wait for running transfers, void what was forgotten, release the lock.

        A scan by ``recover`` that runs ends with nothing.
        """
        if self._access.volume is not None:
            self._access.volume.book.end_scan()
        if not self._access.finish():
            return
        self._payload.close()
        self._voider.shutdown(wait=True)
        self._void_forgotten()
        self._access.close()

    def _prepare(self, volume: DiskVolume, batch: Batch) -> npt.NDArray[np.int64]:
        """Set space aside and void old records; return the positions to write."""
        addresses = batch.io.addresses
        slabs = addresses // volume.meta.slots_per_slab
        writable = np.ones(len(addresses), np.bool_)
        for slab in np.unique(slabs).tolist():
            try:
                volume.slabs.ensure(slab)
            except OSError as error:
                batch.note(error, f"slab {slab}")
                writable[slabs == slab] = False
        positions = np.flatnonzero(writable)
        try:
            volume.book.void(addresses[positions])
        except OSError as error:
            batch.note(error, "index")
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
            records = records.part(positions, slots, batch.checksums[positions])
        try:
            volume.book.enter(slots, batch.checksums[positions], records)
        except OSError as error:
            batch.note(error, "index")
            batch.ok[positions] = False

    def _void_soon(self) -> None:
        """Have what was forgotten voided, and the mark written, in the background."""
        if self._voids.is_set():
            return
        self._voids.set()
        try:
            self._voider.submit(self._void_forgotten)
        except RuntimeError:
            # While the tier closes, which does what is left by itself; or there is no
            # thread to be had, and the next one tries again.
            self._voids.clear()

    def _void_forgotten(self) -> None:
        # Before looking: what is forgotten from now on is voided by the next one.
        self._voids.clear()
        volume = self._access.volume
        try:
            if volume is not None:
                volume.book.void_forgotten()
        except OSError as error:
            self._access.count(error)
            # They stay marked, and are voided by the next attempt.
            self._access.writes.record(f"{error.strerror} (index)")
        if self._is_mark_due.is_set():
            self._write_mark()

    def _write_mark(self) -> None:
        volume = self._access.volume
        # It is written by its path, under which there may be another server's directory
        # by now, or none: then it is due still, and written after the next opening.
        if volume is None or volume.directory.vanished:
            return
        # Before looking, as above.
        self._is_mark_due.clear()
        try:
            volume.directory.write_meta(self._wanted.meta)
        except OSError as error:
            self._is_mark_due.set()
            # A process that finds the former mark discards what is here.
            self._access.count(error)
            self._access.writes.record(f"{error.strerror} (meta file)")

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
