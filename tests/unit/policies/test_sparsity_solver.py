"""Per-layer ratios are the best there are, and what they promise is what they keep."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_tiered.policies.sparsity.profile import SparsityProfile
from sgl_tiered.policies.sparsity.solver import (
    HeldCurves,
    lost_share,
    ratios_for_quality,
    ratios_for_tokens,
)


@st.composite
def curves(draw: st.DrawFn) -> HeldCurves:
    """Curves of a few layers, some steep and some flat, of any weight."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_layers = draw(st.integers(1, 5))
    steepness = rng.integers(0, 12, size=(num_layers, 1))
    importance = rng.random((num_layers, 50)) ** steepness
    return HeldCurves.of_importance(importance, rng.random(num_layers) + 0.01)


@settings(max_examples=40, deadline=None)
@given(found=curves(), share=st.floats(0, 1), floor=st.floats(0, 0.3))
def test_a_byte_budget_is_used_up(
    found: HeldCurves, share: float, floor: float
) -> None:
    """The mean is the budget, or the floor where that is more; no layer below it."""
    ratios = ratios_for_tokens(found, share, floor)
    assert ((ratios >= floor - 1e-9) & (ratios <= 1.0)).all()
    assert ratios.mean() == pytest.approx(max(share, floor), abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(found=curves(), budget=st.floats(0, 1), floor=st.floats(0, 0.3))
def test_a_quality_budget_is_kept_and_used_up(
    found: HeldCurves, budget: float, floor: float
) -> None:
    """The loss is the budget, unless the floor alone loses less."""
    ratios = ratios_for_quality(found, budget, floor)
    assert lost_share(found, ratios) <= budget + 1e-9
    at_floor = lost_share(found, np.full(found.num_layers, floor))
    if at_floor > budget:
        assert lost_share(found, ratios) == pytest.approx(budget, abs=1e-9)
    else:
        assert ratios == pytest.approx(np.full(found.num_layers, floor))


@settings(max_examples=40, deadline=None)
@given(found=curves(), budget=st.floats(0.001, 0.5))
def test_both_budgets_have_the_same_solutions(found: HeldCurves, budget: float) -> None:
    """The loss that a quality budget allows is what its bytes lose at least."""
    ratios = ratios_for_quality(found, budget)
    again = ratios_for_tokens(found, float(ratios.mean()))
    assert lost_share(found, again) == pytest.approx(
        lost_share(found, ratios), abs=1e-9
    )


@settings(max_examples=15, deadline=None)
@given(found=curves(), share=st.sampled_from([0.1, 0.25, 0.5, 0.8]))
def test_no_other_ratios_lose_less(found: HeldCurves, share: float) -> None:
    """Moving tokens between any two layers never helps."""
    ratios = ratios_for_tokens(found, share)
    best = lost_share(found, ratios)
    for giver, taker, step in product(
        range(found.num_layers), range(found.num_layers), (0.001, 0.02, 0.1)
    ):
        moved = ratios.copy()
        step = min(step, moved[giver], 1.0 - moved[taker])
        moved[giver] -= step
        moved[taker] += step
        assert lost_share(found, moved) >= best - 1e-9


def test_a_sparse_layer_keeps_fewer_tokens() -> None:
    """One layer holds all in a tenth of its tokens, the other is flat: by hand."""
    found = HeldCurves(
        np.array([0.1, 1.0]), np.array([[1.0, 1.0], [0.1, 1.0]]), np.ones(2)
    )
    assert ratios_for_tokens(found, 0.5) == pytest.approx([0.1, 0.9])
    assert ratios_for_quality(found, 0.05) == pytest.approx([0.1, 0.9])
    assert lost_share(found, np.array([0.1, 0.9])) == pytest.approx(0.05)


def test_weights_decide_between_layers() -> None:
    """Of two equal layers the one that loses more attention keeps more."""
    held = np.array([[0.5, 1.0]] * 2)
    found = HeldCurves(np.array([0.2, 1.0]), held, np.array([1.0, 2.0]))
    light, heavy = ratios_for_tokens(found, 0.5)
    assert (light, heavy) == pytest.approx((0.2, 0.8))


def test_a_curve_that_sags_is_replaced_by_its_hull() -> None:
    """A rise behind a flat stretch is reached through it, all of it or nothing."""
    found = HeldCurves(
        np.array([0.5, 0.6, 1.0]), np.array([[0.1, 0.9, 1.0]]), np.ones(1)
    )
    assert lost_share(found, np.array([0.3])) == pytest.approx(0.55)


def test_curves_of_a_prefix_are_what_its_top_tokens_hold() -> None:
    """Ten tokens of which one holds half, in any order."""
    importance = np.ones((1, 10))
    importance[0, 3] = 9.0
    found = HeldCurves.of_importance(importance, shares=[0.1, 0.5, 1.0])
    assert found.held[0] == pytest.approx([0.5, 13 / 18, 1.0])


def test_a_profile_is_planned_with_as_a_server_chooses() -> None:
    """By what was read before, where that was measured, and by what can be lost."""
    profile = SparsityProfile(
        model="m",
        fingerprint="",
        num_kv_heads=1,
        num_tokens=100,
        num_prompts=1,
        local_tokens=64,
        small_share=np.array([[0.9]]),
        fractions=np.array([0.5, 1.0]),
        held_by_top=np.array([[0.9, 1.0]]),
        held_later=np.array([[0.7, 1.0 + 1e-7]]),
        long_share=np.array([0.0]),
    )
    found = HeldCurves.of_profile(profile)
    assert found.held[0] == pytest.approx([0.7, 1.0])
    assert found.weights[0] > 0.0
    profile = replace(profile, held_later=None, long_share=None)
    found = HeldCurves.of_profile(profile)
    assert found.held[0] == pytest.approx([0.9, 1.0])
    assert found.weights == pytest.approx([1.0])


@pytest.mark.parametrize(
    ("shares", "held", "weights"),
    [
        ([0.5, 0.4], [[0.5, 1.0]], [1.0]),
        ([0.0, 0.4], [[0.5, 1.0]], [1.0]),
        ([0.5, 1.1], [[0.5, 1.0]], [1.0]),
        ([0.5, 1.0], [[0.5, 1.2]], [1.0]),
        ([0.5, 1.0], [[np.nan, 1.0]], [1.0]),
        ([0.5, 1.0], [[0.5, 1.0]], [0.0]),
        ([0.5, 1.0], [[0.5, 1.0]], [1.0, 1.0]),
        ([0.5, 1.0], [[0.5]], [1.0]),
    ],
)
def test_wrong_curves_are_refused(
    shares: list[float], held: list[list[float]], weights: list[float]
) -> None:
    """Before they become ratios."""
    with pytest.raises(ValueError, match=r"share|held|weight"):
        HeldCurves(np.array(shares), np.array(held), np.array(weights))
