"""The figures of the reuse benchmark follow from the samples."""

import math

import numpy as np
import pytest
from reuse.statistics import (
    PenaltyError,
    median_interval,
    penalty,
    penalty_ratio,
    quantiles,
)


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def spread(middle, num=60):
    return [middle + 0.001 * (i - num // 2) / num for i in range(num + 1)]


def test_quantiles():
    """p50 and p99 of 0..100 are 50 and 99."""
    assert quantiles(range(101)) == (50.0, 99.0)


def test_penalty_is_the_distance_of_medians(rng):
    """A penalty is the difference of the medians, and its interval holds it."""
    found = penalty(spread(0.080), spread(0.050), rng)
    assert found.value == pytest.approx(0.030)
    assert 0.029 < found.low <= found.value <= found.high < 0.031


def test_constant_samples_have_no_spread(rng):
    """Without noise an interval is a point."""
    found = penalty([0.2] * 50, [0.1] * 50, rng)
    assert found.low == found.high == pytest.approx(0.1)
    assert found.half_width == pytest.approx(0.0)


def test_ratio_of_penalties(rng):
    """The ratio is our distance from the baseline over theirs."""
    found = penalty_ratio(spread(0.060), spread(0.090), spread(0.050), rng)
    assert found.value == pytest.approx(0.25)
    assert found.low < 0.25 < found.high


@pytest.mark.parametrize("theirs", [0.05, 0.04])
def test_peer_without_penalty_is_refused(rng, theirs):
    """A peer that is not slower than the device has no penalty to compare with."""
    with pytest.raises(PenaltyError):
        penalty_ratio([0.06] * 50, [theirs] * 50, [0.05] * 50, rng)


def test_uncertain_peer_gives_an_open_interval(rng):
    """Where the peer's penalty may be zero, nothing bounds the ratio from above."""
    noisy = [0.01, 0.09] * 10 + [0.051]
    found = penalty_ratio([0.06] * 21, noisy, [0.05] * 21, rng)
    assert math.isinf(found.high)


def test_penalties_repeat_with_the_seed():
    """Equal seeds give equal intervals."""
    found = [
        penalty(spread(0.08), spread(0.05), np.random.default_rng(9)) for _ in range(2)
    ]
    assert found[0] == found[1]


def test_median_interval_of_fifteen():
    """Of 15 samples the 4th and the 12th bound the median with 96.5 %."""
    found = median_interval([float(i) for i in range(1, 16)])
    assert (found.value, found.low, found.high) == (8.0, 4.0, 12.0)


def test_median_interval_of_six_is_the_range():
    """Six samples are the fewest: their range holds the median with 96.9 %."""
    found = median_interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0])
    assert (found.low, found.high) == (1.0, 6.0)


def test_median_interval_needs_samples():
    """Five samples cannot hold the median with 95 %."""
    with pytest.raises(ValueError, match="too few"):
        median_interval([1.0] * 5)


def test_median_interval_covers():
    """In repeated draws the interval holds the true median in 95 % or a bit more."""
    draws = np.random.default_rng(1).normal(size=(2000, 25))
    found = [median_interval(list(row)) for row in draws]
    held = np.mean([i.low <= 0.0 <= i.high for i in found])
    assert 0.94 < held < 0.99
