"""What a waiting request is predicted to cost, by where its pages are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sgl_tiered.cache.foresight import foresee
from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.cache.waiting_state import WaitingLoad
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import Namespace
from sgl_tiered.core.plans import TransferResult
from sgl_tiered.policies.order.base import Location
from sgl_tiered.testing.strategies import spell

PAGE_TOKENS = 4
MakeCache = Callable[..., TieredCache]


def landed(num_pages: int) -> TransferResult:
    return TransferResult(np.ones(num_pages, np.bool_), 0, 1e-3)


def keep(cache: TieredCache, word: str, tier: TierId) -> bytes:
    """Put a word's pages into one tier alone; return the namespace."""
    digest = cache.open_namespace(Namespace("model", "bfloat16", PAGE_TOKENS))
    plan = cache.plan_offload(digest, spell(word, PAGE_TOKENS))
    assert plan is not None
    cache.finish_offload(plan, landed(len(plan.pages)))
    if tier is not TierId.HOST:
        while (demote := cache.plan_demote(100)) is not None:
            cache.finish_demote(demote, landed(len(demote.pages)))
        cache.drop_tier(TierId.HOST)
    return digest


def waiting(digest: bytes, word: str) -> WaitingLoad[object]:
    tokens = spell(word, PAGE_TOKENS, 1)
    return WaitingLoad(digest, tokens, len(tokens) // PAGE_TOKENS)


@pytest.mark.parametrize(
    ("tier", "location"),
    [(TierId.HOST, Location.HOST), (TierId.CXL, Location.CXL)],
)
def test_pages_of_a_memory_tier(
    make_cache: MakeCache, tier: TierId, location: Location
) -> None:
    """They are named by their tier, and cost their load and the token behind them."""
    cache = make_cache(cxl=8)
    digest = keep(cache, "abcd", tier)
    state = waiting(digest, "abcd")
    found = foresee(cache, state, 0, len(state.tokens))
    assert found.location is location
    assert found.num_uncached_tokens == 1
    assert found.has_history
    load_s = cache.planner.load_s(tier, 4)
    one_s = cache.planner.service_s(np.zeros(0, np.uint8), 4, 17)
    assert found.service_s == pytest.approx(load_s + one_s)


def test_pages_on_disk_cost_their_copy_and_not_their_read(
    make_cache: MakeCache,
) -> None:
    """The read runs before the pass; only what is copied in it counts."""
    cache = make_cache(disk=8)
    digest = keep(cache, "abcd", TierId.DISK)
    found = foresee(cache, waiting(digest, "abcd"), 0, 17)
    assert found.location is Location.DISK
    copy_s = cache.planner.load_s(TierId.HOST, 4)
    one_s = cache.planner.service_s(np.zeros(0, np.uint8), 4, 17)
    assert found.service_s == pytest.approx(copy_s + one_s)


def test_the_slowest_tier_gives_the_name(make_cache: MakeCache) -> None:
    """Two pages on the device, the rest in the host: the host; all here: the device."""
    cache = make_cache()
    state = waiting(keep(cache, "abcd", TierId.HOST), "abcd")
    assert foresee(cache, state, 2, 17).location is Location.HOST
    whole = foresee(cache, state, 4, 17)
    assert whole.location is Location.DEVICE
    assert whole.num_uncached_tokens == 1


def test_what_nobody_has_is_computed(make_cache: MakeCache) -> None:
    """Nowhere, without history, all of it uncached, and the dearest."""
    cache = make_cache()
    digest = keep(cache, "abcd", TierId.HOST)
    new = foresee(cache, waiting(digest, "wxyz"), 0, 17)
    assert new.location is Location.NOWHERE
    assert not new.has_history
    assert new.num_uncached_tokens == 17
    assert new.service_s == cache.planner.service_s(np.zeros(0, np.uint8), 0, 17)


def test_what_is_not_worth_its_load_has_history_all_the_same(
    make_cache: MakeCache,
) -> None:
    """It is computed, though it was found."""
    cache = make_cache(load_policy="never")
    found = foresee(cache, waiting(keep(cache, "abcd", TierId.HOST), "abcd"), 0, 17)
    assert found.location is Location.NOWHERE
    assert found.has_history


def test_a_begun_read_counts_as_done(make_cache: MakeCache) -> None:
    """Its pages are in the plan; the cache would call them busy."""
    cache = make_cache(disk=8)
    state = waiting(keep(cache, "abcd", TierId.DISK), "abcd")
    before = foresee(cache, state, 0, 17)
    decision = cache.lookup(state.digest, state.tokens, 0, max_pages=4)
    state.plan = cache.commit_load(decision)
    state.num_good = 4
    assert foresee(cache, state, 0, 17) == before


def test_a_prediction_changes_nothing(make_cache: MakeCache) -> None:
    """Neither pages nor recency nor counters nor trials, however often it is asked."""
    cache = make_cache(disk=8, load_policy="auto")
    digest = keep(cache, "abcd", TierId.HOST)
    keep(cache, "wxyz", TierId.HOST)
    before = cache.state_digest(), cache.stats
    for _ in range(50):
        foresee(cache, waiting(digest, "abcd"), 0, 17)
    assert (cache.state_digest(), cache.stats) == before
    cache.lookup(digest, spell("abcd", PAGE_TOKENS), 0)
    assert (cache.state_digest(), cache.stats) != before
