"""When work arrives: open loop as times, closed loop as a concurrency.

Open-loop arrivals do not wait for the server, so queues can grow; a closed loop keeps
a number of users busy and measures throughput. Times are seconds from the start of
the run, sorted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = [
    "Arrivals",
    "ClosedLoop",
    "OpenLoop",
    "bursty_arrivals",
    "even_arrivals",
    "poisson_arrivals",
    "trace_arrivals",
]


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Each session (or single request) starts at its own time.

    Attributes:
        times_s: start of each, in order, not decreasing.
    """

    times_s: tuple[float, ...]

    def __post_init__(self) -> None:
        times = np.asarray(self.times_s)
        if times.size and not (np.all(np.diff(times) >= 0) and times[0] >= 0):
            raise ValueError("arrival times must be sorted and not negative")


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """``concurrency`` users take one session after another, each alone at a time."""

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {self.concurrency}")


Arrivals = OpenLoop | ClosedLoop


def poisson_arrivals(
    rate_per_s: float, num_arrivals: int, generator: np.random.Generator
) -> OpenLoop:
    """Return a Poisson process: exponential gaps of mean ``1 / rate_per_s``."""
    return bursty_arrivals(rate_per_s, 1.0, num_arrivals, generator)


def bursty_arrivals(
    rate_per_s: float, cv: float, num_arrivals: int, generator: np.random.Generator
) -> OpenLoop:
    """Return a renewal process with Gamma gaps of a given coefficient of variation.

    ``cv`` is the standard deviation of a gap over its mean: 1 is Poisson, above 1
    comes in bursts, below 1 is smoother.

    Raises:
        ValueError: the rate or the CV is not positive.
    """
    if not rate_per_s > 0 or not cv > 0:
        raise ValueError(f"rate {rate_per_s:g}/s and CV {cv:g} must be positive")
    # A Gamma of shape a has CV 1 / sqrt(a).
    shape = 1.0 / (cv * cv)
    gaps_s = generator.gamma(shape, 1.0 / (rate_per_s * shape), num_arrivals)
    return OpenLoop(tuple(np.cumsum(gaps_s).tolist()))


def even_arrivals(rate_per_s: float, num_arrivals: int) -> OpenLoop:
    """Return arrivals at equal gaps, the first at once.

    Raises:
        ValueError: the rate is not positive.
    """
    if not rate_per_s > 0:
        raise ValueError(f"rate {rate_per_s:g}/s must be positive")
    return OpenLoop(tuple((np.arange(num_arrivals) / rate_per_s).tolist()))


def trace_arrivals(times_s: Sequence[float], slowdown: float = 1.0) -> OpenLoop:
    """Return a trace's own times from its first arrival on, stretched.

    Args:
        times_s: of the trace, sorted.
        slowdown: 2 lets the trace take twice as long, at half the rate.

    Raises:
        ValueError: the slow-down is not positive.
    """
    if not slowdown > 0:
        raise ValueError(f"slow-down {slowdown:g} must be positive")
    times = np.asarray(times_s, dtype=np.float64)
    if times.size:
        times = (times - times[0]) * slowdown
    return OpenLoop(tuple(times.tolist()))
