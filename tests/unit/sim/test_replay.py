"""Replays through exclusive and served hierarchies, by hand and against a list."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_tiered.cache.tiered_cache import TierConfig
from sgl_tiered.core.ids import TierId
from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.eviction.lru import LRUPolicy
from sgl_tiered.policies.eviction.registry import (
    EVICTION_POLICIES,
    make_eviction_policy,
)
from sgl_tiered.policies.write_admission.registry import WRITE_ADMISSIONS
from sgl_tiered.sim.exclusive import ExclusiveHierarchy, ExclusiveTier
from sgl_tiered.sim.page_trace import PageTrace
from sgl_tiered.sim.replay import (
    ReplayResult,
    ServedPolicies,
    replay_exclusive,
    replay_served,
)
from sgl_tiered.sim.stack import LRUCurve
from tests.unit.sim.replay_support import lru_places, spell_trace, word_lists

TIERS = (TierId.DEVICE, TierId.HOST, TierId.DISK)
SIZES = st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6))


def exclusive(words: list[str], *sizes: int, policy: str = "lru") -> ReplayResult:
    rng = np.random.default_rng(0)
    return replay_exclusive(
        spell_trace(words),
        [
            ExclusiveTier(tier, size, make_eviction_policy(policy, rng))
            for tier, size in zip(TIERS, sizes, strict=False)
        ],
    )


def served(words: list[str], device: int, *sizes: int) -> ReplayResult:
    lower = [TierConfig(t, n) for t, n in zip(TIERS[1:], sizes, strict=False)]
    return replay_served(spell_trace(words), device, lower)


def pages(result: ReplayResult) -> list[int]:
    return list(result.hit_pages.values())


def test_each_tier_serves_what_lies_there() -> None:
    """With one page on the device, one in the host and one on the disk: ``c`` is on
    the device, ``b`` in the host, ``a`` on the disk, and a hit moves it up."""
    result = exclusive(["a", "b", "c", "c", "b", "a", "a"], 1, 1, 1)
    assert pages(result) == [2, 1, 1]
    assert list(result.resident_pages.values()) == [1, 1, 1]
    assert result.token_hit_rate == pytest.approx(4 / 7)


def test_what_the_last_tier_loses_is_gone() -> None:
    """The fourth page pushes the first one out of three tiers of one page."""
    result = exclusive(["a", "b", "c", "d", "a"], 1, 1, 1)
    assert pages(result) == [0, 0, 0]
    assert list(result.lost_pages.values()) == [4, 3, 2]


def test_the_end_of_a_prompt_goes_first() -> None:
    """Of ``abc`` two pages stay on the device and the last goes to the host."""
    result = exclusive(["abc", "abc"], 2, 1)
    assert pages(result) == [2, 1]


def test_a_request_longer_than_the_device_is_served() -> None:
    """Its own pages are extra while it runs; afterwards its beginning is kept."""
    result = exclusive(["abcabca", "abcabca"], 2)
    assert pages(result) == [2]


def test_a_partial_page_counts_its_own_tokens() -> None:
    """``abC`` has 11 tokens, all of them hit, the last three in the host."""
    result = exclusive(["abC", "abC"], 2, 4)
    assert result.prompt_tokens == 22
    assert list(result.hit_tokens.values()) == [8, 3]


def test_the_device_hits_what_it_shares_with_a_longer_prompt() -> None:
    """``ab`` after ``abc``, then ``abd``: the common beginning only."""
    assert pages(exclusive(["abc", "ab", "abd"], 9)) == [4]


def test_fifo_is_told_from_lru() -> None:
    """The page used again stays under LRU and goes under FIFO."""
    words = ["a", "b", "a", "c", "a"]
    assert pages(exclusive(words, 2)) == [2]
    assert pages(exclusive(words, 2, policy="fifo")) == [1]


@given(words=word_lists(), sizes=SIZES)
def test_tiers_are_one_lru_cut_in_pieces(
    words: list[str], sizes: tuple[int, int, int]
) -> None:
    """Every page is hit in the tier that its place in a plain list falls into."""
    cuts = np.cumsum(sizes)
    wanted = [0, 0, 0]
    for places in lru_places(words):
        for place in places:
            if place is not None and place < cuts[-1]:
                wanted[int(np.searchsorted(cuts, place, "right"))] += 1
    assert pages(exclusive(words, *sizes)) == wanted


@given(words=word_lists(), sizes=SIZES)
def test_tiers_add_up_to_one_of_the_total_size(
    words: list[str], sizes: tuple[int, int, int]
) -> None:
    """In tokens, whatever the split."""
    whole = exclusive(words, sum(sizes))
    split = exclusive(words, *sizes)
    assert sum(split.hit_tokens.values()) == sum(whole.hit_tokens.values())


@given(words=word_lists(), sizes=SIZES)
def test_pages_are_conserved(words: list[str], sizes: tuple[int, int, int]) -> None:
    """What comes into a tier is hit, lost or still there."""
    result = exclusive(words, *sizes)
    used = sum(len(word) for word in words)
    came = used - result.hit_pages[TierId.DEVICE]
    for tier, size in zip(TIERS, sizes, strict=True):
        moved_up = 0 if tier is TierId.DEVICE else result.hit_pages[tier]
        assert result.resident_pages[tier] == came - moved_up - result.lost_pages[tier]
        assert result.resident_pages[tier] <= size
        came = result.lost_pages[tier]


@given(
    words=word_lists(), sizes=SIZES, policy=st.sampled_from(sorted(EVICTION_POLICIES))
)
def test_any_policy_keeps_a_page_once(
    words: list[str], sizes: tuple[int, int, int], policy: str
) -> None:
    """Tiers stay within their sizes, hold no page twice, and hit at most the ideal."""
    result = exclusive(words, *sizes, policy=policy)
    curve = LRUCurve(spell_trace(words))
    resident = result.resident_pages
    assert all(resident[t] <= n for t, n in zip(TIERS, sizes, strict=True))
    assert sum(resident.values()) <= curve.num_unique
    assert sum(pages(result)) <= curve.hit_pages(curve.num_unique)


def test_served_tiers_hold_copies() -> None:
    """Two pages on the device and two in the host are two pages, not four."""
    words = ["a", "b", "c", "d", "b", "a"]
    assert sum(pages(exclusive(words, 2, 2))) == 2
    assert pages(served(words, 2, 2)) == [0, 0]
    assert pages(served(words, 2, 4)) == [0, 2]


def test_served_disk_outlives_the_host() -> None:
    """What the host lost is read from the disk, and is in the host again then."""
    assert pages(served(["a", "b", "c", "a", "b", "a"], 1, 2, 9)) == [0, 1, 2]


@given(words=word_lists(), sizes=SIZES)
def test_served_reaches_its_largest_tier(
    words: list[str], sizes: tuple[int, int, int]
) -> None:
    """An inclusive hierarchy hits what LRU of its largest tier alone does, where the
    host can hold any prompt: what never was in the host is never on the disk."""
    device, host, disk = sizes[0], sizes[1] + 7, sizes[2] + 7
    curve = LRUCurve(spell_trace(words))
    result = served(words, device, host, disk)
    assert sum(pages(result)) == curve.hit_pages(max(device, host, disk))


CHAIN = (TierId.HOST, TierId.CXL, TierId.DISK)


def chained(
    words: list[str], device: int, *sizes: int, **policies: str
) -> ReplayResult:
    lower = [TierConfig(tier, n) for tier, n in zip(CHAIN, sizes, strict=True)]
    return replay_served(spell_trace(words), device, lower, ServedPolicies(**policies))


@given(words=word_lists(), more=st.tuples(*[st.integers(0, 6)] * 4))
def test_a_chain_hits_in_each_tier_what_lru_of_its_size_does(
    words: list[str], more: tuple[int, int, int, int]
) -> None:
    """Each tier holds what those above do and more: stack distances say its hits."""
    # Every tier can hold any prompt, and is larger than the one above it.
    device, host, cxl, disk = (8 * (n + 1) + sum(more[: n + 1]) for n in range(4))
    curve = LRUCurve(spell_trace(words))
    hits = [curve.hit_pages(size) for size in (device, host, cxl, disk)]
    wanted = [b - a for a, b in pairwise([0, *hits])]
    assert pages(chained(words, device, host, cxl, disk)) == wanted


@given(words=word_lists(), admission=st.sampled_from(WRITE_ADMISSIONS))
def test_no_admission_hits_more_than_writing_all(
    words: list[str], admission: str
) -> None:
    """It writes at most as much, and where the disk holds everything hits so too."""
    everything = chained(words, 1, 8, 8, 999)
    picky = chained(words, 1, 8, 8, 999, disk_admission=admission)
    assert picky.stored_pages[TierId.DISK] <= everything.stored_pages[TierId.DISK]
    assert sum(pages(picky)) <= sum(pages(everything))


def test_second_hit_leaves_one_time_prompts_out() -> None:
    """Of three prompts seen once and one seen twice only the latter is on disk."""
    words = ["aa", "bb", "cc", "bb", "dd"]
    picky = chained(words, 1, 9, 9, 99, disk_admission="second-hit")
    assert picky.stored_pages[TierId.DISK] == 2


@given(words=word_lists(), threshold=st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_on_evict_loses_only_what_it_says(words: list[str], threshold: float) -> None:
    """Pages in no tier at the end are on the device or were counted as late."""
    lower = [TierConfig(TierId.HOST, 999)]
    policies = ServedPolicies(write_policy="on-evict", offload_threshold=threshold)
    result = replay_served(spell_trace(words), 9, lower, policies)
    through = replay_served(spell_trace(words), 9, lower)
    assert result.stored_pages[TierId.HOST] <= through.stored_pages[TierId.HOST]
    assert sum(pages(result)) <= sum(pages(through))
    missing = through.stored_pages[TierId.HOST] - result.stored_pages[TierId.HOST]
    assert missing <= result.late_pages + result.resident_pages[TierId.DEVICE]


@pytest.mark.parametrize(
    "tiers",
    [
        [],
        [(TierId.HOST, 1), (TierId.DEVICE, 1)],
        [(TierId.HOST, 1), (TierId.HOST, 1)],
        [(TierId.DEVICE, 0)],
    ],
)
def test_a_hierarchy_that_cannot_be_is_refused(tiers: list[tuple[TierId, int]]) -> None:
    """None, out of order, twice the same, or without room."""
    with pytest.raises(ConfigError):
        ExclusiveHierarchy(
            [ExclusiveTier(t, n, LRUPolicy()) for t, n in tiers], max_request_pages=1
        )


def test_an_empty_trace_is_no_hit() -> None:
    """No requests, and a request without pages."""
    assert exclusive([], 1).token_hit_rate == 0
    trace = PageTrace([np.zeros(0, np.int64)] * 2, [3, 3], 4)
    result = replay_exclusive(trace, [ExclusiveTier(TierId.DEVICE, 1, LRUPolicy())])
    assert (result.prompt_tokens, result.token_hit_rate) == (6, 0)
