"""Loads to the device layer by layer, under the computation.

One thread of its own copies layer 0 of all jobs of a batch, then layer 1, and so on;
the model waits for a layer only just before it needs it. Order within a ticket: layers
ascending, so "layer i is there" is a comparison with a counter.

Where copies and computation share the cores (a CPU as the device), the model thread
copies each layer itself, with all cores, just before it needs it: 74 MB beside the
forward cost 16 ms of TTFT on two cores, the same by itself 10 ms.

Where the device has queues of its own (CUDA), the loader only queues: "layer i is
there" then means that its copy is queued, the model's stream waits for it and no thread
does. A second thread sees loads through to their ends, so that the first can queue the
next batch's behind them.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.clock import Clock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import LoadPlan
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.pipelines.base import Arrival, DevicePool
from sgl_tiered.pipelines.completions import CompletionQueue, LoadFigures, LoadFinished
from sgl_tiered.pipelines.page_numbers import PageNumbers, join_pages
from sgl_tiered.pipelines.worker import Worker
from sgl_tiered.tiers.base import MemoryTier

__all__ = [
    "LayerwiseLoader",
    "LoadJob",
    "LoadTicket",
    "Segment",
    "Steps",
    "group_layers",
]

Int64s = npt.NDArray[np.int64]
LinkFigures = tuple[float, float]
"""Seconds of an empty copy, and bytes per second."""

_POLL_S = 0.001
_LEFT_TO_WAITER_S = 0.05
"""How long the loader leaves the next layer to a model thread that copies: more than
the computation of a layer takes, and little where the forward broke off."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Pages of a plan that lie in one region of memory.

    Attributes:
        region: uint8 [num_rows, >= slot_bytes].
        rows: int64 [m], where the pages are in ``region``.
        positions: int [m], indices of the same pages in the plan.
        charge: called with the bytes of each layer copied; None for nothing to pay.
        source: the medium of ``region``, for the metrics.
        is_paced: ``charge`` sleeps: the copy stands for one that no core does.
    """

    region: npt.NDArray[np.uint8]
    rows: Int64s
    positions: npt.NDArray[np.integer]
    charge: Callable[[int], None] | None = None
    source: TierId = TierId.HOST
    is_paced: bool = False

    @classmethod
    def of_tier(
        cls, tier: MemoryTier, addresses: Int64s, positions: npt.NDArray[np.integer]
    ) -> Segment:
        """Return the segment of pages that lie in a memory tier."""
        region, rows = tier.read_view(addresses)
        is_paced = tier.health().emulated
        return cls(region, rows, positions, tier.charge, tier.tier_id, is_paced)


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """Pages of several jobs that are copied by one call per layer."""

    region: npt.NDArray[np.uint8]
    rows: Int64s
    device_pages: PageNumbers
    charge: Callable[[int], None] | None
    source: TierId
    num_bytes: int


def _merge(jobs: Sequence[LoadJob], page_bytes: int) -> list[_Copy]:
    """Return the jobs' segments, those of one region and medium put together."""
    parts: dict[tuple[int, TierId], list[tuple[Segment, PageNumbers, int]]] = {}
    for job in jobs:
        for segment in job.segments:
            key = (segment.region.ctypes.data, segment.source)
            pages = job.device_pages[segment.positions]
            num_bytes = job.bytes_of(segment, page_bytes)
            parts.setdefault(key, []).append((segment, pages, num_bytes))
    merged = []
    for found in parts.values():
        first = found[0][0]
        merged.append(
            _Copy(
                first.region,
                np.concatenate([segment.rows for segment, _, _ in found]),
                join_pages([pages for _, pages, _ in found]),
                first.charge,
                first.source,
                sum(num_bytes for _, _, num_bytes in found),
            )
        )
    return merged


def group_layers(num_layers: int, num_bytes: int, link: LinkFigures | None) -> int:
    """Return how many layers to copy at a time, from the link's measured figures.

    With ``n`` groups the copies take ``n * latency`` longer and the model waits for
    ``bytes / n`` at first; the sum is least at ``n = sqrt(bytes / bandwidth /
    latency)``. One layer at a time where the latency is not to be seen.

    Args:
        num_layers: of the model.
        num_bytes: of the whole load.
        link: (seconds per copy, bytes per second); None for not measured.
    """
    if link is None or num_bytes <= 0:
        return 1
    latency_s, bytes_per_s = link
    if latency_s <= 0.0:
        return 1
    num_groups = math.sqrt(num_bytes / bytes_per_s / latency_s)
    return min(num_layers, max(1, round(num_layers / max(num_groups, 1.0))))


@dataclass(frozen=True, slots=True, eq=False)
class LoadJob:
    """The load of one request.

    Attributes:
        plan: what is loaded; its sources stay pinned until the completion.
        segments: together they cover each position of the plan once.
        device_pages: numbers of as many device pages, where the pages go.
        page_bytes: int64 [plan.num_pages], bytes that are copied of each, where the
            device does not take all of them; None for whole pages.
    """

    plan: LoadPlan
    segments: tuple[Segment, ...]
    device_pages: PageNumbers
    page_bytes: Int64s | None = None

    def num_pages_from(self, tier: TierId) -> int:
        """Return how many pages lie in a tier's memory; staged ones are the host's."""
        return sum(len(part.rows) for part in self.segments if part.source is tier)

    def bytes_of(self, segment: Segment, page_bytes: int) -> int:
        """Return the bytes copied of a segment; ``page_bytes`` are a whole page's."""
        if self.page_bytes is None:
            return len(segment.rows) * page_bytes
        return int(self.page_bytes[segment.positions].sum())


class LoadTicket:
    """The state of one submitted batch of jobs, shared by loader and model thread.

    Who copies: the loader. Where the pool says that ``waiter_copies``, the model thread
    does not sleep in ``wait_layer`` but copies the layer itself, and the loader steps
    in only where it does not come for the next one.

    Made on the engine's thread: the load starts after the work queued until then.
    """

    def __init__(
        self,
        jobs: Sequence[LoadJob],
        pool: DevicePool,
        clock: Clock,
        link: LinkFigures | None = None,
    ) -> None:
        self.jobs = tuple(jobs)
        self._pool = pool
        self._after = pool.mark()
        # A copy that sleeps for its pace would hold the model up for nothing.
        is_paced = any(segment.is_paced for job in jobs for segment in job.segments)
        self._waiter_copies = pool.waiter_copies and not is_paced
        self._num_layers = pool.layout.num_layers
        self._arrivals: list[list[tuple[TierId, Arrival]]] = [
            [] for _ in range(self._num_layers)
        ]
        self._clock = clock
        self._copies = _merge(jobs, pool.layout.page_bytes)
        self._group = 1
        if not self._waiter_copies:
            num_bytes = sum(c.num_bytes for c in self._copies)
            self._group = group_layers(self._num_layers, num_bytes, link)
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        # A second one on the same lock: the loader need not wake up for every layer
        # that the waiter copies, which would cost the waiter the interpreter lock.
        self._loader_needed = threading.Condition(lock)
        # Read without the lock by wait_layer: it only grows, and an int is read whole.
        self._num_arrived = 0
        self._copying = False
        self._left_to_waiter_until_s = 0.0
        if self._waiter_copies:
            self._left_to_waiter_until_s = clock.now() + _LEFT_TO_WAITER_S
        self._seconds_by_tier = {copy.source: 0.0 for copy in self._copies}
        self._done = False
        self._failed = ""
        self._source: TierId | None = None
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
    def sources(self) -> frozenset[TierId]:
        """The tiers read in place; staging memory is none."""
        return frozenset(c.source for c in self._copies if c.charge is not None)

    @property
    def failed_source(self) -> TierId | None:
        """The one whose copy failed; None where none did."""
        return self._source if self._failed else None

    @property
    def waiter_pool(self) -> DevicePool | None:
        """Where ``wait_layer`` copies to; None where it does not, or no more."""
        return self._pool if self._waiter_copies and not self._done else None

    @property
    def stall_s(self) -> float:
        """Seconds that the model stood still so far, copying included.

        Those spent in ``wait_layer`` and ``wait``. Where the device has streams, those
        in ``wait_layer``, and those that the engine's stream waited, once known.
        """
        return self._stall_s + sum(
            arrival.stall_s() for _, arrival in itertools.chain(*self._arrivals)
        )

    @property
    def moved(self) -> dict[TierId, tuple[int, float]]:
        """Bytes of the jobs, and seconds of their copies, by the tier they lay in."""
        num_bytes = _bytes_by_tier(self.jobs, self._pool.layout.page_bytes)
        return {
            tier: (count, self._seconds_by_tier[tier])
            for tier, count in num_bytes.items()
        }

    @property
    def seconds(self) -> float:
        """Time of the copies alone: a waiter that copies computes between them."""
        return sum(self._seconds_by_tier.values())

    def wait_layer(self, layer: int) -> None:
        """Block until a layer has arrived, or the load failed (see ``failed``).

        Costs a comparison once the layer is there. A failed load releases everybody:
        the caller finds out by ``wait`` and must not use what was computed. Where the
        device has streams, the one that the calling thread works on waits instead.
        """
        if layer >= self._num_arrived:
            self._block_until(layer)
        if not self._done:
            for _, arrival in self._arrivals[layer]:
                arrival.order()

    def wait_last_layer(self) -> None:
        """Do as ``wait_layer`` for the last one, and so for all: they come in order."""
        self.wait_layer(self._num_layers - 1)

    def _block_until(self, layer: int) -> None:
        started_s = self._clock.now()
        if self._waiter_copies:
            self._left_to_waiter_until_s = started_s + _LEFT_TO_WAITER_S
            while layer >= self._num_arrived and self._claim_for_waiter():
                self._copy(by_waiter=True)
        with self._changed:
            while layer >= self._num_arrived and not self._done:
                self._changed.wait()
            self._stall_s += self._clock.now() - started_s

    @property
    def is_queued(self) -> bool:
        """Whether the device has copies that were only queued; they may have ended."""
        return any(self._arrivals)

    def wait_queued(self) -> bool:
        """Block until all layers are there or queued; return False if one failed.

        Waits for no copy that is queued, unless another one failed before it.
        """
        if not self._done and self._num_arrived < self._num_layers:
            started_s = self._clock.now()
            with self._changed:
                # Whoever waits for the whole will not come back for the layers.
                self._left_to_waiter_until_s = 0.0
                self._loader_needed.notify_all()
                self._changed.wait_for(
                    lambda: self._done or self._failed or self._has_all
                )
                if not self.is_queued:
                    self._stall_s += self._clock.now() - started_s
        if self.is_queued and not self._failed:
            return True
        return self.wait()

    @property
    def _has_all(self) -> bool:
        """Whether all layers are there or queued."""
        return self._num_arrived == self._num_layers

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the load ended; return True if everything landed.

        With a timeout, False may also mean "not yet": see ``done``.
        """
        if not self._done:
            started_s = self._clock.now()
            with self._changed:
                # Whoever waits for the whole will not come back for the layers.
                self._left_to_waiter_until_s = 0.0
                self._loader_needed.notify_all()
                self._changed.wait_for(lambda: self._done, timeout_s)
                if not self._arrivals[0]:
                    self._stall_s += self._clock.now() - started_s
        return self._done and not self._failed

    def _claim_for_waiter(self) -> bool:
        """Take the next layer; False where none is missing or the load failed."""
        with self._changed:
            while self._copying and not self._done:
                self._changed.wait()
            return self._claim()

    def _claim_for_loader(self) -> bool:
        """Like ``_claim_for_waiter``, once the waiter has stopped coming."""
        with self._changed:
            while self._num_arrived < self._num_layers and not self._failed:
                left_s = self._left_to_waiter_until_s - self._clock.now()
                if not self._copying and left_s <= 0:
                    break
                self._loader_needed.wait(max(left_s, _POLL_S))
            return self._claim()

    def _claim(self) -> bool:
        missing = self._num_arrived < self._num_layers and not self._failed
        if missing:
            self._copying = True
        return missing

    def _copy(self, *, by_waiter: bool) -> None:
        """Copy the claimed layers; a copy that raises fails the ticket."""
        error = ""
        first = self._num_arrived
        stop = min(first + self._group, self._num_layers)
        try:
            self._copy_layers(first, stop, by_waiter)
        except Exception as problem:  # noqa: BLE001 - the model thread has to live on
            error = f"{type(problem).__name__}: {problem}"
        with self._changed:
            self._copying = False
            # A load that was ended meanwhile stays ended: its failure is not undone.
            if not self._done:
                self._failed = error
                if not error:
                    self._num_arrived = stop
            self._changed.notify_all()
            if error or self._num_arrived == self._num_layers:
                self._loader_needed.notify_all()

    def _copy_layers(self, first: int, stop: int, by_waiter: bool) -> None:
        for copy in self._copies:
            before_s = self._clock.now()
            self._source = None if copy.charge is None else copy.source
            for layer in range(first, stop):
                arrival = self._pool.load_layer(
                    layer,
                    copy.region,
                    copy.rows,
                    # The pool gets back what it has handed out.
                    cast(Int64s, copy.device_pages),
                    after=self._after,
                    by_waiter=by_waiter,
                )
                if arrival is not None:
                    # Its own seconds come with its end; queueing's are nobody's.
                    self._arrivals[layer].append((copy.source, arrival))
                    before_s = self._clock.now()
            if copy.charge is not None:
                # So that all layers together are charged all bytes.
                ends = [copy.num_bytes * n // self._num_layers for n in (first, stop)]
                copy.charge(ends[1] - ends[0])
            self._seconds_by_tier[copy.source] += self._clock.now() - before_s

    def _land(self) -> str:
        """Block until no copy is under way any more; return what went wrong.

        Also after a failure: sources and pages belong to the load until it has ended.
        """
        error = self._failed
        for source, arrival in itertools.chain(*self._arrivals):
            try:
                self._seconds_by_tier[source] += arrival.finish()
            except RuntimeError as problem:
                error = error or str(problem)
        return error

    def _finish(self, error: str = "") -> None:
        with self._changed:
            self._failed = error
            self._done = True
            # From here on wait_layer takes its short way, whatever happened.
            self._num_arrived = self._num_layers
            self._changed.notify_all()


class Steps(Protocol):
    """Copies that nobody waits for; each step is short."""

    def step(self) -> bool:
        """Do or queue the next one; False once there is nothing more to do."""
        ...

    @property
    def is_queued(self) -> bool:
        """Whether the last one is only queued, and ``land`` has to follow."""
        ...

    def land(self) -> None:
        """Block until what is queued has ended."""
        ...

    def fail(self, error: str) -> None:
        """Take note that no further step will be done."""
        ...


class LayerwiseLoader:
    """Copies batches of jobs to the device on a thread of its own.

    What that thread has only queued is seen to its end by a second one.

    Args:
        pool: the device's memory.
        completions: gets one ``LoadFinished`` per ticket.
        clock: times copies and stalls.
        metrics: counts the bytes of each edge to the device.
        link: tells the measured figures of the link to the device, by which layers
            are grouped; None copies one at a time.
    """

    def __init__(
        self,
        pool: DevicePool,
        completions: CompletionQueue,
        clock: Clock,
        metrics: MetricsRegistry,
        *,
        link: Callable[[], LinkFigures] | None = None,
    ) -> None:
        self._link = link
        self._pool = pool
        self._completions = completions
        self._clock = clock
        self._metrics = metrics
        self._worker: Worker[LoadTicket | Steps] = Worker(
            "tiered-load", self._work, self._end
        )
        self._lander: Worker[LoadTicket | Steps] = Worker(
            "tiered-land", self._land, self._end
        )

    def submit(self, jobs: Sequence[LoadJob]) -> LoadTicket:
        """Start loading; the ticket tells when each layer is there. Never blocks."""
        figures = None if self._link is None else self._link()
        ticket = LoadTicket(jobs, self._pool, self._clock, figures)
        if not self._worker.try_put(ticket):
            self._give_up(ticket, "the loader is closed")
        return ticket

    def submit_steps(self, steps: Steps) -> bool:
        """Do them where no load waits; False once it is closed. Never blocks."""
        return self._worker.try_put(steps)

    @property
    def busy(self) -> bool:
        """True while a load waits or runs."""
        return self._worker.busy or self._lander.busy

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until no load waits or runs; return False after the timeout."""
        while self.busy:
            # A step goes to and fro between the two.
            workers = (self._worker, self._lander)
            if not all(worker.drain(timeout_s) for worker in workers):
                return False
        return True

    def close(self, timeout_s: float = 5.0) -> None:
        """Fail the waiting loads and let the running and the queued ones end."""
        self._worker.close(timeout_s)
        self._lander.drain(timeout_s)
        self._lander.close(timeout_s)

    def _work(self, job: LoadTicket | Steps) -> None:
        if isinstance(job, LoadTicket):
            while job._claim_for_loader():
                job._copy(by_waiter=False)
            if job.is_queued:
                self._pass_on(job, self._lander)
            else:
                self._load_ended(job, job.failed)
        elif job.step():
            self._pass_on(job, self._lander if job.is_queued else self._worker)

    def _land(self, job: LoadTicket | Steps) -> None:
        if isinstance(job, LoadTicket):
            self._load_ended(job, job._land())
        else:
            job.land()
            self._pass_on(job, self._worker)

    def _pass_on(
        self, job: LoadTicket | Steps, worker: Worker[LoadTicket | Steps]
    ) -> None:
        if worker.try_put(job):
            return
        if worker is self._lander:
            self._land(job)
        else:
            self._end(job, "the loader is closed")

    def _end(self, job: LoadTicket | Steps, error: str) -> None:
        if isinstance(job, LoadTicket):
            self._give_up(job, error)
        else:
            job.fail(error)

    def _load_ended(self, ticket: LoadTicket, error: str) -> None:
        if error:
            self._give_up(ticket, error)
            return
        moved = ticket.moved
        for tier, num_pages in _pages_by_tier(ticket.jobs).items():
            self._metrics.record_transfer(
                tier,
                TierId.DEVICE,
                num_pages=num_pages,
                num_bytes=moved[tier][0],
                seconds=moved[tier][1],
            )
        num_bytes = sum(count for count, _ in moved.values())
        self._post(ticket, num_bytes, ticket.seconds, "")

    def _give_up(self, ticket: LoadTicket, error: str) -> None:
        for tier, num_pages in _pages_by_tier(ticket.jobs).items():
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
                figures=LoadFigures(ticket.moved, ticket.sources, ticket.failed_source),
            )
        )


def _pages_by_tier(jobs: Sequence[LoadJob]) -> dict[TierId, int]:
    pages: dict[TierId, int] = {}
    for job in jobs:
        for segment in job.segments:
            pages[segment.source] = pages.get(segment.source, 0) + len(segment.rows)
    return pages


def _bytes_by_tier(jobs: Sequence[LoadJob], page_bytes: int) -> dict[TierId, int]:
    num_bytes: dict[TierId, int] = {}
    for job in jobs:
        for segment in job.segments:
            count = job.bytes_of(segment, page_bytes)
            num_bytes[segment.source] = num_bytes.get(segment.source, 0) + count
    return num_bytes
