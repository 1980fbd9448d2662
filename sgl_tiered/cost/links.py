"""Time to bring bytes from a tier to the device: ``latency + bytes / bandwidth``."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_tiered.cost.regression import GUESSED, BoundedRegression
from sgl_tiered.errors import ConfigError

__all__ = ["LinkCost", "LinkSnapshot"]


@dataclass(frozen=True, slots=True)
class LinkSnapshot:
    """A link's figures at one moment."""

    latency_s: float
    bandwidth_bytes_per_s: float
    num_observations: int


class LinkCost:
    """One edge, tier -> device, refined by every load.

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

    def seconds(self, num_bytes: int) -> float:
        """Return the predicted time of a load; 0 for no bytes."""
        if num_bytes <= 0:
            return 0.0
        return self._latency_s + num_bytes * self._s_per_byte

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Learn from a load; values that cannot be are left out."""
        if num_bytes > 0 and self._fit.observe((1.0, float(num_bytes)), seconds):
            self._latency_s, self._s_per_byte = self._fit.coefficients

    def snapshot(self) -> LinkSnapshot:
        """Return the figures as they are now."""
        return LinkSnapshot(
            latency_s=self._latency_s,
            bandwidth_bytes_per_s=1.0 / self._s_per_byte,
            num_observations=self._fit.num_observations,
        )
