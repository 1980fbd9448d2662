"""The units of one forward: copied ahead, rebuilt, and waited for.

The mover's threads do the work; what has become of each unit is noted here, and what
its loads and rebuilds took, for the cost model.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sgl_tiered.layered.rebuilding import RebuildJob, exposed_s
from sgl_tiered.layered.units import ActPart, Unit
from sgl_tiered.pipelines.base import Arrival

if TYPE_CHECKING:
    from sgl_tiered.layered.mover import LayerMover

__all__ = ["CopyFailedError", "Measured", "UnitStream"]


class CopyFailedError(RuntimeError):
    """A sub-unit of a unit was not copied.

    Attributes:
        pages: int64 [n], logical.
    """

    def __init__(self, pages: npt.NDArray[np.int64], reason: str) -> None:
        self.pages = pages
        super().__init__(reason)


@dataclass(slots=True)
class Measured:
    """What loads, or rebuilds, of parts of layers have taken in one forward.

    Attributes:
        count: parts.
        num_pages: of all of them.
        seconds: of all of them.
    """

    count: int = 0
    num_pages: int = 0
    seconds: float = 0.0

    def add(self, num_pages: int, seconds: float) -> None:
        """Note one."""
        self.count += 1
        self.num_pages += num_pages
        self.seconds += seconds

    def mean(self, page_tokens: int) -> tuple[int, float] | None:
        """Return tokens and seconds of one in the mean, which lies on the same line.

        None where there was none.
        """
        if not self.count:
            return None
        tokens = round(self.num_pages * page_tokens / self.count)
        return tokens, self.seconds / self.count


class UnitStream:
    """The units of one forward: handed out by the mover, waited for by the model.

    The copy of unit u starts when unit u - 2, which used the same half, was read.

    Attributes:
        rebuild_s: seconds of computing KV for units that have settled.
        rebuild_exposed_s: of these, after all that the unit loads had landed.
        num_rebuilt: pages whose KV was computed, layer by layer.
        rebuilds: what parts of units took to compute; complete after ``end``.
        loads: what parts of KV took, alone on the link; complete after ``end``.
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
        """Units whose copy is queued on the device, done or failed, and rebuilt."""
        self._num_open = [1] * len(units)
        """Of each unit: one for its loads, one for each sub-unit that is rebuilt."""
        self._spans: dict[int, list[tuple[float, float]]] = {}
        self._landed_s: dict[int, float] = {}
        self.rebuild_s = 0.0
        self.rebuild_exposed_s = 0.0
        self.num_rebuilt = 0
        self.rebuilds = Measured()
        self.loads = Measured()
        self._queued_loads: list[tuple[int, Arrival]] = []
        """Pages of each, and the copy, whose time is the device's."""
        self._arrivals: list[Arrival | None] = [None] * len(units)
        self._act_arrivals: list[Arrival | None] = [None] * len(units)
        """The last load of activations, which ends when all of them have."""
        self._built: list[list[tuple[int, Arrival]]] = [[] for _ in units]
        """Pages of each rebuild that is queued on the device, in order, and it."""
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
        # What the model's stream still waits for after the loads is the rebuilds'.
        for arrival in self._queued(index):
            arrival.order()

    def _queued(self, index: int) -> list[Arrival]:
        """Return what the model's stream has to wait for before it reads a unit."""
        loads = (self._act_arrivals[index], self._arrivals[index])
        last = [built for _, built in self._built[index][-1:]]
        return [one for one in loads if one is not None] + last

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
        for index, built in enumerate(self._built):
            queued = self._queued(index)
            try:
                for arrival in queued:
                    arrival.finish()
                for num_pages, one in built:
                    seconds = one.finish()
                    self.rebuild_s += seconds
                    self.rebuilds.add(num_pages, seconds)
            except RuntimeError as error:
                self._failed.setdefault(index, str(error))
            stall_s += sum(arrival.stall_s() for arrival in queued)
            self.rebuild_exposed_s += sum(one.stall_s() for _, one in built)
        if not self._failed:
            for num_pages, load in self._queued_loads:
                self.loads.add(num_pages, load.finish())
        return stall_s

    @property
    def failed(self) -> dict[int, str]:
        """Units whose copy failed; complete after ``end``."""
        return dict(self._failed)

    def failed_rows(self, index: int) -> npt.NDArray[np.int64]:
        """Return int64 [n], logical pages of a unit that failed: those not copied.

        All of them where that is not known. Their host rows, where all are of KV.
        """
        return self._failed_rows.get(index, self._units[index].pages)

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
                unit = self._units[index]
                if unit.rebuilds:
                    hand_on = partial(self._hand_on, index, after)
                    self._mover.copy_acts(unit, after, hand_on)
                self._arrivals[index] = self._mover.copy_unit(unit, after, self._loaded)
        except CopyFailedError as error:
            self._failed_rows.setdefault(index, error.pages)
            self._settle(index, str(error))
        except Exception as error:  # noqa: BLE001 - the thread has to live on
            self._settle(index, f"{type(error).__name__}: {error}")
        else:
            self._settle(index, "")

    def _loaded(self, num_pages: int, seconds: float, copy: Arrival | None) -> None:
        """Note a part of KV that was alone on the link, or its copy if it is queued."""
        if copy is None:
            self.loads.add(num_pages, seconds)
        else:
            self._queued_loads.append((num_pages, copy))

    def _settle(self, index: int, error: str) -> None:
        """Note that all of a unit's loads have ended."""
        if self._units[index].rebuilds:
            self._landed_s[index] = self._mover.clock.now()
        self._close_one(index, error)

    def _hand_on(
        self, index: int, after: object, part: ActPart, arrival: Arrival | None
    ) -> None:
        """Let a sub-unit's KV be computed; on the stream's thread."""
        with self._changed:
            self._num_open[index] += 1
        self._act_arrivals[index] = arrival or self._act_arrivals[index]

        def ended(
            error: str, from_s: float, to_s: float, built: Arrival | None
        ) -> None:
            if built is not None:
                # It takes its time later, on the device.
                self._built[index].append((len(part), built))
                from_s = to_s
            elif not error and to_s > from_s:
                self.rebuilds.add(len(part), to_s - from_s)
            self._spans.setdefault(index, []).append((from_s, to_s))
            if error:
                self._failed_rows.setdefault(index, part.pages)
            self._close_one(index, error)

        layer = self._units[index].layer
        self._mover.rebuild(
            RebuildJob(layer, part, arrival, after, lambda: not self._ended, ended)
        )

    def _close_one(self, index: int, error: str) -> None:
        with self._changed:
            if error:
                self._failed.setdefault(index, error)
            self._num_open[index] -= 1
            if self._num_open[index]:
                return
            spans = self._spans.pop(index, [])
            if spans:
                self.rebuild_s += sum(to_s - from_s for from_s, to_s in spans)
                self.rebuild_exposed_s += exposed_s(spans, self._landed_s[index])
                self.num_rebuilt += self._units[index].num_rebuilt
            self._is_settled[index] = True
            self._changed.notify_all()
