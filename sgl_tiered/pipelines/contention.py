"""Swaps give way to collectives on a link that both use (LayerKV, section 3.1.3).

Without NVLink the all-reduces of tensor parallelism cross the links over which KV is
swapped, and every one of them is waited for. So a swap is cut into sub-units, and
before each one the guard asks whether a collective is in flight: if so it waits a
fraction of what such a collective takes, and asks again. A collective is then delayed
by one sub-unit at most, the one that was on its way when it began. No sub-unit waits
for ever: after ``max_wait_s`` it goes.

This holds only while a sub-unit is queued once the one before it has ended: what lies
in a device's queue can no longer be held back.

Two watches tell of collectives: `CountedCollectives` where the calling thread blocks
until the collective has ended, `QueuedCollectives` where it is queued on a stream.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from sgl_tiered.core.clock import Clock
from sgl_tiered.pipelines.streams import Event, Stream

__all__ = [
    "CollectiveWatch",
    "Collectives",
    "ContentionGuard",
    "CountedCollectives",
    "LatencyBook",
    "QueuedCollectives",
    "sub_unit_pages",
]

FRACTION = 0.25
"""Of a collective's latency: four looks while it runs, and at most a quarter of it lost
after its end."""
MIN_POLL_S = 20e-6
"""Below this a thread cannot sleep; also the pause where no latency is known yet."""
MAX_WAIT_S = 0.02
"""Ten times an all-reduce of 32 MB over 25 GB/s: only a chain of collectives without a
gap, or a rank that hangs, keeps a sub-unit so long."""
SUB_UNIT_S = 200e-6
"""What a collective may be delayed by: 5 MB at 25 GB/s, ten times a launch."""
_REMEMBERED = 15


class Collectives(Protocol):
    """Whether a collective is on the link; any thread may ask."""

    def in_flight_s(self) -> float | None:
        """Return the seconds that the one in flight usually takes, None if none is.

        0 where one is in flight and none of its size has been measured.
        """
        ...


class CollectiveWatch(Collectives, Protocol):
    """What the code around a collective tells; on the thread that calls it."""

    @property
    def num_seen(self) -> int:
        """Collectives begun so far."""
        ...

    def begin(self, num_bytes: int) -> object:
        """Note that one begins; the result goes to ``end``."""
        ...

    def end(self, begun: object) -> None:
        """Note that the call has returned, or raised."""
        ...


class LatencyBook:
    """What collectives took, by size: the median of the last ones. Any thread.

    Sizes are told apart by powers of two, since a prefill's collective takes a hundred
    times what a decode step's does. A median, because one that waited for a slow rank
    says nothing about the link.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[int, deque[float]] = {}

    def learn(self, num_bytes: int, seconds: float) -> None:
        """Add one that has ended."""
        with self._lock:
            known = self._seconds.setdefault(
                num_bytes.bit_length(), deque(maxlen=_REMEMBERED)
            )
            known.append(seconds)

    def usual_s(self, num_bytes: int) -> float:
        """Return the seconds of one of this size; 0 if none has been measured."""
        with self._lock:
            known = self._seconds.get(num_bytes.bit_length())
            return statistics.median(known) if known else 0.0


@dataclass(slots=True, eq=False)
class _Counted:
    """One that blocks its caller."""

    num_bytes: int
    began_s: float


class CountedCollectives:
    """Collectives that are on the link from their call to its return.

    Args:
        clock: times them.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._book = LatencyBook()
        self._lock = threading.Lock()
        self._open: list[_Counted] = []
        self._num_seen = 0

    @property
    def num_seen(self) -> int:
        """Collectives begun so far."""
        return self._num_seen

    def begin(self, num_bytes: int) -> object:
        """Note that one begins; the result goes to ``end``."""
        begun = _Counted(num_bytes, self._clock.now())
        with self._lock:
            self._num_seen += 1
            self._open.append(begun)
        return begun

    def end(self, begun: object) -> None:
        """Note that the call has returned, or raised."""
        assert isinstance(begun, _Counted), f"not begun here: {begun!r}"
        with self._lock:
            self._open.remove(begun)
        self._book.learn(begun.num_bytes, self._clock.now() - begun.began_s)

    def in_flight_s(self) -> float | None:
        """Return the seconds that the one in flight usually takes, None if none is."""
        with self._lock:
            begun = self._open[0] if self._open else None
        return None if begun is None else self._book.usual_s(begun.num_bytes)


@dataclass(slots=True, eq=False)
class _Queued:
    """One that is queued between two events; ``end`` counts once it is recorded."""

    num_bytes: int
    first: Event
    last: Event
    recorded: bool = False


class QueuedCollectives:
    """Collectives on a stream: in flight between two events that the device passes.

    The thread that queues them may be many layers ahead of the device, so its calls say
    nothing about the link. All are queued on one stream, in order.

    Args:
        new_event: makes an event with a time.
        current_stream: gives the stream on which the calling thread queues work.
    """

    def __init__(
        self, new_event: Callable[[], Event], current_stream: Callable[[], Stream]
    ) -> None:
        self._new_event = new_event
        self._current_stream = current_stream
        self._book = LatencyBook()
        self._lock = threading.Lock()
        self._queued: deque[_Queued] = deque()
        self._spare: list[Event] = []
        self._num_seen = 0

    @property
    def num_seen(self) -> int:
        """Collectives begun so far."""
        return self._num_seen

    def begin(self, num_bytes: int) -> object:
        """Record an event before one; the result goes to ``end``."""
        with self._lock:
            self._forget_ended()
            first, last = (
                self._spare.pop() if self._spare else self._new_event()
                for _ in range(2)
            )
            self._current_stream().record_event(first)
            begun = _Queued(num_bytes, first, last)
            # Known before it is launched: a device that is idle starts it at once.
            self._queued.append(begun)
            self._num_seen += 1
        return begun

    def end(self, begun: object) -> None:
        """Record an event behind it."""
        assert isinstance(begun, _Queued), f"not begun here: {begun!r}"
        with self._lock:
            self._current_stream().record_event(begun.last)
            begun.recorded = True

    def in_flight_s(self) -> float | None:
        """Return the seconds that the one in flight usually takes, None if none is."""
        with self._lock:
            self._forget_ended()
            if not self._queued or not self._queued[0].first.query():
                return None
            return self._book.usual_s(self._queued[0].num_bytes)

    def _forget_ended(self) -> None:
        """Learn from those that the device has passed; under the lock."""
        while self._queued and self._queued[0].recorded:
            oldest = self._queued[0]
            if not oldest.last.query():
                return
            self._queued.popleft()
            milliseconds = oldest.first.elapsed_time(oldest.last)
            self._book.learn(oldest.num_bytes, milliseconds / 1e3)
            self._spare += (oldest.first, oldest.last)


class ContentionGuard:
    """Asked before every sub-unit of a swap; one per link, from any thread.

    Args:
        collectives: tells whether one is in flight; None where the link is not shared,
            and then nothing ever waits.
        clock: times waits.
        fraction: of a collective's latency, between two looks.
        max_wait_s: after that a sub-unit goes, whatever is in flight.
    """

    def __init__(
        self,
        collectives: Collectives | None,
        clock: Clock,
        *,
        fraction: float = FRACTION,
        max_wait_s: float = MAX_WAIT_S,
    ) -> None:
        if not 0.0 < fraction <= 1.0:
            raise ValueError(f"fraction must be above 0 and at most 1: {fraction}")
        if max_wait_s < 0.0:
            raise ValueError(f"max_wait_s must not be negative: {max_wait_s}")
        self._collectives = collectives
        self._clock = clock
        self._fraction = fraction
        self._max_wait_s = max_wait_s
        self._lock = threading.Lock()
        self._waited_s = 0.0
        self._num_asked = 0
        self._num_waits = 0
        self._num_expired = 0

    @property
    def waited_s(self) -> float:
        """Seconds that sub-units have waited."""
        return self._waited_s

    @property
    def num_asked(self) -> int:
        """Sub-units that asked."""
        return self._num_asked

    @property
    def num_waits(self) -> int:
        """Sub-units that had to wait."""
        return self._num_waits

    @property
    def num_expired(self) -> int:
        """Sub-units that went beside a collective, having waited long enough."""
        return self._num_expired

    def delay_s(self, waited_s: float) -> float:
        """Return for how long to wait before the next look; 0 to go now.

        Args:
            waited_s: what this sub-unit has waited so far.
        """
        if self._collectives is None:
            return 0.0
        usual_s = self._collectives.in_flight_s()
        if usual_s is None:
            return 0.0
        left_s = self._max_wait_s - waited_s
        if left_s <= 0.0:
            return 0.0
        return min(max(self._fraction * usual_s, MIN_POLL_S), left_s)

    def wait(self, stop: threading.Event) -> bool:
        """Block until a sub-unit may go; False if ``stop`` was set."""
        if self._collectives is None:
            return not stop.is_set()
        started_s, waited_s = self._clock.now(), 0.0
        while delay_s := self.delay_s(waited_s):
            if stop.wait(delay_s):
                return False
            waited_s = self._clock.now() - started_s
        with self._lock:
            self._num_asked += 1
            if waited_s > 0.0:
                self._waited_s += waited_s
                self._num_waits += 1
                self._num_expired += waited_s >= self._max_wait_s
        return not stop.is_set()


def sub_unit_pages(
    layer_page_bytes: int, bytes_per_s: float, *, max_delay_s: float = SUB_UNIT_S
) -> int:
    """Return how many layer-pages to move between two looks, at least one.

    Args:
        layer_page_bytes: keys and values of one page in one layer.
        bytes_per_s: bandwidth of the link.
        max_delay_s: what a collective may be delayed by.
    """
    if layer_page_bytes < 1:
        raise ValueError(f"layer_page_bytes must be at least 1: {layer_page_bytes}")
    return max(1, int(bytes_per_s * max_delay_s / layer_page_bytes))
