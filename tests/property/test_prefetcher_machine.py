"""The prefetcher over a queue that changes: one transfer per page, and no leak.

Requests join, change places, are admitted or aborted; reads end whole, in part, with
bad pages, or are cancelled; other requests' pages come and go meanwhile.
"""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sgl_tiered.cache.config import CacheConfig, TierConfig
from sgl_tiered.cache.prefetcher import Prefetcher
from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.cache.waiting_state import WaitingLoad
from sgl_tiered.core.clock import ManualClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import Namespace
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import PromotePlan, TransferResult
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost
from sgl_tiered.policies.eviction.registry import make_eviction_policy
from sgl_tiered.policies.prefetch.base import Decoding
from sgl_tiered.policies.prefetch.registry import make_prefetch_policy
from sgl_tiered.testing.strategies import spell

PAGE_TOKENS = 2
HOST_SLOTS, DISK_SLOTS = 6, 40
WORDS = ["abcd", "abce", "abff", "xyz", "xyw", "q", "abcdefg"]


class SlowRead:
    """Ends when the machine says so."""

    def __init__(self, plan: PromotePlan) -> None:
        self.plan = plan
        self.is_cancelled = False
        self.num_left = plan.num_pages

    def hurry(self) -> None:
        """Nothing to do."""

    def cancel(self) -> None:
        assert not self.is_cancelled, "cancelled twice"
        self.is_cancelled = True


class PrefetcherMachine(RuleBasedStateMachine):
    """A queue, a cache of a few pages and a reader of two promotions at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        tiers = (
            TierConfig(TierId.HOST, HOST_SLOTS),
            TierConfig(TierId.DISK, DISK_SLOTS),
        )
        rng = np.random.default_rng(0)
        self.cache = TieredCache(
            CacheConfig(PageLayout(2, PAGE_TOKENS, 64), tiers),
            cost=CostModel(
                PrefillCost(1000, 1, 1, 1e9),
                {TierId.HOST: LinkCost(1e-7, 1e10), TierId.DISK: LinkCost(1e-6, 5e8)},
            ),
            eviction={t.tier: make_eviction_policy("lru", rng) for t in tiers},
            clock=self.clock,
        )
        self.digest = self.cache.open_namespace(Namespace("m", "bfloat16", PAGE_TOKENS))
        self.reads: list[SlowRead] = []
        self.prefetcher = Prefetcher(
            self.cache, make_prefetch_policy("car"), self, self.clock, window=3
        )
        self.queue: list[WaitingLoad] = []

    # The reader.

    def submit(self, plan: PromotePlan) -> SlowRead | None:
        """Take two at most."""
        if len(self.reads) >= 2:
            return None
        self.reads.append(SlowRead(plan))
        return self.reads[-1]

    # Rules.

    @rule(word=st.sampled_from(WORDS), on_host=st.booleans())
    def keep(self, word: str, on_host: bool) -> None:
        """Another request has computed a prompt; its pages go down to the disk."""
        plan = self.cache.plan_offload(self.digest, spell(word, PAGE_TOKENS))
        if plan is not None:
            self.cache.finish_offload(plan, _done(len(plan.pages)))
        while (demote := self.cache.plan_demote(8)) is not None:
            self.cache.finish_demote(demote, _done(len(demote.pages)))
        if not on_host:
            self.cache.drop_tier(TierId.HOST)

    @rule(word=st.sampled_from(WORDS), place=st.integers(0, 9))
    def join(self, word: str, place: int) -> None:
        """A request joins, or an order puts it before others."""
        state = WaitingLoad(self.digest, spell(word, PAGE_TOKENS, tail=1), len(word))
        self.queue.insert(min(place, len(self.queue)), state)

    @precondition(lambda self: self.queue)
    @rule(place=st.integers(0, 9))
    def leave(self, place: int) -> None:
        """A request is admitted or aborted."""
        self.queue.pop(place % len(self.queue))

    @rule(device_pages=st.integers(0, 2), tpot_s=st.sampled_from([0.0, 1.0]))
    def look(self, device_pages: int, tpot_s: float) -> None:
        """The engine looks ahead; what nobody waits for is cancelled."""
        self.prefetcher.advance(
            [(state, device_pages) for state in self.queue[:3]],
            others=self.queue[3:],
            is_blocked=True,
            tpot_s=tpot_s,
            decoding=[Decoding(10, 0.0)],
        )
        if not self.queue:
            assert all(read.is_cancelled for read in self.reads)

    @precondition(lambda self: self.queue)
    @rule(place=st.integers(0, 9), device_pages=st.integers(0, 2))
    def turn(self, place: int, device_pages: int) -> None:
        """The engine could take a request: it waits for what comes, or goes."""
        state = self.queue[place % len(self.queue)]
        left_s = self.prefetcher.hold_s(state, device_pages, 0.0)
        if left_s == 0.0:
            state.memory_only = True

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """A read ends; a cancelled one after any number of its pages."""
        read = self.reads.pop(data.draw(st.integers(0, len(self.reads) - 1)))
        num_read = read.plan.num_pages
        if read.is_cancelled:
            num_read = data.draw(st.integers(0, num_read))
        ok = np.array([data.draw(st.integers(0, 9)) > 0 for _ in range(num_read)], bool)
        positions = np.arange(num_read, dtype=np.int32)
        self.prefetcher.finished(read.plan, positions, TransferResult(ok, 0, 0.0))

    @rule(really=st.sampled_from([False] * 9 + [True]))
    def reset(self, really: bool) -> None:
        """Everything is forgotten while reads are under way."""
        if really:
            self.prefetcher.cancel_all()
            self.cache.reset()

    @rule(rests=st.booleans())
    def rest(self, rests: bool) -> None:
        """The disk fails, or is well again."""
        self.cache.rest([TierId.DISK] if rests else [])

    # Laws.

    @invariant()
    def laws_hold(self) -> None:
        """No page is on its way twice, and only reads under way hold anything."""
        self.cache.check()
        writes = [p.writes for p in self.cache.promoter.under_way]
        assert len(writes) == len(self.reads)
        num_pages = sum(read.plan.num_pages for read in self.reads)
        targets = {int(a) for read in self.reads for a in read.plan.target_addresses}
        assert len(targets) == num_pages
        table = self.cache._store.table
        coming = [
            int(row)
            for read in self.reads
            for row in read.plan.pages
            if table.in_index[row]
        ]
        assert len(set(coming)) == len(coming), "a page is read twice"
        host, disk = (self.cache.occupancy(t) for t in (TierId.HOST, TierId.DISK))
        assert host.pinned_slots == disk.pinned_slots == num_pages
        assert self.prefetcher.is_busy == bool(self.reads)

    def teardown(self) -> None:
        """With all reads ended nothing is held any more."""
        for read in self.reads:
            nothing = TransferResult(np.zeros(0, bool), 0, 0.0)
            self.prefetcher.finished(read.plan, np.zeros(0, np.int32), nothing)
        self.reads.clear()
        self.laws_hold()


def _done(num_pages: int) -> TransferResult:
    ok = np.ones(num_pages, np.bool_)
    return TransferResult(ok, 0, 0.0, np.zeros(num_pages, np.uint64))


TestPrefetcherMachine = PrefetcherMachine.TestCase
TestPrefetcherMachine.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
