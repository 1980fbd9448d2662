"""The tiered cache and its runtime where layers are placed one by one.

The tree, the tiers and what they decide stay as they are. Added is what the layer
manager has to know: which pages a transfer reads or fills, and who holds KV no more.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sgl_tiered.core.ids import Representation
from sgl_tiered.core.plans import Bools, Int64s, OffloadPlan, UInt8s
from sgl_tiered.engines.device.tokens import device_pages
from sgl_tiered.engines.sglang.cache import TieredRadixCache
from sgl_tiered.engines.sglang.decoders import Decoders
from sgl_tiered.engines.sglang.layered.driver import LayerDriver
from sgl_tiered.engines.sglang.layered.facts import LayerFacts
from sgl_tiered.engines.sglang.layered.sending import LayerSources
from sgl_tiered.engines.sglang.runtime import Parts, TieredRuntime
from sgl_tiered.engines.sglang.step_times import StepTimes
from sgl_tiered.pipelines.page_numbers import PageNumbers, host_numbers
from sgl_tiered.serving.coordinator import RequestState
from sgl_tiered.serving.loading_pass import LoadingPass

__all__ = ["LayeredRadixCache", "LayeredRuntime", "driver_of"]


class LayeredRuntime(TieredRuntime):
    """A runtime that tells the layer manager of offloads, and reports of it.

    Args:
        parts: as put together by the factory; the device is a `LayeredDevicePool`.
        driver: of the pool.
    """

    def __init__(self, parts: Parts, driver: LayerDriver) -> None:
        # A page has its places when its load has ended, so forwards wait for it.
        super().__init__(parts, wait_whole=True)
        self.layers = driver
        # Of what is sent to a decode server; None where nothing is.
        self.sources: LayerSources | None = None
        # Set where a scheduler is attached.
        self.layer_admission: Any = None
        self.step_times: StepTimes | None = None
        self._decoders: Decoders | None = None
        self._facts: LayerFacts | None = None

    def attach(self, admission: object, decoders: Decoders, facts: LayerFacts) -> None:
        """Take what a scheduler's decisions are made with."""
        self.layer_admission = admission
        self._decoders, self._facts = decoders, facts

    def send_from(self, pool: Any) -> None:
        """Let a `LayeredPool` be sent from, to a decode server."""
        self.sources = pool.sources = LayerSources(pool, self.layers)

    def pace_s(self, num_running: float, context_tokens: float) -> float:
        """Return the seconds of a token with so many running, paused ones included.

        Args:
            num_running: requests.
            context_tokens: of all of them.
        """
        assert self._facts is not None, "no scheduler is attached"
        return self._facts.pace_s(num_running, context_tokens)

    def paused_s(self, rid: str) -> float | None:
        """Return how long a request was paused so far; None for one that is now."""
        pauses = self.layers.pauses
        return None if pauses.is_waiting(rid) else pauses.of(rid)[1]

    def forget_request(self, rid: str) -> None:
        """End what is known of a request, but for its report."""
        super().forget_request(rid)
        if self._decoders is not None:
            self._decoders.forget(rid)

    def offload(self, plan: OffloadPlan, device_pages: PageNumbers) -> bool:
        """Queue an offload, its pages kept where they are until it has ended."""
        numbers = host_numbers(device_pages)
        self.layers.begin_store(plan.plan_id, numbers, plan.representations)
        if super().offload(plan, device_pages):
            return True
        self.layers.end_store(plan.plan_id)
        return False

    def pump(self) -> None:
        """Take the ends of transfers, and start what follows from them."""
        if self.sources is not None:
            self.sources.collect()
        super().pump()

    def _end_offload(self, plan_id: int) -> None:
        self.layers.end_store(plan_id)
        super()._end_offload(plan_id)

    def take_report(self, rid: str) -> dict[str, Any] | None:
        """Return what was decided for a request that ends, and what its layers did."""
        report = super().take_report(rid)
        told = self.layers.take_report(rid)
        if told is None:
            return report
        if told["steps_paused"]:
            paused = {"s": told["paused_s"], "steps": told["steps_paused"]}
            self.ledger.note(rid, paused_between_tokens=paused)
        return {**(report or {"actual": {}}), "layerkv": told}

    def metrics_snapshot(self) -> dict[str, Any]:
        """Return the counters and the occupancy, for exporters."""
        snapshot = super().metrics_snapshot()
        snapshot["counters"] |= self.layers.counters()
        return snapshot

    def stats(self) -> dict[str, Any]:
        """Return a JSON-able picture of tiers and layers."""
        return {**super().stats(), "layerkv": self.layers.stats()}

    def close(self, pump: Any) -> None:
        """Close the tiers, then stop moving layers."""
        super().close(pump)
        self.layers.close()


class LayeredRadixCache(TieredRadixCache):
    """The tiered cache over a `LayeredPool`."""

    # Whose load slots are being taken for.
    _loading_rid = ""

    @property
    def _layers(self) -> LayerDriver:
        runtime = self.tiered
        assert isinstance(runtime, LayeredRuntime)
        return runtime.layers

    def init_load_back(self, params: Any) -> tuple[int, Any]:
        """Take slots for the host hit of an admitted request and queue its load."""
        self._loading_rid = params.req.rid
        return super().init_load_back(params)

    def resume_split(self, req: Any) -> int:
        """Put the back of a split prompt behind what was computed, if it has come."""
        self._loading_rid = req.rid
        return super().resume_split(req)

    def _take_slots(self, num_tokens: int) -> torch.Tensor | None:
        """Take slots whose layers have room; None where there are none."""
        slots = super()._take_slots(num_tokens)
        if slots is None:
            return None
        firsts = slots[:: self.page_size].cpu().numpy().astype(np.int64)
        pages = firsts // self.page_size
        is_act = self._comes_as_act(len(pages))
        if self._layers.open_load(self._loading_rid, pages, is_act):
            return slots
        self.give_slots(slots)
        return None

    def _comes_as_act(self, num_pages: int) -> Bools | None:
        """Return which pages of the load at hand are activations; None for none."""
        coordinator = self.tiered.coordinator
        state = coordinator.state(self._loading_rid)
        listed = None if state is None else coordinator.to_load(state, num_pages)
        if listed is None:
            return None
        kinds, first = listed[0].representations, listed[1]
        if kinds is None:
            return None
        is_act: Bools = kinds[first : first + num_pages] == Representation.ACT
        return is_act

    def page_kinds(self, pages: Int64s) -> tuple[UInt8s | None, Bools | None]:
        """Return what pages go down as, and which are whole in no form."""
        told = self._layers.kinds(pages)
        if told is None:
            return None, None
        kinds, lacking = told
        return kinds, lacking if lacking.any() else None

    @property
    def has_kinds(self) -> bool:
        """Whether pages may be kept as activations."""
        return self._layers.act_transfers is not None

    def _offload(self, req: Any, state: RequestState | None, num_tokens: int) -> None:
        """Offload pages as what they are kept as."""
        if self.has_kinds and num_tokens >= self.page_size:
            every = np.arange(num_tokens // self.page_size)
            pages = host_numbers(device_pages(self, req, every))
            self._kinds, self._leave = self.page_kinds(pages)
        try:
            super()._offload(req, state, num_tokens)
        finally:
            self._kinds = self._leave = None

    def ready_to_load_host_cache(self) -> int:
        """Load what the batch needs, all of it before its forward."""
        consumer = super().ready_to_load_host_cache()
        self._layers.close_loads()
        return consumer

    def _has_come(self, loading: LoadingPass, *, may_run: bool) -> bool:
        """Wait for the end of a load: the mover knows nothing of its stream."""
        del may_run
        return super()._has_come(loading, may_run=False)

    def finish_external_linker_loads(self, reqs: list[Any]) -> list[Any]:
        """End the loads of the batch; return requests that ended with an error."""
        failed = super().finish_external_linker_loads(reqs)
        return failed + [req for req in reqs if self._layers.is_lost(req.rid)]

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        """Forget the request; called once its slots are given back."""
        self._layers.finished(req.rid)
        super().on_release(req, checkpointed=checkpointed)


def driver_of(runtime: Any) -> LayerDriver | None:
    """Return the driver of a runtime; None where layers are not placed singly."""
    return getattr(runtime, "layers", None)
