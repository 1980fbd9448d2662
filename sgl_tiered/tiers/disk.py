"""The disk tier: slots in slab files, kept over a restart.

Invariants:

- A page is served only if its bytes have the checksum under which it was stored, and
  the one that the caller expects, if any. Everything else is a miss.
- A slot's index record is voided before its payload is overwritten and written again
  after: a kill at any moment loses the pages being written and no others.
- Space is set aside before it is written; a full disk is a failed result.

Threads: ``load``, ``store`` and ``forget`` from any, several at a time. Two transfers
of one slot at a time are the caller's to prevent; at worst the slot becomes a miss.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.clock import Clock, SystemClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.layout import ALIGNMENT_BYTES
from sgl_tiered.core.plans import PageRecords, TransferResult
from sgl_tiered.errors import ConfigError, TierUnavailableError
from sgl_tiered.tiers.base import TierHealth, TierIO
from sgl_tiered.tiers.breaker import CircuitBreaker
from sgl_tiered.tiers.checks import check_io
from sgl_tiered.tiers.disk_directory import DiskDirectory
from sgl_tiered.tiers.disk_files import IndexFile, SlabFiles, takes_direct_io
from sgl_tiered.tiers.disk_format import (
    META_NAME,
    DiskMeta,
    encode_records,
    group_by_namespace,
    record_dtype,
)
from sgl_tiered.tiers.disk_io import SystemCalls
from sgl_tiered.tiers.disk_payload import Batch, PayloadIO

__all__ = ["DiskTier"]

logger = logging.getLogger(__name__)
SLAB_BYTES = 256 << 20
MAX_SLABS = 256
"""A large tier gets larger slabs: each one costs a file descriptor."""
MAX_IO_BYTES = 2 << 20
"""With 8 threads 1 to 4 MiB read within 8 % of bare preadv; less makes more calls."""


class DiskTier:
    """A ``Tier`` over the files of one directory. Made by ``DiskTier.open``."""

    def __init__(
        self,
        directory: DiskDirectory,
        meta: DiskMeta,
        *,
        num_slots: int,
        num_threads: int,
        max_io_bytes: int,
        rest_s: float,
        clock: Clock,
        calls: SystemCalls,
    ) -> None:
        self._directory = directory
        self._meta = meta
        self._num_slots = num_slots
        self._clock = clock
        self._direct = takes_direct_io(calls, directory.path)
        self._slabs = SlabFiles(
            directory.path,
            calls,
            num_slots=num_slots,
            slots_per_slab=meta.slots_per_slab,
            slot_bytes=meta.slot_bytes,
            direct=self._direct,
        )
        self._index = IndexFile(
            directory.path, calls, num_slots=num_slots, page_tokens=meta.page_tokens
        )
        self._slabs.open_existing()
        self._reads = CircuitBreaker(clock, rest_s=rest_s)
        self._writes = CircuitBreaker(clock, rest_s=rest_s)
        self._payload = PayloadIO(
            self._slabs,
            calls,
            meta,
            direct=self._direct,
            num_threads=num_threads,
            max_io_bytes=max_io_bytes,
        )
        # Guards the arrays below and the index file; never held during payload I/O.
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._num_running = 0
        self._closed = False
        self._sequence = 1
        self._checksums = np.zeros(num_slots, np.uint64)
        self._valid = np.zeros(num_slots, np.bool_)
        self._recorded = np.zeros(num_slots, np.bool_)
        self._recorded[: self._index.num_former_slots] = True
        self._forgotten = np.zeros(num_slots, np.bool_)

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
        num_threads: int = 8,
        slab_bytes: int = SLAB_BYTES,
        max_io_bytes: int = MAX_IO_BYTES,
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
            num_threads: I/Os in flight.
            slab_bytes: size of one slab file, for a new directory.
            max_io_bytes: longest single I/O.
            rest_s: how long the tier rests after repeated errors, in seconds.
            clock: times transfers and rests.
            calls: the operating system; tests put failures in here.

        Raises:
            ConfigError: a size is wrong.
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
        directory = DiskDirectory(path)
        try:
            return cls(
                directory,
                directory.adopt(meta),
                num_slots=num_slots,
                num_threads=num_threads,
                max_io_bytes=max_io_bytes,
                rest_s=rest_s,
                clock=clock or SystemClock(),
                calls=calls or SystemCalls(),
            )
        except OSError as error:
            directory.close()
            raise TierUnavailableError(
                f"the disk tier cannot use {path}: {error.strerror}; see to the disk "
                f"or give another path."
            ) from error

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
        return self._direct

    def load(self, io: TierIO) -> TransferResult:
        """Read and verify pages; one never stored, torn or changed is not ok."""
        check_io(io, self._num_slots, self.slot_bytes)
        started_s = self._clock.now()
        if not self._enter():
            return self._refused(io, started_s, "the disk tier is closed")
        try:
            if not self._reads.allows():
                return self._refused(io, started_s, self._resting(self._reads))
            with self._lock:
                known = self._valid[io.addresses]
                sums = self._checksums[io.addresses]
            if io.records is not None:
                wanted = io.records.checksums
                known &= (wanted == 0) | (wanted == sums)
            batch = self._payload.batch(io, sums)
            self._payload.read(batch, np.flatnonzero(known))
            self._reads.record(batch.error)
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
            if not self._writes.allows():
                return self._refused(io, started_s, self._resting(self._writes))
            sums = np.zeros(len(io.addresses), np.uint64)
            batch = self._payload.batch(io, sums)
            self._payload.write(batch, self._prepare(batch))
            self._commit(batch)
            self._writes.record(batch.error)
            if batch.error:
                logger.warning("disk tier: a write failed: %s", batch.error)
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
            with self._lock:
                self._void_forgotten()
                found = self._index.scan()
                groups, stale = group_by_namespace(found, self._meta.page_tokens)
                self._recorded[:] = False
                self._recorded[stale] = True
                self._forgotten[stale] = True
                self._void_forgotten()
                for part in found:
                    newest = int(part["sequence"].max()) + 1
                    self._sequence = max(self._sequence, newest)
                for group in groups:
                    self._recorded[group.addresses] = True
                    self._valid[group.addresses] = True
                    self._checksums[group.addresses] = group.checksums
                return groups
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
            with self._lock:
                self._valid[addresses] = False
                self._forgotten[addresses] = self._recorded[addresses]
            self._payload.submit(self._void_in_background)
        finally:
            self._leave()

    def health(self) -> TierHealth:
        """Return usable unless closed, gone, or resting after read errors."""
        how = "O_DIRECT" if self._direct else "buffered: O_DIRECT refused"
        if self._closed:
            return TierHealth(usable=False, detail="closed")
        if not (self._directory.path / META_NAME).exists():
            return TierHealth(usable=False, detail="the directory has vanished")
        if self._reads.is_open:
            return TierHealth(usable=False, detail=self._resting(self._reads))
        if self._writes.is_open:
            return TierHealth(
                usable=True, detail=f"{how}; {self._resting(self._writes)}"
            )
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
        self._void_in_background()
        self._slabs.close()
        self._index.close()
        self._directory.close()

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

    def _prepare(self, batch: Batch) -> npt.NDArray[np.int64]:
        """Set space aside and void old records; return the positions to write."""
        addresses = batch.io.addresses
        slabs = addresses // self._meta.slots_per_slab
        writable = np.ones(len(addresses), np.bool_)
        for slab in np.unique(slabs).tolist():
            try:
                self._slabs.ensure(slab)
            except OSError as error:
                batch.errors.append(f"{error.strerror} (slab {slab})")
                writable[slabs == slab] = False
        positions = np.flatnonzero(writable)
        chosen = addresses[positions]
        with self._lock:
            self._valid[chosen] = False
            old = chosen[self._recorded[chosen]]
            try:
                self._index.clear(old)
            except OSError as error:
                batch.errors.append(f"{error.strerror} (index)")
                return positions[:0]
            self._recorded[old] = False
            self._forgotten[old] = False
        return positions

    def _commit(self, batch: Batch) -> None:
        """Write the records of the pages that are whole on disk."""
        positions = np.flatnonzero(batch.ok)
        if len(positions) == 0:
            return
        slots = batch.io.addresses[positions]
        sums = batch.checksums[positions]
        records = batch.io.records
        with self._lock:
            if records is not None:
                chosen = PageRecords(
                    namespace=records.namespace,
                    keys=records.keys[positions],
                    parents=records.parents[positions],
                    tokens=records.tokens[positions],
                    checksums=sums,
                    addresses=slots,
                )
                encoded = encode_records(
                    self._index.dtype, chosen, slots, sums, self._sequence
                )
                self._sequence += len(slots)
                self._recorded[slots] = True
                try:
                    self._index.write(slots, encoded)
                except OSError as error:
                    batch.errors.append(f"{error.strerror} (index)")
                    batch.ok[positions] = False
                    return
            self._checksums[slots] = sums
            self._valid[slots] = True

    def _void_in_background(self) -> None:
        with self._lock:
            try:
                self._void_forgotten()
            except OSError as error:
                # They stay marked, and are voided by the next attempt.
                self._writes.record(f"{error.strerror} (index)")

    def _void_forgotten(self) -> None:
        slots = np.flatnonzero(self._forgotten)
        self._index.clear(slots)
        self._recorded[slots] = False
        self._forgotten[slots] = False

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
