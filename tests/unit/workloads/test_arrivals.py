"""Arrival processes have the rate and the burstiness that they promise."""

from __future__ import annotations

import numpy as np
import pytest
from sgl_tiered_workloads.arrivals import (
    ClosedLoop,
    OpenLoop,
    bursty_arrivals,
    even_arrivals,
    poisson_arrivals,
    trace_arrivals,
)


def gaps(arrivals: OpenLoop) -> np.ndarray:
    return np.diff(np.array([0.0, *arrivals.times_s]))


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_gaps_have_the_asked_mean_and_variation(cv: float) -> None:
    """Many Gamma gaps come within 5 % of the rate and 10 % of the CV."""
    found = gaps(bursty_arrivals(20.0, cv, 100_000, np.random.default_rng(3)))
    assert found.mean() == pytest.approx(1 / 20.0, rel=0.05)
    assert found.std() / found.mean() == pytest.approx(cv, rel=0.1)


def test_poisson_is_the_process_of_variation_one() -> None:
    """Both draw the same times from the same seed, and other times from another."""
    one, same, other = (np.random.default_rng(seed) for seed in (1, 1, 2))
    drawn = poisson_arrivals(2.0, 50, one)
    assert drawn == bursty_arrivals(2.0, 1.0, 50, same)
    assert drawn != poisson_arrivals(2.0, 50, other)


def test_even_arrivals_begin_at_once_and_keep_step() -> None:
    """Four arrivals at two per second take a second and a half."""
    assert even_arrivals(2.0, 4).times_s == (0.0, 0.5, 1.0, 1.5)


def test_a_trace_starts_at_its_first_arrival_and_is_stretched() -> None:
    """Times are relative to the first and grow by the slow-down."""
    assert trace_arrivals([5.0, 6.0, 6.0, 9.0], 2.0).times_s == (0.0, 2.0, 2.0, 8.0)
    assert trace_arrivals([]).times_s == ()


def test_impossible_arrivals_are_refused() -> None:
    """Rates, variations, slow-downs and concurrencies must be positive."""
    draw = np.random.default_rng(0)
    for make in (
        lambda: poisson_arrivals(0.0, 1, draw),
        lambda: bursty_arrivals(1.0, -1.0, 1, draw),
        lambda: even_arrivals(float("nan"), 1),
        lambda: trace_arrivals([0.0], 0.0),
        lambda: ClosedLoop(0),
        lambda: OpenLoop((1.0, 0.5)),
        lambda: OpenLoop((-1.0,)),
    ):
        with pytest.raises(ValueError, match="must be"):
            make()
