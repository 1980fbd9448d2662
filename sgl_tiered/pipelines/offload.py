"""Copies from the device to a memory tier, off the critical path.

The queue is bounded: an engine that produces faster than the copies run is told so and
drops the write, which costs a later miss and no waiting now. Copies that do not end are
given up: whatever they still read is shown to nobody.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.clock import Clock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import OffloadPlan, TransferResult
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.pipelines.base import DevicePool
from sgl_tiered.pipelines.completions import CompletionQueue, OffloadFinished
from sgl_tiered.pipelines.page_numbers import PageNumbers
from sgl_tiered.pipelines.shares import BandwidthShares, Share
from sgl_tiered.pipelines.worker import Worker
from sgl_tiered.tiers.base import MemoryTier

__all__ = ["CHUNK_PAGES", "OffloadWorker"]

MAX_QUEUED = 64
CHUNK_PAGES = 64
"""At 2 MiB a page about 5 ms of copying: how long a load may have to wait."""


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    plan: OffloadPlan
    device_pages: PageNumbers
    after: object
    num_given_up: int


class OffloadWorker:
    """Stores pages of the device into ``tier.region`` on one thread of its own.

    Args:
        pool: the device's memory.
        tier: the destination of all plans.
        completions: gets one ``OffloadFinished`` per plan.
        clock: times the copies.
        metrics: counts the edge from the device to the tier.
        shares: says when a chunk may go; None for at once.
        max_queued: plans that may wait.
    """

    def __init__(
        self,
        pool: DevicePool,
        tier: MemoryTier,
        completions: CompletionQueue,
        clock: Clock,
        metrics: MetricsRegistry,
        *,
        shares: BandwidthShares | None = None,
        max_queued: int = MAX_QUEUED,
    ) -> None:
        self._pool = pool
        self._tier = tier
        self._completions = completions
        self._clock = clock
        self._metrics = metrics
        self._shares = shares
        self._closing = threading.Event()
        self._num_given_up = 0
        # When the copy that runs began or last ended a chunk; None while none runs.
        self._moved_s: float | None = None
        self._worker: Worker[_Job] = Worker(
            "tiered-offload",
            self._store,
            self._fail,
            max_queued=max_queued,
            background=True,
        )

    @property
    def busy(self) -> bool:
        """True while a plan waits or runs."""
        return self._worker.busy

    def try_submit(
        self, plan: OffloadPlan, device_pages: PageNumbers, after: object
    ) -> bool:
        """Queue a copy; False if the queue is full, and then nothing is posted.

        Args:
            plan: what goes where.
            device_pages: numbers in the device pool, not to be reused before the
                completion.
            after: ``DevicePool.mark()`` of the work that writes them.
        """
        return self._worker.try_put(_Job(plan, device_pages, after, self._num_given_up))

    def submit(
        self, plan: OffloadPlan, device_pages: PageNumbers, after: object
    ) -> None:
        """Queue a copy; with a full queue it is posted as failed. Never blocks."""
        job = _Job(plan, device_pages, after, self._num_given_up)
        if not self._worker.try_put(job):
            self._fail(job, "the offload queue is full or closed")

    def stuck_s(self) -> float:
        """Return for how long the copy that runs has moved no byte; 0 if none runs."""
        moved_s = self._moved_s
        return 0.0 if moved_s is None else self._clock.now() - moved_s

    def give_up(self) -> None:
        """Let what is not copied yet of all that was handed in so far end as failed.

        So device pages may be reused at once: a copy that runs on may read anything.
        Slots stay set aside until the completion. Never blocks.
        """
        self._num_given_up += 1

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until no copy waits or runs; return False after the timeout."""
        return self._worker.drain(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Fail the waiting copies and let the running chunk end."""
        self._closing.set()
        self._worker.close(timeout_s)

    def _store(self, job: _Job) -> None:
        try:
            self._moved_s = self._clock.now()
            self._store_chunks(job)
        finally:
            self._moved_s = None

    def _store_chunks(self, job: _Job) -> None:
        num_pages = len(job.plan.addresses)
        ok = np.zeros(num_pages, np.bool_)
        started_s = self._clock.now()
        error = ""
        for begin in range(0, num_pages, CHUNK_PAGES):
            chunk = slice(begin, min(begin + CHUNK_PAGES, num_pages))
            if self._shares is not None:
                self._shares.wait(Share.DEMOTE, self._closing)
            if self._closing.is_set():
                error = "closed"
                break
            if not self._is_given_up(job):
                self._store_chunk(job, chunk)
                self._moved_s = self._clock.now()
            # Asked after the copy: one given up under it may have read other pages.
            if self._is_given_up(job):
                error = "given up, as it did not end"
                break
            ok[chunk] = True
        result = TransferResult(
            ok=ok,
            num_bytes=job.plan.bytes_of(ok, self._pool.layout.page_bytes),
            seconds=self._clock.now() - started_s,
            checksums=np.zeros(num_pages, np.uint64),
            error=error,
        )
        self._finish(job, result)

    def _store_chunk(self, job: _Job, chunk: slice) -> None:
        addresses = job.plan.addresses[chunk]
        started_s = self._clock.now()
        # The pool gets back what it has handed out.
        pages = cast(npt.NDArray[np.int64], job.device_pages[chunk])
        self._pool.store_pages(self._tier.region, addresses, pages, job.after)
        num_bytes = job.plan.bytes_of(chunk, self._pool.layout.page_bytes)
        self._tier.charge(num_bytes, is_store=True)
        if self._shares is not None:
            self._shares.used(Share.DEMOTE, self._clock.now() - started_s)

    def _is_given_up(self, job: _Job) -> bool:
        return job.num_given_up != self._num_given_up

    def _fail(self, job: _Job, error: str) -> None:
        self._finish(job, TransferResult.failed(len(job.plan.pages), 0.0, error))

    def _finish(self, job: _Job, result: TransferResult) -> None:
        self._metrics.record_result(TierId.DEVICE, self._tier.tier_id, result)
        self._completions.post(OffloadFinished(job.plan, result))
