"""Moves layer-pages between device and host rows, on three threads of its own.

- *Down*: what is to leave the device, in the order in which it was handed in.
- *Stream*: the units of a forward (``units.py``), each once the half that it goes to
  has been read. The model waits for these.
- *Up*: layer-pages that return to stay.

Copies go in sub-units. Before each one the guard is asked (collectives on the same
link), and for those that nobody waits for also ``BandwidthShares``. A copy that fails
is tried again once; what a failed one leaves behind is nowhere shown as valid. What
fails again and again is an outage (``outage.py``), one for each direction.

Where the copier says that ``waiter_copies`` and no link is emulated, the model thread
copies its units itself, just before it reads them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.clock import Clock, SystemClock
from sgl_tiered.layered.base import LayerCopier, SwapGuard
from sgl_tiered.layered.binding import Flight
from sgl_tiered.layered.outage import Outage
from sgl_tiered.layered.units import Unit
from sgl_tiered.pipelines.base import Arrival
from sgl_tiered.pipelines.shares import BandwidthShares, Share
from sgl_tiered.pipelines.worker import Worker
from sgl_tiered.tiers.throttled import Pace

__all__ = ["Landing", "LayerMover", "UnitStream"]

SUB_UNIT_PAGES = 64
"""Of one layer: 4 MiB for a 7-billion-parameter model with pages of 16 tokens."""
CALLED_OFF = "called off"
"""The error of a flight that nobody wanted any more."""
ATTEMPTS = 2
"""One failure may be a passing one; a second in a row is not waited out here."""


@dataclass(frozen=True, slots=True, eq=False)
class Landing:
    """The end of a flight.

    Attributes:
        flight: as handed in.
        ok: bool [n], what was copied.
        error: one sentence, empty if all was.
    """

    flight: Flight
    ok: npt.NDArray[np.bool_]
    error: str


class _CopyFailedError(RuntimeError):
    """A sub-unit of a unit was not copied.

    Attributes:
        rows: int64 [n], of the host region.
    """

    def __init__(self, rows: npt.NDArray[np.int64], reason: str) -> None:
        self.rows = rows
        super().__init__(reason)


class _Job:
    """A flight that is queued, and may be called off."""

    def __init__(self, flight: Flight, after: object) -> None:
        self.flight = flight
        self.after = after
        self.is_wanted = True


class UnitStream:
    """The units of one forward: handed out by the mover, waited for by the model.

    The copy of unit u starts when unit u - 2, which used the same half, was read.
    """

    def __init__(
        self, units: Sequence[Unit], mover: LayerMover, *, inline: bool
    ) -> None:
        self._units = units
        self._mover = mover
        self._inline = inline
        self._changed = threading.Condition()
        self._num_started = 0
        self._is_settled = [False] * len(units)
        """Units whose copy is queued on the device, done or failed."""
        self._arrivals: list[Arrival | None] = [None] * len(units)
        self._failed: dict[int, str] = {}
        self._failed_rows: dict[int, npt.NDArray[np.int64]] = {}
        self._ended = False
        if not inline:
            self._start_until(2)

    def wait(self, index: int) -> None:
        """Block until the model may read a unit; units are read in order.

        Raises:
            RuntimeError: its copy failed.
        """
        if self._inline:
            self._copy(index, None)
        else:
            # What is read before it has been read, whether ``done`` said so or not.
            self._start_until(index + 2)
            with self._changed:
                self._changed.wait_for(lambda: self._is_settled[index] or self._ended)
        if index in self._failed:
            raise RuntimeError(self._failed[index])
        assert self._is_settled[index], "waited for after the end"
        arrival = self._arrivals[index]
        if arrival is not None:
            arrival.order()

    def done(self, index: int) -> None:
        """The model has queued all that reads a unit: its half may be filled again."""
        if not self._inline:
            self._start_until(index + 3)

    def end(self) -> float:
        """Start nothing more, and block until no copy of the stream runs.

        Returns:
            Seconds that the device's work stood still for queued copies.
        """
        with self._changed:
            self._ended = True
            self._changed.wait_for(lambda: all(self._is_settled[: self._num_started]))
        stall_s = 0.0
        for index, arrival in enumerate(self._arrivals):
            if arrival is not None:
                try:
                    arrival.finish()
                except RuntimeError as error:
                    self._failed.setdefault(index, str(error))
                stall_s += arrival.stall_s()
        return stall_s

    @property
    def failed(self) -> dict[int, str]:
        """Units whose copy failed; complete after ``end``."""
        return dict(self._failed)

    def failed_rows(self, index: int) -> npt.NDArray[np.int64]:
        """Return int64 [n], host rows of a unit that failed: those not copied.

        All of them where that is not known.
        """
        return self._failed_rows.get(index, self._units[index].rows)

    def _start_until(self, stop: int) -> None:
        for index in range(self._num_started, min(stop, len(self._units))):
            with self._changed:
                if self._ended:
                    return
                self._num_started += 1
            self._mover.queue_unit(self, index)

    def _copy(self, index: int, after: object) -> None:
        """Copy a unit; on the stream's thread, or on the model's."""
        try:
            if not self._ended:
                self._arrivals[index] = self._mover.copy_unit(self._units[index], after)
        except _CopyFailedError as error:
            self._failed_rows[index] = error.rows
            self._settle(index, str(error))
        except Exception as error:  # noqa: BLE001 - the thread has to live on
            self._settle(index, f"{type(error).__name__}: {error}")
        else:
            self._settle(index, "")

    def _settle(self, index: int, error: str) -> None:
        with self._changed:
            if error:
                self._failed[index] = error
            self._is_settled[index] = True
            self._changed.notify_all()


class LayerMover:
    """The threads that copy, and the queue in which the ends of flights arrive.

    Args:
        copier: does the copies.
        layer_page_bytes: of one physical layer-page.
        clock: times copies.
        pace: the emulated link; None for as fast as it goes.
        shares: who goes first; its own if None. Streams are its loads, what returns
            are promotions, what leaves are offloads.
        guard: asked before each sub-unit.
        sub_unit_pages: layer-pages moved between two looks at guard and shares.

    Attributes:
        to_host, to_device: how copies of each direction fare.
    """

    def __init__(
        self,
        copier: LayerCopier,
        layer_page_bytes: int,
        clock: Clock | None = None,
        *,
        pace: Pace | None = None,
        shares: BandwidthShares | None = None,
        guard: SwapGuard | None = None,
        sub_unit_pages: int = SUB_UNIT_PAGES,
    ) -> None:
        if min(layer_page_bytes, sub_unit_pages) < 1:
            raise ValueError(f"sub-units of {sub_unit_pages} x {layer_page_bytes} B")
        self._copier = copier
        self._layer_page_bytes = layer_page_bytes
        self._clock = clock or SystemClock()
        self._pace = pace
        self._shares = shares or BandwidthShares(self._clock)
        self._guard = guard
        self._sub_unit_pages = sub_unit_pages
        self._closing = threading.Event()
        self._hurry = threading.Event()
        self._landings: deque[Landing] = deque()
        self._landed = threading.Condition()
        self.to_host = Outage("to the host", self._clock)
        self.to_device = Outage("to the device", self._clock)
        self._jobs: list[_Job] = []
        self._stream: Worker[tuple[UnitStream, int, object]] = Worker(
            "layers-stream",
            lambda job: job[0]._copy(job[1], job[2]),
            lambda job, error: job[0]._settle(job[1], error),
        )
        self._down: Worker[_Job] = Worker("layers-down", self._move, self._give_up)
        self._up: Worker[_Job] = Worker("layers-up", self._move, self._give_up)
        self._shares.watch(Share.LOAD, lambda: self._stream.busy)

    @property
    def clock(self) -> Clock:
        """What copies are timed with."""
        return self._clock

    @property
    def layer_page_bytes(self) -> int:
        """Bytes of one layer-page."""
        return self._layer_page_bytes

    @property
    def num_flights(self) -> int:
        """Flights handed in whose landing was not collected."""
        return len(self._jobs)

    def stream(self, units: Sequence[Unit]) -> UnitStream:
        """Begin to copy the units of a forward; on the engine's thread."""
        inline = self._pace is None and self._copier.waiter_copies
        return UnitStream(units, self, inline=inline)

    def start(self, flight: Flight) -> None:
        """Queue a flight; its landing is collected later. On the engine's thread."""
        job = _Job(flight, self._copier.mark())
        self._jobs.append(job)
        worker = self._up if flight.is_up else self._down
        if not worker.try_put(job):
            self._give_up(job, "the mover is closed")

    def call_off(self, is_unwanted: Callable[[Flight], bool]) -> None:
        """Do not begin further sub-units of such flights; they land as failed."""
        for job in self._jobs:
            if is_unwanted(job.flight):
                job.is_wanted = False

    def collect(self) -> list[Landing]:
        """Take the landings so far, oldest first; on the engine's thread."""
        taken: list[Landing] = []
        while self._landings:
            taken.append(self._landings.popleft())
        if taken:
            gone = {id(landing.flight) for landing in taken}
            self._jobs = [job for job in self._jobs if id(job.flight) not in gone]
        return taken

    def wait(self) -> bool:
        """Block until there is a landing to collect; False if none is to come.

        Meanwhile nothing that leaves or returns gives way to anything else.
        """
        if self._landings or not self._jobs:
            return bool(self._landings)
        self._hurry.set()
        with self._landed:
            self._landed.wait_for(lambda: bool(self._landings))
        self._hurry.clear()
        return True

    def close(self, timeout_s: float = 5.0) -> None:
        """Fail what waits, let what runs end its sub-unit."""
        self._closing.set()
        for worker in (self._stream, self._up, self._down):
            worker.close(timeout_s)

    def queue_unit(self, stream: UnitStream, index: int) -> None:
        """Queue a unit's copy behind all that the engine has queued so far."""
        job = (stream, index, self._copier.mark())
        if not self._stream.try_put(job):
            stream._settle(index, "the mover is closed")

    def copy_unit(self, unit: Unit, after: object) -> Arrival | None:
        """Copy a unit, or queue it; return the last copy that is only queued."""
        arrival = None
        for part in self._parts(len(unit.rows)):
            self._wait_for_guard()
            rows, targets = unit.rows[part], unit.targets[part]
            copy = partial(self._copier.to_device, unit.layer, rows, targets, after)
            try:
                found = self._insist(copy, len(rows), is_store=False)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                raise _CopyFailedError(rows, reason) from error
            arrival = found or arrival
        return arrival

    def _parts(self, count: int) -> list[slice]:
        step = self._sub_unit_pages
        return [slice(at, min(at + step, count)) for at in range(0, count, step)]

    def _wait_for_guard(self) -> None:
        if self._guard is not None and not self._guard.wait(self._closing):
            raise RuntimeError("the mover is closed")

    def _insist(
        self, copy: Callable[[], Arrival | None], num_pages: int, *, is_store: bool
    ) -> Arrival | None:
        """Copy at the link's pace, a second time if it fails."""
        num_bytes = num_pages * self._layer_page_bytes
        outage = self._outage(is_store=is_store)
        for attempt in range(ATTEMPTS):
            end_s = None
            if self._pace is not None:
                end_s = self._pace.reserve(num_bytes, is_store=is_store)
            try:
                arrival = copy()
            except Exception as error:
                is_last = attempt == ATTEMPTS - 1
                outage.failed(error, is_last=is_last)
                if is_last:
                    raise
                continue
            outage.succeeded()
            if self._pace is not None and end_s is not None:
                self._pace.wait_until(end_s)
            return arrival
        raise AssertionError("no attempt was made")

    def _move(self, job: _Job) -> None:
        """Copy a flight in sub-units; one that fails leaves the others alone."""
        flight = job.flight
        ok = np.zeros(len(flight), np.bool_)
        error = ""
        share = Share.PROMOTE if flight.is_up else Share.DEMOTE
        for part in self._parts(len(flight)):
            if not job.is_wanted or not self._may_go(share):
                error = CALLED_OFF
                break
            started_s = self._clock.now()
            try:
                self._wait_for_guard()
                self._move_part(job, part)
            except Exception as problem:  # noqa: BLE001 - a value, not an exception
                error = f"{type(problem).__name__}: {problem}"
            else:
                ok[part] = True
            self._shares.used(share, self._clock.now() - started_s)
        self._land(Landing(flight, ok, error))

    def _move_part(self, job: _Job, part: slice) -> None:
        flight = job.flight
        rows, physical = flight.pages[part], flight.physical[part]

        def up() -> None:
            arrival = self._copier.to_device(flight.layer, rows, physical, job.after)
            if arrival is not None:
                arrival.finish()

        def down() -> None:
            self._copier.to_host(flight.layer, physical, rows, job.after)

        self._insist(up if flight.is_up else down, len(rows), is_store=not flight.is_up)

    def _outage(self, *, is_store: bool) -> Outage:
        """Return what is told of each attempt; any thread."""
        return self.to_host if is_store else self.to_device

    def _may_go(self, share: Share) -> bool:
        """Give way to what is waited for, unless this is; False when closing."""
        if self._hurry.is_set():
            return not self._closing.is_set()
        return self._shares.wait(share, self._closing)

    def _give_up(self, job: _Job, error: str) -> None:
        self._land(Landing(job.flight, np.zeros(len(job.flight), np.bool_), error))

    def _land(self, landing: Landing) -> None:
        with self._landed:
            self._landings.append(landing)
            self._landed.notify_all()
