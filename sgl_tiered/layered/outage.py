"""Copies of one direction that fail: counted, told once, and not tried too often."""

from __future__ import annotations

import logging
import threading

from sgl_tiered.core.clock import Clock

__all__ = ["ATTEMPTS", "Outage"]

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
"""A few decode steps: what failed for a moment is not noticed."""
LONGEST_PAUSE_S = 5.0
"""How late the end of an outage is noticed at most."""
QUIET_S = 10.0
"""Outages that begin sooner after one that was told are counted, and not told."""
ATTEMPTS = 2
"""One failure may be a passing one; a second in a row is not waited out here."""


class Outage:
    """Whether copies of one direction work. An outage ends with the first that does.

    After each copy that was given up the pause before the next attempt is doubled, so
    that a direction that is out of order costs next to nothing. Thread-safe.

    Args:
        name: of the direction, for the log.
        clock: times the pauses.

    Attributes:
        num_failed: attempts that failed since the start.
        num_outages: outages since the start.
    """

    def __init__(self, name: str, clock: Clock) -> None:
        self._name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._num_given_up = 0
        self._since_s = 0.0
        self._told_s = float("-inf")
        self._is_told = False
        self._not_before_s = 0.0
        self.num_failed = 0
        self.num_outages = 0

    @property
    def lasts(self) -> bool:
        """True from a copy that was given up to the next that works."""
        return self._num_given_up > 0

    @property
    def holds_back(self) -> bool:
        """True while nothing should be tried that nobody waits for."""
        return self.lasts and self._clock.now() < self._not_before_s

    def failed(self, error: Exception, *, is_last: bool) -> None:
        """Note an attempt that failed; ``is_last`` where the copy is given up."""
        with self._lock:
            self.num_failed += 1
            now_s = self._clock.now()
            if not is_last or now_s < self._not_before_s:
                # What was queued before the pause began does not lengthen it.
                return
            begins = not self._num_given_up
            tells = begins and now_s - self._told_s >= QUIET_S
            if begins:
                self.num_outages += 1
                self._since_s = now_s
                self._is_told = tells
            if tells:
                self._told_s = now_s
            pause_s = FIRST_PAUSE_S * 2.0 ** min(self._num_given_up, 30)
            self._not_before_s = now_s + min(pause_s, LONGEST_PAUSE_S)
            self._num_given_up += 1
        if tells:
            logger.warning(
                "copies of layers %s fail, and are tried again from time to time: %r",
                self._name,
                error,
            )

    def succeeded(self) -> None:
        """Note a copy that worked."""
        if not self._num_given_up:
            return
        with self._lock:
            tells = self._num_given_up > 0 and self._is_told
            self._num_given_up = 0
            self._not_before_s = 0.0
            seconds = self._clock.now() - self._since_s
        if tells:
            logger.warning(
                "copies of layers %s work again after %.1f s", self._name, seconds
            )
