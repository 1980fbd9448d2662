"""Copies from a memory tier to a slower one, behind everything that is waited for.

Before each chunk the worker asks for its turn: see ``shares.py``.
"""

from __future__ import annotations

import threading

import numpy as np

from sgl_tiered.core.clock import Clock
from sgl_tiered.core.plans import DemotePlan, TransferResult
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.pipelines.completions import CompletionQueue, DemoteFinished
from sgl_tiered.pipelines.shares import BandwidthShares, Share
from sgl_tiered.pipelines.worker import Worker
from sgl_tiered.tiers.base import MemoryTier, Tier, TierIO

__all__ = ["DemoteWorker"]

MAX_QUEUED = 64
CHUNK_PAGES = 32
"""At 192 KiB a page about 2 ms of writing: how long a read may have to wait."""


class DemoteWorker:
    """Writes pages of ``source`` into ``target`` on one thread of its own.

    Args:
        source: where the pages are; read in place.
        target: where they go.
        completions: gets one ``DemoteFinished`` per plan.
        clock: times the copies.
        metrics: counts the edge.
        shares: says when a chunk may go; None for at once.
        max_queued: plans that may wait.
    """

    def __init__(
        self,
        source: MemoryTier,
        target: Tier,
        completions: CompletionQueue,
        clock: Clock,
        metrics: MetricsRegistry,
        *,
        shares: BandwidthShares | None = None,
        max_queued: int = MAX_QUEUED,
    ) -> None:
        self._source = source
        self._target = target
        self._completions = completions
        self._clock = clock
        self._metrics = metrics
        self._shares = shares
        self._closing = threading.Event()
        self._worker: Worker[DemotePlan] = Worker(
            "tiered-demote",
            self._copy,
            self._give_up,
            max_queued=max_queued,
            background=True,
        )

    @property
    def busy(self) -> bool:
        """True while a plan waits or runs."""
        return self._worker.busy

    def try_submit(self, plan: DemotePlan) -> bool:
        """Queue a copy; False if the queue is full, and then nothing is posted."""
        return self._worker.try_put(plan)

    def submit(self, plan: DemotePlan) -> None:
        """Queue a copy; with a full queue it is posted as failed. Never blocks."""
        if not self._worker.try_put(plan):
            self._give_up(plan, "the demote queue is full or closed")

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until no copy waits or runs; return False after the timeout."""
        return self._worker.drain(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Fail the waiting copies and let the running chunk end."""
        self._closing.set()
        self._worker.close(timeout_s)

    def _copy(self, plan: DemotePlan) -> None:
        num_pages = len(plan.pages)
        started_s = self._clock.now()
        parts = []
        for begin in range(0, num_pages, CHUNK_PAGES):
            chunk = slice(begin, min(begin + CHUNK_PAGES, num_pages))
            if self._shares is not None:
                self._shares.wait(Share.DEMOTE, self._closing)
            if self._closing.is_set():
                rest = TransferResult.failed(num_pages - begin, 0.0, "closed")
                parts.append(rest)
                break
            chunk_started_s = self._clock.now()
            parts.append(self._store(plan, chunk))
            if self._shares is not None:
                seconds = self._clock.now() - chunk_started_s
                self._shares.used(Share.DEMOTE, seconds)
        self._finish(plan, _joined(parts, self._clock.now() - started_s))

    def _store(self, plan: DemotePlan, chunk: slice) -> TransferResult:
        part = plan.records.part(chunk, plan.target_addresses[chunk])
        result = self._target.store(
            TierIO(
                addresses=plan.target_addresses[chunk],
                buffer=self._source.region,
                rows=plan.source_addresses[chunk],
                records=part,
            )
        )
        self._source.charge(result.num_bytes)
        return result

    def _give_up(self, plan: DemotePlan, error: str) -> None:
        self._finish(plan, TransferResult.failed(len(plan.pages), 0.0, error))

    def _finish(self, plan: DemotePlan, result: TransferResult) -> None:
        self._metrics.record_result(plan.source, plan.target, result)
        self._completions.post(DemoteFinished(plan, result))


def _joined(parts: list[TransferResult], seconds: float) -> TransferResult:
    """Return the result of a copy done in chunks."""
    if not parts:
        return TransferResult.failed(0, seconds, "")
    return TransferResult(
        ok=np.concatenate([part.ok for part in parts]),
        num_bytes=sum(part.num_bytes for part in parts),
        seconds=seconds,
        checksums=np.concatenate([part.checksums for part in parts]),
        error=next((part.error for part in parts if part.error), ""),
    )
