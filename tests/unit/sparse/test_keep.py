"""What of a span stays: what a selection says of its facts, and its ends."""

import numpy as np
import pytest

from sgl_tiered.policies.sparsity.profile import FRACTIONS
from sgl_tiered.policies.sparsity.registry import SELECTIONS, make_selection
from sgl_tiered.policies.sparsity.solver import (
    HeldCurves,
    lost_share,
    ratios_for_quality,
)
from sgl_tiered.sparse.gauge import Reading
from sgl_tiered.sparse.keep import RECENT, SINKS, SpanChoice

LAYERS, HEADS, TOKENS = 4, 2, 400
STEEP = HeldCurves(
    np.array(FRACTIONS),
    np.array([np.array(FRACTIONS) ** power for power in (0.8, 0.4, 0.1, 0.02)]),
    np.array([1.0, 2.0, 1.0, 0.5]),
)
"""Layers from one that reads all tokens to one that reads few."""


def selection(name):
    return make_selection(name, np.random.default_rng(3))


def readings(name, *, seed=0, num_tokens=TOKENS, unknown=()):
    """Return a reading for each book of a selection; unknown tokens in all layers."""
    rng = np.random.default_rng(seed)
    made, asked = [], selection(name)
    for _ in range(int(asked.needs_mass) + int(asked.window_tokens > 0)):
        mean = rng.random((LAYERS, HEADS, num_tokens)).astype(np.float32) ** 4
        reads = rng.integers(1, 300, (LAYERS, num_tokens)).astype(np.float32)
        reads[:, list(unknown)] = 0.0
        mean[:, :, list(unknown)] = np.nan
        made.append(Reading(mean, reads))
    return tuple(made)


@pytest.mark.parametrize("curves", [None, STEEP], ids=["bare", "profile"])
@pytest.mark.parametrize("name", SELECTIONS)
def test_the_registrys_choice_is_what_stays(name, curves):
    """Of the same facts, tokens by tokens; the budget in bytes is used up exactly."""
    known = readings(name)
    choice = SpanChoice(selection(name), LAYERS, 0.5, curves=curves)
    kept = choice.keep(0, TOKENS, known)
    wanted = selection(name).keep(choice.facts(0, TOKENS, known))
    for mine, theirs in zip(kept, wanted, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert sum(map(len, kept)) == LAYERS * TOKENS // 2
    ends = [*range(SINKS), *range(TOKENS - RECENT, TOKENS)]
    assert all(np.isin(ends, tokens).all() for tokens in kept)


def test_facts_are_sums_where_selections_want_sums():
    """Mass is mean times readers, by layer and head; a window's is its mean."""
    (reading,) = known = readings("h2o")
    facts = SpanChoice(selection("h2o"), LAYERS, 0.5).facts(0, TOKENS, known)
    np.testing.assert_allclose(facts.mass, reading.mean * reading.reads[:, None])
    np.testing.assert_array_equal(facts.reads, reading.reads)
    assert facts.recent_mass is None
    (reading,) = known = readings("snapkv")
    facts = SpanChoice(selection("snapkv"), LAYERS, 0.5).facts(0, TOKENS, known)
    np.testing.assert_array_equal(facts.recent_mass, reading.mean)
    assert facts.mass is None


@pytest.mark.parametrize("name", SELECTIONS)
def test_a_span_in_the_middle_has_no_sinks(name):
    """They are the first tokens of the prompt, not of the span; its end stays."""
    known = readings(name)
    for reading in known:
        reading.mean[:, :, :64] = 0.0
    facts = SpanChoice(selection(name), LAYERS, 0.5).facts(64, TOKENS, known)
    assert (facts.num_sinks, facts.num_recent) == (0, RECENT)
    facts = SpanChoice(selection(name), LAYERS, 0.5).facts(1, TOKENS, known)
    assert facts.num_sinks == SINKS - 1


@pytest.mark.parametrize("name", ["car", "car-uniform", "h2o", "snapkv", "pyramidkv"])
def test_what_nobody_judged_stays(name):
    """Even where that is more than the budget; and all of it where nothing is known."""
    unknown = range(50, 350)
    kept = SpanChoice(selection(name), LAYERS, 0.25).keep(
        0, TOKENS, readings(name, unknown=unknown)
    )
    expected = [*range(SINKS), *unknown, *range(TOKENS - RECENT, TOKENS)]
    for tokens in kept:
        assert np.isin(expected, tokens).all()
        assert (np.diff(tokens) > 0).all()
    assert sum(map(len, kept)) < LAYERS * TOKENS
    nothing = readings(name, unknown=range(TOKENS))
    assert SpanChoice(selection(name), LAYERS, 0.25).keep(0, TOKENS, nothing) is None


@pytest.mark.parametrize("name", ["random", "recent"])
def test_who_looks_at_nothing_needs_to_know_nothing(name):
    """They choose from the first load on."""
    kept = SpanChoice(selection(name), LAYERS, 0.25).keep(0, TOKENS, ())
    assert sum(map(len, kept)) == LAYERS * TOKENS // 4


def test_all_is_all():
    """Whatever is kept of a short span, and a share of 1, drop nothing."""
    whole = SpanChoice(selection("car"), LAYERS, 1.0)
    assert whole.keep(0, TOKENS, readings("car")) is None
    short = SpanChoice(selection("car"), LAYERS, 0.1)
    assert short.keep(0, 64, readings("car", num_tokens=64)) is None


@pytest.mark.parametrize("max_lost", [0.02, 0.1, 0.3])
def test_a_quality_budget_gives_each_layer_its_ratio(max_lost):
    """That of the solver, and so a predicted loss inside the budget."""
    choice = SpanChoice(selection("car"), LAYERS, 0.5, max_lost=max_lost, curves=STEEP)
    kept = choice.keep(0, TOKENS, readings("car"))
    floor = (SINKS + RECENT) / TOKENS
    wanted = ratios_for_quality(STEEP, max_lost, floor)
    ratios = np.array([len(tokens) / TOKENS for tokens in kept])
    np.testing.assert_allclose(ratios, wanted, atol=1.5 / TOKENS)
    assert ratios[0] > ratios[3], "a layer that reads all keeps no more than one"
    assert lost_share(STEEP, ratios) <= max_lost + 0.01
    assert choice.share(floor) == pytest.approx(wanted.mean())


def test_rivals_get_the_bytes_of_a_quality_budget():
    """Shared out as their method says: evenly."""
    choice = SpanChoice(selection("h2o"), LAYERS, 0.5, max_lost=0.1, curves=STEEP)
    kept = choice.keep(0, TOKENS, readings("h2o"))
    ours = SpanChoice(selection("car"), LAYERS, 0.5, max_lost=0.1, curves=STEEP)
    counts = [len(tokens) for tokens in kept]
    assert max(counts) - min(counts) <= 1
    assert sum(counts) == sum(map(len, ours.keep(0, TOKENS, readings("car"))))


def test_a_quality_budget_needs_curves():
    """Nobody else knows what a layer loses."""
    with pytest.raises(ValueError, match="curves"):
        SpanChoice(selection("car"), LAYERS, 0.5, max_lost=0.1)


def test_the_wrong_choice_is_wrong():
    """It drops what is recent and what is read, which a gate has to notice."""
    (reading,) = known = readings("car-uniform")
    right, wrong = (
        SpanChoice(selection("car-uniform"), LAYERS, 0.5, is_wrong=bad).keep(
            0, TOKENS, known
        )
        for bad in (False, True)
    )
    for layer in range(LAYERS):
        assert len(wrong[layer]) == len(right[layer])
        assert not np.isin(np.arange(TOKENS - RECENT, TOKENS), wrong[layer]).any()
        mean = reading.mean[layer].max(axis=0)
        assert mean[wrong[layer]].mean() < mean[right[layer]].mean()
