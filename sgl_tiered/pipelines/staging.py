"""Reads from a tier that cannot be read in place into a staging region.

From there the ``LayerwiseLoader`` copies to the device. A read gets all of its rows or
none; the rows belong to it until it is released and has ended.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.clock import Clock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import LoadPlan, TransferResult
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.pipelines.completions import CompletionQueue, StageFinished
from sgl_tiered.pipelines.worker import Worker
from sgl_tiered.tiers.base import Tier, TierIO
from sgl_tiered.tiers.checks import expected_checksums
from sgl_tiered.tiers.memory import MemoryRegion, Register

__all__ = ["StagedRead", "StagingReader"]

NUM_READERS = 2
"""Two reads in flight: one's checksums are computed while the other's I/O runs."""


class StagedRead:
    """One read: where its pages are, and how it ended.

    Attributes:
        plan: as given to ``try_submit``.
        positions: int32 [n], the pages of the plan that are read.
        region: the staging region.
        rows: int64 [n], the row of each page in ``region``.
        result: None until the read ended.
    """

    def __init__(
        self,
        plan: LoadPlan,
        positions: npt.NDArray[np.int32],
        region: npt.NDArray[np.uint8],
        rows: npt.NDArray[np.int64],
    ) -> None:
        self.plan = plan
        self.positions = positions
        self.region = region
        self.rows = rows
        self.result: TransferResult | None = None
        self._released = False

    @property
    def done(self) -> bool:
        """True once the read ended."""
        return self.result is not None


class StagingReader:
    """Reads pages of load plans into ``num_rows`` rows of memory, in the background.

    Args:
        tier: where the pages are.
        num_rows: pages that can be staged at a time.
        completions: gets one ``StageFinished`` per read.
        clock: times failed reads.
        metrics: counts the edge from the tier to host memory.
        register: pins the region for a device; see ``MemoryRegion``.
    """

    def __init__(
        self,
        tier: Tier,
        num_rows: int,
        completions: CompletionQueue,
        clock: Clock,
        metrics: MetricsRegistry,
        *,
        register: Register | None = None,
        num_threads: int = NUM_READERS,
    ) -> None:
        if num_rows < 1:
            raise ValueError(f"{num_rows} staging rows cannot hold a page")
        self._tier = tier
        self._completions = completions
        self._clock = clock
        self._metrics = metrics
        self._memory = MemoryRegion(num_rows, tier.slot_bytes, register=register)
        self._num_rows = num_rows
        self._lock = threading.Lock()
        self._is_free = np.ones(num_rows, np.bool_)
        self._num_free = num_rows
        self._num_threads = num_threads
        # Reads under way -> when they began. A plain dict: one key per thread.
        self._began_s: dict[int, float] = {}
        self._worker: Worker[StagedRead] = Worker(
            "tiered-stage", self._read, self._give_up, num_threads=num_threads
        )

    @property
    def region(self) -> npt.NDArray[np.uint8]:
        """The staging region: uint8 [num_rows, slot_bytes]."""
        return self._memory.array

    @property
    def largest_read_pages(self) -> int:
        """Pages that one read can have at most, when nothing else is staged."""
        return self._num_rows

    @property
    def num_free_rows(self) -> int:
        """Rows that a read submitted now could have."""
        return self._num_free

    @property
    def busy(self) -> bool:
        """True while a read waits or runs."""
        return self._worker.busy

    def stuck_s(self) -> float:
        """Return for how long no thread has been free to read; 0 where one is.

        The age of the youngest read while every thread has one: a read submitted now
        begins when one of them ends, if it ever does.
        """
        began = list(self._began_s.values())
        if len(began) < self._num_threads:
            return 0.0
        return self._clock.now() - max(began)

    def try_submit(
        self, plan: LoadPlan, positions: npt.NDArray[np.int32]
    ) -> StagedRead | None:
        """Start reading ``plan.addresses[positions]``; None if rows are short.

        Never blocks. After ``close`` it returns None as well.
        """
        wanted = len(positions)
        with self._lock:
            if wanted > self._num_free or self._worker.closed:
                return None
            rows = np.flatnonzero(self._is_free)[:wanted].astype(np.int64)
            self._is_free[rows] = False
            self._num_free -= wanted
        staged = StagedRead(plan, positions, self._memory.array, rows)
        if not self._worker.try_put(staged):
            self._free(staged)
            return None
        return staged

    def release(self, staged: StagedRead) -> None:
        """Give the rows back; during the read they are kept until it ends.

        May be called twice.
        """
        with self._lock:
            if staged._released:
                return
            staged._released = True
            if staged.done:
                self._free_locked(staged)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until no read waits or runs; return False after the timeout."""
        return self._worker.drain(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Fail the waiting reads, let the running ones end, unpin the region."""
        if self._worker.close(timeout_s):
            self._memory.close()

    def _read(self, staged: StagedRead) -> None:
        plan, positions = staged.plan, staged.positions
        addresses = plan.addresses[positions]
        me = threading.get_ident()
        self._began_s[me] = self._clock.now()
        try:
            result = self._tier.load(
                TierIO(
                    addresses=addresses,
                    buffer=staged.region,
                    rows=staged.rows,
                    records=expected_checksums(plan.checksums[positions], addresses),
                )
            )
        finally:
            self._began_s.pop(me, None)
        self._finish(staged, result)

    def _give_up(self, staged: StagedRead, error: str) -> None:
        self._finish(staged, TransferResult.failed(len(staged.rows), 0.0, error))

    def _finish(self, staged: StagedRead, result: TransferResult) -> None:
        self._metrics.record_result(self._tier.tier_id, TierId.HOST, result)
        with self._lock:
            staged.result = result
            if staged._released:
                self._free_locked(staged)
        self._completions.post(
            StageFinished(staged.plan, staged.positions, staged, result)
        )

    def _free(self, staged: StagedRead) -> None:
        with self._lock:
            self._free_locked(staged)

    def _free_locked(self, staged: StagedRead) -> None:
        self._is_free[staged.rows] = True
        self._num_free += len(staged.rows)
