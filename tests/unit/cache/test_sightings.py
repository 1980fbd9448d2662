"""The memory of what requests had."""

from __future__ import annotations

import numpy as np

from sgl_tiered.cache.sightings import WORTH, Sightings
from sgl_tiered.core.keys import page_keys
from sgl_tiered.core.plans import UInt8s


def keys(num_pages: int, seed: int) -> UInt8s:
    """Return keys of pages that nobody else has."""
    tokens = np.random.default_rng(seed).integers(2**31, size=num_pages * 4)
    return page_keys(bytes(16), tokens.astype(np.int32), 4)


def test_sightings_are_counted_up_to_two() -> None:
    """None, one, two, and still two."""
    sightings = Sightings(1000)
    pages = keys(50, seed=0)
    for wanted in (0, 1, 2, 2):
        assert set(sightings.count(pages).tolist()) == {wanted}
        sightings.see(pages, 0)


def test_a_full_filter_mistakes_few_new_pages() -> None:
    """At most one in ten thousand of unseen pages counts as seen."""
    sightings = Sightings(4000)
    for seed in range(6):
        sightings.see(keys(1000, seed=1 + seed), 0)
    wrong = np.count_nonzero(sightings.count(keys(20_000, seed=99)))
    assert wrong <= 2


def test_what_was_seen_long_ago_is_forgotten_and_what_is_used_is_not() -> None:
    """Two generations of others later only the page seen in between is known."""
    sightings = Sightings(100)
    old, used = keys(10, seed=1), keys(10, seed=2)
    sightings.see(old, 0)
    for seed in range(10, 40):
        sightings.see(used, 0)
        sightings.see(keys(20, seed=seed), 0)
    assert (sightings.count(used) == 2).all()
    assert np.count_nonzero(sightings.count(old)) <= 3


def test_reuse_rates_are_by_depth() -> None:
    """Beginnings that come again have a rate of their own."""
    sightings = Sightings(10_000)
    shared = keys(4, seed=0)
    for seed in range(10):
        sightings.see(shared, 0)
        sightings.see(keys(60, seed=1 + seed), 4)
    rates = sightings.reuse_rates(0, 64)
    assert (rates[:3] == 1.0).all()
    assert rates[40:].max() < 0.1


def test_pages_come_again_until_as_many_as_were_asked_for_did_not() -> None:
    """Then one page that does is worth fifty new ones, up to where it began or to what
    one prompt has earned."""
    sightings = Sightings(1000, trust_pages=100)
    sightings.see(keys(99, seed=0), 0)
    assert sightings.comes_again
    sightings.see(keys(1, seed=1), 0)
    assert not sightings.comes_again
    sightings.see(keys(1, seed=1), 0)
    sightings.see(keys(WORTH - 1, seed=2), 0)
    assert sightings.comes_again
    sightings.see(keys(1, seed=3), 0)
    assert not sightings.comes_again
    for _ in range(2):
        sightings.see(keys(10, seed=4), 0)
    sightings.see(keys(10 * WORTH - 1, seed=5), 0)
    assert sightings.comes_again
    sightings.see(keys(1, seed=6), 0)
    assert not sightings.comes_again
    for _ in range(2):
        for seed in range(7, 12):
            sightings.see(keys(1, seed=seed), 0)
    sightings.see(keys(99, seed=12), 0)
    assert sightings.comes_again
    sightings.see(keys(1, seed=13), 0)
    assert not sightings.comes_again


def test_a_third_sight_is_worth_nothing() -> None:
    """As of a beginning that all prompts share."""
    sightings = Sightings(1000, trust_pages=100)
    for _ in range(3):
        sightings.see(keys(2, seed=0), 0)
    for seed in range(1, 11):
        sightings.see(np.concatenate([keys(2, seed=0), keys(10, seed=seed)]), 0)
    assert not sightings.comes_again


def test_pages_behind_a_new_one_are_new() -> None:
    """A key stands for all that precedes it, so what the filter says there is wrong."""
    sightings = Sightings(1000, trust_pages=100)
    sightings.see(keys(50, seed=0), 0)
    sightings.see(np.concatenate([keys(1, seed=1), keys(50, seed=0)]), 0)
    assert not sightings.comes_again


def test_what_a_tier_has_comes_again_at_its_first_sight() -> None:
    """A former process left it on disk, or it was forgotten here."""
    sightings = Sightings(1000, trust_pages=100)
    sightings.see(keys(100, seed=0), 0)
    sightings.see(keys(10, seed=1), 0, num_held=10)
    assert sightings.comes_again


def test_without_trust_nothing_is_expected() -> None:
    """Policies that do not ask."""
    assert not Sightings(1000).comes_again


def test_clear_forgets_everything() -> None:
    """As after a change of weights."""
    sightings = Sightings(100, trust_pages=10)
    sightings.see(keys(10, seed=0), 0)
    sightings.clear()
    assert sightings.comes_again
    assert not sightings.count(keys(10, seed=0)).any()
    assert not sightings.reuse_rates(0, 10).any()
    sightings.see(keys(0, seed=0), 5)


def test_memory_is_fixed() -> None:
    """16 bytes per page of the capacity, whatever comes."""
    sightings = Sightings(1000)
    assert sightings.num_bytes == 16_000
    sightings.see(keys(5000, seed=0), 0)
    assert sightings.num_bytes == 16_000
