"""Everything of one rank below the device: cache, tiers, pipelines, and their upkeep.

Built by `factory.build_cache`; driven by `TieredRadixCache` on the scheduler's thread.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from sgl_tiered.cache.deferred import DeferredOffloads
from sgl_tiered.cache.device_prefetcher import DevicePrefetcher
from sgl_tiered.cache.lookahead import QueueLookahead
from sgl_tiered.cache.prefetcher import Prefetcher
from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.core.clock import Clock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import Namespace
from sgl_tiered.core.plans import (
    QUEUE_FULL,
    WRITES_REST,
    OffloadPlan,
    TransferResult,
)
from sgl_tiered.cost.model import CostModel
from sgl_tiered.engines.sglang.adapters import Adapters
from sgl_tiered.engines.sglang.lengths import LengthReader
from sgl_tiered.engines.sglang.slo_admission import ServedAdmission
from sgl_tiered.engines.sglang.step_times import PassTimes
from sgl_tiered.errors import ConfigError
from sgl_tiered.metrics.ledger import RequestLedger, WaitReason
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.pipelines.base import DevicePool
from sgl_tiered.pipelines.completions import (
    CompletionQueue,
    DemoteFinished,
    LoadFinished,
    OffloadFinished,
    PromoteFinished,
    SlotsReady,
    StageFinished,
)
from sgl_tiered.pipelines.demote import DemoteWorker
from sgl_tiered.pipelines.layerwise_load import LayerwiseLoader
from sgl_tiered.pipelines.offload import CHUNK_PAGES, OffloadWorker
from sgl_tiered.pipelines.page_numbers import PageNumbers
from sgl_tiered.pipelines.promote import PromoteWorker
from sgl_tiered.pipelines.staging import StagingReader
from sgl_tiered.policies.prefetch.registry import make_prefetch_policy
from sgl_tiered.serving.agreement import ARRIVED, Agreement
from sgl_tiered.serving.coordinator import LoadCoordinator, RequestState
from sgl_tiered.serving.explain import Explainer
from sgl_tiered.serving.layer_counter import LayerCounter
from sgl_tiered.serving.namespaces import MAX_NAME_BYTES, NamedSpaces, is_too_long
from sgl_tiered.serving.options import Options
from sgl_tiered.serving.rank_disk import DiskAdoption, disk_fingerprint
from sgl_tiered.serving.shutdown import close_in_time
from sgl_tiered.serving.transfers import make_transfers
from sgl_tiered.serving.weights import WeightsIdentity
from sgl_tiered.testing.emulator import Emulator
from sgl_tiered.tiers.base import KeptTier, MemoryTier, Tier
from sgl_tiered.tiers.breaker import CircuitBreaker

__all__ = ["STORE_PATIENCE_S", "Parts", "TieredRuntime"]

logger = logging.getLogger(__name__)

_DEMOTE_PAGES = 128
"""Pages per write to disk: 25 MB at 196 kB a page, enough for the disk to stream, short
enough that a read does not wait long behind it."""
_CLOSE_TIMEOUT_S = 10.0
_DRAIN_TIMEOUT_S = 5.0
"""A copy from the device that does not end must not hold the scheduler: its memory and
its slots stay set aside until it does."""
STORE_PATIENCE_S = 20.0
"""A store that has moved no byte for so long is stuck: 10 ms are usual. One that is
given up too early costs a later miss; until it is, decoders may have to wait."""
_STORE_PATIENCE = 10.0
"""Or for so many times what a chunk takes at the measured bandwidth, if longer."""
_NAP_S = 0.001
"""A request that arrives meanwhile waits so long at most: no TTFT shows it."""
_PUBLISH_S = 1.0
"""Seconds between two publications of the metrics; a scrape is seldom more frequent."""
_MAX_REPORTS = 1024
"""Reports of requests that ended and were not asked for: aborted ones, mostly."""


@dataclass(slots=True)
class Parts:
    """What the factory puts together; ``clock`` is what decisions read."""

    config: Options
    namespace: Namespace
    weights: WeightsIdentity
    clock: Clock
    cost: CostModel
    cache: TieredCache
    device: DevicePool
    host: MemoryTier
    cxl: MemoryTier | None
    disk: Tier | None
    emulator: Emulator
    metrics: MetricsRegistry
    completions: CompletionQueue
    loader: LayerwiseLoader
    offloader: OffloadWorker
    demoters: dict[tuple[TierId, TierId], DemoteWorker]
    stager: StagingReader | None
    lookahead: QueueLookahead | None
    deferred: DeferredOffloads | None
    probe: dict[str, float]
    served: dict[str, Any]
    lengths: LengthReader | None = None
    promoter: PromoteWorker | None = None
    agreement: Agreement | None = None
    adoption: DiskAdoption | None = None
    adapters: Adapters | None = None

    @property
    def tiers(self) -> list[Tier]:
        """The tiers that there are, fastest first."""
        return [t for t in (self.host, self.cxl, self.disk) if t is not None]

    @property
    def memory(self) -> dict[TierId, MemoryTier]:
        """Those that can be read in place."""
        return {t.tier_id: t for t in (self.host, self.cxl) if t is not None}


class TieredRuntime:
    """The tiers of one rank and the threads that serve them.

    Args:
        parts: as put together by the factory.
        wait_whole: let the forward begin after a whole load (needed where it does not
            ask layer by layer, as in a captured graph).
    """

    def __init__(self, parts: Parts, *, wait_whole: bool) -> None:
        self.parts = parts
        self.cache = parts.cache
        self.loader = parts.loader
        self.completions = parts.completions
        # Says whether the engine has nothing to compute; the scheduler sets it.
        self.engine_idle: Callable[[], bool] = lambda: False
        # And whether nobody waits either.
        self.engine_free: Callable[[], bool] = lambda: False
        # Offloads gave back pages that they had kept; the scheduler sets it.
        self.on_offloaded: Callable[[], None] = lambda: None
        # The offload of this plan has ended, however it did; the tree sets it.
        self.on_offload_end: Callable[[int], None] = lambda plan_id: None
        # Holds prefill for the decoders' sake; the scheduler sets it.
        self.admission: ServedAdmission | None = None
        self.wait_whole = wait_whole
        self.counter = LayerCounter(parts.device.layout.num_layers)
        self.agreement = parts.agreement or Agreement(parts.clock)
        self.transfers = make_transfers(
            self.agreement,
            parts.completions,
            parts.offloader,
            parts.stager,
            parts.promoter,
        )
        if parts.adoption is not None:
            parts.adoption.is_idle = lambda: self.engine_idle()
        self.coordinator = LoadCoordinator(
            parts.cache, parts.memory, self.transfers.stager, parts.clock
        )
        # Refines the recompute cost from a prefill: prefix, new tokens, seconds.
        self.observe_prefill = self.agreement.learned(parts.cost.observe_prefill)
        # Rank 0 answers, and tells its own times.
        keep = 0 if self.agreement.rank else parts.config.observe.explain_last
        self.ledger = RequestLedger(keep, self.agreement.own_clock)
        self.explainer = Explainer(self.ledger, parts.cache)
        policy = make_prefetch_policy(parts.config.queue.prefetch)
        self.reads_at_arrival = policy.at_arrival
        self.prefetcher: Prefetcher | None = None
        promoter = self.transfers.promoter
        device: DevicePrefetcher | None = None
        if parts.config.queue.prefetch_to == "device":
            device = DevicePrefetcher(parts.cache, policy)
        if policy.looks_ahead and (promoter or device) is not None:
            window = parts.config.queue.prefetch_window
            self.prefetcher = Prefetcher(
                parts.cache, policy, promoter, parts.clock, window, device
            )
            self.coordinator.prefetcher = self.prefetcher
        # Called when a promotion has ended.
        self.on_promoted: Callable[[], None] = lambda: None
        self.namespaces = NamedSpaces(parts.cache.has_pages)
        parts.cache.watch_namespaces(self.namespaces.lost_pages)
        self._told_of_names = False
        self.pass_times = PassTimes()
        self.weights = parts.weights
        self.adapters = parts.adapters or Adapters(None, self.agreement)
        # Called when the same tokens have come to mean other pages.
        self.on_renewed: Callable[[], None] = lambda: None
        # Of loads, one per tier; of offloads.
        self._breakers = {
            tier.tier_id: CircuitBreaker(parts.clock) for tier in parts.tiers
        }
        self._offloads = CircuitBreaker(parts.clock)
        # By the numbers of their plans: under way; given up, but not ended yet.
        self._storing: set[int] = set()
        self._given_up: set[int] = set()
        self._resting: tuple[TierId, ...] = ()
        self._num_demoting = 0
        self._closed = False
        self.pool: Any = None  # ``pooled.server.ServedPool``, where there is one
        self._waits: dict[str, float] = {}
        self._reports: OrderedDict[str, dict[str, Any]] = OrderedDict()
        # Takes a snapshot of the metrics; None where nobody collects them.
        self.publish: Callable[[Mapping[str, Any]], None] | None = None
        self._published_at_s = -math.inf
        self._logged_at_s = parts.clock.now()
        self._logged: dict[str, int] = {}
        self._evicted: dict[TierId, int] = {}
        # What was told last of whether new pages are copied, and when.
        self._told_copying = parts.cache.copies_at_once
        self._told_copying_at_s = -math.inf

    @property
    def metrics(self) -> MetricsRegistry:
        """Counters of edges and tiers."""
        return self.parts.metrics

    @property
    def config(self) -> Options:
        """The settings."""
        return self.parts.config

    @property
    def clock(self) -> Clock:
        """SGLang's own time base; with several ranks as they agree on it."""
        return self.parts.clock

    @property
    def is_reading(self) -> bool:
        """Whether the disk is read for requests that wait."""
        ahead = self.prefetcher is not None and self.prefetcher.is_busy
        return ahead or bool(self.coordinator.num_staging)

    def nap(self) -> None:
        """Leave a core to those that copy, until a transfer ends or for a moment."""
        self.completions.wait(_NAP_S)

    @property
    def is_moving(self) -> bool:
        """Whether the disk is written, or read: for requests that wait, or at start.

        What is to be written waits for the end of the latter.
        """
        adoption = self.parts.adoption
        is_scanning = adoption is not None and adoption.is_scanning
        return bool(self._num_demoting) or is_scanning or self.is_reading

    @property
    def is_storing(self) -> bool:
        """Whether a copy from the device may still read it, one given up included.

        On all ranks alike, as of the last ``pump``.
        """
        return bool(self._storing or self._given_up)

    @property
    def is_adopting(self) -> bool:
        """Whether the next look between two passes has pages to adopt."""
        adoption = self.parts.adoption
        return adoption is not None and adoption.is_adopting

    @property
    def is_freeing(self) -> bool:
        """Whether pages that were forgotten are still to be given back by ``pump``."""
        return self.cache.is_freeing

    @property
    def cost(self) -> CostModel:
        """What passes and loads cost."""
        return self.parts.cost

    @property
    def deferred(self) -> DeferredOffloads | None:
        """Offloads put off until the device is full; None for other policies."""
        return self.parts.deferred

    @property
    def lengths(self) -> LengthReader | None:
        """Predicted answer lengths; None where nobody asked for a predictor."""
        return self.parts.lengths

    @property
    def lookahead(self) -> QueueLookahead | None:
        """What requests will use; None where no policy looks."""
        return self.parts.lookahead

    @property
    def page_tokens(self) -> int:
        """Tokens in a page."""
        return self.parts.device.layout.page_tokens

    def has_tier(self, tier: TierId) -> bool:
        """Say whether there is such a tier below the device."""
        return any(t.tier_id is tier for t in self.parts.tiers)

    def namespace(self, extra_key: str | None, cache_salt: str | None) -> bytes | None:
        """Return the digest for an adapter and a tenant; cached.

        None while it is not known what the device's KV was computed by: then nothing is
        to be found or kept below it.

        Args:
            extra_key: SGLang's: what the sender gave, and the adapter's id.
            cache_salt: the tenant's.
        """
        if not self.weights.settled:
            return None
        names = (extra_key or "", cache_salt or "")
        digest = self.namespaces.get(names)
        if digest is None:
            parted = self.adapters.parted(names[0])
            if parted is None:
                return None
            namespace = replace(
                self.parts.namespace,
                extra_key=parted[0],
                lora=parted[1],
                cache_salt=names[1],
            )
            digest = self.cache.open_namespace(namespace)
            self.namespaces.add(names, digest)
        return digest

    def can_name(self, req: Any) -> bool:
        """Say whether the tiers can serve a request's adapter and salt; count if not.

        Not where a name is so long that it would have to be kept by nobody.
        """
        can: bool | None = getattr(req, "tiered_can_name", None)
        if can is None:
            named = ("extra_key", "cache_salt")
            long = [what for what in named if is_too_long(getattr(req, what, "") or "")]
            can = req.tiered_can_name = not long
            if long:
                self.metrics.add("requests_name_too_long")
            if long and not self._told_of_names:
                self._told_of_names = True
                logger.warning(
                    "sgl-tiered: a request's %s has more than %d bytes; such requests "
                    "use the device's cache only: send a shorter one",
                    " and ".join(long),
                    MAX_NAME_BYTES,
                )
        return can

    def note_copy(self, tier: TierId, error: str) -> None:
        """Tell a tier's breaker how a copy from it ended; empty for well."""
        self._breakers[tier].record(error)

    def offload(self, plan: OffloadPlan, device_pages: PageNumbers) -> bool:
        """Queue an offload; False (and the plan ended) where it is dropped.

        That is, where the queue is full, or the tier failed again and again and rests.
        """
        parts = self.parts
        may = self._offloads.allows() and self.transfers.takes_offload
        if may and parts.offloader.try_submit(plan, device_pages, parts.device.mark()):
            self.transfers.submitted_offload()
            self._storing.add(plan.plan_id)
            return True
        self.metrics.add("offload_dropped_pages", len(plan.pages))
        reason = WRITES_REST if self._offloads.is_open else QUEUE_FULL
        failed = TransferResult.failed(len(plan.pages), 0.0, reason)
        self.cache.finish_offload(plan, failed)
        self.explainer.offloaded(plan, failed)
        return False

    def pump(self) -> None:
        """Take the ends of transfers, and start what follows from them."""
        for event in self.transfers.take():
            match event:
                case OffloadFinished(plan, result):
                    self.cache.finish_offload(plan, result)
                    self.explainer.offloaded(plan, result)
                    self._offloads.record(_failure(result))
                    if plan.plan_id in self._given_up:
                        self._given_up.remove(plan.plan_id)
                        continue
                    self._storing.remove(plan.plan_id)
                    self._end_offload(plan.plan_id)
                    self.on_offloaded()
                case DemoteFinished(plan, result):
                    self._num_demoting -= 1
                    self.cache.finish_demote(plan, result)
                case StageFinished(plan, positions, staged, result):
                    self.coordinator.stage_finished(plan, positions, result)
                    # A read that was given up before it began says nothing.
                    if len(positions):
                        self._breakers[TierId.DISK].record(_failure(result))
                    # Two reads at a time share the link: neither's time is its own.
                    if result.num_bytes and staged.is_alone:
                        self.parts.cost.observe_load(
                            TierId.DISK, result.num_bytes, result.seconds
                        )
                case PromoteFinished():
                    self._end_promotion(event)
                case LoadFinished():
                    self._observe_load(event)
                    self._note_load(event)
                case SlotsReady(tier, num_slots):
                    self.cache.open_slots(tier, num_slots)
                case _:
                    raise AssertionError(f"unknown completion {event!r}")
        if self.weights.poll():
            self._renew()
        self.cache.free_dropped()
        self._give_up_stores()
        self._let_rest()
        self._demote()
        self._forget_on_disk()

    def predicted_pass_s(self, rid: str, prefix: int, new: int) -> float:
        """Return the predicted time of a pass over ``new`` tokens of a request.

        What was decided to be loaded for it is part of ``prefix``.
        """
        compute_s = self.parts.cost.recompute_s(prefix, new)
        state = self.coordinator.state(rid)
        decision = None if state is None else state.report.decision
        load_s = decision.load_s if decision is not None and decision.num_pages else 0.0
        return self.cache.planner.pass_s(compute_s, load_s)

    def note_queued(self, req: Any) -> None:
        """Note a request that SGLang has put into its queue; no question of ours."""
        asks = None if self.lengths is None else self.lengths.asks
        if asks is not None and req.rid in asks:
            return
        # For the admission, which asks later.
        self.agreement.moment_s(req.rid, ARRIVED, 0.0)
        self.explainer.queued(req, self.coordinator.state(req.rid))

    def note_wait(self, rid: str, *, waiting: bool) -> None:
        """Measure how long a request is held back for pages on their way."""
        if waiting:
            self.ledger.waits(rid, WaitReason.LOAD)
            self._waits.setdefault(rid, self.parts.clock.now())
        elif rid in self._waits:
            waited_s = self.parts.clock.now() - self._waits.pop(rid)
            self.metrics.add("requests_waited_for_pages")
            self.metrics.add("wait_for_pages_s", waited_s)
            state = self.coordinator.state(rid)
            if state is not None:
                state.report.waited_s += waited_s

    def forget_request(self, rid: str) -> None:
        """End what is known of a request, but for its report."""
        self._waits.pop(rid, None)
        self.agreement.forget(rid)
        if self.admission is not None:
            self.admission.forget(rid)
        if self.lookahead is not None:
            self.lookahead.finished(rid)
        state = self.coordinator.state(rid)
        self.coordinator.release(rid)
        if state is not None:
            self._reports[rid] = state.report.as_dict()
            if len(self._reports) > _MAX_REPORTS:
                self._reports.popitem(last=False)

    def followed(self) -> set[str]:
        """Return the names of all requests of which more than a report is kept."""
        return {*self._waits, *self.coordinator.rids, *self.ledger.live}

    def take_report(self, rid: str) -> dict[str, Any] | None:
        """Return what was decided for a request that ends, once; None if nothing."""
        kept = self._reports.pop(rid, None)
        if kept is not None:
            return kept
        state = self.coordinator.state(rid)
        return None if state is None else state.report.as_dict()

    def count_decision(self, state: RequestState) -> None:
        """Count what was decided for a request that has been admitted."""
        decision = state.report.decision
        if decision is None or not decision.num_found:
            return
        if state.is_split or decision.split_at:
            kind = "split"
        elif decision.num_pages:
            kind = "load"
        else:
            kind = "recompute"
        self.metrics.add(f"decisions_{kind}")
        self.metrics.add("decisions_replanned", len(state.report.replans))
        self.metrics.add("predicted_load_s", decision.load_s)
        self.metrics.add("predicted_recompute_s", decision.recompute_s)

    def count_request(self, num_tokens: int, hits: Mapping[TierId, int]) -> None:
        """Count where the prompt of a request came from, in tokens by tier."""
        left = num_tokens
        tiers = {TierId.DEVICE, *(tier.tier_id for tier in self.parts.tiers)}
        for tier in sorted(tiers | {tier for tier, num in hits.items() if num}):
            tokens = hits.get(tier, 0)
            left -= tokens
            self.metrics.record_lookup(
                tier,
                pages_hit=tokens // self.page_tokens,
                pages_missed=left // self.page_tokens,
                page_tokens=self.page_tokens,
            )
        self.metrics.add("tokens_computed", left)
        self.metrics.add("tokens_total", num_tokens)

    def drop(self, tier: TierId) -> None:
        """Let copies from and to the device end, then forget every page of a tier."""
        self.drain_device()
        self.pump()
        self.forget(tier)

    def forget(self, tier: TierId) -> None:
        """Forget every page of one tier, at once and whatever runs.

        Slots come back by and by (``pump``), those that a transfer uses when it has
        ended; what is beside them on disk is voided then.
        """
        if tier is TierId.DISK and self.parts.adoption is not None:
            self.parts.adoption.discard()
        self.cache.drop_tier(tier)
        self._forget_on_disk()

    def drain_offloads(self) -> bool:
        """Wait until no copy from the device runs, in bounded time; False if one does.

        Its pages stay locked until it ends or is given up. One that was given up is not
        waited for: it may still read the device, see ``is_storing``.
        """
        if self._given_up:
            return False
        if self.parts.offloader.drain(_DRAIN_TIMEOUT_S):
            return True
        self.metrics.add("drains_given_up")
        logger.warning("sgl-tiered: a copy from the device does not end")
        return False

    def drain_device(self) -> None:
        """Wait until no copy from or to the device runs.

        In bounded time but for loads: one that runs writes to pages of the device,
        which nobody may have meanwhile. It copies from memory what was read from disk
        or a peer before it began, so it ends unless the memory or the device hangs; and
        then no forward that loads something ends either, whose layers come from the
        same thread. What the disk and the memory tiers exchange is
        waited for by nobody: it touches no page of the device, its slots are kept until
        it ends, and of pages that were forgotten meanwhile it ends into nothing.
        """
        self.parts.loader.drain()
        self.drain_offloads()

    def reset(self) -> None:
        """Forget every page of every tier.

        No copy from or to the device may run: see ``drain_device``.
        """
        self.forget_plans()
        self.coordinator.release_all()
        self.explainer.reset()
        if self.parts.adoption is not None:
            self.parts.adoption.discard()
        self.cache.reset()
        self.namespaces.clear()
        self._forget_on_disk()
        self.emptied()

    def emptied(self) -> None:
        """Note that no KV is left on the device, nor anybody who had some."""
        self.weights.emptied()
        self.adapters.emptied()

    def forget_plans(self) -> None:
        """Forget what was found and begun for requests that wait.

        Loads that have started go on: they end in pages of the device.
        """
        self.coordinator.release_waiting()
        if self.prefetcher is not None:
            self.prefetcher.cancel_all()
        self._waits.clear()
        if self.lookahead is not None:
            self.lookahead.clear()

    def close(self, pump: Callable[[], None]) -> None:
        """Write out what is still to be written, in bounded time, then close."""
        if self._closed:
            return
        self._closed = True
        self.agreement.leave()
        self.weights.close()
        parts = self.parts
        give_up_at_s = parts.clock.now() + _CLOSE_TIMEOUT_S
        while self._num_demoting and parts.clock.now() < give_up_at_s:
            if TierId.DISK in self._resting:
                break
            self.completions.wait(0.05)
            pump()
        behind = (parts.stager, parts.promoter, *parts.demoters.values())
        for worker in (parts.loader, parts.offloader, *behind):
            if worker is not None:
                worker.close(1.0)
        # Else the next server would find what this one was told to forget.
        while self.cache.free_dropped() and parts.clock.now() < give_up_at_s:
            pass
        self._forget_on_disk()
        for tier in parts.memory.values():
            tier.close()
        if parts.disk is not None:
            close_in_time(parts.disk.close, _CLOSE_TIMEOUT_S, "the disk tier")

    def stats(self) -> dict[str, Any]:
        """Return a JSON-able picture of the tiers, for ``GET /tiered/stats``."""
        parts = self.parts
        media = {}
        for tier in parts.tiers:
            health = tier.health()
            breaker = self._breakers[tier.tier_id]
            media[tier.tier_id.label] = {
                "slot_bytes": tier.slot_bytes,
                "num_bytes": tier.num_slots * tier.slot_bytes,
                "pinned_bytes": health.pinned_bytes,
                "usable": health.usable and not breaker.is_open,
                "emulated": health.emulated,
                "emulation": parts.emulator.text(tier.tier_id),
                "faults_struck": parts.emulator.num_struck(tier.tier_id),
                "detail": breaker.last_error if breaker.is_open else health.detail,
                "age_s": health.age_s,
            }
        admission = {} if self.admission is None else self.admission.stats()
        return {
            "page_tokens": self.page_tokens,
            "media": media,
            "admission": admission,
            **self.metrics_snapshot(),
            "cache": asdict(self.cache.stats),
            "cost": parts.cost.snapshot(),
            "probe": parts.probe,
            "served": parts.served,
            "weights": self.weights.stats(),
            **({} if parts.lengths is None else {"lengths": parts.lengths.stats()}),
            "queue_lookahead": 0 if parts.lookahead is None else len(parts.lookahead),
            "namespaces": self.cache.num_namespaces,
            "empty_namespaces": self.namespaces.num_empty,
            "adoption": {} if parts.adoption is None else parts.adoption.stats(),
        }

    def metrics_snapshot(self) -> dict[str, Any]:
        """Return the counters and the occupancy, for exporters."""
        parts = self.parts
        for tier, num_pages in self.cache.stats.pages_evicted.items():
            self.metrics.record_evictions(tier, num_pages - self._evicted.get(tier, 0))
            self._evicted[tier] = num_pages
        occupancy = {}
        for medium in parts.tiers:
            slots = self.cache.occupancy(medium.tier_id)
            occupancy[medium.tier_id.label] = {
                "capacity": slots.capacity_slots,
                "used": slots.used_slots,
                "pinned": slots.pinned_slots,
            }
        health = {tier.tier_id.label: tier.health() for tier in parts.tiers}
        emulated = [label for label, state in health.items() if state.emulated]
        snapshot = self.metrics.snapshot()
        snapshot["counters"] |= self.cache.stats.lost_writes()
        snapshot["counters"] |= {
            f"{label}_errors_{name}": number
            for label, state in health.items()
            for name, number in state.errors.items()
        }
        return {
            **snapshot,
            "occupancy": occupancy,
            "emulated": emulated,
            "copies_at_once": self.cache.copies_at_once,
        }

    def between_passes(self) -> None:
        """Ask the model, where it is asked; publish and write a line if that is due."""
        if self.lengths is not None and self.lengths.asks is not None:
            self.lengths.asks.between_passes()
        if self.parts.adoption is not None:
            self.parts.adoption.advance()
        if self.engine_free():
            self.namespaces.drop_empty()
        interval_s = self.config.observe.log_interval_s
        now = self.parts.clock.now()
        if self._told_copying != self.cache.copies_at_once:
            self._tell_copying(now)
        if self.publish is not None and now - self._published_at_s >= _PUBLISH_S:
            self._published_at_s = now
            self.publish(self.metrics_snapshot())
        if interval_s == 0 or now - self._logged_at_s < interval_s:
            return
        self._logged_at_s = now
        snapshot = self.metrics.snapshot()
        tokens = {name: int(t["tokens_hit"]) for name, t in snapshot["tiers"].items()}
        tokens["computed"] = int(snapshot["counters"].get("tokens_computed", 0))
        if tokens == self._logged:
            return
        new = {name: tokens[name] - self._logged.get(name, 0) for name in tokens}
        self._logged = tokens
        total = max(sum(new.values()), 1)
        served = ", ".join(f"{name} {n / total:.0%}" for name, n in new.items())
        fill = []
        for tier in self.parts.tiers:
            occupancy = self.cache.occupancy(tier.tier_id)
            share = occupancy.used_slots / max(occupancy.capacity_slots, 1)
            note = " (emulated)" if tier.health().emulated else ""
            fill.append(f"{tier.tier_id.label} {share:.0%} full{note}")
        logger.info(
            "sgl-tiered: %d prompt tokens (%s); %s", total, served, ", ".join(fill)
        )

    def _tell_copying(self, now_s: float) -> None:
        """Say that copies have stopped or begun again; not more often than other lines.

        Under write policy ``auto``, the only one that ever changes.
        """
        interval_s = self.config.observe.log_interval_s
        if interval_s == 0 or now_s - self._told_copying_at_s < interval_s:
            return
        self._told_copying_at_s = now_s
        self._told_copying = self.cache.copies_at_once
        if self._told_copying:
            logger.info(
                "sgl-tiered: prompts come again: new pages are copied below the device"
            )
            return
        logger.info(
            "sgl-tiered: nothing has come again for %d tokens: pages are copied below "
            "the device when they do, and new ones are not (--tiered-write-policy "
            "auto)",
            self.cache.trust_pages * self.page_tokens,
        )

    def switch_faults(self, text: str) -> str:
        """Switch delays and faults; return why not, empty where it was done."""
        try:
            self.parts.emulator.switch(text, list(self._breakers))
        except ConfigError as error:
            return str(error)
        logger.warning("sgl-tiered: EMULATED from now on: %s", text or "nothing")
        return ""

    def _end_offload(self, plan_id: int) -> None:
        self.on_offload_end(plan_id)

    def _give_up_stores(self) -> None:
        """Give up stores once the one that runs is stuck; begin none until it goes on.

        Whoever waits for device pages that they read gets these. The slots that they
        may still write to stay set aside. Ranks are told alike how long it is stuck,
        and have the same costs.
        """
        if self._given_up:
            self._offloads.trip("stores do not end")
        stuck_s = self.transfers.store_stuck_s
        if not self._storing or stuck_s <= STORE_PATIENCE_S:
            return
        tier = self.parts.host.tier_id
        _, bytes_per_s = self.cost.link_figures(tier)
        chunk_bytes = CHUNK_PAGES * self.parts.device.layout.page_bytes
        if stuck_s <= _STORE_PATIENCE * chunk_bytes / bytes_per_s:
            return
        self.parts.offloader.give_up()
        self._offloads.trip("stores do not end")
        given_up = sorted(self._storing)
        self._given_up |= self._storing
        self._storing.clear()
        self.metrics.add("offloads_given_up", len(given_up))
        logger.warning(
            "sgl-tiered: %d store(s) into the %s tier are given up, as the first has "
            "moved no byte for %.1f s; their pages may leave the device without being "
            "stored, and nothing is stored until it ends",
            len(given_up),
            tier.label,
            stuck_s,
        )
        for plan_id in given_up:
            self._end_offload(plan_id)
        self.on_offloaded()

    def _end_promotion(self, event: PromoteFinished) -> None:
        """Take the end of a read ahead of need, or for a peer, whole or not."""
        plan, result = event.plan, event.result
        if self.pool is None or not self.pool.took(event):
            assert self.prefetcher is not None, "nobody else promotes"
            self.prefetcher.finished(plan, event.positions, result)
        if len(event.positions):
            self._breakers[TierId.DISK].record(_failure(result))
        if event.is_alone and result.num_bytes:
            self.parts.cost.observe_load(TierId.DISK, result.num_bytes, result.seconds)
        self.metrics.add("promotions")
        self.metrics.add("promoted_pages", int(np.count_nonzero(result.ok)))
        self.metrics.add("promotions_cut_pages", plan.num_pages - len(event.positions))
        self.on_promoted()

    def _note_load(self, event: LoadFinished) -> None:
        """Tell the breakers of the memory tiers how a load to the device ended."""
        figures = event.figures
        for tier, breaker in self._breakers.items():
            if tier is figures.failed or (event.landed and tier in figures.sources):
                breaker.record(event.error)

    def _let_rest(self) -> None:
        """Keep tiers that fail again and again out of lookups, until a probe is due."""
        if self.transfers.is_stuck:
            self._breakers[TierId.DISK].trip("reads of the disk do not end")
        resting = tuple(tier for tier, b in self._breakers.items() if b.rests)
        if resting == self._resting:
            return
        for tier in set(resting) - set(self._resting):
            error = self._breakers[tier].last_error
            logger.warning("sgl-tiered: the %s tier rests: %s", tier.label, error)
            self.metrics.add(f"{tier.label}_rests")
        for tier in set(self._resting) - set(resting):
            logger.warning("sgl-tiered: the %s tier is tried again", tier.label)
        self._resting = resting
        self.cache.rest(resting)

    def _observe_load(self, event: LoadFinished) -> None:
        """Refine the link costs; staged pages lie in the host's memory.

        Which may be faster than a host tier that is slowed down, so a load with such
        pages tells nothing of the host's link.
        """
        if not event.landed or not event.num_bytes:
            return
        staged = any((plan.tiers == TierId.DISK).any() for plan in event.plans)
        for tier, (num_bytes, seconds) in event.figures.moved.items():
            if not (staged and tier is TierId.HOST):
                self.parts.cost.observe_load(tier, num_bytes, seconds)

    def _demote(self) -> None:
        if not self.parts.demoters:
            return
        adoption = self.parts.adoption
        # Its free slots are not known before.
        is_closed = adoption is not None and adoption.is_scanning
        not_to = (TierId.DISK,) if is_closed else ()
        while (
            plan := self.cache.plan_demote(_DEMOTE_PAGES, not_to=not_to)
        ) is not None:
            # Addresses that this very plan takes over must not be forgotten after it.
            self._forget_on_disk()
            self._num_demoting += 1
            self.parts.demoters[plan.source, plan.target].submit(plan)

    def _renew(self) -> None:
        """Forget all pages of the weights before; those now are known, and others."""
        parts = self.parts
        assert self.weights.value is not None
        parts.namespace = replace(parts.namespace, model_fingerprint=self.weights.value)
        if parts.adoption is not None:
            parts.adoption.discard()
        self.cache.reset()
        self.namespaces.clear()
        self.explainer.namespaces.clear()
        self._forget_on_disk()
        if isinstance(parts.disk, KeptTier):
            parts.disk.relabel(disk_fingerprint(parts.namespace, self.agreement))
        self.on_renewed()

    def _forget_on_disk(self) -> None:
        if self.parts.disk is not None:
            gone = self.cache.take_forgotten(TierId.DISK)
            if len(gone):
                self.parts.disk.forget(gone)


def _failure(result: TransferResult) -> str:
    """Return the error of a transfer that brought nothing; empty for any other."""
    return "" if result.ok.any() else result.error or "no page arrived"
