"""T_kv_gen and T_load_kv: fitted, kept in the file, learned while serving."""

import json
from dataclasses import replace

import numpy as np
import pytest

from sgl_tiered.cost.calibrated import calibrated_rebuild
from sgl_tiered.cost.calibration import (
    RebuildFit,
    TokensFit,
    calibration_from_dict,
    calibration_to_dict,
    read_calibration,
    write_calibration,
)
from sgl_tiered.cost.fitting import TokensSample, fit_tokens
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost
from sgl_tiered.cost.rebuild import RebuildCosts, TokensCost
from sgl_tiered.errors import ConfigError
from tests.unit.cost.calibration_support import CALIBRATION, QUALITY

TOKENS = (256, 1_024, 4_096, 16_384)
FIT = RebuildFit(TokensFit(2e-4, 3e-6, QUALITY), TokensFit(1e-4, 1e-6, QUALITY))


def samples(overhead_s, token_s, noise=None):
    rows = []
    for num in TOKENS:
        seconds = overhead_s + token_s * num
        if noise is not None:
            seconds *= 1 + noise.uniform(-0.05, 0.05)
        rows.append(TokensSample(num, seconds))
    return rows


def test_the_line_is_recovered():
    """Overhead, time per token and an R2 of 1."""
    fit = fit_tokens(samples(2e-4, 3e-6))
    assert fit.overhead_s == pytest.approx(2e-4)
    assert fit.token_s == pytest.approx(3e-6)
    assert fit.quality.r2 == pytest.approx(1.0)
    assert fit.seconds(1_000) == pytest.approx(3.2e-3)
    assert fit.seconds(0) == 0.0


def test_noise_lowers_r2_and_moves_little():
    """5 % of noise: R2 as the paper's 0.99, and predictions within 10 %."""
    fit = fit_tokens(samples(2e-4, 3e-6, np.random.default_rng(3)))
    assert 0.98 < fit.quality.r2 < 1.0
    assert fit.seconds(8_192) == pytest.approx(2e-4 + 3e-6 * 8_192, rel=0.1)


def test_one_size_is_no_line():
    """It could not tell the overhead from the tokens."""
    assert fit_tokens([TokensSample(64, 0.1)] * 3) is None
    assert fit_tokens([]) is None


def test_times_that_fall_still_grow_with_tokens():
    """A slope of zero would make any number of pages free."""
    fit = fit_tokens([TokensSample(100, 2.0), TokensSample(1_000, 1.0)])
    assert fit.token_s > 0
    assert fit.quality.r2 < 0


def test_the_file_keeps_both_fits(tmp_path):
    """Written and read back, with the coefficients and R2."""
    path = tmp_path / "calibration.json"
    measured = replace(CALIBRATION, rebuild=FIT)
    write_calibration(path, measured)
    assert read_calibration(path) == measured
    body = json.loads(path.read_text())["rebuild"]["kv_gen"]
    assert (body["overhead_s"], body["token_s"]) == (2e-4, 3e-6)
    assert body["quality"]["r2"] == QUALITY.r2


def test_an_older_file_has_none():
    """A file without the key is read as one in which nothing was measured."""
    raw = calibration_to_dict(CALIBRATION)
    assert raw["rebuild"] is None
    del raw["rebuild"]
    assert calibration_from_dict(raw) == CALIBRATION
    assert calibrated_rebuild(CALIBRATION) is None


def test_half_of_it_is_refused():
    """One line without the other balances nothing."""
    raw = json.loads(json.dumps(calibration_to_dict(replace(CALIBRATION, rebuild=FIT))))
    del raw["rebuild"]["load_kv"]
    with pytest.raises(ConfigError, match=r"lacks rebuild\.load_kv"):
        calibration_from_dict(raw)
    raw = json.loads(json.dumps(calibration_to_dict(replace(CALIBRATION, rebuild=FIT))))
    raw["rebuild"]["kv_gen"]["token_s"] = -1.0
    with pytest.raises(ConfigError, match=r"rebuild\.kv_gen\.token_s is negative"):
        calibration_from_dict(raw)


def test_the_planner_starts_from_the_file():
    """Both lines predict what was fitted; one odd time moves them little."""
    costs = calibrated_rebuild(replace(CALIBRATION, rebuild=FIT))
    assert costs.kv_gen.seconds(1_000) == pytest.approx(FIT.kv_gen.seconds(1_000))
    assert costs.load_kv.seconds(1_000) == pytest.approx(FIT.load_kv.seconds(1_000))
    guess = TokensCost(FIT.kv_gen.overhead_s, FIT.kv_gen.token_s)
    for cost in (costs.kv_gen, guess):
        cost.observe(1_000, 10 * FIT.kv_gen.seconds(1_000))
    assert costs.kv_gen.seconds(1_000) < 1.5 * FIT.kv_gen.seconds(1_000)
    assert costs.kv_gen.seconds(1_000) < guess.seconds(1_000)


def test_a_guess_is_corrected():
    """From a guess that is 20 times off to within 5 %, by 60 rebuilds."""
    cost = TokensCost(1e-5, 6e-5)
    for num in TOKENS * 15:
        cost.observe(num, 2e-4 + 3e-6 * num)
    assert cost.seconds(2_048) == pytest.approx(2e-4 + 3e-6 * 2_048, rel=0.05)
    assert cost.snapshot().num_observations == 60
    assert cost.snapshot().token_s == pytest.approx(3e-6, rel=0.05)


def test_nothing_and_nonsense():
    """No tokens take no time; a time that is none teaches nothing; zeros are let in."""
    cost = TokensCost(0.0, 0.0)
    assert cost.seconds(0) == 0.0
    assert cost.seconds(1) > 0.0
    for num, seconds in ((0, 1.0), (5, 0.0), (5, float("nan"))):
        cost.observe(num, seconds)
    assert cost.snapshot().num_observations == 0


def test_guesses_from_a_probe():
    """T_kv_gen as sampled; the link's latency is shared by the layers."""
    costs = RebuildCosts.probed(FIT.kv_gen, 4e-3, 1e6, 100, 4)
    assert costs.kv_gen.seconds(1_000) == pytest.approx(FIT.kv_gen.seconds(1_000))
    assert costs.load_kv.seconds(1_000) == pytest.approx(1e-3 + 0.1)


def test_the_cost_model_bundles_both_lines():
    """It names their figures, learns each from its own times, and can be rebuilt."""
    prefill = PrefillCost(1_000, 4, 64, 1e9)
    model = CostModel(prefill, {}, RebuildCosts.measured(FIT))
    before = model.snapshot()
    model.observe_rebuild(1_000, 10 * FIT.kv_gen.seconds(1_000))
    after = model.snapshot()
    changed = {name for name in after if after[name] != before[name]}
    assert changed <= {name for name in after if name.startswith("rebuild.kv_gen.")}
    assert after["rebuild.kv_gen.num_observations"] == 1.0
    model.observe_load_kv(1_000, 10 * FIT.load_kv.seconds(1_000))
    now = model.snapshot()
    assert now["rebuild.load_kv.token_s"] > after["rebuild.load_kv.token_s"]
    again = RebuildCosts.from_snapshot(now)
    for name in ("kv_gen", "load_kv"):
        mine, theirs = getattr(model.rebuild, name), getattr(again, name)
        assert mine.seconds(777) == pytest.approx(theirs.seconds(777))


def test_a_cost_model_without_activations():
    """No figures, and what is observed is let go."""
    model = CostModel(PrefillCost(1_000, 4, 64, 1e9), {})
    before = model.snapshot()
    model.observe_rebuild(10, 1.0)
    model.observe_load_kv(10, 1.0)
    assert model.rebuild is None
    assert model.snapshot() == before
    assert RebuildCosts.from_snapshot(before) is None
