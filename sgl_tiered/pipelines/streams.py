"""Queues of a device: streams, events, and what must be kept until an event has passed.

The shapes are those of torch's streams and events, so that these can be used as they
are; the pipelines themselves know no torch. Work that is queued on a stream runs later,
in the order of that stream; two streams are in order only where one waits for an event
of the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["BufferRing", "Event", "Stream", "StreamArrival"]

UInt8s = npt.NDArray[np.uint8]


class Event(Protocol):
    """A point in the work of a stream."""

    def query(self) -> bool:
        """Return whether the device has passed it."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until the device has passed it.

        Raises:
            RuntimeError: work before it failed.
        """
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds from this event to a later one; both have passed."""
        ...


class Stream(Protocol):
    """A queue of work that runs in order."""

    def wait_event(self, event: Any) -> None:
        """Hold later work of this stream back until the event has passed.

        An event that was never recorded holds nothing back.
        """
        ...

    def record_event(self, event: Any = None) -> Any:
        """Record an event (a new one if None) behind the work queued so far."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until the stream is empty."""
        ...


class StreamArrival:
    """One copy to the device that is queued, and may still run.

    Args:
        begin, end: events around the copy.
        current_stream: gives the stream on which the calling thread queues work.
        new_event: makes an event with a time.
        keep: what the copy reads; held until it has ended.
    """

    def __init__(
        self,
        begin: Event,
        end: Event,
        current_stream: Callable[[], Stream],
        new_event: Callable[[], Event],
        keep: object,
    ) -> None:
        self._begin = begin
        self._end = end
        self._current_stream = current_stream
        self._new_event = new_event
        self._keep = keep
        self._ordered: list[tuple[Stream, Event, Event]] = []

    def order(self) -> None:
        """Make the calling thread's stream wait for the copy. Never blocks.

        A stream that waited once has waited for good, so the second call is cheap.
        """
        stream = self._current_stream()
        if any(stream == known for known, _, _ in self._ordered):
            return
        before, after = self._new_event(), self._new_event()
        stream.record_event(before)
        stream.wait_event(self._end)
        stream.record_event(after)
        self._ordered.append((stream, before, after))

    def finish(self) -> float:
        """Block until the copy has ended and return its seconds on the device.

        Raises:
            RuntimeError: the device reports that the copy, or work before it, failed.
        """
        self._end.synchronize()
        self._keep = None
        return self._begin.elapsed_time(self._end) / 1e3

    def stall_s(self) -> float:
        """Return how long streams stood still for the copy, as far as known by now."""
        return sum(
            before.elapsed_time(after) / 1e3
            for _, before, after in self._ordered
            if before.query() and after.query()
        )


class BufferRing:
    """Pinned buffers in turn; one is lent again only after its event has passed.

    One thread at a time. A buffer grows where more is asked for.

    Args:
        allocate: makes a pinned uint8 array of a length.
        num_buffers: how many copies may be under way.
        num_bytes: of each buffer at first.
        grows: where the next buffer is still read, another one is put before it, and
            nobody waits.
    """

    def __init__(
        self,
        allocate: Callable[[int], UInt8s],
        num_buffers: int,
        num_bytes: int,
        *,
        grows: bool = False,
    ) -> None:
        self._allocate = allocate
        self._grows = grows
        self._buffers = [allocate(num_bytes) for _ in range(num_buffers)]
        self._events: list[Event | None] = [None] * num_buffers
        self._next = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that a buffer has without growing."""
        return min(len(buffer) for buffer in self._buffers)

    def lend(self, num_bytes: int) -> UInt8s:
        """Return the next buffer's first bytes; blocks while the device reads it.

        Not where the ring grows. ``passes`` must follow once the work that uses it is
        queued.

        Raises:
            RuntimeError: the work that used the buffer before failed.
        """
        event = self._events[self._next]
        if event is not None and self._grows and not event.query():
            self._buffers.insert(self._next, self._allocate(self.num_bytes))
            self._events.insert(self._next, None)
        elif event is not None:
            self._events[self._next] = None
            event.synchronize()
        if len(self._buffers[self._next]) < num_bytes:
            self._buffers[self._next] = self._allocate(num_bytes)
        return self._buffers[self._next][:num_bytes]

    def passes(self, event: Event) -> None:
        """Keep the buffer lent last until ``event``, and go on to the next one."""
        self._events[self._next] = event
        self._next = (self._next + 1) % len(self._buffers)
