"""The real ``TieredCache`` below the simulated device, and the transfers it plans.

Does in simulated time what the engine's coordinator and pipelines do in real time: what
waits for what is decided by the very object that the engine uses (cache/waiting.py);
reads from disk are staged in memory before admission, loads are committed at admission
and settled when the engine's tree has the pages, offloads run one after the other on
their link, and one batch is demoted at a time on each edge of the chain. Under the
write policy ``on-evict`` offloads wait until the device is nearly full.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from sgl_tiered.cache.config import CacheConfig, TierConfig
from sgl_tiered.cache.deferred import Deferred, DeferredOffloads
from sgl_tiered.cache.device_prefetcher import DevicePrefetcher
from sgl_tiered.cache.foresight import foresee
from sgl_tiered.cache.lookahead import QueueLookahead
from sgl_tiered.cache.prefetcher import Prefetcher
from sgl_tiered.cache.stats import CacheStats
from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.cache.tombstones import cells_for
from sgl_tiered.cache.waiting import WaitingLoads
from sgl_tiered.cache.waiting_state import WaitingLoad
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import Namespace
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import (
    QUEUE_FULL,
    DemotePlan,
    Int32s,
    OffloadPlan,
    PromotePlan,
    TransferResult,
)
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.pipelines.staging import part_pages
from sgl_tiered.policies.eviction.registry import make_eviction_policy
from sgl_tiered.policies.order.queue import Outlook
from sgl_tiered.policies.prefetch.base import Decoding
from sgl_tiered.policies.prefetch.registry import make_prefetch_policy
from sgl_tiered.sim.config import ServerConfig
from sgl_tiered.sim.device_tree import DeviceTree, TreeNode
from sgl_tiered.sim.events import EventLog, EventQueue, Priority
from sgl_tiered.sim.fetches import SimDeviceRoom
from sgl_tiered.sim.links import Link
from sgl_tiered.sim.reads import SimPromotions, SimRead, SimStaging
from sgl_tiered.sim.times import StandInCost

__all__ = ["NAMESPACE", "LowerTiers", "StartedLoad"]

NAMESPACE = Namespace("sim", "bfloat16", 1)
"""Of all pages, on the device too."""

_DEMOTE_PAGES = 128
_AHEAD_PAGES = 256
"""Of engines/sglang: runtime.py and ahead.py."""
_MIN_LATENCY_S = 1e-9
_LEAST_LOOK_S = 1e-4
"""The queue is not looked at again before that, however soon a read is due."""


@dataclass(frozen=True, slots=True)
class StartedLoad:
    """Pages that go to the device with the next pass.

    ``num_bytes`` are all of them; ``cxl_bytes`` those that have a link of their own.
    """

    host_pages: int
    disk_pages: int
    num_bytes: int
    cxl_pages: int = 0
    cxl_bytes: int = 0


_State = WaitingLoad[SimRead]


class LowerTiers:
    """Host and CXL, or one of them, and disk of one simulated rank.

    Args:
        config: of the server; it has tiers.
        queue: simulated time.
        log: gets transfers.
        wake: called with whether a waiting request may now go on, when a transfer ends.
        tree: the device's pages.
        lookahead: the queue, where a policy looks at it.
    """

    def __init__(
        self,
        config: ServerConfig,
        queue: EventQueue,
        log: EventLog,
        wake: Callable[[bool], None],
        tree: DeviceTree,
        lookahead: QueueLookahead | None = None,
    ) -> None:
        self._queue = queue
        self._log = log
        self._wake = wake
        self._page_bytes = config.page_bytes
        self._page_tokens = config.page_tokens
        self._max_offloads = config.max_offloads
        self.cache = _make_cache(config, queue, lookahead)
        self._digest = self.cache.open_namespace(NAMESPACE)
        self._memory = tuple(t.tier for t in config.tiers if t.tier is not TierId.DISK)
        self._disk = config.tiers[-1] if config.tiers[-1].tier is TierId.DISK else None
        discipline = config.link_discipline
        memory = config.tiers[0]
        name = memory.tier.label

        def link(a: str, b: str, latency_s: float, speed: float) -> Link:
            return Link(f"{a}>{b}", queue, latency_s, speed, discipline)

        read, write = memory.read, memory.write
        self.load_link = link(name, "device", read.latency_s, read.bytes_per_s)
        self._offload_link = link("device", name, write.latency_s, write.bytes_per_s)
        self.links = [self.load_link, self._offload_link]
        # What lies in CXL memory below the host has a way of its own to the device.
        self._cxl_link: Link | None = None
        self._demote_links: dict[TierId, Link] = {}
        for above, below in pairwise(config.tiers):
            a, b, write = above.tier.label, below.tier.label, below.write
            demote_link = link(a, b, write.latency_s, write.bytes_per_s)
            self._demote_links[above.tier] = demote_link
            self.links.append(demote_link)
            if below.tier is not TierId.DISK:
                read = below.read
                self._cxl_link = link(b, "device", read.latency_s, read.bytes_per_s)
                self.links.append(self._cxl_link)
        staging = promotions = None
        if self._disk is not None:
            read = self._disk.read
            stage_link = link("disk", name, read.latency_s, read.bytes_per_s)
            self.links.append(stage_link)
            num_rows = config.staging_bytes // config.page_bytes
            part = part_pages(read.latency_s, read.bytes_per_s, self._page_bytes)
            staging = SimStaging(
                stage_link,
                num_rows,
                self._page_bytes,
                part,
                queue.now,
                self._end_stage,
            )
            promotions = SimPromotions(
                stage_link, self._page_bytes, part, queue.now, self._end_promotion
            )
        self._loads: WaitingLoads[_State, SimRead] = WaitingLoads(
            self.cache,
            self._memory,
            staging,
            queue,
            ask_again_at=self._wake_at,
        )
        policy = make_prefetch_policy(config.prefetch)
        self._reads_at_arrival = policy.at_arrival
        self.prefetcher: Prefetcher | None = None
        device: DevicePrefetcher | None = None
        if config.prefetch_to == "device":
            device = DevicePrefetcher(self.cache, policy)
            ways: dict[TierId, Link] = dict.fromkeys(self._memory, self.load_link)
            if self._cxl_link is not None:
                ways[TierId.CXL] = self._cxl_link
            device.room = SimDeviceRoom(
                tree,
                ways,
                config.page_bytes,
                device,
                may_evict=lambda: self.cache.copies_at_once,
            )
        if policy.looks_ahead and (promotions is not None or device is not None):
            window = config.prefetch_window
            self.prefetcher = Prefetcher(
                self.cache, policy, promotions, queue, window, device
            )
            self._loads.prefetcher = self.prefetcher
        self._look_at_s = -1.0
        self._states: dict[int, _State] = {}
        self._offloads: deque[tuple[OffloadPlan, Callable[[], None]]] = deque()
        self._deferred: DeferredOffloads | None = None
        if config.write_policy == "on-evict":
            rng = np.random.default_rng(config.seed)
            self._deferred = DeferredOffloads(
                make_eviction_policy(config.eviction, rng),
                1,
                config.capacity_pages,
                config.offload_threshold,
                lookahead,
            )
        self._num_evicted = 0
        self.late_pages = 0

    @property
    def stats(self) -> CacheStats:
        """The cache's counters."""
        return self.cache.stats

    # -- Loads -----------------------------------------------------------------

    def track(self, subject: int, pages: Int32s, device_pages: int) -> None:
        """Take note of a request that is queued, and start its reads from disk."""
        state = _State(self._digest, pages, len(pages))
        self._states[subject] = state
        if self._reads_at_arrival and self._disk is not None and len(pages):
            self._loads.prefetch(state, device_pages)
            self._note_read(subject, state)

    def look_ahead(
        self,
        subjects: Sequence[tuple[int, int]],
        others: Sequence[int],
        *,
        busy_s: float,
        is_blocked: bool,
        tpot_s: float,
        decoding: Sequence[Decoding],
        sizes: Sequence[int],
        reserved_pages: int,
    ) -> None:
        """Start the reads that are due for requests that wait.

        Args:
            subjects: those at the head of the queue, with their pages on the device.
            others: those behind them.
            busy_s, is_blocked, tpot_s, decoding: see ``QueueFacts``.
            sizes, reserved_pages: see ``DevicePrefetcher.advance``.
        """
        if self.prefetcher is None:
            return
        due_s = self.prefetcher.advance(
            [(self._states[subject], num_pages) for subject, num_pages in subjects],
            others=[self._states[subject] for subject in others],
            busy_s=busy_s,
            is_blocked=is_blocked,
            tpot_s=tpot_s,
            decoding=decoding,
            sizes=sizes,
            reserved_pages=reserved_pages,
        )
        look_at_s = self._queue.now() + max(due_s, _LEAST_LOOK_S)
        is_planned = self._queue.now() < self._look_at_s <= look_at_s
        if due_s < float("inf") and not is_planned:
            self._look_at_s = look_at_s
            self._wake_at(look_at_s)

    def begin_pass(self, num_waiting: int, *, is_busy: bool) -> None:
        """Note that a new pass is being put together; see ``weight_among``."""
        self._loads.begin_pass(num_waiting, is_busy=is_busy)

    def admitted(self, context_tokens: int, new_tokens: int) -> None:
        """Note what a request adds to that pass."""
        # The cache's tokens are pages here.
        page = self._page_tokens
        self._loads.admitted(context_tokens // page, -(-new_tokens // page))

    def foresee(self, subject: int, device_pages: int, num_pages: int) -> Outlook:
        """Return what the cache says of a waiting request; its tokens are pages."""
        return foresee(self.cache, self._states[subject], device_pages, num_pages)

    def prepare(self, subject: int, device_pages: int) -> bool:
        """Decide and start what can be started; False while the request waits."""
        state = self._states[subject]
        if not len(state.tokens):
            return True
        is_ready = self._loads.prepare(state, device_pages)
        self._note_read(subject, state)
        return is_ready

    def loadable(self, subject: int, device_pages: int) -> int:
        """Return how many pages after ``device_pages`` can be loaded at once."""
        return self._loads.loadable_pages(self._states[subject], device_pages)

    def begin(self, subject: int, num_pages: int) -> StartedLoad:
        """Commit the load of the last ``num_pages`` pages that ``loadable`` promised.

        Its bytes are to be sent with the next pass, by ``load``.
        """
        plan = self._loads.start(self._states[subject])
        assert plan is not None, "the decision was made at this very moment"
        tiers = plan.tiers[plan.num_pages - num_pages :]
        num_disk = int(np.count_nonzero(tiers == TierId.DISK))
        num_cxl = 0
        if self._cxl_link is not None:
            num_cxl = int(np.count_nonzero(tiers == TierId.CXL))
        size = self._page_bytes
        num_host = num_pages - num_disk - num_cxl
        return StartedLoad(
            num_host, num_disk, num_pages * size, num_cxl, num_cxl * size
        )

    def load(self, num_bytes: int, cxl_bytes: int, on_end: Callable[[], None]) -> None:
        """Send the bytes of a pass's loads; ``on_end`` when all have come."""
        parts = [(self.load_link, num_bytes - cxl_bytes)]
        if self._cxl_link is not None:
            parts.append((self._cxl_link, cxl_bytes))
        parts = [part for part in parts if part[1]]
        left = len(parts)

        def ended() -> None:
            nonlocal left
            left -= 1
            if not left:
                on_end()

        for link, size in parts:
            link.submit(size, ended)

    def settle(self, subject: int) -> None:
        """End a started load: the engine's tree has the pages."""
        state = self._states.get(subject)
        if state is not None and state.started:
            self._loads.settle(state, landed=True)

    def forget(self, subject: int) -> None:
        """Forget a request."""
        state = self._states.pop(subject, None)
        if state is not None and state.plan is not None:
            self._loads.settle(state, landed=False)

    def _note_read(self, subject: int, state: _State) -> None:
        """Log a read that has just begun."""
        read = state.staged
        if read is not None and read.subject < 0:
            read.subject = subject
            self._log.add(self._queue.now(), "stage", subject, len(read.positions))

    def _end_stage(self, read: SimRead) -> None:
        read.done = True
        state = self._states.get(read.subject)
        if state is None or state.staged is not read:
            return
        num_pages = len(read.arrived)
        assert state.plan is not None, "it is read for a plan"
        result = self._arrived(num_pages, self._queue.now() - (read.started_s or 0.0))
        self._loads.stage_finished(state.plan, read.arrived, result)
        self._log.add(self._queue.now(), "staged", read.subject, num_pages)
        self._wake(True)

    def _end_promotion(self, plan: PromotePlan, positions: Int32s) -> None:
        assert self.prefetcher is not None
        self.prefetcher.finished(plan, positions, self._arrived(len(positions)))
        self._log.add(self._queue.now(), "promoted", plan.plan_id, len(positions))
        self._demote()
        self._wake(True)

    def _wake_at(self, time_s: float) -> None:
        self._queue.at(time_s, Priority.WAKE, lambda: self._wake(True))

    # -- What is told ----------------------------------------------------------

    def state(self, subject: int) -> WaitingLoad[SimRead] | None:
        """Return what is known of a request's load; None if it is not tracked."""
        return self._states.get(subject)

    # -- Offloads and demotions ------------------------------------------------

    @property
    def defers(self) -> bool:
        """Whether offloads wait until the device is nearly full."""
        return self._deferred is not None

    def defer(self, pages: Int32s, seen_pages: int) -> None:
        """Note what a request has computed; ``offload_ahead`` copies it if it must."""
        assert self._deferred is not None
        recency = self.cache.sight(self._digest, pages, seen_pages=seen_pages)
        self._deferred.note(self._digest, pages, recency, None)

    def offload_ahead(self, tree: DeviceTree) -> None:
        """Copy the coldest of the device if it is nearly full, one at a time."""
        deferred = self._deferred
        if deferred is None:
            return
        if tree.num_evicted_pages != self._num_evicted:
            self._num_evicted = tree.num_evicted_pages
            for lost, num_left in deferred.sweep(lambda p: _num_resident(tree, p)):
                self.late_pages += self.cache.num_without_copy(
                    self._digest, lost.tokens, num_left
                )
                self.cache.misses.lost(self._digest, lost.tokens, num_left)
        while not self._offloads:
            prompt = deferred.next(tree.free_pages)
            if prompt is None:
                return
            node, count = tree.find(prompt.tokens.tobytes())
            tokens = prompt.tokens[:count]
            plan = self.cache.plan_offload(
                self._digest, tokens, max_pages=_AHEAD_PAGES, sighted=prompt.recency
            )
            if plan is None:
                has_copies = not self.cache.num_without_copy(self._digest, tokens, 0)
                deferred.settle(prompt, count if has_copies else 0)
                continue
            is_last = len(plan.pages) < _AHEAD_PAGES
            tree.lock(node)

            self._queue_offload(
                -1, plan, partial(self._end_ahead, tree, node, prompt, count, is_last)
            )
            self._demote()

    def _end_ahead(
        self,
        tree: DeviceTree,
        node: TreeNode,
        prompt: Deferred,
        num_pages: int,
        is_last: bool,
    ) -> None:
        tree.unlock(node)
        if is_last and self._deferred is not None:
            self._deferred.settle(prompt, num_pages)

    def offload(
        self,
        subject: int,
        pages: Int32s,
        on_end: Callable[[], None],
        seen_pages: int = 0,
    ) -> bool:
        """Plan copies of what a request has computed.

        Returns:
            Whether a copy was queued; then ``on_end`` is called when the device's
            pages are no longer read.
        """
        plan = self.cache.plan_offload(self._digest, pages, seen_pages=seen_pages)
        self._demote()
        if plan is None:
            return False
        if len(self._offloads) > self._max_offloads:
            lost = TransferResult.failed(len(plan.pages), 0.0, QUEUE_FULL)
            self.cache.finish_offload(plan, lost)
            self._log.add(self._queue.now(), "offload_lost", subject, len(plan.pages))
            return False
        self._queue_offload(subject, plan, on_end)
        return True

    def _queue_offload(
        self, subject: int, plan: OffloadPlan, on_end: Callable[[], None]
    ) -> None:
        self._log.add(self._queue.now(), "offload", subject, len(plan.pages))
        self._offloads.append((plan, on_end))
        if len(self._offloads) == 1:
            self._start_offload()

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
        while (plan := self.cache.plan_demote(_DEMOTE_PAGES)) is not None:
            if plan.target is TierId.DISK:
                self.cache.take_forgotten(TierId.DISK)
            self._start_demote(plan)

    def _start_demote(self, plan: DemotePlan) -> None:
        num_bytes = len(plan.pages) * self._page_bytes
        link = self._demote_links[plan.source]
        link.submit(num_bytes, lambda: self._end_demote(plan))

    def _end_demote(self, plan: DemotePlan) -> None:
        self.cache.finish_demote(plan, self._arrived(len(plan.pages)))
        self._log.add(self._queue.now(), "demoted", plan.plan_id, len(plan.pages))
        self._demote()

    def _arrived(self, num_pages: int, seconds: float = 0.0) -> TransferResult:
        return TransferResult(
            np.ones(num_pages, np.bool_), num_pages * self._page_bytes, seconds
        )


def _num_resident(tree: DeviceTree, prompt: Deferred) -> int:
    return tree.find(prompt.tokens.tobytes())[1]


def _make_cache(
    config: ServerConfig, queue: EventQueue, lookahead: QueueLookahead | None
) -> TieredCache:
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
            disk_admission=config.disk_admission,
            device_pages=config.capacity_pages,
            load_overlaps=config.load_mode == "layerwise",
            tombstones=cells_for(sum(slots.values())) if config.explain else 0,
        ),
        cost=StandInCost(config.times, config.page_tokens, costs),
        eviction={tier: make_eviction_policy(config.eviction, rng) for tier in slots},
        clock=queue,
        lookahead=lookahead,
    )
