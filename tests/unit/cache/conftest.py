"""Caches and transfer results for the stories told by these tests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sgl_tiered.cache.lookahead import QueueLookahead
from sgl_tiered.cache.tiered_cache import CacheConfig, TierConfig, TieredCache
from sgl_tiered.core.clock import ManualClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost
from sgl_tiered.policies.eviction.registry import make_eviction_policy

PAGE_TOKENS = 4


@pytest.fixture
def make_cache() -> Callable[..., TieredCache]:
    """Return a maker of caches: slots per tier, then settings of CacheConfig."""

    def make(
        host: int = 8,
        disk: int = 0,
        cxl: int = 0,
        eviction: str = "lru",
        clock: ManualClock | None = None,
        lookahead: QueueLookahead | None = None,
        **settings: object,
    ) -> TieredCache:
        sizes = {TierId.HOST: host, TierId.CXL: cxl, TierId.DISK: disk}
        tiers = tuple(TierConfig(t, n) for t, n in sizes.items() if n)
        rng = np.random.default_rng(0)
        settings.setdefault("load_policy", "always")
        return TieredCache(
            CacheConfig(PageLayout(2, PAGE_TOKENS, 32), tiers, **settings),  # type: ignore[arg-type]
            cost=CostModel(
                PrefillCost(10**6, 2, 32, 1e9),
                {t: LinkCost(1e-4, 1e9) for t in sizes},
            ),
            eviction={t.tier: make_eviction_policy(eviction, rng) for t in tiers},
            clock=clock or ManualClock(),
            lookahead=lookahead,
        )

    return make
