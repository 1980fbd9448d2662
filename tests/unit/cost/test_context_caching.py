"""The context-caching cost model: by hand, by the paper's findings, and fitted."""

import json
from dataclasses import replace

import numpy as np
import pytest

from sgl_tiered.core.ids import TierId
from sgl_tiered.cost.caching_fitting import CachingSample, fit_caching
from sgl_tiered.cost.calibration import (
    CachingFit,
    LocationFit,
    calibration_from_dict,
    calibration_to_dict,
    read_calibration,
    write_calibration,
)
from sgl_tiered.cost.context_caching import CachedPrompt, ContextCaching
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost
from sgl_tiered.errors import ConfigError
from tests.unit.cost.calibration_support import CALIBRATION, QUALITY

DEVICE, HOST, DISK, PEER = TierId.DEVICE, TierId.HOST, TierId.DISK, TierId.PEER
PAGE, LAYERS = 16, 4
PLACES = (
    LocationFit("host", 5e-4, 2e-6, 0.0, True, QUALITY),
    LocationFit("disk", 4e-3, 2e-5, 0.0, False, QUALITY),
    LocationFit("peer", 2e-2, 1e-5, 1e-5, False, QUALITY),
)
FIT = CachingFit(0.004, 0.003, 0.001, 2e-4, 3e-8, 1e-6, PLACES, QUALITY)


def model(fit=FIT, page=PAGE, chunk=None):
    return ContextCaching(fit, page, LAYERS, chunk)


def compute_s(context, new, num=1, passes=1):
    """The sum of the docstring, for equal requests."""
    pairs = new * (context + (new + 1) / 2)
    read = passes * context + new * (passes - 1) / 2
    each = 0.001 + 2e-4 * new + 3e-8 * pairs + 1e-6 * read
    return 0.004 + 0.003 * passes + num * each


def test_a_batch_that_reuses_nothing():
    """The coefficients times what they count; an empty batch takes no time."""
    batch = [CachedPrompt(512), CachedPrompt(512)]
    assert model().seconds(batch) == pytest.approx(compute_s(0, 512, 2))
    assert model().seconds([]) == 0.0
    assert model().decide([]).seconds == 0.0


def test_a_place_before_the_pass_is_added():
    """Its requests, tokens and pages, to the pass over what is left."""
    batch = [CachedPrompt(512, ((PEER, 256),))]
    move_s = 2e-2 + 256e-5 + 16e-5
    expected = move_s + compute_s(256, 256)
    assert model().seconds(batch, {PEER}) == pytest.approx(expected)


def test_a_place_under_the_pass_is_hidden():
    """A short load costs nothing, a long one itself and the last layer's pass."""
    short = [CachedPrompt(512, ((HOST, 256),))]
    assert model().seconds(short, {HOST}) == pytest.approx(compute_s(256, 256))
    slow = replace(FIT, locations=(replace(PLACES[0], token_s=1e-2),))
    expected = 5e-4 + 2.56 + compute_s(256, 256) / LAYERS
    assert model(slow).seconds(short, {HOST}) == pytest.approx(expected)


def test_only_whole_pages_are_reused_and_a_token_is_left():
    """Page size is a factor: a larger page reuses less of the same prompt."""
    prompt = CachedPrompt(100, ((DEVICE, 100),))
    for page, reused in ((16, 96), (64, 64), (128, 0), (10, 90)):
        assert model(page=page).decide([prompt]).reused_tokens == (reused,)


def test_chunks_are_passes():
    """The batch's new tokens fill passes; each request reads its context in its own."""
    batch = [CachedPrompt(1024, ((DEVICE, 224),))] * 2
    found = model(chunk=400).seconds(batch, set())
    assert found == pytest.approx(compute_s(224, 800, 2, 2) + 0.003 * 2)


def test_a_prefix_is_reused_up_to_the_first_place_that_is_not():
    """What lies behind a place that is not taken is no prefix."""
    prompt = CachedPrompt(400, ((DEVICE, 64), (DISK, 64), (HOST, 128)))
    taken = model().seconds([prompt], {HOST})
    assert taken == pytest.approx(compute_s(64, 336))
    both = model().seconds([prompt], {HOST, DISK})
    assert both == pytest.approx(4e-3 + 64 * 2e-5 + compute_s(256, 144))


def test_pages_across_two_places_count_for_the_second():
    """A page whose tokens end in a place is loaded from there."""
    fit = replace(FIT, locations=(replace(PLACES[0], token_s=1.0),))
    prompt = CachedPrompt(400, ((DEVICE, 24), (HOST, 8)))
    found = model(fit).seconds([prompt], {HOST})
    assert found == pytest.approx(5e-4 + 16.0 + compute_s(32, 368) / LAYERS)


def test_an_unmeasured_place_is_not_taken():
    """When in doubt, recompute."""
    choice = model().decide([CachedPrompt(4096, ((TierId.CXL, 4000),))])
    assert choice.places == frozenset()
    assert choice.reused_tokens == (0,)
    assert choice.seconds == choice.none_s
    assert model().break_even_ratio(4096, TierId.CXL) is None


def test_improvement_grows_with_ratio_and_prompt():
    """The paper's findings 1 and 2 (Figure 13a), for every place.

    The second holds until attention, of which a prefix saves less, outweighs the rest.
    """
    for place in (DEVICE, HOST, DISK, PEER):
        by_prompt = []
        for num_tokens in (64, 128, 256, 512):
            gains = [
                model()
                .decide([CachedPrompt(num_tokens, ((place, int(ratio * num_tokens)),))])
                .improvement
                for ratio in (0.25, 0.5, 0.75, 1.0)
            ]
            assert gains == sorted(gains)
            by_prompt.append(gains[2])
        assert by_prompt == sorted(by_prompt)
        assert by_prompt[-1] > 0.4


def test_a_batch_acts_like_a_longer_prompt():
    """Finding 3 (Figure 13b): the same ratio of more requests saves a larger share."""
    prompt = CachedPrompt(128, ((DISK, 112),))
    gains = [model().decide([prompt] * num).improvement for num in (1, 2, 4, 8)]
    assert gains == sorted(gains)
    assert gains[-1] > gains[0] + 0.1


def test_reuse_pays_from_a_threshold_on():
    """Finding 4 (Figure 13d): below it the batch recomputes, above it it does not."""
    num_tokens = 1024
    ratio = model().break_even_ratio(num_tokens, PEER)
    assert 0.0 < ratio < 1.0
    cached = round(ratio * num_tokens)
    enough = CachedPrompt(num_tokens, ((PEER, cached),))
    less = CachedPrompt(num_tokens, ((PEER, cached - PAGE),))
    assert model().decide([enough]).places == {PEER}
    assert model().decide([less]).places == frozenset()
    assert model().break_even_ratio(num_tokens, HOST) < ratio
    assert model().break_even_ratio(PAGE, PEER) is None


def test_the_batch_decides_otherwise_than_its_requests_alone():
    """A slow load under the pass pays when others' computation hides it."""
    fit = replace(FIT, locations=(replace(PLACES[0], token_s=2.4e-4),))
    loads = CachedPrompt(512, ((HOST, 496),))
    assert model(fit).decide([loads]).places == frozenset()
    assert model(fit).decide([loads, CachedPrompt(1024)]).places == {HOST}


def test_what_a_move_would_gain():
    """Nothing where it is as good; what the recompute costs over the load else."""
    now = CachedPrompt(1024, ((DEVICE, 512),))
    better = ((DEVICE, 512), (HOST, 496))
    gained = compute_s(512, 512) - compute_s(1008, 16)
    assert model().gain_s(now, better) == pytest.approx(gained, rel=0.05)
    assert model().gain_s(now, now.found) == 0.0


def test_the_planners_own_figures_make_one():
    """Prefill and links as they are, with what an engine hides under the pass."""
    links = {HOST: LinkCost(1e-4, 1e9), DISK: LinkCost(1e-3, 1e8)}
    cost = CostModel(PrefillCost.from_coefficients(0.01, 1e-4, 1e-8), links)
    found = ContextCaching.of_costs(
        cost, token_bytes=1000, page_tokens=PAGE, num_layers=LAYERS, overlaps=True
    )
    assert found.places == {HOST, DISK}
    prompt = [CachedPrompt(320, ((DISK, 160),))]
    pass_s = cost.recompute_s(160, 160)
    assert found.seconds(prompt, {DISK}) == pytest.approx(1e-3 + 1.6e-3 + pass_s)
    prompt = [CachedPrompt(320, ((HOST, 160),))]
    assert found.seconds(prompt, {HOST}) == pytest.approx(pass_s)


# Fitting.


def samples(fit=FIT, noise=None, pages=(PAGE,), chunk=1024):
    made = []
    for page in pages:
        truth = model(fit, page, chunk)
        for tier in (DEVICE, *truth.places):
            for num, tokens in ((1, 256), (1, 1024), (1, 3072), (4, 512), (2, 1536)):
                for share in (0.0, 0.25, 0.5, 0.9):
                    cached = int(share * tokens) // page * page
                    batch = [CachedPrompt(tokens, ((tier, cached),))] * num
                    seconds = truth.seconds(batch, {tier})
                    if noise is not None:
                        seconds *= 1 + noise.uniform(-0.03, 0.03)
                    made.append(
                        CachingSample(tokens, cached, tier, seconds, page, num, chunk)
                    )
    return made


def test_known_coefficients_come_back():
    """Of computing and of each place, whether it hides, and R2 of 1."""
    host = replace(PLACES[0], token_s=3e-4, request_s=5e-3)
    truth = replace(FIT, locations=(host, *PLACES[1:]))
    found = fit_caching(samples(truth, pages=(8, 64)), LAYERS)
    for name in ("message_s", "pass_s", "request_s", "token_s", "pair_s"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-3)
    assert [place.location for place in found.locations] == ["host", "disk", "peer"]
    for mine, true in zip(found.locations, truth.locations, strict=True):
        assert mine.overlaps == true.overlaps
        assert mine.request_s == pytest.approx(true.request_s, rel=1e-3)
        assert mine.token_s == pytest.approx(true.token_s, rel=1e-3)
        assert mine.page_s == pytest.approx(true.page_s, rel=1e-3, abs=1e-12)
        assert mine.quality.r2 > 0.9999
    assert found.quality.r2 > 0.9999


def test_one_page_size_puts_pages_on_the_tokens():
    """They cannot be told apart, and predictions are the same."""
    found = fit_caching(samples(), LAYERS)
    peer = found.locations[-1]
    assert peer.page_s == 0.0
    assert peer.token_s == pytest.approx(1e-5 + 1e-5 / PAGE, rel=1e-3)


def test_a_load_that_is_always_hidden_costs_nothing():
    """Nothing shows of it, so no form of it is claimed."""
    found = fit_caching(samples(), LAYERS)
    assert found.locations[0].location == "host"
    fitted = model(found, chunk=1024)
    batch = [CachedPrompt(1024, ((HOST, 512),))]
    expected = model(chunk=1024).seconds(batch, {HOST})
    assert fitted.seconds(batch, {HOST}) == pytest.approx(expected, rel=1e-3)


def test_noise_moves_predictions_little():
    """3 % of noise: within 4 % of the truth, and R2 says so."""
    found = fit_caching(samples(noise=np.random.default_rng(2)), LAYERS)
    assert 0.98 < found.quality.r2 < 1.0
    for tier in (DEVICE, HOST, DISK, PEER):
        batch = [CachedPrompt(2048, ((tier, 1024),))] * 2
        expected = model(chunk=1024).seconds(batch, {tier})
        fitted = model(found, chunk=1024).seconds(batch, {tier})
        assert fitted == pytest.approx(expected, rel=0.04)


def test_a_place_faster_than_the_device_is_no_negative_cost():
    """Noise that makes a load look like a gain fits as nothing."""
    made = samples()
    fast = [
        replace(s, location=TierId.CXL, seconds=0.9 * s.seconds)
        for s in made
        if s.location is DEVICE and s.cached_tokens
    ]
    (cxl,) = [
        place
        for place in fit_caching(made + fast, LAYERS).locations
        if place.location == "cxl"
    ]
    assert (cxl.request_s, cxl.token_s, cxl.page_s) == (0.0, 0.0, 0.0)


def test_too_little_is_no_fit():
    """One number of tokens tells nothing; a place with one is left out."""
    assert fit_caching([], LAYERS) is None
    assert fit_caching([CachingSample(64, 0, DEVICE, 0.1, PAGE)] * 3, LAYERS) is None
    here = [s for s in samples() if s.location is DEVICE]
    one = CachingSample(512, 256, DISK, 0.1, PAGE)
    assert fit_caching([*here, one, one], LAYERS).locations == ()


# The file.


def test_the_file_keeps_it(tmp_path):
    """Written and read back; older files have none; the model's facts go with it."""
    path = tmp_path / "c.json"
    measured = replace(CALIBRATION, caching=FIT)
    write_calibration(path, measured)
    assert read_calibration(path) == measured
    body = json.loads(path.read_text())["caching"]
    assert body["locations"][1]["location"] == "disk"
    assert body["quality"]["r2"] == QUALITY.r2
    raw = calibration_to_dict(CALIBRATION)
    del raw["caching"]
    assert calibration_from_dict(raw) == CALIBRATION
    assert ContextCaching.calibrated(CALIBRATION) is None
    batch = [CachedPrompt(512, ((DISK, 256),))]
    found = ContextCaching.calibrated(measured).seconds(batch, {DISK})
    assert found == pytest.approx(model().seconds(batch, {DISK}))


@pytest.mark.parametrize("wrong", ["disc", "device", "host"])
def test_a_place_that_is_none_is_refused(wrong):
    """An unknown name, the device, and one that is there twice."""
    fit = replace(FIT, locations=(PLACES[0], replace(PLACES[1], location=wrong)))
    raw = json.loads(json.dumps(calibration_to_dict(replace(CALIBRATION, caching=fit))))
    with pytest.raises(ConfigError, match=r"caching\.locations has"):
        calibration_from_dict(raw)
