"""Time to bring bytes from a tier to the device: ``latency + bytes / bandwidth``."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_tiered.cost.regression import GUESSED, BoundedRegression
from sgl_tiered.errors import ConfigError

__all__ = ["LinkCost", "LinkSnapshot"]

_FIRST_TRIAL = 32
_LAST_TRIAL = 1 << 16
_TRIAL_LOOKUPS = 8


@dataclass(frozen=True, slots=True)
class LinkSnapshot:
    """A link's figures at one moment."""

    latency_s: float
    bandwidth_bytes_per_s: float
    num_observations: int


class LinkCost:
    """One edge, tier -> device, refined by every load.

    A link that looks too slow is never used, so nothing would ever correct a figure
    that was measured in a bad moment. Hence trials: after 32 loads that were decided
    against, one is due all the same, and after each trial twice as many as before, so
    that a link that is really slow costs less and less.

    Args:
        latency_s: first guess of the time of an empty load, > 0.
        bandwidth_bytes_per_s: first guess, > 0.
        deviation: how far these may be off; see ``BoundedRegression``.
    """

    def __init__(
        self,
        latency_s: float,
        bandwidth_bytes_per_s: float,
        *,
        deviation: float = GUESSED,
    ) -> None:
        if not (latency_s > 0.0 and bandwidth_bytes_per_s > 0.0):
            raise ConfigError(
                "link",
                f"latency {latency_s} s, bandwidth {bandwidth_bytes_per_s} bytes/s",
                "give positive numbers",
            )
        self._fit = BoundedRegression(
            (latency_s, 1.0 / bandwidth_bytes_per_s), deviation
        )
        self._latency_s, self._s_per_byte = self._fit.coefficients
        self._num_declined = 0
        self._next_trial = _FIRST_TRIAL

    def trial_due(self) -> bool:
        """Note that a load was decided against; True if it should run all the same.

        Stays true for a few calls, for a request is looked up more than once before
        its load begins, and ends with the next observation.
        """
        self._num_declined += 1
        if self._num_declined > self._next_trial + _TRIAL_LOOKUPS:
            self._end_trial()
        return self._num_declined > self._next_trial

    def _end_trial(self) -> None:
        self._num_declined = 0
        self._next_trial = min(2 * self._next_trial, _LAST_TRIAL)

    def seconds(self, num_bytes: int) -> float:
        """Return the predicted time of a load; 0 for no bytes."""
        if num_bytes <= 0:
            return 0.0
        return self._latency_s + num_bytes * self._s_per_byte

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Learn from a load; values that cannot be are left out."""
        if self._num_declined > self._next_trial:
            self._end_trial()
        if num_bytes > 0 and self._fit.observe((1.0, float(num_bytes)), seconds):
            self._latency_s, self._s_per_byte = self._fit.coefficients

    def snapshot(self) -> LinkSnapshot:
        """Return the figures as they are now."""
        return LinkSnapshot(
            latency_s=self._latency_s,
            bandwidth_bytes_per_s=1.0 / self._s_per_byte,
            num_observations=self._fit.num_observations,
        )
