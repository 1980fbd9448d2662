"""The figures of the reuse benchmark, as pure functions of samples in seconds.

Intervals are at 95 %. Those of medians of hits come from a bootstrap over hits; that
of a median of paired runs from order statistics, which assume no distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = [
    "Interval",
    "PenaltyError",
    "median_interval",
    "penalty",
    "penalty_ratio",
    "quantiles",
]

_RESAMPLES = 10_000
_CONFIDENCE = 0.95


class PenaltyError(ValueError):
    """A peer's hits were not slower than device hits, so a ratio means nothing."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and where it lies with 95 % confidence."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the distance of the bounds."""
        return (self.high - self.low) / 2


def quantiles(samples: Sequence[float]) -> tuple[float, float]:
    """Return p50 and p99."""
    p50, p99 = np.percentile(samples, [50, 99])
    return float(p50), float(p99)


def penalty(
    hits_s: Sequence[float], device_s: Sequence[float], rng: np.random.Generator
) -> Interval:
    """Return how much longer the median hit took than the median device hit."""
    moves = _medians(hits_s, rng) - _medians(device_s, rng)
    value = float(np.median(hits_s) - np.median(device_s))
    return _interval(value, moves)


def penalty_ratio(
    ours_s: Sequence[float],
    theirs_s: Sequence[float],
    device_s: Sequence[float],
    rng: np.random.Generator,
) -> Interval:
    """Return our penalty over theirs, both against the same device hits.

    A resample in which their penalty is not positive counts as an infinite ratio, which
    is the worst for us.

    Raises:
        PenaltyError: their penalty is zero or less.
    """
    theirs = float(np.median(theirs_s) - np.median(device_s))
    if theirs <= 0:
        raise PenaltyError(f"the peer's penalty is {theirs * 1e3:.2f} ms")
    # One draw of the baseline for both sides: its error is common to them.
    device = _medians(device_s, rng)
    over = _medians(ours_s, rng) - device
    under = _medians(theirs_s, rng) - device
    ratios = np.full(_RESAMPLES, np.inf)
    np.divide(over, under, out=ratios, where=under > 0)
    value = float(np.median(ours_s) - np.median(device_s)) / theirs
    return _interval(value, ratios)


def median_interval(samples: Sequence[float]) -> Interval:
    """Return the median between the order statistics that hold it with 95 %.

    Raises:
        ValueError: fewer than six samples, too few for any such pair.
    """
    ordered = sorted(samples)
    num = len(ordered)
    # The number of samples below the true median is binomial (num, 1/2).
    tail, rank = 0.0, 0
    while True:
        tail += math.comb(num, rank) / 2**num
        if 2 * tail > 1 - _CONFIDENCE:
            break
        rank += 1
    if rank == 0:
        raise ValueError(f"{num} samples are too few for an interval of the median")
    return Interval(float(np.median(ordered)), ordered[rank - 1], ordered[num - rank])


def _medians(
    samples: Sequence[float], rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Return medians of resamples."""
    data = np.asarray(samples, dtype=np.float64)
    picks = rng.integers(data.size, size=(_RESAMPLES, data.size))
    return np.asarray(np.median(data[picks], axis=1))


def _interval(value: float, draws: npt.NDArray[np.float64]) -> Interval:
    edge = (1 - _CONFIDENCE) / 2
    ordered = np.sort(draws)
    # By rank and not interpolated: infinite draws would make interpolation undefined.
    low = ordered[int(edge * (ordered.size - 1))]
    high = ordered[math.ceil((1 - edge) * (ordered.size - 1))]
    return Interval(value, float(low), float(high))
