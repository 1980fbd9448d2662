"""Replay of a trace without time: how many prompt tokens are hit, and in which tier.

Two hierarchies, both run with the product's own classes: ``replay_exclusive`` (every
page in one tier, see ``exclusive.py``) and ``replay_served`` (what is shipped: the
engine's device tree under LRU over an inclusive, write-through ``TieredCache``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sgl_tiered.cache.tiered_cache import CacheConfig, TierConfig, TieredCache
from sgl_tiered.core.clock import ManualClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import Namespace
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import Int32s, TransferResult
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost
from sgl_tiered.policies.eviction.lru import LRUPolicy
from sgl_tiered.sim.exclusive import ExclusiveHierarchy, ExclusiveTier
from sgl_tiered.sim.page_trace import PageTrace

__all__ = ["ReplayResult", "replay_exclusive", "replay_served"]

_DEMOTE_PAGES = 4096
"""Pages asked for in one demotion; without time, only the number of calls depends."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a hierarchy made of a trace.

    Attributes:
        prompt_tokens: of all requests, those in no page included.
        hit_tokens: per tier, fastest first.
        hit_pages: the same in pages; what was brought up from each tier.
        lost_pages: per tier, pages that it gave up: passed to the next tier in an
            exclusive hierarchy, dropped in an inclusive one and from the last tier.
        resident_pages: per tier, pages in it at the end.
    """

    prompt_tokens: int
    hit_tokens: Mapping[TierId, int]
    hit_pages: Mapping[TierId, int]
    lost_pages: Mapping[TierId, int]
    resident_pages: Mapping[TierId, int]

    @property
    def token_hit_rate(self) -> float:
        """Share of all prompt tokens that some tier had."""
        return sum(self.hit_tokens.values()) / max(1, self.prompt_tokens)

    def token_hit_rate_of(self, tier: TierId) -> float:
        """Share of all prompt tokens that were hit in this tier."""
        return self.hit_tokens[tier] / max(1, self.prompt_tokens)


class _Hits:
    """Adds up hits by tier; the last page of a prompt may be a partial one."""

    def __init__(self, trace: PageTrace, tiers: Sequence[TierId]) -> None:
        self._trace = trace
        self.tokens = dict.fromkeys(tiers, 0)
        self.pages = dict.fromkeys(tiers, 0)

    def add(self, request: int, pages: Mapping[TierId, int]) -> None:
        """Note a request's hits: the fastest tier has the first pages, and so on."""
        num_pages = num_tokens = 0
        for tier, count in pages.items():
            num_pages += count
            reached = self._trace.tokens_of(request, num_pages)
            self.tokens[tier] += reached - num_tokens
            self.pages[tier] += count
            num_tokens = reached


def replay_exclusive(trace: PageTrace, tiers: Sequence[ExclusiveTier]) -> ReplayResult:
    """Replay through an exclusive hierarchy.

    Where a policy other than LRU leaves the pages of a prompt in mixed order, a last
    partial page is counted for the slowest tier that the prompt was hit in.

    Args:
        trace: the requests.
        tiers: fastest first.
    """
    hierarchy = ExclusiveHierarchy(
        tiers, max_request_pages=int(trace.num_pages.max(initial=0))
    )
    hits = _Hits(trace, [tier.tier for tier in tiers])
    for request in range(len(trace)):
        hits.add(request, hierarchy.access(trace.pages(request)))
    return ReplayResult(
        prompt_tokens=trace.total_tokens,
        hit_tokens=hits.tokens,
        hit_pages=hits.pages,
        lost_pages=hierarchy.lost_pages,
        resident_pages=hierarchy.num_resident,
    )


def replay_served(
    trace: PageTrace, device_pages: int, lower: Sequence[TierConfig]
) -> ReplayResult:
    """Replay through what is shipped: device LRU over an inclusive ``TieredCache``.

    All policies are the defaults (LRU, write-through both ways) but the load policy,
    which is ``always``: without time nothing says what a load costs. Every transfer
    succeeds, and ends before the next request comes.

    Args:
        trace: the requests.
        device_pages: pages that the device holds between requests.
        lower: one or two tiers below it; each also holds what the one above does.
    """
    longest = int(trace.num_pages.max(initial=0))
    device = ExclusiveHierarchy(
        [ExclusiveTier(TierId.DEVICE, device_pages, LRUPolicy())],
        max_request_pages=longest,
    )
    cache = _tiered_cache(lower)
    # One token of a page says which prefix it ends, as its id does.
    digest = cache.open_namespace(Namespace("replay", "none", page_tokens=1))
    hits = _Hits(trace, [TierId.DEVICE, *(tier.tier for tier in lower)])
    for request in range(len(trace)):
        pages = trace.pages(request)
        found = device.access(pages)
        found |= _load(cache, digest, pages, found[TierId.DEVICE])
        hits.add(request, found)
        _store(cache, digest, pages)
    lost = dict(device.lost_pages)
    resident = dict(device.num_resident)
    for tier in lower:
        lost[tier.tier] = cache.stats.pages_evicted[tier.tier]
        resident[tier.tier] = cache.occupancy(tier.tier).used_slots
    return ReplayResult(
        prompt_tokens=trace.total_tokens,
        hit_tokens=hits.tokens,
        hit_pages=hits.pages,
        lost_pages=lost,
        resident_pages=resident,
    )


def _tiered_cache(lower: Sequence[TierConfig]) -> TieredCache:
    config = CacheConfig(
        PageLayout(num_layers=1, page_tokens=1, token_bytes=1),
        tuple(lower),
        load_policy="always",
    )
    link = LinkCost(1e-6, 1e9)
    return TieredCache(
        config,
        cost=CostModel(
            PrefillCost(1000, 1, 1, 1e9), {tier.tier: link for tier in lower}
        ),
        eviction={tier.tier: LRUPolicy() for tier in lower},
        clock=ManualClock(),
    )


def _load(
    cache: TieredCache, digest: bytes, pages: Int32s, device_pages: int
) -> dict[TierId, int]:
    """Bring the pages behind the device's; return how many came from each tier."""
    decision = cache.lookup(digest, pages, device_pages)
    found = {tier.tier: decision.num_from(tier.tier) for tier in cache.config.tiers}
    plan = cache.commit_load(decision)
    if plan is not None:
        cache.finish_load(plan, landed=True)
    return found


def _store(cache: TieredCache, digest: bytes, pages: Int32s) -> None:
    """Write the prompt through to all tiers."""
    offload = cache.plan_offload(digest, pages)
    if offload is not None:
        cache.finish_offload(offload, _arrived(len(offload.pages)))
    while (demote := cache.plan_demote(_DEMOTE_PAGES)) is not None:
        cache.finish_demote(demote, _arrived(len(demote.pages)))


def _arrived(num_pages: int) -> TransferResult:
    return TransferResult(np.ones(num_pages, np.bool_), num_bytes=0, seconds=0.0)
