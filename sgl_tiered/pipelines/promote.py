"""Reads from the disk straight into the slots of a memory tier, ahead of need.

One thread reads one promotion after the other, each in parts. While others' loads run
it goes only in turns (see `shares.py`), unless a request is held up by this very
promotion. A slot is shown to nobody before the end is told, so a read that breaks, or
is cancelled, leaves nothing wrong behind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.clock import Clock
from sgl_tiered.core.plans import PromotePlan, TransferResult
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.pipelines.completions import CompletionQueue, PromoteFinished
from sgl_tiered.pipelines.shares import POLL_S, BandwidthShares, Share
from sgl_tiered.pipelines.worker import Worker
from sgl_tiered.tiers.base import MemoryTier, Tier, TierIO
from sgl_tiered.tiers.checks import expected_checksums

__all__ = ["PromoteWorker", "PromotedRead"]

MAX_QUEUED = 64


class PromotedRead:
    """One promotion under way.

    Attributes:
        plan: as submitted.
    """

    def __init__(self, plan: PromotePlan) -> None:
        self.plan = plan
        self._num_done = 0
        self._is_urgent = threading.Event()
        self._is_cancelled = threading.Event()

    @property
    def num_left(self) -> int:
        """Pages still to come; 0 once it ended or was cancelled."""
        if self._is_cancelled.is_set():
            return 0
        return self.plan.num_pages - self._num_done

    def hurry(self) -> None:
        """Let it go before other transfers: a request is held up by it."""
        self._is_urgent.set()

    def cancel(self) -> None:
        """Leave out what was not begun."""
        self._is_cancelled.set()


class PromoteWorker:
    """Reads pages of ``source`` into the slots of ``target``.

    Args:
        source: where the pages are; must be read.
        target: where they go; written in place.
        completions: gets one ``PromoteFinished`` per plan.
        clock: times the reads.
        metrics: counts the edge.
        part_pages: pages per call of the source.
        shares: says when a part may go; None for at once.
        is_shared: whether others use the link now, so that a read's time is not the
            link's own.
        max_queued: plans that may wait.
    """

    def __init__(
        self,
        source: Tier,
        target: MemoryTier,
        completions: CompletionQueue,
        clock: Clock,
        metrics: MetricsRegistry,
        *,
        part_pages: int,
        shares: BandwidthShares | None = None,
        is_shared: Callable[[], bool] = lambda: False,
        max_queued: int = MAX_QUEUED,
    ) -> None:
        self._source = source
        self._target = target
        self._completions = completions
        self._clock = clock
        self._metrics = metrics
        self._part_pages = part_pages
        self._shares = shares
        self._is_shared = is_shared
        self._closing = threading.Event()
        self._began_s: float | None = None
        self._worker: Worker[PromotedRead] = Worker(
            "tiered-promote", self._read, self._give_up, max_queued=max_queued
        )

    @property
    def busy(self) -> bool:
        """True while a promotion waits or runs."""
        return self._worker.busy

    def submit(self, plan: PromotePlan) -> PromotedRead | None:
        """Queue a promotion; None if the queue is full or closed. Never blocks."""
        read = PromotedRead(plan)
        return read if self._worker.try_put(read) else None

    def stuck_s(self) -> float:
        """Return for how long the part under way has been read; 0 without one."""
        began_s = self._began_s
        return 0.0 if began_s is None else self._clock.now() - began_s

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until none waits or runs; return False after the timeout."""
        return self._worker.drain(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """End those that wait unread, and let the running part end."""
        self._closing.set()
        self._worker.close(timeout_s)

    def _read(self, read: PromotedRead) -> None:
        plan = read.plan
        ok = np.zeros(plan.num_pages, np.bool_)
        is_read = np.zeros(plan.num_pages, np.bool_)
        num_bytes, seconds, error, is_alone = 0, 0.0, "", True
        for begin in range(0, plan.num_pages, self._part_pages):
            if not self._may_go(read):
                break
            part = slice(begin, min(begin + self._part_pages, plan.num_pages))
            is_alone = is_alone and not self._is_shared()
            result, is_whole = self._load(plan, part)
            if is_whole:
                ok[part], is_read[part] = result.ok, True
            num_bytes += result.num_bytes
            seconds += result.seconds
            error = error or result.error
            read._num_done = part.stop
            if self._shares is not None:
                self._shares.used(Share.PROMOTE, result.seconds)
        is_alone = is_alone and not self._is_shared()
        read._num_done = plan.num_pages
        self._finish(read, is_read, ok[is_read], num_bytes, seconds, error, is_alone)

    def _may_go(self, read: PromotedRead) -> bool:
        """Wait for the turn of a part; False where it is not to be read any more."""
        shares = self._shares
        while shares is not None and shares.delay_s(Share.PROMOTE) > 0.0:
            if read._is_urgent.is_set() or read._is_cancelled.is_set():
                break
            if self._closing.wait(POLL_S):
                break
        return not (read._is_cancelled.is_set() or self._closing.is_set())

    def _load(self, plan: PromotePlan, part: slice) -> tuple[TransferResult, bool]:
        """Read a part; False where the target, not the source, has failed."""
        sources, targets = plan.source_addresses[part], plan.target_addresses[part]
        self._began_s = started_s = self._clock.now()
        try:
            result = self._source.load(
                TierIO(
                    addresses=sources,
                    buffer=self._target.region,
                    rows=targets,
                    records=expected_checksums(plan.checksums[part], sources),
                )
            )
        except Exception as error:  # noqa: BLE001 - the thread and the others live on
            seconds = self._clock.now() - started_s
            text = f"{type(error).__name__}: {error}"
            return TransferResult.failed(len(sources), seconds, text), True
        finally:
            self._began_s = None
        try:
            self._target.charge(result.num_bytes, is_store=True)
        except OSError as error:
            return TransferResult.failed(
                len(sources), result.seconds, str(error)
            ), False
        return result, True

    def _give_up(self, read: PromotedRead, error: str) -> None:
        nothing = np.zeros(read.plan.num_pages, np.bool_)
        read._num_done = read.plan.num_pages
        self._finish(read, nothing, nothing[:0], 0, 0.0, error, False)

    def _finish(
        self,
        read: PromotedRead,
        is_read: npt.NDArray[np.bool_],
        ok: npt.NDArray[np.bool_],
        num_bytes: int,
        seconds: float,
        error: str,
        is_alone: bool,
    ) -> None:
        plan = read.plan
        result = TransferResult(
            ok=ok, num_bytes=num_bytes, seconds=seconds, error=error
        )
        self._metrics.record_result(plan.source, plan.target, result)
        positions = np.flatnonzero(is_read).astype(np.int32)
        self._completions.post(PromoteFinished(plan, positions, result, is_alone))
