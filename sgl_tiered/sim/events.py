"""Simulated time: a queue of events, and the log of what happened.

Order is ``(time, priority, sequence)``: events of one moment run by priority, then in
the order in which they were made, so that a run never depends on a hash or an address.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable
from enum import IntEnum

__all__ = ["Event", "EventLog", "EventQueue", "Priority"]


class Priority(IntEnum):
    """Order of events of one moment: ends of transfers before new decisions."""

    TRANSFER = 0
    ARRIVAL = 1
    PASS = 2
    WAKE = 3


class Event:
    """Something that will happen; ``cancel`` takes it back."""

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], None]) -> None:
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        """Let it not happen; nothing if it has."""
        self.action = None


class EventQueue:
    """The simulation's clock: a ``Clock`` whose time is that of the current event."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Event]] = []
        self._sequence = 0
        self._now_s = 0.0
        self.num_run = 0

    def now(self) -> float:
        """Return the simulated time in seconds."""
        return self._now_s

    def at(self, time_s: float, priority: int, action: Callable[[], None]) -> Event:
        """Plan an action; a time in the past means now."""
        event = Event(action)
        self._sequence += 1
        item = (max(time_s, self._now_s), int(priority), self._sequence, event)
        heapq.heappush(self._heap, item)
        return event

    def run(self) -> None:
        """Run events until there are none."""
        heap = self._heap
        while heap:
            time_s, _, _, event = heapq.heappop(heap)
            action = event.action
            if action is None:
                continue
            self._now_s = time_s
            event.action = None
            self.num_run += 1
            action()


class EventLog:
    """What happened, one row per event: time, kind, subject, two numbers.

    The meaning of the numbers is that of the kind (README.md lists them).
    """

    def __init__(self) -> None:
        self.rows: list[tuple[float, str, int, float, float]] = []

    def add(
        self, time_s: float, kind: str, subject: int, a: float = 0.0, b: float = 0.0
    ) -> None:
        """Append a row."""
        self.rows.append((time_s, kind, subject, a, b))

    def digest(self) -> str:
        """Return a hash of all rows: equal for equal runs."""
        state = hashlib.blake2b(digest_size=16)
        for row in self.rows:
            state.update(repr(row).encode())
        return state.hexdigest()
