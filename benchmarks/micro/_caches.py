"""A cache over host and disk with the costs of a small model, for the programs here."""

from __future__ import annotations

import numpy as np

from sgl_tiered.cache.tiered_cache import CacheConfig, TierConfig, TieredCache
from sgl_tiered.core.clock import SystemClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import TransferResult
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost
from sgl_tiered.policies.eviction.registry import make_eviction_policy

PAGE_TOKENS = 16


def make_cache(host_pages: int, disk_pages: int, tombstones: int = 0) -> TieredCache:
    """Return an empty cache of so many pages per tier."""
    tiers = (TierConfig(TierId.HOST, host_pages), TierConfig(TierId.DISK, disk_pages))
    rng = np.random.default_rng(0)
    return TieredCache(
        CacheConfig(PageLayout(12, PAGE_TOKENS, 512), tiers, tombstones=tombstones),
        cost=CostModel(
            PrefillCost(40_000_000, 12, 512, 1e11),
            {TierId.HOST: LinkCost(1e-4, 8e9), TierId.DISK: LinkCost(5e-4, 1e9)},
        ),
        eviction={t.tier: make_eviction_policy("lru", rng) for t in tiers},
        clock=SystemClock(),
    )


def landed(num_pages: int) -> TransferResult:
    """Return the result of a transfer that succeeded."""
    return TransferResult(np.ones(num_pages, np.bool_), 0, 1e-3)
