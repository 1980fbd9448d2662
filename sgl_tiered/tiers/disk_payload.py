"""Payload of a disk tier: batches of pages between slabs and rows of a buffer.

A batch is cut into extents, of which an engine keeps several in flight; whoever moved
an extent also computes its checksums, while others move. A batch has ended only when
nothing touches its buffer any more, whatever failed.
"""

from __future__ import annotations

import errno
import logging
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.layout import ALIGNMENT_BYTES
from sgl_tiered.tiers.base import TierIO
from sgl_tiered.tiers.checks import checksum
from sgl_tiered.tiers.disk_files import SlabFiles
from sgl_tiered.tiers.disk_format import DiskMeta
from sgl_tiered.tiers.disk_io import Extent, explained, plan_extents
from sgl_tiered.tiers.disk_threads import IOEngine

__all__ = ["Batch", "PayloadIO"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Batch:
    """One load or store while it is worked off: the ``Work`` of an engine.

    Attributes:
        io: what is moved.
        slabs, meta: where to, and in what sizes.
        buffer: the bytes of ``io.buffer``.
        row_bytes: distance between two rows.
        ok: bool [n], pages that are whole so far.
        checksums: uint64 [n]: expected by a read, computed by a write.
        writes: True for a store.
        errors: one clause per failed I/O.
        failures: what the operating system said of them.
        refused: extents refused with EINVAL, to be tried without O_DIRECT.
        slowest_s: time of the longest I/O.
    """

    io: TierIO
    slabs: SlabFiles
    meta: DiskMeta
    buffer: memoryview
    row_bytes: int
    ok: npt.NDArray[np.bool_]
    checksums: npt.NDArray[np.uint64]
    writes: bool
    errors: deque[str] = field(default_factory=deque)
    failures: deque[OSError] = field(default_factory=deque)
    refused: deque[Extent] = field(default_factory=deque)
    slowest_s: float = 0.0

    @property
    def error(self) -> str:
        """The first error, or empty."""
        return self.errors[0] if self.errors else ""

    def target(self, extent: Extent) -> tuple[int, list[memoryview]]:
        """Return the slab's descriptor and the pieces of the buffer."""
        return self.slabs.fd(extent.slab), self._views(extent)

    def checksum(self, extent: Extent) -> None:
        """Compute the checksums of the pages of a store."""
        for position in extent.positions:
            self.checksums[position] = checksum(self._page(position))

    def moved(self, extent: Extent, num_bytes: int, seconds: float) -> None:
        """Mark the pages that are whole; those of a load are verified first."""
        self.slowest_s = max(self.slowest_s, seconds)
        num_whole = num_bytes // self.meta.slot_bytes
        for position in extent.positions[:num_whole]:
            self.ok[position] = self.writes or (
                checksum(self._page(position)) == int(self.checksums[position])
            )

    def failed(self, extent: Extent, error: OSError) -> None:
        """Note an error; what O_DIRECT refused gets another chance."""
        if error.errno == errno.EINVAL and self.slabs.direct:
            self.refused.append(extent)
        else:
            self.note(error, f"slab {extent.slab}")

    def note(self, error: OSError, where: str) -> None:
        """Note an error that costs pages."""
        self.errors.append(f"{explained(error)} ({where})")
        self.failures.append(error)

    def _views(self, extent: Extent) -> list[memoryview]:
        """Return the pieces of the buffer for an extent; neighbours as one."""
        width = self.meta.slot_bytes
        rows = self.io.rows
        views: list[memoryview] = []
        begin = end = -1
        for position in extent.positions:
            start = int(rows[position]) * self.row_bytes
            if start != end:
                if end > begin:
                    views.append(self.buffer[begin:end])
                begin = start
            end = start + width
        views.append(self.buffer[begin:end])
        return views

    def _page(self, position: int) -> memoryview:
        start = int(self.io.rows[position]) * self.row_bytes
        return self.buffer[start : start + self.meta.page_bytes]


class PayloadIO:
    """Reads and writes batches.

    Args:
        engine: moves the extents; closed with this.
        num_threads: I/Os in flight, over all batches.
        max_io_bytes: longest single I/O.
    """

    def __init__(
        self, engine: IOEngine, *, num_threads: int, max_io_bytes: int
    ) -> None:
        self.engine = engine
        self._num_threads = num_threads
        self._max_io_bytes = max_io_bytes

    def batch(
        self,
        io: TierIO,
        slabs: SlabFiles,
        meta: DiskMeta,
        checksums: npt.NDArray[np.uint64],
        *,
        writes: bool,
    ) -> Batch:
        """Return a batch of which no page is ok yet.

        Raises:
            ValueError: the rows are not aligned as O_DIRECT wants them.
        """
        row_bytes = io.buffer.shape[1]
        aligned = (io.buffer.ctypes.data | row_bytes) % ALIGNMENT_BYTES == 0
        if slabs.direct and not aligned and len(io.addresses):
            raise ValueError(f"the buffer's rows are not at {ALIGNMENT_BYTES} B bounds")
        return Batch(
            io=io,
            slabs=slabs,
            meta=meta,
            buffer=io.buffer.reshape(-1).data,
            row_bytes=row_bytes,
            ok=np.zeros(len(io.addresses), np.bool_),
            checksums=checksums,
            writes=writes,
        )

    def run(self, batch: Batch, positions: npt.NDArray[np.int64]) -> None:
        """Move these pages. Slabs that are written must be allocated."""
        extents = plan_extents(
            batch.io.addresses,
            positions,
            batch.meta.slots_per_slab,
            batch.meta.slot_bytes,
            self._max_io_bytes,
            self._num_threads,
        )
        self.engine.run(extents, batch)
        if batch.refused:
            if batch.slabs.leave_direct():
                logger.warning(
                    "disk tier: an I/O with O_DIRECT was refused; going through the "
                    "page cache from now on"
                )
            again = list(batch.refused)
            batch.refused.clear()
            self.engine.run(again, batch)
            # Other batches may have left O_DIRECT meanwhile: no third attempt.
            batch.errors.extend(f"refused (slab {e.slab})" for e in batch.refused)

    def close(self) -> None:
        """Wait for the threads; may be called twice."""
        self.engine.close()
