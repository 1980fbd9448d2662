"""Quantiles and intervals, as pure functions of samples.

Intervals are at 95 %. That of a median comes from order statistics, which assume no
distribution; all others from a bootstrap, with the generator given by the caller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = [
    "NUM_RESAMPLES",
    "Interval",
    "draw_interval",
    "median_interval",
    "paired_interval",
    "quantiles",
    "resampled_medians",
]

NUM_RESAMPLES = 10_000
_CONFIDENCE = 0.95

Floats = npt.NDArray[np.float64]


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

    def excludes(self, value: float) -> bool:
        """Whether ``value`` lies outside."""
        return not self.low <= value <= self.high


def quantiles(samples: Sequence[float]) -> tuple[float, float]:
    """Return p50 and p99."""
    p50, p99 = np.percentile(samples, [50, 99])
    return float(p50), float(p99)


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


def resampled_medians(
    samples: Sequence[float], generator: np.random.Generator
) -> Floats:
    """Return medians of resamples."""
    data = np.asarray(samples, dtype=np.float64)
    picks = generator.integers(data.size, size=(NUM_RESAMPLES, data.size))
    return np.asarray(np.median(data[picks], axis=1))


def draw_interval(value: float, draws: Floats) -> Interval:
    """Return ``value`` between the 2.5 and 97.5 % ranks of the draws."""
    edge = (1 - _CONFIDENCE) / 2
    ordered = np.sort(draws)
    # By rank and not interpolated: infinite draws would make interpolation undefined.
    low = ordered[int(edge * (ordered.size - 1))]
    high = ordered[math.ceil((1 - edge) * (ordered.size - 1))]
    return Interval(value, float(low), float(high))


def paired_interval(
    base: Sequence[Floats],
    other: Sequence[Floats],
    statistic: Callable[[Floats], float],
    generator: np.random.Generator,
    num_resamples: int = 2_000,
) -> Interval:
    """Return ``statistic(other) - statistic(base)`` with its bootstrap interval.

    Pairs are drawn together, so what is common to both sides (a long prompt, a
    crowded second) cancels. With several repeats the repeats are drawn first, then
    pairs within each: requests of one repeat are not independent of one another.

    Args:
        base: one array per repeat.
        other: the same shapes; element i of repeat r answers the same request.
        statistic: of the pooled samples, such as a percentile.
        generator: of the resamples.
        num_resamples: how many.

    Raises:
        ValueError: no pair, or arrays that do not pair.
    """
    if [a.shape for a in base] != [b.shape for b in other]:
        raise ValueError("the two sides do not pair")
    if not base or min(a.size for a in base) == 0:
        raise ValueError("no pair to compare")
    draws = np.empty(num_resamples)
    num_repeats = len(base)
    for number in range(num_resamples):
        repeats = generator.integers(num_repeats, size=num_repeats)
        picks = [generator.integers(base[r].size, size=base[r].size) for r in repeats]
        ours = [base[r][p] for r, p in zip(repeats, picks, strict=True)]
        theirs = [other[r][p] for r, p in zip(repeats, picks, strict=True)]
        draws[number] = statistic(np.concatenate(theirs)) - statistic(
            np.concatenate(ours)
        )
    value = statistic(np.concatenate(other)) - statistic(np.concatenate(base))
    return draw_interval(value, draws)
