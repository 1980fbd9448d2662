"""What of a span stays: the share that attention read most, and what nobody judged."""

import numpy as np
import pytest

from sgl_tiered.errors import ConfigError
from sgl_tiered.sparse.keep import RECENT, SINKS, KeepFacts, KeepShare, KeepWrong

LAYERS, TOKENS = 3, 400


def facts(first_token=0, *, seed=0, num_tokens=TOKENS):
    rng = np.random.default_rng(seed)
    mass = rng.random((LAYERS, num_tokens)).astype(np.float32)
    return KeepFacts(first_token, num_tokens, mass)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.9, 1.0])
def test_a_layer_keeps_its_share(share):
    """Of the heaviest tokens, each layer by its own mass, in order."""
    given = facts()
    kept = KeepShare(share).keep(given)
    for layer, tokens in enumerate(kept):
        assert len(tokens) == np.ceil(share * TOKENS)
        assert (np.diff(tokens) > 0).all()
        free = np.arange(SINKS, TOKENS - RECENT)
        inside = np.isin(free, tokens)
        mass = given.mass[layer, free]
        if not inside.all():
            assert mass[inside].min() >= mass[~inside].max()
    if share < 1.0:
        assert len({tuple(tokens) for tokens in kept}) == LAYERS


def test_ends_always_stay():
    """The first tokens of the prompt and the last of the span, however light."""
    given = facts()
    given.mass[:, :SINKS] = given.mass[:, -RECENT:] = 0.0
    for tokens in KeepShare(0.3).keep(given):
        assert np.isin(np.arange(SINKS), tokens).all()
        assert np.isin(np.arange(TOKENS - RECENT, TOKENS), tokens).all()


def test_a_span_in_the_middle_has_no_sinks():
    """They are the prompt's first tokens, not the span's."""
    given = facts(first_token=64)
    given.mass[:, :SINKS] = 0.0
    for tokens in KeepShare(0.5).keep(given):
        assert not np.isin(np.arange(SINKS), tokens).any()


def test_what_nobody_judged_stays():
    """Even where that is more than the share."""
    given = facts()
    given.mass[:, 50:350] = np.nan
    for tokens in KeepShare(0.25).keep(given):
        expected = {*range(SINKS), *range(50, 350), *range(TOKENS - RECENT, TOKENS)}
        assert set(tokens.tolist()) == expected


def test_equal_masses_give_equal_choices():
    """Ties go to the earlier token, on every machine."""
    given = facts()
    given.mass[:] = 0.5
    (first, *others) = KeepShare(0.5).keep(given)
    assert all((first == other).all() for other in others)
    left = TOKENS // 2 - SINKS - RECENT
    assert first[: SINKS + left].tolist() == list(range(SINKS + left))


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01])
def test_a_share_outside_is_refused(share):
    """Nothing and more than all are no shares."""
    with pytest.raises(ConfigError):
        KeepShare(share)


def test_the_wrong_choice_is_wrong():
    """It drops what is recent and what is read, which a gate has to notice."""
    given = facts()
    right, wrong = KeepShare(0.5).keep(given), KeepWrong(0.5).keep(given)
    for layer in range(LAYERS):
        assert len(wrong[layer]) == len(right[layer])
        assert not np.isin(np.arange(TOKENS - RECENT, TOKENS), wrong[layer]).any()
        light, heavy = (
            given.mass[layer, tokens].mean() for tokens in (wrong[layer], right[layer])
        )
        assert light < heavy
