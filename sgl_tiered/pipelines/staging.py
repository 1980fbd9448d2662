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

__all__ = ["StagedRead", "StagingReader", "part_pages"]

NUM_READERS = 2
"""Two reads in flight: one's checksums are computed while the other's I/O runs."""


_MIN_PART_BYTES, _MAX_PART_BYTES = 1 << 20, 8 << 20
_PART_S = 0.02
_PART_LATENCIES = 8.0


def part_pages(latency_s: float, bytes_per_s: float, page_bytes: int) -> int:
    """Return the pages of one part of a read, from the link's measured figures.

    Small parts can be used sooner and given up more finely: 20 ms of the link, between
    1 and 8 MiB. But each pays the link's latency, so it takes eight of them at least.
    """
    wanted = min(_MAX_PART_BYTES, max(_MIN_PART_BYTES, _PART_S * bytes_per_s))
    wanted = max(wanted, _PART_LATENCIES * latency_s * bytes_per_s)
    return max(1, round(wanted / page_bytes))


class StagedRead:
    """One read: where its pages are, what has arrived so far, and how it ended.

    It is done in parts, first pages first, so that what has arrived can be used before
    the rest: ``turn_round`` lets the rest come last pages first (the engine computes
    towards them), ``cancel`` leaves out what was not begun.

    Attributes:
        plan: as given to ``try_submit``.
        positions: int32 [n], the pages of the plan that are read.
        region: the staging region.
        rows: int64 [n], the row of each page in ``region``.
        result: None until the read ended; of the pages that were attempted.
    """

    def __init__(
        self,
        plan: LoadPlan,
        positions: npt.NDArray[np.int32],
        region: npt.NDArray[np.uint8],
        rows: npt.NDArray[np.int64],
        part_pages: int | None = None,
    ) -> None:
        self.plan = plan
        self.positions = positions
        self.region = region
        self.rows = rows
        self.result: TransferResult | None = None
        self._released = False
        self._part_pages = part_pages or max(len(positions), 1)
        self._lock = threading.Lock()
        # Pages [_first, _last) were not begun.
        self._first, self._last = 0, len(positions)
        self._is_turned = False
        num = len(positions)
        self._tried = np.zeros(num, np.bool_)
        self._ok = np.zeros(num, np.bool_)
        self._checksums = np.zeros(num, np.uint64)
        self._num_bytes = 0
        self._num_ok = 0
        self._part_seconds = 0.0
        self._error = ""
        self._num_workers = 0
        self._started_s: float | None = None
        self._ended_s = 0.0
        self._is_alone = True

    @property
    def done(self) -> bool:
        """True once the read ended."""
        return self.result is not None

    @property
    def num_parts(self) -> int:
        """Parts of the whole read."""
        return -(-len(self.positions) // self._part_pages)

    @property
    def started_s(self) -> float | None:
        """When the first part began, by the reader's clock; None before."""
        return self._started_s

    @property
    def is_alone(self) -> bool:
        """Whether no other read shared the link so far: its time tells the link's."""
        return self._is_alone

    @property
    def arrived(self) -> npt.NDArray[np.int32]:
        """Positions in the plan of the pages that have arrived and are good."""
        return self.positions[self._ok]

    @property
    def num_left(self) -> int:
        """Pages that are still to come."""
        return 0 if self.done else len(self._tried) - int(self._tried.sum())

    @property
    def num_unbegun(self) -> int:
        """Pages whose part was not begun."""
        return max(self._last - self._first, 0)

    def turn_round(self) -> None:
        """Read what was not begun from its end on."""
        with self._lock:
            self._is_turned = True

    def cancel(self) -> None:
        """Leave out what was not begun; the read ends with the parts under way."""
        with self._lock:
            self._last = self._first

    def _take(self) -> slice | None:
        with self._lock:
            num = min(self._part_pages, self._last - self._first)
            if num <= 0:
                return None
            if self._is_turned:
                self._last -= num
                return slice(self._last, self._last + num)
            self._first += num
            return slice(self._first - num, self._first)

    def _put(self, part: slice, result: TransferResult) -> None:
        with self._lock:
            # The good ones last: whoever sees a page tried and not ok knows it is bad.
            self._ok[part] = result.ok
            if len(result.checksums):
                self._checksums[part] = result.checksums
            self._tried[part] = True
            self._num_bytes += result.num_bytes
            self._part_seconds += result.seconds
            self._error = self._error or result.error

    def _summed(self) -> tuple[npt.NDArray[np.int32], TransferResult]:
        """Return the positions that were attempted, and their result."""
        if self.num_parts > 1 and self._started_s is not None:
            seconds = self._ended_s - self._started_s
        else:
            seconds = self._part_seconds
        tried = self._tried
        return self.positions[tried], TransferResult(
            ok=self._ok[tried],
            num_bytes=self._num_bytes,
            seconds=seconds,
            checksums=self._checksums[tried],
            error=self._error,
        )


class StagingReader:
    """Reads pages of load plans into ``num_rows`` rows of memory, in the background.

    Args:
        tier: where the pages are.
        num_rows: pages that can be staged at a time.
        completions: gets one ``StageFinished`` per read.
        clock: times failed reads.
        metrics: counts the edge from the tier to host memory.
        register: pins the region for a device; see ``MemoryRegion``.
        part_pages: pages per call of the tier; None reads everything in one call.
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
        part_pages: int | None = None,
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
        self._part_pages = part_pages
        self._running: list[StagedRead] = []
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
        staged = StagedRead(plan, positions, self._memory.array, rows, self._part_pages)
        # Several threads do the parts of one read: one's checksums are computed, or
        # its latency passes, while the other's bytes come.
        wanted = min(self._num_threads, staged.num_parts)
        staged._num_workers = wanted
        for number in range(wanted):
            if not self._worker.try_put(staged):
                if number == 0:
                    self._free(staged)
                    return None
                self._leave(staged)
        return staged

    def release(self, staged: StagedRead) -> None:
        """Give the rows back; during the read they are kept until it ends.

        May be called twice.
        """
        with self._lock:
            if staged._released:
                return
            staged._released = True
            # Nobody wants what was not begun.
            staged.cancel()
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
        self._note_start(staged)
        plan = staged.plan
        while (part := staged._take()) is not None:
            positions = staged.positions[part]
            addresses = plan.addresses[positions]
            io = TierIO(
                addresses=addresses,
                buffer=staged.region,
                rows=staged.rows[part],
                records=expected_checksums(plan.checksums[positions], addresses),
            )
            me = threading.get_ident()
            self._began_s[me] = self._clock.now()
            try:
                result = self._tier.load(io)
            except Exception as error:  # noqa: BLE001 - the others' parts go on
                text = f"{type(error).__name__}: {error}"
                result = TransferResult.failed(len(positions), 0.0, text)
            finally:
                self._began_s.pop(me, None)
            staged._put(part, result)
        self._leave(staged)

    def _give_up(self, staged: StagedRead, error: str) -> None:
        while (part := staged._take()) is not None:
            num_pages = part.stop - part.start
            staged._put(part, TransferResult.failed(num_pages, 0.0, error))
        self._leave(staged)

    def _note_start(self, staged: StagedRead) -> None:
        with self._lock:
            if staged._started_s is not None:
                return
            staged._started_s = self._clock.now()
            self._running.append(staged)
            if len(self._running) > 1:
                for other in self._running:
                    other._is_alone = False

    def _leave(self, staged: StagedRead) -> None:
        """End a thread's work on a read; the last one ends the read."""
        with self._lock:
            staged._num_workers -= 1
            if staged._num_workers:
                return
            staged._ended_s = self._clock.now()
            if staged in self._running:
                self._running.remove(staged)
        positions, result = staged._summed()
        self._metrics.record_result(self._tier.tier_id, TierId.HOST, result)
        with self._lock:
            staged.result = result
            if staged._released:
                self._free_locked(staged)
        self._completions.post(StageFinished(staged.plan, positions, staged, result))

    def _free(self, staged: StagedRead) -> None:
        with self._lock:
            self._free_locked(staged)

    def _free_locked(self, staged: StagedRead) -> None:
        self._is_free[staged.rows] = True
        self._num_free += len(staged.rows)
