"""The share of activations for ``auto``: refused with a sentence, or the balance's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sgl_tiered.policies.activations.balance import balanced_split, split_at
from sgl_tiered.policies.activations.base import LayerFacts, PageLine
from sgl_tiered.policies.activations.choice import choose_share
from sgl_tiered.policies.activations.ratio import PageRatio

FACTS = LayerFacts(
    num_pages=1_000,
    device_bytes=0,
    kv_page_bytes=4,
    act_page_bytes=2,
    kv_gen=PageLine(0.0, 0.8),
    load_kv=PageLine(0.0, 1.0),
    load_act=PageLine(0.0, 0.5),
    load_weights_s=0.0,
    compute_s=0.0,
)
"""T_load_kv / T_kv_gen = 1.25: both sides are equal at 10 / 13."""
MHA = (512, 8, 64)


def test_the_balance_is_chosen():
    """Link and rebuilding take equally long; the ratio is the same share."""
    choice = choose_share(FACTS, *MHA)
    assert not choice.is_refused
    assert choice.share == pytest.approx(10 / 13, abs=1e-3)
    assert choice.ratio == PageRatio.of_share(choice.share)
    # The two shares beside it are no better.
    best = balanced_split(FACTS).seconds
    chosen = round(choice.share * FACTS.num_pages)
    assert split_at(FACTS, chosen).seconds == pytest.approx(best, rel=2e-3)
    assert "77%" in choice.reason
    assert choice.reason.endswith(".")
    assert choice.reason.count(". ") == 0


def test_the_model_refuses_before_the_load():
    """Grouped queries: the sentence is about the model, whatever the link does."""
    idle = replace(FACTS, compute_s=10_000.0)
    for facts in (FACTS, idle):
        choice = choose_share(facts, 512, 4, 64)
        assert (choice.share, choice.ratio, choice.is_refused) == (
            0.0,
            PageRatio(0, 1),
            True,
        )
        assert "nothing would be saved" in choice.reason


def test_the_load_refuses():
    """An idle link: no activations, and the sentence says so."""
    choice = choose_share(replace(FACTS, compute_s=10_000.0), *MHA)
    assert choice.is_refused
    assert choice.ratio.act_of(100) == 0
    assert "the link is idle" in choice.reason
