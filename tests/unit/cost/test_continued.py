"""The share of answers that are continued: what counts, and how it is forgotten."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_tiered.cost.continued import ContinuedShare

MODEL, OTHER = b"model", b"other"


def tokens(seed: int, num: int = 32) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, num, dtype=np.int32)


def test_at_first_all_are_continued() -> None:
    """Nothing speaks against it yet."""
    assert ContinuedShare().share == 1.0


def test_a_prompt_that_begins_with_an_answer() -> None:
    """Once each; of the same namespace; and longer, equal or not at all."""
    answers = ContinuedShare(2)
    answers.ended(MODEL, tokens(1))
    assert not answers.asked(MODEL, tokens(1)[:31])
    assert not answers.asked(OTHER, tokens(1))
    assert not answers.asked(MODEL, tokens(2, 64))
    assert answers.asked(MODEL, np.concatenate([tokens(1), tokens(3)]))
    assert not answers.asked(MODEL, np.concatenate([tokens(1), tokens(3)]))


def test_answers_of_several_lengths_in_one_walk() -> None:
    """A prompt may continue a turn and the one before it."""
    answers = ContinuedShare()
    whole = tokens(4, 96)
    for length in (16, 48, 80):
        answers.ended(MODEL, whole[:length])
    answers.ended(MODEL, tokens(5, 48))
    assert answers.asked(MODEL, whole)
    assert not answers.asked(MODEL, whole)
    assert answers.asked(MODEL, tokens(5, 48))


def test_what_is_never_continued_lowers_the_share() -> None:
    """Once enough others have ended after it; and continued ones raise it again."""
    answers = ContinuedShare(4)
    for seed in range(4):
        answers.ended(MODEL, tokens(seed))
    assert answers.share == 1.0
    for seed in range(4, 1000):
        answers.ended(MODEL, tokens(seed))
    low = answers.share
    assert low < 0.05
    for seed in range(1000, 3000):
        answers.ended(MODEL, tokens(seed))
        assert answers.asked(MODEL, tokens(seed, 32))
    assert answers.share > 0.7 > low


def test_the_share_is_that_of_what_happened() -> None:
    """Every third answer is continued at once, the others are not."""
    answers = ContinuedShare(8)
    for seed in range(6000):
        answers.ended(MODEL, tokens(seed))
        if seed % 3 == 0:
            answers.asked(MODEL, tokens(seed))
    assert answers.share == pytest.approx(1 / 3, abs=0.05)


def test_what_is_forgotten_counts_for_nothing() -> None:
    """Neither as continued nor as left."""
    answers = ContinuedShare(4)
    answers.ended(MODEL, tokens(1))
    answers.clear()
    assert not answers.asked(MODEL, tokens(1))
    assert answers.share == 1.0


def test_one_answer_twice_is_one() -> None:
    """It counts as the later one."""
    answers = ContinuedShare(2)
    for seed in (1, 2, 1, 3):
        answers.ended(MODEL, tokens(seed))
    assert answers.asked(MODEL, tokens(1))
    assert not answers.asked(MODEL, tokens(2))


def test_how_long_an_answer_is_hoped_for_is_learned() -> None:
    """Where others were continued at once, few have to end after one that is not."""

    def ended_until_half(answers: ContinuedShare, first: int) -> int:
        for number in range(2000):
            answers.ended(MODEL, tokens(first + number))
            if answers.share < 0.5:
                return number
        raise AssertionError("never")

    quick = ContinuedShare()
    for seed in range(16):
        quick.ended(MODEL, tokens(seed))
        assert quick.asked(MODEL, tokens(seed))
    assert ended_until_half(quick, 100) < 60
    slow = ContinuedShare()
    for seed in range(600):
        slow.ended(MODEL, tokens(seed))
        if seed >= 200:
            assert slow.asked(MODEL, tokens(seed - 200))
    assert slow.share > 0.9
    assert ended_until_half(slow, 1000) > 500


def test_an_answer_that_is_continued_after_all_was_never_left() -> None:
    """The share is what it would be had nobody given up."""
    answers = ContinuedShare()
    for seed in range(200):
        answers.ended(MODEL, tokens(seed))
    assert answers.share < 0.2
    for seed in range(200):
        assert answers.asked(MODEL, tokens(seed))
    assert answers.share == 1.0
