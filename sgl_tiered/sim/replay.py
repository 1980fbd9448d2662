"""Replay of a trace without time: how many prompt tokens are hit, and in which tier.

Two hierarchies, both run with the product's own classes: ``replay_exclusive`` (every
page in one tier, see ``exclusive.py``) and ``replay_served`` (what is shipped: the
engine's device tree under LRU over the chain of a ``TieredCache``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from sgl_tiered.cache.deferred import Deferred, DeferredOffloads
from sgl_tiered.cache.lookahead import QueueLookahead
from sgl_tiered.cache.tiered_cache import CacheConfig, TierConfig, TieredCache
from sgl_tiered.core.clock import ManualClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import Namespace
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import Int32s, OffloadPlan, TransferResult
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost
from sgl_tiered.policies.eviction.lru import LRUPolicy
from sgl_tiered.policies.eviction.registry import make_eviction_policy
from sgl_tiered.sim.exclusive import ExclusiveHierarchy, ExclusiveTier, page_ids
from sgl_tiered.sim.page_trace import PageTrace

__all__ = ["ReplayResult", "ServedPolicies", "replay_exclusive", "replay_served"]

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
        stored_pages: per tier, pages written to it from the tier above.
        late_pages: pages that the device lost before a copy was made.
    """

    prompt_tokens: int
    hit_tokens: Mapping[TierId, int]
    hit_pages: Mapping[TierId, int]
    lost_pages: Mapping[TierId, int]
    resident_pages: Mapping[TierId, int]
    stored_pages: Mapping[TierId, int]
    late_pages: int = 0

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


def replay_exclusive(
    trace: PageTrace,
    tiers: Sequence[ExclusiveTier],
    visible: int | Sequence[int] = 0,
) -> ReplayResult:
    """Replay through an exclusive hierarchy.

    Where a policy other than LRU leaves the pages of a prompt in mixed order, a last
    partial page is counted for the slowest tier that the prompt was hit in.

    Args:
        trace: the requests.
        tiers: fastest first.
        visible: requests that policies see waiting behind the one that is served; one
            number, or one for each request.
    """
    lookahead = QueueLookahead(1, keys_of=page_ids) if visible else None
    hierarchy = ExclusiveHierarchy(
        tiers,
        max_request_pages=int(trace.num_pages.max(initial=0)),
        page_tokens=trace.page_tokens,
        lookahead=lookahead,
    )
    hits = _Hits(trace, [tier.tier for tier in tiers])
    num_entered = 0
    for request in range(len(trace)):
        pages = trace.pages(request)
        if lookahead is None:
            hits.add(request, hierarchy.access(pages))
            continue
        num_behind = visible if isinstance(visible, int) else visible[request]
        last = min(len(trace), request + 1 + num_behind)
        for waiting in range(num_entered, last):
            lookahead.entered(waiting, b"", trace.pages(waiting))
        num_entered = max(num_entered, last)
        lookahead.running(request)
        hits.add(request, hierarchy.access(pages))
        lookahead.finished(request)
    return ReplayResult(
        prompt_tokens=trace.total_tokens,
        hit_tokens=hits.tokens,
        hit_pages=hits.pages,
        lost_pages=hierarchy.lost_pages,
        resident_pages=hierarchy.num_resident,
        stored_pages={
            tiers[0].tier: 0,
            **{
                below.tier: hierarchy.lost_pages[above.tier]
                for above, below in pairwise(tiers)
            },
        },
    )


@dataclass(frozen=True, slots=True)
class ServedPolicies:
    """How the tiers below the device are run; see ``CacheConfig``.

    Attributes:
        write_policy, demote_policy, disk_admission, eviction: by their names.
        offload_threshold: share of the device above which ``on-evict`` copies.
    """

    write_policy: str = "write-through"
    demote_policy: str = "write-through"
    disk_admission: str = "all"
    eviction: str = "lru"
    offload_threshold: float = 0.9


def replay_served(
    trace: PageTrace,
    device_pages: int,
    lower: Sequence[TierConfig],
    policies: ServedPolicies | None = None,
) -> ReplayResult:
    """Replay through what is shipped: device LRU over an inclusive ``TieredCache``.

    The device evicts by LRU, and the load policy is ``always``: without time nothing
    says what a load costs. Every transfer succeeds, and ends before the next request
    comes.

    Args:
        trace: the requests.
        device_pages: pages that the device holds between requests.
        lower: tiers below it; under write-through each also holds what the one above
            does.
        policies: None for the defaults.
    """
    served = _Served(trace, device_pages, lower, policies or ServedPolicies())
    for request in range(len(trace)):
        served.serve(request)
    return served.result()


class _Served:
    """A replay through the shipped form."""

    def __init__(
        self,
        trace: PageTrace,
        device_pages: int,
        lower: Sequence[TierConfig],
        policies: ServedPolicies,
    ) -> None:
        longest = int(trace.num_pages.max(initial=0))
        self._trace = trace
        self._device_pages = device_pages
        self._device = ExclusiveHierarchy(
            [ExclusiveTier(TierId.DEVICE, device_pages, LRUPolicy())],
            max_request_pages=longest,
        )
        self._cache = _tiered_cache(device_pages, lower, policies)
        # One token of a page says which prefix it ends, as its id does.
        self._digest = self._cache.open_namespace(Namespace("replay", "none", 1))
        self._hits = _Hits(trace, [TierId.DEVICE, *(tier.tier for tier in lower)])
        self._late_pages = 0
        self._deferred: DeferredOffloads | None = None
        if policies.write_policy == "on-evict":
            self._deferred = DeferredOffloads(
                LRUPolicy(), 1, device_pages, policies.offload_threshold
            )

    def serve(self, request: int) -> None:
        """Find a request's pages, bring them up, write what is new."""
        pages = self._trace.pages(request)
        found = self._device.access(pages)
        found |= self._load(pages, found[TierId.DEVICE])
        self._hits.add(request, found)
        if self._deferred is None:
            self._store(self._cache.plan_offload(self._digest, pages))
        elif len(pages):
            self._defer(self._deferred, pages)
        while (demote := self._cache.plan_demote(_DEMOTE_PAGES)) is not None:
            self._cache.finish_demote(demote, _arrived(len(demote.pages)))

    def result(self) -> ReplayResult:
        """Return what came of it."""
        cache = self._cache
        lost, resident = dict(self._device.lost_pages), dict(self._device.num_resident)
        stored = {TierId.DEVICE: 0}
        for setup in cache.config.tiers:
            lost[setup.tier] = cache.stats.pages_evicted[setup.tier]
            stored[setup.tier] = cache.stats.pages_stored[setup.tier]
            resident[setup.tier] = cache.occupancy(setup.tier).used_slots
        return ReplayResult(
            prompt_tokens=self._trace.total_tokens,
            hit_tokens=self._hits.tokens,
            hit_pages=self._hits.pages,
            lost_pages=lost,
            resident_pages=resident,
            stored_pages=stored,
            late_pages=self._late_pages + self._late_unseen(),
        )

    def _late_unseen(self) -> int:
        """Return the late pages behind prompts that are still there, not yet swept."""
        if self._deferred is None:
            return 0
        return sum(
            self._cache.num_without_copy(
                self._digest, prompt.tokens, self._device.num_first(prompt.tokens)
            )
            for prompt in self._deferred
        )

    def _load(self, pages: Int32s, device_pages: int) -> dict[TierId, int]:
        """Bring the pages behind the device's; return how many came from each tier."""
        cache = self._cache
        decision = cache.lookup(self._digest, pages, device_pages)
        found = {tier.tier: decision.num_from(tier.tier) for tier in cache.config.tiers}
        plan = cache.commit_load(decision)
        if plan is not None:
            cache.finish_load(plan, landed=True)
        return found

    def _store(self, plan: OffloadPlan | None) -> None:
        if plan is not None:
            self._cache.finish_offload(plan, _arrived(len(plan.pages)))

    def _defer(self, deferred: DeferredOffloads, pages: Int32s) -> None:
        """Note a prompt, and copy what the device would lose to the next ones."""
        cache, digest = self._cache, self._digest

        def num_resident(prompt: Deferred) -> int:
            return self._device.num_first(prompt.tokens)

        num_resident_now = self._device.num_first(pages)
        recency = cache.sight(digest, pages)
        deferred.note(digest, pages[:num_resident_now], recency, None)
        # Only now: the sweep ends at the coldest prompt that is still there, which may
        # have been a beginning of this one.
        for prompt, num_left in deferred.sweep(num_resident):
            lost = cache.num_without_copy(digest, prompt.tokens, num_left)
            self._late_pages += lost
        # What the device could not keep of this very prompt was never noted.
        self._late_pages += cache.num_without_copy(digest, pages, num_resident_now)
        free = self._device_pages - self._device.num_resident[TierId.DEVICE]
        while (next_prompt := deferred.next(free)) is not None:
            count = num_resident(next_prompt)
            tokens = next_prompt.tokens[:count]
            self._store(cache.plan_offload(digest, tokens, sighted=next_prompt.recency))
            deferred.settle(next_prompt, count)


def _tiered_cache(
    device_pages: int, lower: Sequence[TierConfig], policies: ServedPolicies
) -> TieredCache:
    config = CacheConfig(
        PageLayout(num_layers=1, page_tokens=1, token_bytes=1),
        tuple(lower),
        load_policy="always",
        write_policy=policies.write_policy,
        demote_policy=policies.demote_policy,
        disk_admission=policies.disk_admission,
        device_pages=device_pages,
    )
    link, rng = LinkCost(1e-6, 1e9), np.random.default_rng(1)
    return TieredCache(
        config,
        cost=CostModel(
            PrefillCost(1000, 1, 1, 1e9), {tier.tier: link for tier in lower}
        ),
        eviction={
            tier.tier: make_eviction_policy(policies.eviction, rng) for tier in lower
        },
        clock=ManualClock(),
    )


def _arrived(num_pages: int) -> TransferResult:
    return TransferResult(np.ones(num_pages, np.bool_), num_bytes=0, seconds=0.0)
