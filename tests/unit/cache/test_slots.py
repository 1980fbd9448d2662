"""SlotAllocator: all or nothing, ascending, and never the same slot twice."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_tiered.cache.slots import SlotAllocator


def test_alloc_is_all_or_nothing() -> None:
    """More than is free gives None and changes nothing."""
    slots = SlotAllocator(4)
    assert slots.alloc(3) is not None
    assert slots.alloc(2) is None
    assert (slots.free_slots, slots.used_slots) == (1, 3)


def test_a_new_tier_is_handed_out_as_one_run() -> None:
    """First slots first, in order."""
    slots = SlotAllocator(10)
    first, second = slots.alloc(4), slots.alloc(3)
    assert first is not None
    assert second is not None
    assert first.tolist() == [0, 1, 2, 3]
    assert second.tolist() == [4, 5, 6]


def test_a_freed_run_is_reused_as_a_run() -> None:
    """Who evicts a run gets that run."""
    slots = SlotAllocator(10)
    slots.alloc(10)
    slots.free(np.array([6, 4, 5]))
    again = slots.alloc(3)
    assert again is not None
    assert again.tolist() == [4, 5, 6]


def test_scattered_frees_do_not_scatter_for_good() -> None:
    """After many frees a contiguous run is found again."""
    slots = SlotAllocator(64)
    slots.alloc(64)
    rng = np.random.default_rng(0)
    for slot in rng.permutation(64)[:63]:
        slots.free(np.array([slot]))
    taken = slots.alloc(16)
    assert taken is not None
    assert (np.diff(taken) == 1).sum() >= 14


def test_random_use_keeps_count() -> None:
    """Free and used always make the capacity; no slot is held twice."""
    rng = np.random.default_rng(1)
    slots, held = SlotAllocator(50), set()
    for _ in range(2000):
        if rng.random() < 0.5:
            taken = slots.alloc(int(rng.integers(0, 8)))
            if taken is not None:
                assert (np.diff(taken) > 0).all()
                assert not held & set(taken.tolist())
                held |= set(taken.tolist())
        else:
            some = rng.permutation(sorted(held))[: int(rng.integers(0, 8))]
            slots.free(some.astype(np.int64))
            held -= set(some.tolist())
        assert slots.used_slots == len(held)
        free = np.ones(50, np.bool_)
        free[sorted(held)] = False
        runs = zip(slots._starts.tolist(), slots._lengths.tolist(), strict=True)
        assert [s for a, n in runs for s in range(a, a + n)] == np.flatnonzero(
            free
        ).tolist()
        assert slots.free_slots + slots.used_slots == slots.capacity


@pytest.mark.parametrize("twice", [[3], [0, 0]])
def test_double_free_is_a_broken_invariant(twice: list[int]) -> None:
    """A free slot, or one slot twice in a call, is asserted with numbers."""
    slots = SlotAllocator(4)
    slots.alloc(2)
    with pytest.raises(AssertionError, match=r"\d"):
        slots.free(np.array(twice))


def test_reserve_takes_the_very_slots() -> None:
    """Free ones inside the tier, each once; the others are refused."""
    slots = SlotAllocator(5)
    slots.alloc(1)
    taken = slots.reserve(np.array([0, 3, 9, -1, 3, 4]))
    assert taken.tolist() == [False, True, False, False, False, True]
    rest = slots.alloc(2)
    assert rest is not None
    assert rest.tolist() == [1, 2]
    assert slots.alloc(1) is None


def test_growth_adds_free_slots() -> None:
    """What is in use stays in use."""
    slots = SlotAllocator(2)
    slots.alloc(2)
    slots.grow(5)
    more = slots.alloc(3)
    assert more is not None
    assert more.tolist() == [2, 3, 4]


def test_the_shortest_run_that_fits_is_taken() -> None:
    """Long runs stay whole for those who need them."""
    slots = SlotAllocator(30)
    slots.alloc(30)
    slots.free(np.arange(2, 12))
    slots.free(np.arange(20, 24))
    taken = slots.alloc(4)
    assert taken is not None
    assert taken.tolist() == [20, 21, 22, 23]
    taken = slots.alloc(8)
    assert taken is not None
    assert taken.tolist() == list(range(2, 10))


def test_what_fits_nowhere_gets_the_longest_runs() -> None:
    """As few pieces as there can be, ascending, the last one from its start."""
    slots = SlotAllocator(30)
    slots.alloc(30)
    for begin, end in ((0, 2), (5, 9), (12, 17), (20, 23)):
        slots.free(np.arange(begin, end))
    taken = slots.alloc(11)
    assert taken is not None
    assert taken.tolist() == [*range(5, 9), *range(12, 17), 20, 21]
    assert slots.alloc(4) is None
    rest = slots.alloc(3)
    assert rest is not None
    assert rest.tolist() == [0, 1, 22]


def test_neighbours_that_are_freed_become_one_run() -> None:
    """Runs grow together from both sides, in one call or in several."""
    slots = SlotAllocator(12)
    slots.alloc(12)
    for some in ([4, 5], [8, 1], [6, 7, 0], [2, 3]):
        slots.free(np.array(some))
    assert slots._starts.tolist() == [0]
    assert slots._lengths.tolist() == [9]


def test_an_empty_tier_has_no_runs() -> None:
    """Nothing can be had from a tier of no slots, and nothing breaks."""
    slots = SlotAllocator(0)
    assert slots.alloc(1) is None
    nothing = slots.alloc(0)
    assert nothing is not None
    assert len(nothing) == 0


def test_what_grows_is_free_behind_what_is_there() -> None:
    """It goes on from a run that touches the end, or is one of its own."""
    slots = SlotAllocator(0)
    slots.grow(0)
    assert slots._starts.tolist() == []
    slots.grow(4)
    slots.grow(6)
    assert (slots._starts.tolist(), slots._lengths.tolist()) == ([0], [6])
    slots.alloc(6)
    slots.free(np.array([1, 2]))
    slots.grow(9)
    assert (slots._starts.tolist(), slots._lengths.tolist()) == ([1, 6], [2, 3])
    slots.grow(9)
    assert (slots._starts.tolist(), slots._lengths.tolist()) == ([1, 6], [2, 3])
    assert (slots.capacity, slots.free_slots) == (9, 5)
