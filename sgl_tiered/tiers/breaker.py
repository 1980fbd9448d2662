"""Circuit breaker: after repeated failures a medium rests, then one probe decides."""

from __future__ import annotations

import threading

from sgl_tiered.core.clock import Clock

__all__ = ["CircuitBreaker"]


class CircuitBreaker:
    """Counts consecutive failures; open after ``max_failures``, for ``rest_s`` seconds.

    After the rest one operation is let through as a probe: its success closes the
    breaker, its failure (or its silence) opens it for another rest. Thread-safe.
    """

    def __init__(
        self, clock: Clock, max_failures: int = 3, rest_s: float = 5.0
    ) -> None:
        self._clock = clock
        self._max_failures = max_failures
        self._rest_s = rest_s
        self._lock = threading.Lock()
        self._failures = 0
        self._open_until_s = 0.0
        self.last_error = ""

    @property
    def is_open(self) -> bool:
        """True while operations are refused or a probe is still to succeed."""
        return self._failures >= self._max_failures

    @property
    def probes_failed(self) -> int:
        """Operations that have failed since the breaker opened."""
        return max(0, self._failures - self._max_failures)

    def allows(self) -> bool:
        """Return whether an operation may run now; may hand out the probe."""
        if self._failures < self._max_failures:
            return True
        with self._lock:
            now_s = self._clock.now()
            if now_s < self._open_until_s:
                return False
            self._open_until_s = now_s + self._rest_s
            return True

    def record(self, error: str) -> None:
        """Count the outcome of an operation; an empty error is a success."""
        if not error and self._failures == 0:
            return
        with self._lock:
            if not error:
                self._failures = 0
                return
            self._failures += 1
            self.last_error = error
            if self._failures >= self._max_failures:
                self._open_until_s = self._clock.now() + self._rest_s

    @property
    def rests(self) -> bool:
        """True while operations are refused; asking hands out no probe."""
        return self.is_open and self._clock.now() < self._open_until_s

    def trip(self, error: str) -> None:
        """Open at once, for a rest from now on: waiting for more failures is futile."""
        with self._lock:
            self._failures = max(self._failures, self._max_failures)
            self.last_error = error
            self._open_until_s = self._clock.now() + self._rest_s
