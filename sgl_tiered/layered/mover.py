"""Moves layer-pages between device and host rows, on threads of its own.

- *Down*: what is to leave the device, in the order in which it was handed in.
- *Stream*: the units of a forward (``units.py``), each once the half that it goes to
  has been read. The model waits for these.
- *Up*: layer-pages that return to stay.

Activations go the same ways. KV of units is computed from them on a fourth thread
(``rebuilding.py``), a sub-unit as soon as it is there, while the stream goes on with
other loads; KV that returns to stay is computed by *up*.

Copies go in sub-units. Before each one the guard is asked (collectives on the same
link), and for those that nobody waits for also ``BandwidthShares``. A copy that fails
is tried again once, and so is a rebuild; what a failed one leaves behind is nowhere
shown as valid. Copies that fail again and again are an outage (``outage.py``), one for
each direction.

Where the copier says that ``waiter_copies``, no link is emulated and nothing has to be
computed, the model thread copies its units itself, just before it reads them.
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
from sgl_tiered.layered.base import ActCopier, LayerCopier, Pace, SwapGuard
from sgl_tiered.layered.binding import Flight
from sgl_tiered.layered.outage import ATTEMPTS, Outage
from sgl_tiered.layered.rebuilding import Rebuilder, RebuildJob, insist
from sgl_tiered.layered.unit_stream import CopyFailedError, UnitStream
from sgl_tiered.layered.units import ActPart, Unit
from sgl_tiered.layered.weights import WeightStream
from sgl_tiered.pipelines.base import Arrival
from sgl_tiered.pipelines.shares import BandwidthShares, Share
from sgl_tiered.pipelines.worker import Worker

__all__ = ["Landing", "LayerMover"]

SUB_UNIT_PAGES = 64
"""Of one layer: 4 MiB for a 7-billion-parameter model with pages of 16 tokens."""
CALLED_OFF = "called off"
"""The error of a flight that nobody wanted any more."""


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


class _Job:
    """A flight that is queued, and may be called off."""

    def __init__(self, flight: Flight, after: object) -> None:
        self.flight = flight
        self.after = after
        self.is_wanted = True


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
        acts: copies activations, and rebuilds KV; None where pages are KV only.
        act_page_bytes: of one layer-page of activations.
        weight_bytes: of one layer's weights, which cross the emulated link before it.

    Attributes:
        to_host, to_device: how copies of each direction fare.
        weights: what waits for emulated weights; None where none are emulated.
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
        acts: ActCopier | None = None,
        act_page_bytes: int = 0,
        weight_bytes: int = 0,
    ) -> None:
        if min(layer_page_bytes, sub_unit_pages) < 1:
            raise ValueError(f"sub-units of {sub_unit_pages} x {layer_page_bytes} B")
        if (acts is None) != (act_page_bytes == 0):
            raise ValueError(f"activations of {act_page_bytes} B, copied by {acts}")
        if weight_bytes < 0 or (weight_bytes and pace is None):
            raise ValueError(f"{weight_bytes} B of weights need an emulated link")
        self._copier = copier
        self._layer_page_bytes = layer_page_bytes
        self._clock = clock or SystemClock()
        self._pace = pace
        self._shares = shares or BandwidthShares(self._clock)
        self._guard = guard
        self._sub_unit_pages = sub_unit_pages
        self._acts = acts
        self._act_page_bytes = act_page_bytes
        self._up_acts = np.empty(0, np.int32)
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
        self._rebuilder = None if acts is None else Rebuilder(acts, self._clock)
        self.weights = (
            WeightStream(pace, weight_bytes)
            if pace is not None and weight_bytes
            else None
        )
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
    def act_page_bytes(self) -> int:
        """Bytes of one layer-page's activations; 0 where pages are KV only."""
        return self._act_page_bytes

    def use_up_acts(self, places: npt.NDArray[np.int32]) -> None:
        """Say through which places of the act area returns to stay go; before any."""
        self._up_acts = places

    @property
    def num_flights(self) -> int:
        """Flights handed in whose landing was not collected."""
        return len(self._jobs)

    def stream(self, units: Sequence[Unit]) -> UnitStream:
        """Begin to copy the units of a forward; on the engine's thread."""
        inline = self._pace is None and self._copier.waiter_copies
        inline = inline and not any(unit.rebuilds for unit in units)
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
        for other in (self._rebuilder, self.weights):
            if other is not None:
                other.close(timeout_s)

    def queue_unit(self, stream: UnitStream, index: int) -> None:
        """Queue a unit's copy behind all that the engine has queued so far."""
        job = (stream, index, self._copier.mark())
        if not self._stream.try_put(job):
            stream._settle(index, "the mover is closed")

    @property
    def is_alone(self) -> bool:
        """Whether nothing but the units of forwards crosses the link."""
        return not self._jobs and self.weights is None

    def copy_unit(
        self,
        unit: Unit,
        after: object,
        loaded: Callable[[int, float, Arrival | None], None],
    ) -> Arrival | None:
        """Copy a unit, or queue it; return the last copy that is only queued.

        Args:
            unit: which.
            after: ``mark()`` of the work that still reads what was there.
            loaded: told pages, seconds and copy, if that is only queued, of each part
                that was alone on the link.
        """
        arrival = None
        for part in self._parts(len(unit.rows)):
            self._wait_for_guard()
            rows, targets = unit.rows[part], unit.targets[part]
            copy = partial(self._copier.to_device, unit.layer, rows, targets, after)
            num_bytes = len(rows) * self._layer_page_bytes
            is_alone, started_s = self.is_alone, self._clock.now()
            try:
                found = self._insist(copy, num_bytes, is_store=False)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                pages = rows if unit.kv_pages is None else unit.kv_pages[part]
                raise CopyFailedError(pages, reason) from error
            if is_alone and self.is_alone:
                loaded(len(rows), self._clock.now() - started_s, found)
            arrival = found or arrival
        return arrival

    def copy_acts(
        self,
        unit: Unit,
        after: object,
        hand_on: Callable[[ActPart, Arrival | None], None],
    ) -> None:
        """Load a unit's activations, and hand each sub-unit on once it is there."""
        assert self._acts is not None, "no copier of activations"
        if unit.device_acts is not None:
            for part in self._parts(len(unit.device_acts)):
                hand_on(unit.device_acts[part], None)
        if unit.acts is None:
            return
        for part in self._parts(unit.num_acts):
            self._wait_for_guard()
            some = unit.acts[part]
            copy = partial(
                self._acts.acts_to_device, unit.layer, some.rows, some.acts, after
            )
            try:
                arrival = self._insist(
                    copy, len(some) * self._act_page_bytes, is_store=False
                )
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                raise CopyFailedError(some.pages, reason) from error
            hand_on(some, arrival)

    def rebuild(self, job: RebuildJob) -> None:
        """Queue a sub-unit of a unit whose KV is to be computed."""
        assert self._rebuilder is not None, "nobody computes KV"
        self._rebuilder.put(job)

    def _parts(self, count: int, most: int | None = None) -> list[slice]:
        step = min(self._sub_unit_pages, most or self._sub_unit_pages)
        return [slice(at, min(at + step, count)) for at in range(0, count, step)]

    def _wait_for_guard(self) -> None:
        if self._guard is not None and not self._guard.wait(self._closing):
            raise RuntimeError("the mover is closed")

    def _insist(
        self, copy: Callable[[], Arrival | None], num_bytes: int, *, is_store: bool
    ) -> Arrival | None:
        """Copy at the link's pace, a second time if it fails."""
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
        most = None
        if flight.acts is not None and flight.is_up:
            most = len(self._up_acts)
        for part in self._parts(len(flight), most):
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
        if flight.acts is not None:
            self._move_acts(job, flight.acts[part], part)
            return
        rows, physical = flight.host_rows[part], flight.physical[part]

        def up() -> None:
            arrival = self._copier.to_device(flight.layer, rows, physical, job.after)
            if arrival is not None:
                arrival.finish()

        def down() -> None:
            self._copier.to_host(flight.layer, physical, rows, job.after)

        num_bytes = len(rows) * self._layer_page_bytes
        self._insist(up if flight.is_up else down, num_bytes, is_store=not flight.is_up)

    def _move_acts(self, job: _Job, places: npt.NDArray[np.int32], part: slice) -> None:
        """Copy activations to the host, or bring them and compute KV to stay."""
        flight, copier = job.flight, self._acts
        assert copier is not None, "no copier of activations"
        assert flight.positions is not None
        layer, after, rows = flight.layer, job.after, flight.host_rows[part]
        if not flight.is_up:
            down = partial(copier.acts_to_host, layer, places, rows, after)
            num_bytes = len(rows) * self._act_page_bytes
            self._insist(down, num_bytes, is_store=True)
            return
        away = places < 0
        num_away = int(np.count_nonzero(away))
        if num_away:
            buffer = self._up_acts[:num_away]

            def up() -> None:
                arrival = copier.acts_to_device(layer, rows[away], buffer, after)
                if arrival is not None:
                    arrival.finish()

            self._insist(up, num_away * self._act_page_bytes, is_store=False)
            places = places.copy()
            places[away] = buffer
        physical, positions = flight.physical[part], flight.positions[part]

        def rebuild() -> None:
            built = copier.rebuild(layer, places, physical, positions, after)
            if built is not None:
                built.finish()

        insist(rebuild)

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
