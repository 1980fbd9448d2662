"""Ratios of two systems' times, with intervals from a bootstrap over documents.

Times of one document (all turns of all its sessions) are not independent of one
another, so documents are drawn and not requests; and both systems' times of a document
are drawn together, as both had the same document to serve.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from sgl_tiered_workloads.harness.statistics import Interval, draw_interval

__all__ = ["NUM_DRAWS", "Times", "figure", "mean", "median_of", "percentile", "ratio"]

NUM_DRAWS = 2_000
Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Times = Mapping[str, Sequence[float]]
"""Times by document; a document without times was not answered at all."""
Statistic = Callable[[Floats, Counts], float]
"""Of rising times, each of which counts so many times."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """One system's figure over the lowest of the others', and its draws."""

    value: float
    draws: Floats

    @property
    def interval(self) -> Interval:
        """The value between the 2.5 and 97.5 % ranks of its draws."""
        return draw_interval(self.value, self.draws)


def percentile(share: float) -> Statistic:
    """Return the statistic that is a percentile, such as 99; linear, as numpy's."""

    def told(times: Floats, counts: Counts) -> float:
        ends = np.cumsum(counts)
        place = share / 100.0 * (ends[-1] - 1)
        below = int(place)
        # Beyond the last one there is nothing to go on to, and nothing is added.
        found = np.searchsorted(ends, (below, below + 1), "right")
        first, second = times[np.minimum(found, len(times) - 1)]
        return float(first + (place - below) * (second - first))

    return told


def mean(times: Floats, counts: Counts) -> float:
    """Return the mean."""
    return float(np.average(times, weights=counts))


def figure(times: Times, statistic: Statistic) -> float:
    """Return a statistic of all times of all documents."""
    pooled = np.sort(np.concatenate([np.asarray(each) for each in times.values()]))
    return statistic(pooled, np.ones(len(pooled), np.int64))


def ratio(
    ours: Times,
    theirs: Sequence[Times],
    statistic: Statistic,
    generator: np.random.Generator,
) -> Ratio:
    """Return our statistic over theirs; of several of theirs, over the lowest.

    The lowest is looked for in every draw anew, which is to their advantage: the best
    of several is never above what one of them has.

    Args:
        ours: times by document.
        theirs: the same documents, for one system or more.
        statistic: of the pooled times.
        generator: of the draws.

    Raises:
        ValueError: there are no times, or other documents.
    """
    names = sorted(ours)
    if not theirs or not names or any(sorted(each) != names for each in theirs):
        raise ValueError("the systems have not served the same documents")
    systems = [_Pooled.of(times, names) for times in (ours, *theirs)]
    draws = np.empty(NUM_DRAWS)
    for number in range(NUM_DRAWS):
        chosen = generator.integers(len(names), size=len(names))
        counts = np.bincount(chosen, minlength=len(names))
        draws[number] = _over_lowest(systems, counts, statistic)
    once = np.ones(len(names), np.int64)
    return Ratio(_over_lowest(systems, once, statistic), draws)


def median_of(ratios: Sequence[Ratio]) -> Ratio:
    """Return the median of ratios of several cells, drawn together.

    Raises:
        ValueError: there is none.
    """
    if not ratios:
        raise ValueError("no ratio to take the median of")
    draws = np.median(np.stack([each.draws for each in ratios]), axis=0)
    return Ratio(float(np.median([each.value for each in ratios])), draws)


@dataclass(frozen=True, slots=True)
class _Pooled:
    """Rising times of all documents, and which document each is of."""

    times: Floats
    places: Counts

    @classmethod
    def of(cls, times: Times, names: Sequence[str]) -> _Pooled:
        pooled = np.concatenate([np.asarray(times[name], np.float64) for name in names])
        places = np.repeat(np.arange(len(names)), [len(times[name]) for name in names])
        order = np.argsort(pooled)
        return cls(pooled[order], places[order])


def _over_lowest(
    systems: Sequence[_Pooled], counts: Counts, statistic: Statistic
) -> float:
    """Return ours over the lowest of theirs, each document so many times."""
    ours, *theirs = (statistic(each.times, counts[each.places]) for each in systems)
    return ours / min(theirs)
