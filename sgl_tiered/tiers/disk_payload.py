"""Payload of a disk tier: batches of pages between slabs and rows of a buffer.

A batch is cut into extents that a pool of threads works off, so that several I/Os are
in flight; each thread also computes the checksums of what it moved. A batch has ended
only when no thread touches its buffer any more, whatever failed. Requests wait for
reads and nobody waits for writes, so writes have few threads, which give way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.background import give_way
from sgl_tiered.core.layout import ALIGNMENT_BYTES
from sgl_tiered.tiers.base import TierIO
from sgl_tiered.tiers.checks import checksum
from sgl_tiered.tiers.disk_files import SlabFiles
from sgl_tiered.tiers.disk_format import DiskMeta
from sgl_tiered.tiers.disk_io import (
    Extent,
    SystemCalls,
    plan_extents,
    read_extent,
    write_extent,
)

__all__ = ["Batch", "PayloadIO"]

_NUM_WRITERS = 2


@dataclass(slots=True)
class Batch:
    """One load or store while it is worked off.

    Attributes:
        io: what is moved.
        buffer: the bytes of ``io.buffer``.
        row_bytes: distance between two rows.
        ok: bool [n], pages that are whole so far.
        checksums: uint64 [n]: expected by a read, computed by a write.
        errors: one clause per failed I/O.
    """

    io: TierIO
    buffer: memoryview
    row_bytes: int
    ok: npt.NDArray[np.bool_]
    checksums: npt.NDArray[np.uint64]
    errors: deque[str] = field(default_factory=deque)

    @property
    def error(self) -> str:
        """The first error, or empty."""
        return self.errors[0] if self.errors else ""


class PayloadIO:
    """Reads and writes batches over the slabs of one tier.

    Args:
        slabs: the open files; closed by their owner.
        calls: the operating system.
        meta: sizes.
        direct: the slabs are open with O_DIRECT: buffers must be aligned.
        num_threads: reads in flight, over all batches.
        max_io_bytes: longest single I/O.
    """

    def __init__(
        self,
        slabs: SlabFiles,
        calls: SystemCalls,
        meta: DiskMeta,
        *,
        direct: bool,
        num_threads: int,
        max_io_bytes: int,
    ) -> None:
        self._slabs = slabs
        self._calls = calls
        self._meta = meta
        self._direct = direct
        self._num_threads = num_threads
        self._max_io_bytes = max_io_bytes
        self._readers = ThreadPoolExecutor(num_threads, "tiered-disk-read")
        self._num_writers = min(num_threads, _NUM_WRITERS)
        self._writers = ThreadPoolExecutor(
            self._num_writers, "tiered-disk-write", initializer=give_way
        )

    def batch(self, io: TierIO, checksums: npt.NDArray[np.uint64]) -> Batch:
        """Return a batch of which no page is ok yet.

        Raises:
            ValueError: the rows are not aligned as O_DIRECT wants them.
        """
        row_bytes = io.buffer.shape[1]
        aligned = (io.buffer.ctypes.data | row_bytes) % ALIGNMENT_BYTES == 0
        if self._direct and not aligned and len(io.addresses):
            raise ValueError(f"the buffer's rows are not at {ALIGNMENT_BYTES} B bounds")
        return Batch(
            io=io,
            buffer=io.buffer.reshape(-1).data,
            row_bytes=row_bytes,
            ok=np.zeros(len(io.addresses), np.bool_),
            checksums=checksums,
        )

    def read(self, batch: Batch, positions: npt.NDArray[np.int64]) -> None:
        """Read these pages; ok are those that have ``batch.checksums``."""
        self._run(batch, positions, self._read, self._readers, self._num_threads)

    def write(self, batch: Batch, positions: npt.NDArray[np.int64]) -> None:
        """Write these pages and fill in their checksums; slabs must be allocated."""
        self._run(batch, positions, self._write, self._writers, self._num_writers)

    def submit(self, work: Callable[[], None]) -> None:
        """Run something small on one of the writing threads, later."""
        self._writers.submit(work)

    def close(self) -> None:
        """Wait for the threads; may be called twice."""
        self._readers.shutdown(wait=True)
        self._writers.shutdown(wait=True)

    def _run(
        self,
        batch: Batch,
        positions: npt.NDArray[np.int64],
        work: Callable[[Batch, Extent], None],
        threads: ThreadPoolExecutor,
        num_threads: int,
    ) -> None:
        queue = deque(
            plan_extents(
                batch.io.addresses,
                positions,
                self._meta.slots_per_slab,
                self._meta.slot_bytes,
                self._max_io_bytes,
                num_threads,
            )
        )

        def work_off() -> None:
            while queue:
                try:
                    extent = queue.popleft()
                except IndexError:
                    return  # another thread took the last one
                try:
                    work(batch, extent)
                except OSError as error:
                    batch.errors.append(f"{error.strerror} (slab {extent.slab})")

        if len(queue) <= 1:
            work_off()
            return
        count = min(num_threads, len(queue))
        futures = [threads.submit(work_off) for _ in range(count)]
        wait(futures)
        for future in futures:
            future.result()

    def _read(self, batch: Batch, extent: Extent) -> None:
        fd = self._slabs.fd(extent.slab)
        views = self._views(batch, extent)
        num_bytes = read_extent(self._calls, fd, views, extent.offset)
        num_whole = num_bytes // self._meta.slot_bytes
        for position in extent.positions[:num_whole]:
            found = checksum(self._page(batch, position))
            batch.ok[position] = found == int(batch.checksums[position])

    def _write(self, batch: Batch, extent: Extent) -> None:
        for position in extent.positions:
            batch.checksums[position] = checksum(self._page(batch, position))
        fd = self._slabs.fd(extent.slab)
        views = self._views(batch, extent)
        write_extent(self._calls, fd, views, extent.offset)
        batch.ok[extent.positions] = True

    def _views(self, batch: Batch, extent: Extent) -> list[memoryview]:
        """Return the pieces of the buffer for an extent; neighbours as one."""
        width = self._meta.slot_bytes
        rows = batch.io.rows
        views: list[memoryview] = []
        begin = end = -1
        for position in extent.positions:
            start = int(rows[position]) * batch.row_bytes
            if start != end:
                if end > begin:
                    views.append(batch.buffer[begin:end])
                begin = start
            end = start + width
        views.append(batch.buffer[begin:end])
        return views

    def _page(self, batch: Batch, position: int) -> memoryview:
        start = int(batch.io.rows[position]) * batch.row_bytes
        return batch.buffer[start : start + self._meta.page_bytes]
