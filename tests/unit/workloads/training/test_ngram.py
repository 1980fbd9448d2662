"""The 5-gram model is a probability model, and a good one where order matters."""

from __future__ import annotations

import numpy as np
import pytest
from sgl_tiered_workloads.training.ngram import NgramModel


@pytest.mark.parametrize("context", [[], [1], [1, 2], [0, 1, 2, 0], [3, 3, 3, 3, 1]])
def test_probabilities_sum_to_one(context: list[int]) -> None:
    """After any context, seen or not, the whole vocabulary has probability one."""
    text = np.random.default_rng(0).integers(0, 4, 300).astype(np.int32)
    model = NgramModel(text, 6)
    total = sum(
        np.exp(model.log_probabilities(np.array([*context, token], np.int32))[-1])
        for token in range(6)
    )
    assert total == pytest.approx(1.0)


def test_one_order_by_hand() -> None:
    """A bigram model's figure is that of the formula worked out by hand."""
    # Bigrams of 0 1 0 1 0 2: 01 twice, 10 twice, 02 once. Discount 1 / (1 + 2 * 2).
    # Lower order: 0 and 1 and 2 each follow one token, discount 0.95 at most.
    model = NgramModel(np.array([0, 1, 0, 1, 0, 2], np.int32), 3, order=2)
    unigram = (1 - 0.95) / 3 + 0.95 * 3 / 3 / 3
    expected = (2 - 0.2) / 3 + 0.2 * 2 / 3 * unigram
    logs = model.log_probabilities(np.array([0, 1], np.int32))
    assert np.exp(logs[1]) == pytest.approx(expected)
    assert np.exp(logs[0]) == pytest.approx(unigram)


def test_longer_contexts_are_used() -> None:
    """A text fixed by four tokens of context is nearly certain to five, not to two."""
    cycle = np.array([0, 0, 0, 0, 1, 0, 0, 0, 2] * 60, np.int32)
    losses = [
        -NgramModel(cycle, 3, order).log_probabilities(cycle)[20:].mean()
        for order in (2, 5)
    ]
    assert losses[1] < 0.5 * losses[0]


def test_an_unseen_text_is_worse_than_a_seen_one() -> None:
    """Held-out text of another kind costs more nats, and never infinitely many."""
    rng = np.random.default_rng(1)
    seen = np.repeat(rng.integers(0, 50, 200), 3).astype(np.int32)
    other = rng.integers(0, 64, 600).astype(np.int32)
    model = NgramModel(seen, 64)
    assert np.isfinite(model.log_probabilities(other)).all()
    assert model.log_probabilities(seen).mean() > model.log_probabilities(other).mean()


def test_what_cannot_be_counted_is_refused() -> None:
    """Keys that exceed 64 bits and texts without an n-gram raise."""
    with pytest.raises(ValueError, match="64 bits"):
        NgramModel(np.zeros(10, np.int32), 8192)
    with pytest.raises(ValueError, match="no 5-gram"):
        NgramModel(np.zeros(4, np.int32), 8)
