"""Time is a parameter: a clock is handed in, so that decisions can be simulated."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "ManualClock", "SystemClock"]


class Clock(Protocol):
    """Gives a monotonic time in seconds."""

    def now(self) -> float:
        """Return the time in seconds; the origin has no meaning."""
        ...


class SystemClock:
    """The real monotonic clock."""

    def now(self) -> float:
        """Return ``time.perf_counter()`` in seconds, SGLang's own time base."""
        return time.perf_counter()


class ManualClock:
    """A clock that moves only when told to: for tests and simulations."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """Return the time in seconds."""
        return self._now_s

    def advance(self, delta_s: float) -> None:
        """Move forward by ``delta_s`` seconds (not negative)."""
        if delta_s < 0:
            raise ValueError(f"a clock cannot go back by {-delta_s} s")
        self._now_s += delta_s
