"""What is learned of reuse: kinds, horizons, and the proof that they are better."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_tiered.cache.duel import Duel
from sgl_tiered.cache.reuse import NUM_KINDS, ReuseHistory

PAGE_TOKENS = 512


def pages(first: int, num: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.arange(first, first + num, dtype=np.uint64)


def teach(history: ReuseHistory, num_rounds: int) -> None:
    """Chats of three turns that come again soon, among prompts that never do."""
    sequence, single = 0, 1_000_000
    for number in range(num_rounds):
        for turn in range(3):
            sequence += 1
            history.see(pages(100 * number, 4 + 4 * turn), 0, sequence)
            for _ in range(5):
                sequence += 1
                single += 100
                history.see(pages(single, 60), 0, sequence)


def test_nothing_is_believed_at_first() -> None:
    """Every horizon is 0, so everything ranks as under LRU."""
    history = ReuseHistory(1_000, PAGE_TOKENS)
    kinds = history.see(pages(0, 10), 0, 1)
    assert not history.is_used
    assert {history.horizon(int(kind)) for kind in kinds} == {0.0}


def test_what_comes_again_gets_a_longer_horizon() -> None:
    """Chats are kept until they are over, prompts that never come again are not."""
    history = ReuseHistory(120, PAGE_TOKENS)
    teach(history, 200)
    assert history.is_used
    chat = history.see(pages(10_000_000, 4), 0, 100_000)
    single = history.see(pages(20_000_000, 60), 0, 100_001)
    assert history.horizon(int(chat[0])) > history.horizon(int(single[0]))


def test_a_dear_page_is_kept_for_longer() -> None:
    """Horizons grow with the weight, and stop growing at some weight."""
    history = ReuseHistory(120, PAGE_TOKENS, trusted=True)
    teach(history, 60)
    for kind in range(NUM_KINDS):
        found = [history.horizon(kind, 2.0**step) for step in range(-5, 6)]
        assert found == sorted(found)
        assert found[0] == found[1]
        assert found[-1] == found[-2]


def test_equal_uses_teach_the_same() -> None:
    """Nothing depends on chance or on a clock."""
    one, two = (ReuseHistory(120, PAGE_TOKENS) for _ in range(2))
    teach(one, 80)
    teach(two, 80)
    assert [one.horizon(kind) for kind in range(NUM_KINDS)] == [
        two.horizon(kind) for kind in range(NUM_KINDS)
    ]
    assert one.version == two.version > 0


def test_a_page_counts_once_per_request() -> None:
    """Pages of an earlier call for the same request are not used again by a later."""
    whole, parts = (ReuseHistory(1_000, PAGE_TOKENS) for _ in range(2))
    for sequence in range(1, 4):
        whole.see(pages(0, 8), 0, sequence)
        parts.see(pages(0, 4), 0, sequence)
        kinds = parts.see(pages(0, 8), 4, sequence)
        assert len(kinds) == 8
    assert (whole.see(pages(0, 8), 0, 9) == parts.see(pages(0, 8), 0, 9)).all()


def test_memory_is_bounded() -> None:
    """A prompt longer than all that is remembered, and many prompts, do no harm."""
    history = ReuseHistory(4, PAGE_TOKENS)
    assert len(history.see(pages(0, 5_000), 0, 1)) == 5_000
    for number in range(200):
        kinds = history.see(pages(10_000 + 50 * number, 50), 0, 2 + number)
        assert len(kinds) == 50
    assert history.see(pages(0, 0), 0, 999).tolist() == []


def test_a_sample_stands_for_a_large_tier() -> None:
    """Of 100 million pages few are looked at, and each still gets a kind."""
    history = ReuseHistory(100_000_000, 16)
    for number in range(50):
        kinds = history.see(pages(1_000_000 * number, 2_000), 0, number + 1)
        assert len(kinds) == 2_000
        assert kinds.max() < NUM_KINDS


def duel(horizons_of: dict[int, float], rounds: int) -> Duel:
    """Three pages in a cache of two: 1 and 2 come again, 3 to 9 each but once."""
    fight = Duel(2)
    sequence = 0
    for number in range(rounds):
        for page in (1, 2, 10 + 2 * number, 11 + 2 * number):
            sequence += 1
            horizon = horizons_of.get(page, 0.0)
            fight.see(pages(page, 1), np.array([horizon]), sequence)
    return fight


def test_the_duel_is_won_by_hits() -> None:
    """Horizons that keep the pages that come again are proven better than LRU."""
    fight = duel({1: 100.0, 2: 100.0}, 40)
    assert fight.is_won
    assert fight.gain > 0


@pytest.mark.parametrize("horizons", [{}, {1: -100.0, 2: -100.0}])
def test_the_duel_is_not_won_without_hits(horizons: dict[int, float]) -> None:
    """Equal horizons are LRU, and wrong ones are worse: neither is trusted."""
    assert not duel(horizons, 40).is_won


def test_a_lost_lead_ends_the_trust() -> None:
    """What was better once is given up when it costs more hits than it brought."""
    fight = Duel(2)
    sequence = 0
    for number in range(40):
        for page in (1, 2, 10 + 2 * number, 11 + 2 * number):
            sequence += 1
            horizon = 1e6 if page < 3 else 0.0
            fight.see(pages(page, 1), np.array([horizon]), sequence)
    assert fight.is_won
    for number in range(400):
        # 1 and 2 never come again, and take up all the room of those that do.
        for page in (1_000 + number, 1_000 + number):
            sequence += 1
            fight.see(pages(page, 1), np.array([0.0]), sequence)
    assert not fight.is_won
