"""Loads to the device layer by layer, under the computation.

One thread of its own copies layer 0 of all jobs of a batch, then layer 1, and so on;
the model waits for a layer only just before it needs it. Order within a ticket: layers
ascending, so "layer i is there" is a comparison with a counter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.clock import Clock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import LoadPlan
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.pipelines.base import DevicePool
from sgl_tiered.pipelines.completions import CompletionQueue, LoadFinished
from sgl_tiered.pipelines.worker import Worker
from sgl_tiered.tiers.base import MemoryTier

__all__ = ["LayerwiseLoader", "LoadJob", "LoadTicket", "Segment"]

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Pages of a plan that lie in one region of memory.

    Attributes:
        region: uint8 [num_rows, >= slot_bytes].
        rows: int64 [m], where the pages are in ``region``.
        positions: int [m], indices of the same pages in the plan.
        charge: called with the bytes of each layer copied; None for nothing to pay.
        source: the medium of ``region``, for the metrics.
    """

    region: npt.NDArray[np.uint8]
    rows: Int64s
    positions: npt.NDArray[np.integer]
    charge: Callable[[int], None] | None = None
    source: TierId = TierId.HOST

    @classmethod
    def of_tier(
        cls, tier: MemoryTier, addresses: Int64s, positions: npt.NDArray[np.integer]
    ) -> Segment:
        """Return the segment of pages that lie in a memory tier."""
        region, rows = tier.read_view(addresses)
        return cls(region, rows, positions, tier.charge, tier.tier_id)


@dataclass(frozen=True, slots=True, eq=False)
class LoadJob:
    """The load of one request.

    Attributes:
        plan: what is loaded; its sources stay pinned until the completion.
        segments: together they cover each position of the plan once.
        device_pages: int64 [plan.num_pages], where the pages go.
    """

    plan: LoadPlan
    segments: tuple[Segment, ...]
    device_pages: Int64s


class LoadTicket:
    """The state of one submitted batch of jobs, shared by loader and model thread."""

    def __init__(self, jobs: Sequence[LoadJob], num_layers: int, clock: Clock) -> None:
        self.jobs = tuple(jobs)
        self._num_layers = num_layers
        self._clock = clock
        self._changed = threading.Condition()
        # Read without the lock by wait_layer: it only grows, and an int is read whole.
        self._num_arrived = 0
        self._done = False
        self._failed = ""
        self._stall_s = 0.0

    @property
    def done(self) -> bool:
        """True once all layers arrived or the load failed."""
        return self._done

    @property
    def failed(self) -> str:
        """Why the load failed; empty while it has not."""
        return self._failed

    @property
    def stall_s(self) -> float:
        """Seconds spent in ``wait_layer`` and ``wait`` so far."""
        return self._stall_s

    def wait_layer(self, layer: int) -> None:
        """Block until a layer has arrived, or the load failed (see ``failed``).

        Costs a comparison once the layer is there. A failed load releases everybody:
        the caller finds out by ``wait`` and must not use what was computed.
        """
        if layer < self._num_arrived:
            return
        started_s = self._clock.now()
        with self._changed:
            while layer >= self._num_arrived and not self._done:
                self._changed.wait()
            self._stall_s += self._clock.now() - started_s

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the load ended; return True if everything landed.

        With a timeout, False may also mean "not yet": see ``done``.
        """
        if not self._done:
            started_s = self._clock.now()
            with self._changed:
                self._changed.wait_for(lambda: self._done, timeout_s)
                self._stall_s += self._clock.now() - started_s
        return self._done and not self._failed

    def _arrive(self) -> None:
        with self._changed:
            self._num_arrived += 1
            self._changed.notify_all()

    def _finish(self, error: str = "") -> None:
        with self._changed:
            self._failed = error
            self._done = True
            # From here on wait_layer takes its short way, whatever happened.
            self._num_arrived = self._num_layers
            self._changed.notify_all()


class LayerwiseLoader:
    """Copies batches of jobs to the device on one thread of its own.

    Args:
        pool: the device's memory.
        completions: gets one ``LoadFinished`` per ticket.
        clock: times copies and stalls.
        metrics: counts the bytes of each edge to the device.
    """

    def __init__(
        self,
        pool: DevicePool,
        completions: CompletionQueue,
        clock: Clock,
        metrics: MetricsRegistry,
    ) -> None:
        self._pool = pool
        self._completions = completions
        self._clock = clock
        self._metrics = metrics
        self._worker: Worker[LoadTicket] = Worker(
            "tiered-load", self._load, self._give_up
        )

    def submit(self, jobs: Sequence[LoadJob]) -> LoadTicket:
        """Start loading; the ticket tells when each layer is there. Never blocks."""
        ticket = LoadTicket(jobs, self._pool.layout.num_layers, self._clock)
        if not self._worker.try_put(ticket):
            self._give_up(ticket, "the loader is closed")
        return ticket

    @property
    def busy(self) -> bool:
        """True while a load waits or runs."""
        return self._worker.busy

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until no load waits or runs; return False after the timeout."""
        return self._worker.drain(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Fail the waiting loads and let the running one end."""
        self._worker.close(timeout_s)

    def _load(self, ticket: LoadTicket) -> None:
        layout = self._pool.layout
        copies = [
            (segment, job.device_pages[segment.positions])
            for job in ticket.jobs
            for segment in job.segments
        ]
        seconds_by_tier: dict[TierId, float] = {}
        pages_by_tier: dict[TierId, int] = {}
        for segment, _ in copies:
            seconds_by_tier[segment.source] = 0.0
            pages_by_tier.setdefault(segment.source, 0)
            pages_by_tier[segment.source] += len(segment.rows)
        now = self._clock.now
        started_s = copied_s = now()
        for layer in range(layout.num_layers):
            for segment, device_pages in copies:
                self._pool.load_layer(layer, segment.region, segment.rows, device_pages)
                if segment.charge is not None:
                    segment.charge(len(segment.rows) * layout.layer_page_bytes)
                before_s, copied_s = copied_s, now()
                seconds_by_tier[segment.source] += copied_s - before_s
            ticket._arrive()
        for tier, num_pages in pages_by_tier.items():
            self._metrics.record_transfer(
                tier,
                TierId.DEVICE,
                num_pages=num_pages,
                num_bytes=num_pages * layout.page_bytes,
                seconds=seconds_by_tier[tier],
            )
        num_bytes = sum(pages_by_tier.values()) * layout.page_bytes
        self._post(ticket, num_bytes, copied_s - started_s, "")

    def _give_up(self, ticket: LoadTicket, error: str) -> None:
        for tier in {s.source for job in ticket.jobs for s in job.segments}:
            num_pages = sum(
                len(segment.rows)
                for job in ticket.jobs
                for segment in job.segments
                if segment.source == tier
            )
            self._metrics.record_transfer(
                tier,
                TierId.DEVICE,
                num_pages=0,
                num_bytes=0,
                seconds=0.0,
                failed_pages=num_pages,
            )
        self._post(ticket, 0, 0.0, error)

    def _post(
        self, ticket: LoadTicket, num_bytes: int, seconds: float, error: str
    ) -> None:
        ticket._finish(error)
        self._completions.post(
            LoadFinished(
                ticket=ticket,
                plans=tuple(job.plan for job in ticket.jobs),
                landed=not error,
                num_bytes=num_bytes,
                seconds=seconds,
                error=error,
            )
        )
