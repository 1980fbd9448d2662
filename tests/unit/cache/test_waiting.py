"""Loads of waiting requests: what a pass that is being put together is charged with."""

import numpy as np
import pytest

from sgl_tiered.cache.tiered_cache import CacheConfig, TierConfig, TieredCache
from sgl_tiered.cache.waiting import WaitingLoads
from sgl_tiered.cache.waiting_state import WaitingLoad
from sgl_tiered.core.clock import ManualClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import Namespace
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import TransferResult
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost
from sgl_tiered.policies.eviction.lru import LRUPolicy

LAYOUT = PageLayout(2, 4, 512)
NUM_PAGES = 6
PAGE_S = {TierId.HOST: 1e-3, TierId.CXL: 5e-3}
TIERS = tuple(PAGE_S)


def landed(num_pages):
    done, zeros = np.ones(num_pages, np.bool_), np.zeros(num_pages, np.uint64)
    return TransferResult(done, 0, 0.0, zeros)


@pytest.fixture
def cache():
    links = {
        tier: LinkCost(1e-9, LAYOUT.page_bytes / page_s)
        for tier, page_s in PAGE_S.items()
    }
    return TieredCache(
        CacheConfig(
            layout=LAYOUT,
            tiers=tuple(TierConfig(tier, 4 * NUM_PAGES) for tier in TIERS),
            load_policy="always",
        ),
        cost=CostModel(PrefillCost.from_coefficients(1e-4, 1.0, 1e-9), links),
        eviction={tier: LRUPolicy() for tier in TIERS},
        clock=ManualClock(),
    )


@pytest.mark.parametrize("tier", TIERS, ids=[tier.label for tier in TIERS])
def test_a_load_is_charged_to_the_link_of_its_tier(cache, monkeypatch, tier):
    """What the next decision counts on is the time of the tier that is read."""
    digest = cache.open_namespace(Namespace("model", "bfloat16", 2))
    tokens = np.arange(NUM_PAGES * LAYOUT.page_tokens + 1, dtype=np.int32)
    plan = cache.plan_offload(digest, tokens[:-1])
    cache.finish_offload(plan, landed(len(plan.pages)))
    demote = cache.plan_demote(NUM_PAGES)
    cache.finish_demote(demote, landed(len(demote.pages)))
    if tier is TierId.CXL:
        cache.drop_tier(TierId.HOST)
    loads = WaitingLoads(cache, TIERS, None, ManualClock())
    loads.begin_pass()
    first = WaitingLoad(digest, tokens, NUM_PAGES)
    assert loads.prepare(first, 0)
    assert set(loads.start(first).tiers.tolist()) == {tier}
    seen = []
    lookup = cache.lookup

    def spy(*args, facts, **kwargs):
        seen.append(facts)
        return lookup(*args, facts=facts, **kwargs)

    monkeypatch.setattr(cache, "lookup", spy)
    loads.decide(WaitingLoad(digest, tokens, NUM_PAGES), 0)

    assert seen[0].load_s == pytest.approx(NUM_PAGES * PAGE_S[tier], rel=1e-3)
