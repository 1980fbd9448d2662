"""Decode steps: learned from what was seen, started from a guess or a calibration."""

import pytest

from sgl_tiered.cost.calibration import DecodeFit, FitQuality
from sgl_tiered.cost.decode import DecodeCost
from sgl_tiered.cost.prefill import PrefillSnapshot

TRUTH = (0.010, 0.002, 1e-6)


def true_s(batch, context):
    return TRUTH[0] + TRUTH[1] * batch + TRUTH[2] * context


def test_it_learns_the_step_from_steps():
    """From a guess that is five times off to within 10 % after 200 steps."""
    cost = DecodeCost.guessed(PrefillSnapshot(0.05, 0.01, 5e-6, 0))
    for number in range(200):
        batch = 1 + number % 16
        context = batch * (100 + 37 * (number % 11))
        cost.observe(batch, context, true_s(batch, context))
    assert cost.num_observations == 200
    for batch, context in ((1, 200), (8, 2_000), (16, 3_000)):
        assert cost.seconds(batch, context) == pytest.approx(
            true_s(batch, context), rel=0.1
        )


def test_a_calibration_is_where_it_starts():
    """And a coefficient that was measured as 0 stays next to nothing."""
    quality = FitQuality(1, 1.0, 0.0, 0.0)
    cost = DecodeCost.measured(DecodeFit(0.01, 0.0, 1e-6, quality))
    assert cost.seconds(10, 1_000) == pytest.approx(0.011, rel=1e-3)


def test_a_batch_of_nothing_teaches_nothing():
    """Nor does a step that took no time."""
    cost = DecodeCost(0.01, 0.001, 1e-6)
    before = cost.seconds(4, 400)
    cost.observe(0, 0, 0.5)
    cost.observe(4, 400, 0.0)
    assert cost.seconds(4, 400) == before
