"""The real ``TieredCache`` below the simulated device, and the transfers it plans.

Does in simulated time what the engine's coordinator and pipelines do in real time:
reads from disk are staged in memory before admission, loads are committed at admission
and settled when the engine's tree has the pages, offloads run one after the other on
their link, and one batch is demoted at a time. Waiting is bounded by the same rule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sgl_tiered.cache.config import CacheConfig, TierConfig
from sgl_tiered.cache.stats import CacheStats
from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.core.ids import Lookup, TierId
from sgl_tiered.core.keys import Namespace
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import (
    Decision,
    DemotePlan,
    Int32s,
    LoadPlan,
    OffloadPlan,
    TransferResult,
)
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.policies.eviction.registry import make_eviction_policy
from sgl_tiered.sim.config import ServerConfig
from sgl_tiered.sim.events import EventLog, EventQueue, Priority
from sgl_tiered.sim.links import Link
from sgl_tiered.sim.times import StandInCost

__all__ = ["LowerTiers", "StartedLoad"]

_DEMOTE_PAGES = 128
_MIN_PATIENCE_S = 0.25
_PATIENCE_FACTOR = 4.0
"""The three of engines/sglang (runtime.py and coordinator.py)."""
_MIN_LATENCY_S = 1e-9


@dataclass(frozen=True, slots=True)
class StartedLoad:
    """Pages that go to the device with the next pass."""

    host_pages: int
    disk_pages: int
    num_bytes: int


@dataclass(slots=True, eq=False)
class _State:
    """One request that waits or loads; as the coordinator's ``RequestState``."""

    pages: Int32s
    decision: Decision | None = None
    plan: LoadPlan | None = None
    is_staging: bool = False
    staged_pages: int = 0
    patience_s: float = 0.0
    give_up_at_s: float | None = None
    waiting_since_s: float | None = None
    memory_only: bool = False
    is_started: bool = False


class LowerTiers:
    """Host (or CXL) and disk of one simulated rank.

    Args:
        config: of the server; it has tiers.
        queue: simulated time.
        log: gets transfers.
        wake: called with whether a waiting request may now go on, when a transfer ends.
    """

    def __init__(
        self,
        config: ServerConfig,
        queue: EventQueue,
        log: EventLog,
        wake: Callable[[bool], None],
    ) -> None:
        self._queue = queue
        self._log = log
        self._wake = wake
        self._page_bytes = config.page_bytes
        self._has_prefetch = config.prefetch
        self._max_offloads = config.max_offloads
        self.cache = _make_cache(config, queue)
        self._digest = self.cache.open_namespace(Namespace("sim", "bfloat16", 1))
        self._memory = config.tiers[0].tier
        self._disk = config.tiers[1] if len(config.tiers) > 1 else None
        discipline = config.link_discipline
        memory = config.tiers[0]
        name = memory.tier.label

        def link(a: str, b: str, latency_s: float, speed: float) -> Link:
            return Link(f"{a}>{b}", queue, latency_s, speed, discipline)

        read, write = memory.read, memory.write
        self.load_link = link(name, "device", read.latency_s, read.bytes_per_s)
        self._offload_link = link("device", name, write.latency_s, write.bytes_per_s)
        self.links = [self.load_link, self._offload_link]
        if self._disk is not None:
            read, write = self._disk.read, self._disk.write
            self._stage_link = link("disk", name, read.latency_s, read.bytes_per_s)
            self._demote_link = link(name, "disk", write.latency_s, write.bytes_per_s)
            self.links += [self._stage_link, self._demote_link]
        self._staging_pages = config.staging_bytes // config.page_bytes
        self._staging_used = 0
        self._num_staging = 0
        self._states: dict[int, _State] = {}
        self._offloads: deque[tuple[OffloadPlan, Callable[[], None]]] = deque()
        self._is_demoting = False

    @property
    def stats(self) -> CacheStats:
        """The cache's counters."""
        return self.cache.stats

    # -- Loads -----------------------------------------------------------------

    def track(self, subject: int, pages: Int32s, device_pages: int) -> None:
        """Take note of a request that is queued, and start its reads from disk."""
        state = _State(pages)
        self._states[subject] = state
        if not self._has_prefetch or self._disk is None or not len(pages):
            return
        decision = self._decide(state, device_pages)
        if decision.lookup is Lookup.HIT and decision.num_from(TierId.DISK):
            self._stage(subject, state, decision)

    def distance(self, subject: int, device_pages: int) -> int:
        """Return where the request's next page is: 1 memory, 2 disk, 3 nowhere."""
        state = self._states[subject]
        if state.plan is not None:
            return 2 if state.is_staging else 1
        decision = self._decide(state, device_pages)
        if decision.lookup is not Lookup.HIT:
            return 3
        return 2 if decision.num_from(TierId.DISK) else 1

    def prepare(self, subject: int, device_pages: int) -> bool:
        """Decide and start what can be started; False while the request waits."""
        state = self._states[subject]
        if not len(state.pages):
            return True
        if state.plan is not None:
            if self._covers(state, device_pages):
                return self._staged_or_late(state)
            self._abandon(state)
        decision = self._decide(state, device_pages)
        if decision.lookup is Lookup.PENDING:
            return self._waited_long(state, decision)
        needs_disk = decision.num_from(TierId.DISK) > 0
        if not needs_disk or not self._stage(subject, state, decision):
            state.waiting_since_s = None
            return True
        if state.plan is not None:
            return self._staged_or_late(state)
        if self._waited_long(state, decision):
            state.memory_only = True
            return True
        return False

    def loadable(self, subject: int, device_pages: int) -> int:
        """Return how many pages after ``device_pages`` can be loaded at once."""
        state = self._states[subject]
        plan = state.plan
        if plan is not None and self._covers(state, device_pages):
            if state.is_staging:
                return 0
            return plan.first_page + plan.num_pages - device_pages
        if plan is not None:
            self._abandon(state)
        decision = state.decision
        if decision is None or decision.first_page != device_pages:
            decision = self._decide(state, device_pages)
        if decision.lookup is not Lookup.HIT or decision.num_from(TierId.DISK):
            return 0
        return decision.num_pages

    def begin(self, subject: int, num_pages: int) -> StartedLoad:
        """Commit the load of the last ``num_pages`` pages that ``loadable`` promised.

        Its bytes are to be sent over ``load_link`` with the next pass.
        """
        state = self._states[subject]
        if state.plan is None:
            assert state.decision is not None, "begin comes after loadable"
            state.plan = self.cache.commit_load(state.decision)
            state.decision = None
        plan = state.plan
        assert plan is not None, "the decision was made at this very moment"
        state.is_started = True
        tiers = plan.tiers[plan.num_pages - num_pages :]
        num_disk = int(np.count_nonzero(tiers == TierId.DISK))
        num_bytes = num_pages * self._page_bytes
        return StartedLoad(num_pages - num_disk, num_disk, num_bytes)

    def settle(self, subject: int) -> None:
        """End a started load: the engine's tree has the pages."""
        state = self._states.get(subject)
        if state is not None and state.is_started:
            self._end_plan(state, landed=True)

    def forget(self, subject: int) -> None:
        """Forget a request."""
        state = self._states.pop(subject, None)
        if state is not None and state.plan is not None:
            self._end_plan(state, landed=False)

    # -- Offloads and demotions ------------------------------------------------

    def offload(self, subject: int, pages: Int32s, on_end: Callable[[], None]) -> bool:
        """Plan copies of what a request has computed.

        Returns:
            Whether a copy was queued; then ``on_end`` is called when the device's
            pages are no longer read.
        """
        plan = self.cache.plan_offload(self._digest, pages)
        self._demote()
        if plan is None:
            return False
        if len(self._offloads) > self._max_offloads:
            lost = TransferResult.failed(len(plan.pages), 0.0, "the queue is full")
            self.cache.finish_offload(plan, lost)
            self._log.add(self._queue.now(), "offload_lost", subject, len(plan.pages))
            return False
        self._log.add(self._queue.now(), "offload", subject, len(plan.pages))
        self._offloads.append((plan, on_end))
        if len(self._offloads) == 1:
            self._start_offload()
        return True

    def _start_offload(self) -> None:
        plan, _ = self._offloads[0]
        num_bytes = len(plan.pages) * self._page_bytes
        self._offload_link.submit(num_bytes, self._end_offload)

    def _end_offload(self) -> None:
        plan, on_end = self._offloads.popleft()
        if self._offloads:
            self._start_offload()
        self.cache.finish_offload(plan, self._arrived(len(plan.pages)))
        self._log.add(self._queue.now(), "offloaded", plan.plan_id, len(plan.pages))
        on_end()
        self._demote()
        self._wake(False)

    def _demote(self) -> None:
        if self._disk is None or self._is_demoting:
            return
        plan = self.cache.plan_demote(_DEMOTE_PAGES)
        self.cache.take_forgotten(TierId.DISK)
        if plan is None:
            return
        self._is_demoting = True
        num_bytes = len(plan.pages) * self._page_bytes
        self._demote_link.submit(num_bytes, lambda: self._end_demote(plan))

    def _end_demote(self, plan: DemotePlan) -> None:
        self._is_demoting = False
        self.cache.finish_demote(plan, self._arrived(len(plan.pages)))
        self._log.add(self._queue.now(), "demoted", plan.plan_id, len(plan.pages))
        self._demote()

    def _arrived(self, num_pages: int) -> TransferResult:
        return TransferResult(
            np.ones(num_pages, np.bool_), num_pages * self._page_bytes, 0.0
        )

    # -- Reads from disk -------------------------------------------------------

    def _stage(self, subject: int, state: _State, decision: Decision) -> bool:
        """Commit and start reading; False where waiting for it would be in vain.

        True without a plan means that other reads hold the staging memory for now.
        """
        disk = np.flatnonzero(decision.tiers == TierId.DISK)
        bound = self._staging_pages
        if bound and len(disk) > bound:
            # Load what fits; the rest is computed.
            decision = self.cache.lookup(
                self._digest,
                state.pages,
                decision.first_page,
                max_pages=int(disk[bound]),
            )
            disk = np.flatnonzero(decision.tiers == TierId.DISK)
            if len(disk) == 0 or len(disk) > bound:
                state.memory_only = True
                return False
        if bound and self._staging_used + len(disk) > bound:
            # Others' reads and loads free the memory, unless there are none.
            state.memory_only = self._staging_used == 0
            return not state.memory_only
        plan = self.cache.commit_load(decision)
        if plan is None:
            return False
        state.plan, state.decision = plan, None
        state.is_staging, state.staged_pages = True, len(disk)
        state.patience_s = _patience_s(decision)
        state.give_up_at_s = None
        self._staging_used += len(disk)
        self._log.add(self._queue.now(), "stage", subject, len(disk))
        num_bytes = len(disk) * self._page_bytes
        self._stage_link.submit(num_bytes, lambda: self._end_stage(subject, plan))
        return True

    def _end_stage(self, subject: int, plan: LoadPlan) -> None:
        state = self._states.get(subject)
        if state is None or state.plan is not plan:
            return
        state.is_staging = False
        self._log.add(self._queue.now(), "staged", subject, state.staged_pages)
        self._wake(True)

    def _staged_or_late(self, state: _State) -> bool:
        if not state.is_staging:
            return True
        now_s = self._queue.now()
        if state.give_up_at_s is None:
            state.give_up_at_s = now_s + state.patience_s
            self._wake_at(state.give_up_at_s)
        if now_s < state.give_up_at_s:
            return False
        state.memory_only = True
        self._abandon(state)
        return True

    def _waited_long(self, state: _State, decision: Decision) -> bool:
        now_s = self._queue.now()
        patience_s = _patience_s(decision)
        if state.waiting_since_s is None:
            state.waiting_since_s = now_s
            self._wake_at(now_s + patience_s)
        return now_s >= state.waiting_since_s + patience_s

    def _wake_at(self, time_s: float) -> None:
        self._queue.at(time_s, Priority.WAKE, lambda: self._wake(True))

    def _decide(self, state: _State, device_pages: int) -> Decision:
        memory_only = state.memory_only or self._disk is None
        decision = self.cache.lookup(
            self._digest,
            state.pages,
            device_pages,
            tiers_allowed=(self._memory,) if memory_only else None,
        )
        state.decision = decision
        return decision

    def _covers(self, state: _State, device_pages: int) -> bool:
        plan = state.plan
        assert plan is not None
        return plan.first_page <= device_pages < plan.first_page + plan.num_pages

    def _abandon(self, state: _State) -> None:
        self._end_plan(state, landed=False)
        state.decision = None

    def _end_plan(self, state: _State, *, landed: bool) -> None:
        plan = state.plan
        assert plan is not None
        self.cache.finish_load(plan, landed=landed)
        # A read that is given up goes on, but its memory counts as free: as in the
        # product its rows are freed when the reader comes to it.
        self._staging_used -= state.staged_pages
        state.plan = None
        state.is_staging = state.is_started = False
        state.staged_pages = 0


def _patience_s(decision: Decision) -> float:
    return max(
        _MIN_PATIENCE_S, decision.recompute_s, _PATIENCE_FACTOR * decision.load_s
    )


def _make_cache(config: ServerConfig, queue: EventQueue) -> TieredCache:
    """Return the cache, with pages of one stand-in token and of the real size."""
    part_bytes = config.page_bytes // (2 * config.num_layers)
    layout = PageLayout(config.num_layers, 1, part_bytes)
    slots = {
        setup.tier: max(1, setup.size_bytes // layout.slot_bytes)
        for setup in config.tiers
    }
    rng = np.random.default_rng(config.seed)
    costs = {
        setup.tier: LinkCost(
            max(setup.read.latency_s, _MIN_LATENCY_S), setup.read.bytes_per_s
        )
        for setup in config.tiers
    }
    return TieredCache(
        CacheConfig(
            layout,
            tuple(TierConfig(tier, num) for tier, num in slots.items()),
            load_policy=config.load_policy,
            write_policy=config.write_policy,
            demote_policy=config.demote_policy,
        ),
        cost=StandInCost(config.times, config.page_tokens, costs),
        eviction={tier: make_eviction_policy(config.eviction, rng) for tier in slots},
        clock=queue,
    )
