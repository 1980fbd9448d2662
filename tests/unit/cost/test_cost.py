"""Costs: the formulas by hand, and learning that is quick but hard to fool."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sgl_tiered.core.ids import TierId
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost
from sgl_tiered.cost.regression import BoundedRegression
from sgl_tiered.errors import ConfigError


def make_prefill(**kwargs: float) -> PrefillCost:
    return PrefillCost(1_000_000, 4, 64, 1e9, **kwargs)


def test_prefill_is_eq_3_counted_per_pair() -> None:
    """2 operations per parameter and token, 4 * width per layer and pair."""
    seconds = make_prefill(overhead_s=0.5).seconds(10, 3)
    pairs = 11 + 12 + 13
    wanted = (2 * 1_000_000 * 3 + 4 * 4 * 64 * pairs) / 1e9 + 0.5
    assert seconds == pytest.approx(wanted)


def test_prefill_without_prefix_is_the_paper_s() -> None:
    """For a long prompt it is s * (2 params + 2 s * hidden * layers) / flops."""
    s = 100_000
    wanted = s * (2 * 1_000_000 + 2 * s * 64 * 4) / 1e9
    assert make_prefill().seconds(0, s) == pytest.approx(wanted, rel=1e-3)


def test_prefill_is_additive_but_for_the_overhead() -> None:
    """Two passes over the halves cost one pass over the whole and one overhead."""
    cost = make_prefill(overhead_s=0.25)
    halves = cost.seconds(100, 60) + cost.seconds(160, 40)
    assert halves == pytest.approx(cost.seconds(100, 100) + 0.25)


def test_alpha_scales_the_work() -> None:
    """Twice alpha is twice the time beyond the overhead."""
    once = make_prefill(overhead_s=1e-9).seconds(0, 100)
    assert make_prefill(alpha=2.0, overhead_s=1e-9).seconds(0, 100) == pytest.approx(
        2 * once, rel=1e-5
    )


def test_nothing_costs_nothing() -> None:
    """No tokens and no bytes take no time."""
    assert make_prefill().seconds(10, 0) == 0.0
    assert LinkCost(1e-3, 1e9).seconds(0) == 0.0


def test_link_is_latency_plus_bytes_over_bandwidth() -> None:
    """By hand: 1 ms + 5 MB at 1 GB/s."""
    assert LinkCost(1e-3, 1e9).seconds(5_000_000) == pytest.approx(6e-3)


def test_link_learns_both_numbers() -> None:
    """From loads of several sizes it finds latency and bandwidth, 10 times off."""
    rng = np.random.default_rng(0)
    link = LinkCost(1e-4, 1e9)
    for _ in range(400):
        num_bytes = int(10.0 ** rng.uniform(4, 7.3))
        noise = rng.normal(1.0, 0.03)
        link.observe(num_bytes, (2e-3 + num_bytes / 1e8) * noise)
    learned = link.snapshot()
    assert learned.bandwidth_bytes_per_s == pytest.approx(1e8, rel=0.1)
    assert learned.latency_s == pytest.approx(2e-3, rel=0.2)
    assert learned.num_observations == 400


def test_prefill_learns_from_passes() -> None:
    """After passes on a machine 5 times slower it predicts these within 10 %."""
    rng = np.random.default_rng(1)
    cost, truth = make_prefill(), make_prefill(alpha=5.0, overhead_s=0.02)
    for _ in range(300):
        prefix, new = int(rng.integers(0, 4000)), int(rng.integers(1, 2000))
        cost.observe(prefix, new, truth.seconds(prefix, new) * rng.normal(1.0, 0.03))
    for prefix, new in [(0, 2000), (3000, 500), (0, 100)]:
        assert cost.seconds(prefix, new) == pytest.approx(
            truth.seconds(prefix, new), rel=0.1
        )


def test_one_stalled_transfer_moves_little() -> None:
    """A load that took 100 times as long shifts the prediction by under 15 %."""
    link = LinkCost(1e-3, 1e9)
    for num_bytes in [1_000_000, 8_000_000, 3_000_000] * 20:
        link.observe(num_bytes, 1e-3 + num_bytes / 1e9)
    before = link.seconds(4_000_000)
    link.observe(4_000_000, 100 * before)
    assert link.seconds(4_000_000) == pytest.approx(before, rel=0.15)


def test_a_lasting_change_is_followed() -> None:
    """A disk that becomes 20 times slower is believed within 30 loads."""
    link = LinkCost(1e-4, 1e9)
    sizes = [1_000_000, 8_000_000, 3_000_000]
    for num_bytes in sizes * 40:
        link.observe(num_bytes, 1e-4 + num_bytes / 1e9)
    for num_bytes in sizes * 10:
        link.observe(num_bytes, 20 * (1e-4 + num_bytes / 1e9))
    wanted = 20 * (1e-4 + 5e-3)
    assert link.seconds(5_000_000) == pytest.approx(wanted, rel=0.2)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_impossible_times_teach_nothing(value: float) -> None:
    """A time that is no positive finite number is left out."""
    fit = BoundedRegression((1.0, 2.0))
    assert not fit.observe((1.0, 1.0), value)
    assert fit.coefficients == (1.0, 2.0)
    assert fit.num_observations == 0


def test_coefficients_stay_within_bounds() -> None:
    """However long it is told nonsense, no coefficient leaves its bounds."""
    rng = np.random.default_rng(3)
    fit = BoundedRegression((1.0, 1.0))
    for _ in range(2000):
        value = float(10.0 ** rng.uniform(-12, 12))
        fit.observe((1.0, float(rng.uniform(0, 10))), value)
        assert all(0.999e-3 <= c <= 1.001e3 for c in fit.coefficients)


def test_model_bundles_and_reports() -> None:
    """The model asks the right parts, learns through them, and names its figures."""
    model = CostModel(
        make_prefill(),
        {TierId.HOST: LinkCost(1e-4, 1e9), TierId.DISK: LinkCost(1e-3, 1e8)},
    )
    assert model.load_s(TierId.HOST, 1000) < model.load_s(TierId.DISK, 1000)
    before = model.snapshot()
    model.observe_load(TierId.DISK, 10**7, 1.0)
    model.observe_prefill(0, 1000, 9.0)
    after = model.snapshot()
    changed = {name.rsplit(".", 1)[0] for name in after if after[name] != before[name]}
    assert changed == {"link.disk", "prefill"}
    with pytest.raises(ConfigError, match="peer"):
        model.observe_load(TierId.PEER, 1, 1.0)


def test_first_guesses_are_checked() -> None:
    """A zero bandwidth or a model without parameters is refused by name."""
    with pytest.raises(ConfigError, match="bandwidth"):
        LinkCost(1e-3, 0.0)
    with pytest.raises(ConfigError, match="num_params"):
        PrefillCost(0, 1, 1, 1e9)
