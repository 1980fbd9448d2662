"""Fetches to the device over a queue that changes: one per page, and nothing kept.

Requests join, change places, are admitted or aborted, load pages themselves; fetches
land, fail, or are cancelled because the engine is short of room; copies come and go.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sgl_tiered.cache.config import CacheConfig, TierConfig
from sgl_tiered.cache.device_prefetcher import DevicePrefetcher, Waiting
from sgl_tiered.cache.prefetcher import Prefetcher
from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.cache.waiting_state import WaitingLoad
from sgl_tiered.core.clock import ManualClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import Namespace
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import LoadPlan, TransferResult
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost
from sgl_tiered.policies.eviction.registry import make_eviction_policy
from sgl_tiered.policies.prefetch.base import QueueFacts
from sgl_tiered.policies.prefetch.car import CarPrefetch
from sgl_tiered.testing.strategies import spell

PAGE_TOKENS = 2
HOST_SLOTS, CXL_SLOTS, ROOM = 8, 30, 20
WORDS = ["abcd", "abce", "abff", "xyz", "xyw", "q", "abcdefg"]


class Eager(CarPrefetch):
    """Everything is due at once, so that much is under way."""

    name = "eager"

    def starts_s(self, facts: QueueFacts) -> tuple[float, ...]:
        """Return 0 for each."""
        return (0.0,) * len(facts.services_s)


class DevicePrefetcherMachine(RuleBasedStateMachine):
    """A queue, a cache of a few pages, and a device that counts its free pages."""

    def __init__(self) -> None:
        super().__init__()
        tiers = (
            TierConfig(TierId.HOST, HOST_SLOTS),
            TierConfig(TierId.CXL, CXL_SLOTS),
        )
        rng = np.random.default_rng(0)
        self.cache = TieredCache(
            CacheConfig(PageLayout(2, PAGE_TOKENS, 64), tiers, "always"),
            cost=CostModel(
                PrefillCost(1000, 1, 1, 1e9),
                {TierId.HOST: LinkCost(1e-7, 1e10), TierId.CXL: LinkCost(1e-7, 5e9)},
            ),
            eviction={t.tier: make_eviction_policy("lru", rng) for t in tiers},
            clock=ManualClock(),
        )
        self.digest = self.cache.open_namespace(Namespace("m", "bfloat16", PAGE_TOKENS))
        policy = Eager()
        self.device = DevicePrefetcher(self.cache, policy)
        self.device.room = self
        self.prefetcher = Prefetcher(
            self.cache, policy, None, ManualClock(), window=3, device=self.device
        )
        self.queue: list[WaitingLoad] = []
        self.flights: dict[int, LoadPlan] = {}
        self.free = ROOM
        self.is_closed = False
        for word in ("abcdefg", "xyz"):
            self.keep(word, keep_host=True)

    # The device.

    def room_pages(self) -> int:
        return self.free + sum(plan.num_pages for plan in self.flights.values())

    def submit(self, plan: LoadPlan, state: Waiting, keep: Sequence[Waiting]) -> bool:
        """Take what fits."""
        if self.is_closed or plan.num_pages > self.free:
            return False
        assert any(state is other for other in keep)
        self.free -= plan.num_pages
        self.flights[plan.plan_id] = plan
        return True

    def cancel(self, plan_id: int) -> None:
        self.end(self.flights[plan_id], landed=False)

    def end(self, plan: LoadPlan, *, landed: bool) -> None:
        del self.flights[plan.plan_id]
        self.free += plan.num_pages
        self.device.ended(plan, landed=landed)

    # Rules.

    @rule(word=st.sampled_from(WORDS), keep_host=st.booleans())
    def keep(self, word: str, keep_host: bool) -> None:
        """Another request has computed a prompt."""
        plan = self.cache.plan_offload(self.digest, spell(word, PAGE_TOKENS))
        if plan is not None:
            self.cache.finish_offload(plan, _done(len(plan.pages)))
        while (demote := self.cache.plan_demote(8)) is not None:
            self.cache.finish_demote(demote, _done(len(demote.pages)))
        if not keep_host:
            self.cache.drop_tier(TierId.HOST)

    @rule(word=st.sampled_from(WORDS), place=st.integers(0, 9))
    def join(self, word: str, place: int) -> None:
        """A request joins, or an order puts it before others."""
        state = WaitingLoad(self.digest, spell(word, PAGE_TOKENS, tail=1), len(word))
        self.queue.insert(min(place, len(self.queue)), state)

    @precondition(lambda self: self.queue)
    @rule(place=st.integers(0, 9), loads=st.booleans())
    def leave(self, place: int, loads: bool) -> None:
        """A request is aborted, or admitted and loads its pages itself."""
        state = self.queue.pop(place % len(self.queue))
        decision = self.cache.lookup(self.digest, state.tokens, 0)
        plan = self.cache.commit_load(decision) if loads else None
        if plan is not None:
            self.cache.finish_load(plan, landed=True)

    @rule(device_pages=st.integers(0, 2), reserved=st.sampled_from([0, 0, 6, ROOM]))
    def look(self, device_pages: int, reserved: int) -> None:
        """The engine looks ahead; what nobody waits for is cancelled."""
        before = self.room_pages()
        self.prefetcher.advance(
            [(state, device_pages) for state in self.queue[:3]],
            others=self.queue[3:],
            reserved_pages=reserved,
        )
        assert self.room_pages() == before
        if not self.queue:
            assert not self.flights

    @precondition(lambda self: self.flights)
    @rule(place=st.integers(0, 9), landed=st.booleans())
    def land(self, place: int, landed: bool) -> None:
        """A fetch ends, well or not."""
        plans = list(self.flights.values())
        self.end(plans[place % len(plans)], landed=landed)

    @precondition(lambda self: self.flights)
    @rule()
    def short_of_room(self) -> None:
        """The engine needs the latest one's pages."""
        self.cancel(next(reversed(self.flights)))

    @rule(really=st.sampled_from([False] * 9 + [True]))
    def reset(self, really: bool) -> None:
        """Everything is forgotten while fetches are under way."""
        if really:
            self.prefetcher.cancel_all()
            self.cache.reset()
            assert self.free == ROOM

    @rule(rests=st.sampled_from([(), (TierId.HOST,), (TierId.CXL,)]))
    def rest(self, rests: tuple[TierId, ...]) -> None:
        """A tier fails, or is well again."""
        self.cache.rest(rests)

    @rule(is_closed=st.sampled_from([False, False, True]))
    def close(self, is_closed: bool) -> None:
        """The device takes nothing now, or does again."""
        self.is_closed = is_closed

    # Laws.

    @invariant()
    def laws_hold(self) -> None:
        """No page comes twice, sources are pinned, and only fetches hold anything."""
        self.cache.check()
        assert len(self.cache.promoter.fetches.under_way) == len(self.flights)
        table = self.cache._store.table
        coming = [
            int(row)
            for plan in self.flights.values()
            for row in plan.pages
            if table.in_index[row]
        ]
        assert len(set(coming)) == len(coming), "a page is fetched twice"
        num_pages = sum(plan.num_pages for plan in self.flights.values())
        assert self.free == ROOM - num_pages
        pinned = [self.cache.occupancy(t).pinned_slots for t in self.cache._tiers]
        assert sum(pinned) == num_pages
        assert self.prefetcher.is_busy == bool(self.flights)

    def teardown(self) -> None:
        """Cancelled, nothing is held any more."""
        self.prefetcher.cancel_all()
        self.laws_hold()
        assert self.free == ROOM


def _done(num_pages: int) -> TransferResult:
    ok = np.ones(num_pages, np.bool_)
    return TransferResult(ok, 0, 0.0, np.zeros(num_pages, np.uint64))


TestDevicePrefetcherMachine = DevicePrefetcherMachine.TestCase
TestDevicePrefetcherMachine.settings = settings(
    max_examples=120,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
