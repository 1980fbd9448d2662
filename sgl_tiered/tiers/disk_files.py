"""The open files of a disk tier: slabs made on demand, and the index.

Slab files hold payloads and take O_DIRECT where the file system does; the index is
small and goes through the page cache, which outlives a killed process. Nothing is
synced: after a power loss the checksums say what is whole.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.layout import ALIGNMENT_BYTES
from sgl_tiered.tiers.disk_format import (
    INDEX_NAME,
    PROBE_NAME,
    read_records,
    record_dtype,
    slab_name,
)
from sgl_tiered.tiers.disk_io import SystemCalls, write_extent
from sgl_tiered.tiers.memory import aligned_buffer

__all__ = ["IndexFile", "SlabFiles", "takes_direct_io"]

SCAN_BYTES = 8 << 20


def takes_direct_io(calls: SystemCalls, path: Path) -> bool:
    """Return whether files under ``path`` take O_DIRECT, by writing one block."""
    probe = path / PROBE_NAME
    block = aligned_buffer(1, ALIGNMENT_BYTES).reshape(-1).data
    fd = -1
    try:
        fd = calls.open(str(probe), os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        calls.pwritev(fd, [block], 0)
        return calls.preadv(fd, [block], 0) == ALIGNMENT_BYTES
    except OSError as error:
        # A full disk says nothing about O_DIRECT, which nearly every one takes.
        return error.errno == errno.ENOSPC
    finally:
        if fd >= 0:
            os.close(fd)
        with contextlib.suppress(OSError):
            probe.unlink()


class SlabFiles:
    """Payload files of up to ``slots_per_slab`` slots each. Thread-safe."""

    def __init__(
        self,
        path: Path,
        calls: SystemCalls,
        *,
        num_slots: int,
        slots_per_slab: int,
        slot_bytes: int,
        direct: bool,
    ) -> None:
        self._path = path
        self._calls = calls
        self._num_slots = num_slots
        self._slots_per_slab = slots_per_slab
        self._slot_bytes = slot_bytes
        self._direct = direct
        self._lock = threading.Lock()
        self._fds: dict[int, int] = {}
        self._whole: set[int] = set()

    @property
    def direct(self) -> bool:
        """True where payloads bypass the page cache."""
        return self._direct

    def leave_direct(self) -> bool:
        """Go through the page cache from now on; False if that was so already."""
        with self._lock:
            if not self._direct:
                return False
            self._direct = False
            for fd in self._fds.values():
                flags = fcntl.fcntl(fd, fcntl.F_GETFL)
                fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            return True

    def open_existing(self) -> None:
        """Open what a former server left; cut what is beyond the capacity."""
        num_slabs = -(-self._num_slots // self._slots_per_slab)
        for file in sorted(self._path.glob("tiered-slab-*.kv")):
            slab = int(file.stem.rpartition("-")[2])
            if slab >= num_slabs:
                file.unlink()
                continue
            fd = self._calls.open(str(file), self._flags())
            self._fds[slab] = fd
            size, wanted = os.fstat(fd).st_size, self._slab_bytes(slab)
            if size > wanted:
                os.ftruncate(fd, wanted)
            # A shorter one was cut, or the tier has grown: allocated again before use.
            if size >= wanted:
                self._whole.add(slab)

    def fd(self, slab: int) -> int:
        """Return the descriptor of a slab, or raise OSError where the file is gone."""
        fd = self._fds.get(slab)
        if fd is None:
            raise OSError(errno.ENOENT, "no such slab")
        return fd

    def ensure(self, slab: int) -> None:
        """Set the space of a slab aside, or raise OSError and leave nothing behind."""
        if slab in self._whole:
            return
        with self._lock:
            if slab in self._whole:
                return
            file = self._path / slab_name(slab)
            fd = self._fds.get(slab, -1)
            is_new = fd < 0
            if is_new:
                fd = self._calls.open(str(file), self._flags() | os.O_CREAT)
            size = os.fstat(fd).st_size
            try:
                self._calls.fallocate(fd, 0, self._slab_bytes(slab))
            except OSError:
                # A half-allocated slab would take the last space from everyone else.
                os.ftruncate(fd, size)
                if is_new:
                    os.close(fd)
                    file.unlink(missing_ok=True)
                raise
            self._fds[slab] = fd
            self._whole.add(slab)

    def close(self) -> None:
        """Close all files; may be called twice."""
        with self._lock:
            for fd in self._fds.values():
                os.close(fd)
            self._fds.clear()
            self._whole.clear()

    def _flags(self) -> int:
        return os.O_RDWR | (os.O_DIRECT if self._direct else 0)

    def _slab_bytes(self, slab: int) -> int:
        first = slab * self._slots_per_slab
        num_slots = min(self._slots_per_slab, self._num_slots - first)
        return num_slots * self._slot_bytes


class IndexFile:
    """One record per slot. Callers serialise writes to the same slot."""

    def __init__(
        self, path: Path, calls: SystemCalls, *, num_slots: int, page_tokens: int
    ) -> None:
        self.dtype = record_dtype(page_tokens)
        self._calls = calls
        self._num_slots = num_slots
        self._fd = calls.open(str(path / INDEX_NAME), os.O_RDWR | os.O_CREAT)
        size = os.fstat(self._fd).st_size
        if size > num_slots * self.dtype.itemsize:
            os.ftruncate(self._fd, num_slots * self.dtype.itemsize)
        self.num_former_slots = self.reach()
        """Slots that may hold a record of a former server."""

    def write(
        self, slots: npt.NDArray[np.int64], records: npt.NDArray[np.void]
    ) -> None:
        """Write one record per slot, neighbours together; raises OSError."""
        order = np.argsort(slots, kind="stable")
        sorted_slots = slots[order]
        raw = memoryview(records[order].tobytes())
        size = self.dtype.itemsize
        breaks = (np.flatnonzero(np.diff(sorted_slots) != 1) + 1).tolist()
        for begin, end in zip([0, *breaks], [*breaks, len(slots)], strict=True):
            offset = int(sorted_slots[begin]) * size
            view = raw[begin * size : end * size]
            write_extent(self._calls, self._fd, [view], offset)

    def clear(self, slots: npt.NDArray[np.int64]) -> None:
        """Make the slots' records void; raises OSError."""
        if len(slots):
            self.write(slots, np.zeros(len(slots), self.dtype))

    def scan(self) -> Iterator[npt.NDArray[np.void]]:
        """Read the whole file in order; yield the records that are whole."""
        step = max(1, SCAN_BYTES // self.dtype.itemsize)
        num_slots = self.reach()
        for first in range(0, num_slots, step):
            part = self._read(first, min(step, num_slots - first))
            yield read_records(part, first)

    def reach(self) -> int:
        """Return how many slots have their place within the file."""
        size = os.fstat(self._fd).st_size
        return min(self._num_slots, -(-size // self.dtype.itemsize))

    def holds(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which slots have a whole record; reads all from first to last."""
        held = np.zeros(len(slots), np.bool_)
        if len(slots) and int(slots.min()) < self.reach():
            first = int(slots.min())
            raw = self._read(first, int(slots.max()) + 1 - first)
            whole = read_records(raw, first)["slot"].astype(np.int64)
            held = np.isin(slots, whole)
        return held

    def _read(self, first: int, count: int) -> npt.NDArray[np.void]:
        """Return up to so many records; fewer where the file ends."""
        size = self.dtype.itemsize
        raw = bytearray(count * size)
        done = 0
        while done < len(raw):
            views = [memoryview(raw)[done:]]
            read = self._calls.preadv(self._fd, views, first * size + done)
            if read == 0:
                break
            done += read
        return np.frombuffer(raw, self.dtype, count=done // size)

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
