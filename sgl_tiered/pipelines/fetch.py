"""A load to the device that nobody waits for, one layer at a time.

It shares the loader's thread: after each layer it goes to the end of that thread's
queue, so that a load of an admitted request is held up by one layer at most. Whoever
owns the slots can take them back at any time: ``cancel`` returns as soon as the layer
under way, if there is one, has been copied. Where the device has streams, that thread
only queues the layer, and the loader's second one waits for its end; ``cancel`` does
not: the engine's stream does, and so does all that gets the slots next. Somebody who
writes to slots without a stream, as a network card does, has to be waited for.
"""

from __future__ import annotations

import contextlib
import threading
from typing import cast

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.clock import Clock
from sgl_tiered.core.ids import TierId
from sgl_tiered.pipelines.base import Arrival, DevicePool
from sgl_tiered.pipelines.layerwise_load import LoadJob

__all__ = ["FetchTicket"]

Int64s = npt.NDArray[np.int64]


class FetchTicket:
    """One such load, from its submission to its end.

    Made on the engine's thread: the copies start after the work queued until then.

    Args:
        job: what goes where; its sources stay pinned, and its device pages nobody
            else's, until the ticket has ended.
        pool: the device's memory.
        clock: times the copies.

    Attributes:
        job: as given.
    """

    def __init__(self, job: LoadJob, pool: DevicePool, clock: Clock) -> None:
        self.job = job
        self._pool = pool
        self._clock = clock
        self._after = pool.mark()
        # Each once: a pool knows pages that it was given before. It gets back what it
        # has handed out.
        self._pages = [
            cast(Int64s, job.device_pages[segment.positions])
            for segment in job.segments
        ]
        self._changed = threading.Condition()
        self._num_copied = 0
        # The loader's thread copies a layer, or queues its copies.
        self._is_copying = False
        self._has_ended = False
        self._seconds = 0.0
        self._error = ""
        self._source: TierId | None = None
        self._arrivals: list[tuple[TierId, Arrival]] = []

    @property
    def ended(self) -> bool:
        """True once nothing is copied any more."""
        return self._has_ended and not self._is_copying and not self._arrivals

    @property
    def landed(self) -> bool:
        """True once all layers are on the device."""
        whole = self._num_copied == self._pool.layout.num_layers
        return self.ended and whole and not self._error

    @property
    def failed(self) -> str:
        """Why a copy failed; empty where none did."""
        return self._error

    @property
    def failed_source(self) -> TierId | None:
        """The tier whose copy failed; None where none did."""
        return self._source if self._error else None

    @property
    def seconds(self) -> float:
        """Time of the copies so far."""
        return self._seconds

    def step(self) -> bool:
        """Copy or queue the next layer; False once there is nothing more to do."""
        with self._changed:
            if self._has_ended:
                return False
            self._is_copying = True
        error = ""
        try:
            self._copy(self._num_copied)
        except Exception as problem:  # noqa: BLE001 - the loader's thread lives on
            error = f"{type(problem).__name__}: {problem}"
        with self._changed:
            self._is_copying = False
            self._changed.notify_all()
            if self.is_queued:
                # To its end, so that there is never more under way than a layer.
                self._error = error
                return True
        return self._end_step(error)

    @property
    def is_queued(self) -> bool:
        """Whether copies of the last layer may still run."""
        return bool(self._arrivals)

    def land(self) -> None:
        """Block until the copies of the last layer have ended."""
        error = self._error
        for source, arrival in self._arrivals:
            try:
                self._seconds += arrival.finish()
            except RuntimeError as problem:
                if not error:
                    error, self._source = str(problem), source
        self._end_step(error)

    def _end_step(self, error: str) -> bool:
        with self._changed:
            self._arrivals.clear()
            self._error = error
            self._num_copied += not error
            if error or self._num_copied == self._pool.layout.num_layers:
                self._has_ended = True
            return not self._has_ended

    def fail(self, error: str) -> None:
        """End it: its next layer will not be copied."""
        with self._changed:
            if not self._has_ended:
                self._error = error
                self._has_ended = True

    def cancel(self, *, lands: bool = False) -> None:
        """Copy no further layer; for the engine's thread.

        Returns once nothing writes to the slots but copies on the device that the
        engine's stream now waits for. Their sources may change from then on: nobody
        reads what they bring.

        Args:
            lands: return once nothing at all writes to the slots.
        """
        with self._changed:
            self._has_ended = True
            self._changed.wait_for(lambda: not self._is_copying)
            queued = [arrival for _, arrival in self._arrivals]
        for arrival in queued:
            if not lands:
                arrival.order()
                continue
            # What failed writes no more either.
            with contextlib.suppress(RuntimeError):
                arrival.finish()

    def _copy(self, layer: int) -> None:
        started_s = self._clock.now()
        layer_bytes = self._pool.layout.layer_page_bytes
        for segment, pages in zip(self.job.segments, self._pages, strict=True):
            self._source = segment.source
            arrival = self._pool.load_layer(
                layer, segment.region, segment.rows, pages, after=self._after
            )
            if arrival is not None:
                # Its own seconds come with its end; queueing's are nobody's.
                self._arrivals.append((segment.source, arrival))
                started_s = self._clock.now()
            if segment.charge is not None:
                segment.charge(len(segment.rows) * layer_bytes)
        self._seconds += self._clock.now() - started_s
