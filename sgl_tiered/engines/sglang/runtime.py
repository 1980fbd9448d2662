"""Everything of one rank below the device: cache, tiers, pipelines, and their upkeep.

Built by `factory.build_cache`; driven by `TieredRadixCache` on the scheduler's thread.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.core.clock import Clock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import Namespace
from sgl_tiered.core.plans import OffloadPlan, TransferResult
from sgl_tiered.cost.model import CostModel
from sgl_tiered.engines.sglang.config import TieredConfig
from sgl_tiered.engines.sglang.coordinator import LoadCoordinator, RequestState
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.pipelines.base import DevicePool
from sgl_tiered.pipelines.completions import (
    CompletionQueue,
    DemoteFinished,
    LoadFinished,
    OffloadFinished,
    StageFinished,
)
from sgl_tiered.pipelines.demote import DemoteWorker
from sgl_tiered.pipelines.layerwise_load import LayerwiseLoader, LoadTicket
from sgl_tiered.pipelines.offload import OffloadWorker
from sgl_tiered.pipelines.staging import StagingReader
from sgl_tiered.tiers.base import MemoryTier, Tier

__all__ = ["LayerCounter", "TieredRuntime"]

logger = logging.getLogger(__name__)

_DEMOTE_PAGES = 128
"""Pages per write to disk: 25 MB at 196 kB a page, enough for the disk to stream, short
enough that a read does not wait long behind it."""
_DEMOTE_REST_S = 5.0
"""Pause after a write of which no page arrived: a full disk does not empty itself in
the next scheduling pass. The tier's own circuit breaker rests as long."""
_CLOSE_TIMEOUT_S = 10.0
_MAX_REPORTS = 1024
"""Reports of requests that ended and were not asked for: aborted ones, mostly."""


class LayerCounter:
    """What SGLang's KV pool asks before a layer is read: has it arrived?"""

    def __init__(self) -> None:
        self.latest = -1
        self._tickets: dict[int, LoadTicket] = {}
        self._current: LoadTicket | None = None

    def add(self, ticket: LoadTicket) -> int:
        """Register a batch's loads; return the index that travels with the batch."""
        self.latest += 1
        # A batch is consumed before the next is built, so only the last one matters;
        # one more is kept for a batch that is still on the device.
        self._tickets.pop(self.latest - 2, None)
        self._tickets[self.latest] = ticket
        return self.latest

    def set_consumer(self, index: int) -> None:
        """Name the batch whose forward begins; -1 for one without loads."""
        self._current = self._tickets.get(index) if index >= 0 else None

    def wait_until(self, layer: int) -> None:
        """Block the model's thread until ``layer`` has arrived."""
        if self._current is not None:
            self._current.wait_layer(layer)


@dataclass(slots=True)
class Parts:
    """What the factory puts together; see the classes themselves."""

    config: TieredConfig
    namespace: Namespace
    fingerprint: Callable[[], str]
    clock: Clock
    cost: CostModel
    cache: TieredCache
    device: DevicePool
    host: MemoryTier
    disk: Tier | None
    metrics: MetricsRegistry
    completions: CompletionQueue
    loader: LayerwiseLoader
    offloader: OffloadWorker
    demoter: DemoteWorker | None
    stager: StagingReader | None
    probe: dict[str, float]
    served: dict[str, Any]


class TieredRuntime:
    """The tiers of one rank and the threads that serve them.

    Args:
        parts: as put together by the factory.
        wait_whole: wait for a whole load before the forward begins (needed where the
            forward does not ask layer by layer, as in a captured graph).
    """

    def __init__(self, parts: Parts, *, wait_whole: bool) -> None:
        self._parts = parts
        self.cache = parts.cache
        self.loader = parts.loader
        self.completions = parts.completions
        # Says whether the engine has nothing to compute; the scheduler sets it.
        self.engine_idle: Callable[[], bool] = lambda: False
        # And whether nobody waits either.
        self.engine_free: Callable[[], bool] = lambda: False
        self.wait_whole = wait_whole
        self.counter = LayerCounter()
        self.coordinator = LoadCoordinator(
            parts.cache, {TierId.HOST: parts.host}, parts.stager, parts.clock
        )
        self.namespaces: dict[tuple[str, str], bytes] = {}
        self._demoting = False
        self._demote_not_before_s = 0.0
        self._closed = False
        self._waits: dict[str, float] = {}
        self._reports: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._logged_at_s = parts.clock.now()
        self._logged: dict[str, int] = {}
        self._evicted: dict[TierId, int] = {}

    @property
    def metrics(self) -> MetricsRegistry:
        """Counters of edges and tiers."""
        return self._parts.metrics

    @property
    def config(self) -> TieredConfig:
        """The settings."""
        return self._parts.config

    @property
    def page_tokens(self) -> int:
        """Tokens in a page."""
        return self._parts.device.layout.page_tokens

    def namespace(self, extra_key: str | None, cache_salt: str | None) -> bytes:
        """Return the digest for an adapter and a tenant; cached."""
        names = (extra_key or "", cache_salt or "")
        digest = self.namespaces.get(names)
        if digest is None:
            namespace = replace(
                self._parts.namespace, lora=names[0], cache_salt=names[1]
            )
            digest = self.cache.open_namespace(namespace)
            self.namespaces[names] = digest
        return digest

    def offload(self, plan: OffloadPlan, device_pages: npt.NDArray[np.int64]) -> bool:
        """Queue an offload; False (and the plan ended) where the queue is full."""
        parts = self._parts
        if parts.offloader.try_submit(plan, device_pages, parts.device.mark()):
            return True
        self.metrics.add("offload_dropped_pages", len(plan.pages))
        failed = TransferResult.failed(len(plan.pages), 0.0, "the queue is full")
        self.cache.finish_offload(plan, failed)
        return False

    def pump(self) -> list[int]:
        """Take the ends of transfers; return the offload plans that have ended."""
        offloaded = []
        for event in self.completions.drain():
            match event:
                case OffloadFinished(plan, result):
                    self.cache.finish_offload(plan, result)
                    offloaded.append(plan.plan_id)
                case DemoteFinished(plan, result):
                    self._demoting = False
                    self.cache.finish_demote(plan, result)
                    if not result.ok.any():
                        self._demote_not_before_s = (
                            self._parts.clock.now() + _DEMOTE_REST_S
                        )
                case StageFinished(plan, positions, staged, result):
                    self.coordinator.stage_finished(plan, positions, result)
                    # Two reads at a time share the link: neither's time is its own.
                    if result.num_bytes and staged.is_alone:
                        self._parts.cost.observe_load(
                            TierId.DISK, result.num_bytes, result.seconds
                        )
                case LoadFinished():
                    self._observe_load(event)
                case _:
                    raise AssertionError(f"unknown completion {event!r}")
        self._demote()
        self._forget_on_disk()
        return offloaded

    def observe_prefill(self, prefix: int, new: int, seconds: float) -> None:
        """Refine the recompute cost from a prefill that has ended."""
        self._parts.cost.observe_prefill(prefix, new, seconds)

    def note_wait(self, rid: str, *, waiting: bool) -> None:
        """Measure how long a request is held back for pages on their way."""
        if waiting:
            self._waits.setdefault(rid, self._parts.clock.now())
        elif rid in self._waits:
            waited_s = self._parts.clock.now() - self._waits.pop(rid)
            self.metrics.add("requests_waited_for_pages")
            self.metrics.add("wait_for_pages_s", waited_s)
            state = self.coordinator.state(rid)
            if state is not None:
                state.report.waited_s += waited_s

    def forget_request(self, rid: str) -> None:
        """End what is known of a request, but for its report."""
        self._waits.pop(rid, None)
        state = self.coordinator.state(rid)
        self.coordinator.release(rid)
        if state is not None:
            self._reports[rid] = state.report.as_dict()
            if len(self._reports) > _MAX_REPORTS:
                self._reports.popitem(last=False)

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

    def count_request(self, num_tokens: int, device: int, host: int, disk: int) -> None:
        """Count where the prompt of a request came from, in tokens."""
        left = num_tokens
        hits = {TierId.DEVICE: device, TierId.HOST: host, TierId.DISK: disk}
        for tier, tokens in hits.items():
            if tier is TierId.DISK and self._parts.disk is None:
                continue
            pages = tokens // self.page_tokens
            left -= tokens
            self.metrics.record_lookup(
                tier,
                pages_hit=pages,
                pages_missed=left // self.page_tokens,
                page_tokens=self.page_tokens,
            )
        self.metrics.add("tokens_computed", left)
        self.metrics.add("tokens_total", num_tokens)

    def drop(self, tier: TierId) -> None:
        """Forget every page of one tier."""
        self.drain()
        self.pump()
        self.cache.drop_tier(tier)
        self._forget_on_disk()

    def drain_offloads(self) -> None:
        """Wait until no copy from the device runs."""
        self._parts.offloader.drain()

    def drain(self) -> None:
        """Wait until no transfer runs."""
        parts = self._parts
        for worker in (parts.loader, parts.offloader, parts.stager, parts.demoter):
            if worker is not None:
                worker.drain()

    def reset(self) -> None:
        """Forget every page of every tier; no transfer may run."""
        self.coordinator.release_all()
        self._waits.clear()
        # The weights may have changed, which is why SGLang resets.
        parts = self._parts
        parts.namespace = replace(
            parts.namespace, model_fingerprint=parts.fingerprint()
        )
        self.cache.reset()
        self.namespaces.clear()
        self._demoting = False
        self._forget_on_disk()

    def close(self, pump: Callable[[], None]) -> None:
        """Write out what is still to be written, in bounded time, then close."""
        if self._closed:
            return
        self._closed = True
        parts = self._parts
        give_up_at_s = parts.clock.now() + _CLOSE_TIMEOUT_S
        while self._demoting and parts.clock.now() < give_up_at_s:
            self.completions.wait(0.05)
            pump()
        for worker in (parts.loader, parts.offloader, parts.stager, parts.demoter):
            if worker is not None:
                worker.close(1.0)
        parts.host.close()
        if parts.disk is not None:
            parts.disk.close()

    def stats(self) -> dict[str, Any]:
        """Return a JSON-able picture of the tiers, for ``GET /tiered/stats``."""
        parts = self._parts
        media = {}
        for tier in (parts.host, parts.disk):
            if tier is not None:
                health = tier.health()
                media[tier.tier_id.label] = {
                    "slot_bytes": tier.slot_bytes,
                    "usable": health.usable,
                    "emulated": health.emulated,
                    "detail": health.detail,
                }
        return {
            "page_tokens": self.page_tokens,
            "media": media,
            **self.metrics_snapshot(),
            "cache": asdict(self.cache.stats),
            "cost": parts.cost.snapshot(),
            "probe": parts.probe,
            "served": parts.served,
        }

    def metrics_snapshot(self) -> dict[str, Any]:
        """Return the counters and the occupancy, for exporters."""
        parts = self._parts
        evicted = self.cache.stats.pages_evicted
        for tier, num_pages in evicted.items():
            self.metrics.record_evictions(tier, num_pages - self._evicted.get(tier, 0))
            self._evicted[tier] = num_pages
        occupancy = {}
        for tier_id in [t.tier_id for t in (parts.host, parts.disk) if t is not None]:
            slots = self.cache.occupancy(tier_id)
            occupancy[tier_id.label] = {
                "capacity": slots.capacity_slots,
                "used": slots.used_slots,
                "pinned": slots.pinned_slots,
            }
        return {**self.metrics.snapshot(), "occupancy": occupancy}

    def log_if_due(self) -> None:
        """Write one line per interval in which something happened."""
        interval_s = self.config.log_interval_s
        now = self._parts.clock.now()
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
        for tier in (self._parts.host, self._parts.disk):
            if tier is not None:
                occupancy = self.cache.occupancy(tier.tier_id)
                share = occupancy.used_slots / max(occupancy.capacity_slots, 1)
                fill.append(f"{tier.tier_id.label} {share:.0%} full")
        logger.info(
            "sgl-tiered: %d prompt tokens (%s); %s", total, served, ", ".join(fill)
        )

    def _observe_load(self, event: LoadFinished) -> None:
        """Refine the link cost, from loads out of the host tier alone.

        Staging memory may be faster than a host tier that is slowed down.
        """
        staged = any((plan.tiers == TierId.DISK).any() for plan in event.plans)
        if event.landed and event.num_bytes and not staged:
            self._parts.cost.observe_load(TierId.HOST, event.num_bytes, event.seconds)

    def _demote(self) -> None:
        demoter, disk = self._parts.demoter, self._parts.disk
        if demoter is None or disk is None or self._demoting:
            return
        if self._parts.clock.now() < self._demote_not_before_s:
            return
        plan = self.cache.plan_demote(_DEMOTE_PAGES)
        if plan is not None:
            # Addresses that this very plan takes over must not be forgotten after it.
            self._forget_on_disk()
            self._demoting = True
            demoter.submit(plan)

    def _forget_on_disk(self) -> None:
        if self._parts.disk is not None:
            gone = self.cache.take_forgotten(TierId.DISK)
            if len(gone):
                self._parts.disk.forget(gone)
