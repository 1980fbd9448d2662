"""The penalties of the reuse benchmark, as pure functions of samples in seconds.

Intervals are at 95 %. Those of medians of hits come from a bootstrap over hits; that
of a median of paired runs from order statistics, which assume no distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from sgl_tiered_workloads.harness.statistics import (
    NUM_RESAMPLES,
    Interval,
    draw_interval,
    median_interval,
    quantiles,
    resampled_medians,
)

__all__ = [
    "Interval",
    "PenaltyError",
    "median_interval",
    "penalty",
    "penalty_ratio",
    "quantiles",
    "share_of_bound",
]


class PenaltyError(ValueError):
    """A peer's hits were not slower than device hits, so a ratio means nothing."""


def penalty(
    hits_s: Sequence[float], device_s: Sequence[float], rng: np.random.Generator
) -> Interval:
    """Return how much longer the median hit took than the median device hit."""
    moves = resampled_medians(hits_s, rng) - resampled_medians(device_s, rng)
    value = float(np.median(hits_s) - np.median(device_s))
    return draw_interval(value, moves)


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
    device = resampled_medians(device_s, rng)
    over = resampled_medians(ours_s, rng) - device
    under = resampled_medians(theirs_s, rng) - device
    ratios = np.full(NUM_RESAMPLES, np.inf)
    np.divide(over, under, out=ratios, where=under > 0)
    value = float(np.median(ours_s) - np.median(device_s)) / theirs
    return draw_interval(value, ratios)


def share_of_bound(
    ours_s: Sequence[float], device_s: Sequence[float], rng: np.random.Generator
) -> Interval:
    """Return our hits' speed-up over recomputing, over that of device hits.

    How long recomputing takes is in both and falls out: what is left is the median
    device hit over our median hit.
    """
    shares = resampled_medians(device_s, rng) / resampled_medians(ours_s, rng)
    return draw_interval(float(np.median(device_s) / np.median(ours_s)), shares)
