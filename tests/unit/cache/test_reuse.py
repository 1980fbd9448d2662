"""What is learned of reuse: kinds, densities, and the proof that they are better."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_tiered.cache.duel import AGE_EDGES, Duel
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
    """Every density is 0, so everything ranks as under LRU."""
    history = ReuseHistory(1_000, PAGE_TOKENS)
    kinds = history.see(pages(0, 10), 0, 1)
    assert not history.is_used
    assert {history.density(int(kind), 1) for kind in kinds} == {0.0}


def test_what_comes_again_is_worth_more() -> None:
    """Chats are proven to be worth more room than prompts that never come again."""
    history = ReuseHistory(120, PAGE_TOKENS)
    teach(history, 200)
    assert history.is_used
    assert history.gain > 0
    chat = history.see(pages(10_000_000, 4), 0, 100_000)
    single = history.see(pages(20_000_000, 60), 0, 100_001)
    of_chat = history.density(int(chat[0]), 100_000)
    assert of_chat > history.density(int(single[0]), 100_000)


def test_densities_are_those_of_the_life_table() -> None:
    """A kind used again at age 1, always, is worth one use per access of room.

    At the start, that is: of those that waited longer none was ever used.
    """
    history = ReuseHistory(100, PAGE_TOKENS, trusted=True)
    for sequence in range(1, 2_000):
        kinds = history.see(pages(0, 4), 0, sequence)
    kind = int(kinds[0])
    assert history.density(kind, 1_999) > 0.5
    assert history.density(kind, 1_000) < history.density(kind, 1_999)


def test_equal_uses_teach_the_same() -> None:
    """Nothing depends on chance or on a clock."""
    one, two = (ReuseHistory(120, PAGE_TOKENS) for _ in range(2))
    teach(one, 80)
    teach(two, 80)
    assert one.is_used
    assert [one.density(kind, 50) for kind in range(NUM_KINDS)] == [
        two.density(kind, 50) for kind in range(NUM_KINDS)
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


def test_a_small_tier_remembers_beyond_its_room() -> None:
    """What comes again after a thousand other pages is known to be used twice."""
    history = ReuseHistory(4, PAGE_TOKENS)
    first = history.see(pages(0, 4), 0, 1)
    for number in range(20):
        history.see(pages(10_000 + 50 * number, 50), 0, 2 + number)
    assert (history.see(pages(0, 4), 0, 99) != first).all()


def test_steps_tell_when_a_density_changes() -> None:
    """A page that gets one access older has another density only at its step."""
    history = ReuseHistory(120, PAGE_TOKENS, trusted=True)
    teach(history, 40)
    kind = int(history.see(pages(10_000_000, 4), 0, 10_000)[0])
    now, num_changes = history.sequence, 0
    for age in range(300):
        accessed = now - age
        step = history.next_step(accessed)
        assert step is not None
        assert step > now
        if history.density(kind, accessed) != history.density(kind, accessed - 1):
            num_changes += 1
            assert step == now + 1
    assert num_changes > 3


def test_a_sample_stands_for_a_large_tier() -> None:
    """Of 100 million pages few are looked at, and each still gets a kind."""
    history = ReuseHistory(100_000_000, 16)
    for number in range(50):
        kinds = history.see(pages(1_000_000 * number, 2_000), 0, number + 1)
        assert len(kinds) == 2_000
        assert kinds.max() < NUM_KINDS


def duel(densities: dict[int, float], rounds: int) -> Duel:
    """Let 1 and 2 come again and again among pages that come but once.

    They are of kind 1, the others of kind 0; both caches hold two pages.
    """
    fight = Duel(2)
    table = np.zeros((2, len(AGE_EDGES) + 1))
    for kind, density in densities.items():
        table[kind] = density
    fight.use(table)
    sequence = 0
    for number in range(rounds):
        for page in (1, 2, 10 + 2 * number, 11 + 2 * number):
            sequence += 1
            fight.see([page], [int(page < 3)], 0, sequence)
    return fight


def test_the_duel_is_won_by_hits() -> None:
    """Densities that keep the pages that come again are proven better than LRU."""
    fight = duel({1: 1.0}, 40)
    assert fight.is_won
    assert fight.gain > 0


@pytest.mark.parametrize("densities", [{}, {0: 1.0}])
def test_the_duel_is_not_won_without_hits(densities: dict[int, float]) -> None:
    """Equal densities are LRU, and wrong ones bring nothing: neither is trusted."""
    fight = duel(densities, 40)
    assert not fight.is_won
    assert fight.gain <= 0


def test_neither_the_oldest_nor_the_youngest_need_go() -> None:
    """Where a middle age is worth least, the page of that age makes room."""
    fight = Duel(3)
    table = np.ones((1, len(AGE_EDGES) + 1))
    table[0, AGE_EDGES.searchsorted(3) : AGE_EDGES.searchsorted(12)] = 0.1
    fight.use(table)
    for page, sequence in ((1, 1), (2, 14), (3, 19), (4, 20), (1, 21)):
        fight.see([page], [0], 0, sequence)
    # LRU gave up the oldest, 1.
    assert fight.gain == pytest.approx(1)


def test_a_lost_lead_ends_the_trust() -> None:
    """What was better once is given up when it costs more hits than it brought."""
    fight = duel({1: 1.0}, 40)
    assert fight.is_won
    for number in range(400):
        # Pages that come twice, and find the room taken by 1 and 2.
        pair = [1_000 + 2 * number, 1_001 + 2 * number]
        for _ in range(2):
            fight.see(pair, [0, 0], 0, 1_000 + number)
    assert not fight.is_won
    assert fight.gain <= 0


def test_a_beginning_outlives_its_end() -> None:
    """Of a prompt the last page goes first, however little its beginning is worth."""
    fight = Duel(2)
    table = np.zeros((2, len(AGE_EDGES) + 1))
    table[1] = 1.0
    fight.use(table)
    fight.see([1, 2, 3], [0, 0, 1], 0, 1)
    before = fight.gain
    fight.see([1, 2], [0, 0], 0, 2)
    # LRU hit both as well: the two caches agree.
    assert fight.gain == pytest.approx(before)
