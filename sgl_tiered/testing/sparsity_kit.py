"""Conformance kit for selections: subclass it in a pytest module.

Example:
    class TestMySelection(SelectionKit):
        def make_selection(self, rng):
            return MySelection()
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgl_tiered.policies.sparsity.base import PrefixFacts, Selection
from sgl_tiered.policies.sparsity.solver import HeldCurves

__all__ = ["SelectionKit", "prefixes"]


@st.composite
def prefixes(draw: st.DrawFn, *, max_tokens: int = 60) -> PrefixFacts:
    """Facts of one prefix, with a mass that may be zero, equal, tiny or huge."""
    num_layers = draw(st.integers(1, 5))
    num_heads = draw(st.integers(1, 3))
    num_tokens = draw(st.integers(0, max_tokens))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = num_layers, num_heads, num_tokens
    scale = draw(st.sampled_from([0.0, 1e-30, 1.0, 1e30]))
    mass = (rng.random(shape) ** draw(st.sampled_from([0.0, 1.0, 8.0])) * scale).astype(
        draw(st.sampled_from([np.float32, np.float64]))
    )
    curves = None
    if draw(st.booleans()):
        importance = rng.random((num_layers, 20)) ** 4
        curves = HeldCurves.of_importance(importance, rng.random(num_layers) + 0.1)
    return PrefixFacts(
        num_layers=num_layers,
        num_tokens=num_tokens,
        budget_tokens=draw(st.integers(0, num_layers * num_tokens + 10)),
        mass=mass,
        reads=draw(
            st.sampled_from(
                [
                    None,
                    np.arange(num_tokens, 0, -1.0),
                    rng.random((num_layers, num_tokens)) * 100,
                ]
            )
        ),
        recent_mass=mass[:, :, ::-1],
        curves=curves,
        num_sinks=draw(st.integers(0, 6)),
        num_recent=draw(st.integers(0, 70)),
    )


def _inherited(max_examples: int) -> settings:
    """Settings of a method that runs in many classes: nothing is kept between them."""
    return settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.differing_executors],
    )


class SelectionKit:
    """What those rely on who load a keep set."""

    def make_selection(self, rng: np.random.Generator) -> Selection:
        """Return a new object; the one method to write."""
        raise NotImplementedError

    def test_has_the_interface(self) -> None:
        """It is a Selection with a name that a flag can spell."""
        selection = self.make_selection(np.random.default_rng(0))
        assert isinstance(selection, Selection)
        assert selection.name
        assert selection.name == selection.name.lower().strip()
        assert selection.local_tokens >= 0
        assert selection.mass_power in (1, 2)
        assert selection.window_tokens >= 0

    @_inherited(60)
    @given(facts=prefixes(), seed=st.integers(0, 5))
    def test_keep_sets_are_sets_that_use_up_the_budget(
        self, facts: PrefixFacts, seed: int
    ) -> None:
        """Ascending positions in range, with the ends, and as many as were paid for."""
        selection = self.make_selection(np.random.default_rng(seed))
        kept = selection.keep(facts)
        ends = np.arange(facts.num_tokens)
        first_recent = facts.num_tokens - facts.num_recent
        ends = ends[(ends < facts.num_sinks) | (ends >= first_recent)]
        assert len(kept) == facts.num_layers
        for positions in kept:
            assert positions.dtype == np.int64
            assert (np.diff(positions) > 0).all()
            assert ((positions >= 0) & (positions < facts.num_tokens)).all()
            assert np.isin(ends, positions).all()
        least = len(ends) * facts.num_layers
        most = facts.num_tokens * facts.num_layers
        wanted = min(max(facts.budget_tokens, least), most)
        assert sum(len(positions) for positions in kept) == wanted

    @_inherited(20)
    @given(facts=prefixes(), seed=st.integers(0, 5))
    def test_equal_facts_have_equal_answers(
        self, facts: PrefixFacts, seed: int
    ) -> None:
        """Asked twice, and of another object: ranks and replays agree."""
        selection = self.make_selection(np.random.default_rng(seed))
        other = self.make_selection(np.random.default_rng(seed))
        first, *others = (s.keep(facts) for s in (selection, selection, other))
        for again in others:
            for one, two in zip(first, again, strict=True):
                np.testing.assert_array_equal(one, two)

    def test_what_it_needs_is_missed(self) -> None:
        """Facts without the mass that it says it needs are refused, others are not."""
        selection = self.make_selection(np.random.default_rng(0))
        bare = PrefixFacts(num_layers=2, num_tokens=100, budget_tokens=150)
        if selection.needs_mass or selection.window_tokens:
            with pytest.raises(ValueError, match=selection.name):
                selection.keep(bare)
        else:
            assert sum(map(len, selection.keep(bare))) == 150
