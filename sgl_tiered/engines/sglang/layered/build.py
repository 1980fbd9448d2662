"""Puts the layers of one pool together: manager, mover, copies, driver."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sgl_tiered.core.clock import Clock
from sgl_tiered.core.ids import TierId
from sgl_tiered.cost.streaming import StreamingCost
from sgl_tiered.engines.device.layer_copier import FaultyCopier
from sgl_tiered.engines.sglang.decoders import Decoders
from sgl_tiered.engines.sglang.layered.activations.build import (
    attach_activations,
    learn_lines,
)
from sgl_tiered.engines.sglang.layered.activations.capture import hook_weights
from sgl_tiered.engines.sglang.layered.activations.choosing import page_chooser
from sgl_tiered.engines.sglang.layered.admission import LayerAdmission
from sgl_tiered.engines.sglang.layered.cache import LayeredRuntime
from sgl_tiered.engines.sglang.layered.capacity import LayerPlan
from sgl_tiered.engines.sglang.layered.collectives import (
    group_has_nvlink,
    hook_collectives,
    make_guard,
)
from sgl_tiered.engines.sglang.layered.copies import layer_copies
from sgl_tiered.engines.sglang.layered.driver import LayerDriver
from sgl_tiered.engines.sglang.layered.facts import LayerFacts
from sgl_tiered.engines.sglang.layered.forecasting import LayerForecast
from sgl_tiered.engines.sglang.layered.pausing import PausingDecode
from sgl_tiered.engines.sglang.layered.recovery import RepeatedForward
from sgl_tiered.engines.sglang.layered.turns import DecodeTurns
from sgl_tiered.engines.sglang.step_times import StepTimes, first_decode_cost
from sgl_tiered.errors import EngineCompatibilityError
from sgl_tiered.layered.base import LayerCopier, Pace
from sgl_tiered.layered.binding import LayerBinding
from sgl_tiered.layered.manager import LayerManager
from sgl_tiered.layered.mover import SUB_UNIT_PAGES, LayerMover
from sgl_tiered.pipelines.base import DevicePool
from sgl_tiered.pipelines.contention import ContentionGuard, sub_unit_pages
from sgl_tiered.policies.layers.registry import make_turns
from sgl_tiered.serving.agreement import Agreement
from sgl_tiered.serving.layered.ranks import SharedMover
from sgl_tiered.serving.options import STAGING_FAULT, Options
from sgl_tiered.testing.emulator import Emulator
from sgl_tiered.testing.fault_switch import FaultSwitch

__all__ = ["PlacedLayers", "attach_scheduler", "connect", "place_layers"]

logger = logging.getLogger(__name__)

_COPY_BYTES_PER_S = 10e9
"""Of one core: 13 to 57 GB/s were measured on pages of 2 to 64 KiB that lay in its
cache. Only the length of a sub-unit follows from it, where a guard is asked."""


@dataclass(frozen=True, slots=True)
class PlacedLayers:
    """What the factory goes on with."""

    driver: LayerDriver
    device: DevicePool

    @property
    def plan(self) -> LayerPlan:
        """Sizes of the pool."""
        return self.driver.plan


def place_layers(
    pool: Any,
    model: Any,
    config: Options,
    clock: Clock,
    emulator: Emulator,
    agreement: Agreement,
    forward_stream: Any = None,
) -> PlacedLayers:
    """Make what places the layers of a `LayeredPool`, and give it to the pool.

    Args:
        pool: of SGLang's model runner, on a CPU or on CUDA.
        model: of that, which is loaded.
        config: of the server.
        clock: times copies.
        emulator: of the tiers; copies of layers go over the host tier's link.
        forward_stream: on which SGLang's overlap scheduler runs the model; or None.

    Raises:
        EngineCompatibilityError: SGLang has made a pool of another kind.
    """
    plan = getattr(pool, "plan", None)
    if plan is None:
        raise EngineCompatibilityError(
            f"--tiered-layerkv does not work with SGLang's {type(pool).__name__}: "
            "leave it out."
        )
    placed = connect(
        pool,
        plan,
        clock,
        emulator.pace(TierId.HOST),
        forward_stream=forward_stream,
        breaks_staging=config.experiment.fault == STAGING_FAULT,
        agreement=agreement,
        faults=emulator.faults(TierId.HOST),
    )
    if config.layerkv is not None and config.layerkv.weight_bytes:
        hook_weights(model, placed.driver)
    if placed.device.waiter_copies:
        # On a device with streams, the attention backend has said something stronger.
        logger.warning(
            "sgl-tiered: layer-wise KV (--tiered-layerkv) is experimental: its answers "
            "are tested on a CPU, its speed on an emulated link only."
        )
    return placed


def connect(
    pool: Any,
    plan: LayerPlan,
    clock: Clock,
    pace: Pace | None,
    *,
    forward_stream: Any = None,
    guard: ContentionGuard | None = None,
    breaks_staging: bool = False,
    agreement: Agreement | None = None,
    faults: FaultSwitch | None = None,
) -> PlacedLayers:
    """Give a `LayeredPool` of SGLang's its driver.

    Args:
        pool: on a CPU or on CUDA.
        plan: that it was made by.
        clock: times copies.
        pace: of the emulated link; None for as fast as it goes.
        forward_stream: see ``place_layers``.
        guard: asked before each sub-unit of a copy; None where links are not shared.
        breaks_staging: for tests: stream wrongly.
        agreement: with the other ranks; None where there are none.
        faults: for tests: let copies fail.

    Raises:
        EngineCompatibilityError: see ``layer_copies``.
    """
    layout = plan.layout
    is_shared = agreement is not None and agreement.is_shared
    if guard is None and agreement is not None and is_shared:
        guard = _guard(plan, pool, clock, agreement.num_ranks)
    copies = layer_copies(
        pool,
        layout,
        forward_stream,
        guarded=guard is not None,
        breaks_staging=breaks_staging,
    )
    copier: LayerCopier = copies.copier
    moving = copier if faults is None else FaultyCopier(copier, faults)
    acts = copies.acts
    if acts is not None and faults is not None:
        from sgl_tiered.engines.sglang.layered.activations.copier import FaultyActCopier

        acts = FaultyActCopier(acts, faults)
    pages = SUB_UNIT_PAGES
    if guard is not None:
        short = sub_unit_pages(layout.layer_page_bytes, _COPY_BYTES_PER_S)
        pages = min(pages, short)
    settings: dict[str, Any] = {
        "pace": pace,
        "guard": guard,
        "sub_unit_pages": pages,
        "acts": acts,
        "act_page_bytes": 0 if plan.acts is None else plan.acts.act_layer_page_bytes,
        "weight_bytes": plan.settings.weight_bytes,
    }
    size = layout.layer_page_bytes
    if agreement is None or not is_shared:
        mover = LayerMover(moving, size, clock, **settings)
    else:
        mover = SharedMover(agreement, moving, size, clock, **settings)
    # Page 0 of the tensor and logical page 0 are those of padding.
    binding = LayerBinding(
        layout.num_layers,
        plan.num_pages + 1,
        plan.num_layer_pages,
        first_physical=1,
        acts=plan.acts,
    )
    chosen = plan.chosen if plan.acts is not None else None
    manager = LayerManager(
        binding,
        mover,
        layout.page_tokens,
        plan.half_pages,
        choose=None if chosen is None else page_chooser(chosen.share),
    )
    driver = LayerDriver(manager, plan, guard)
    if chosen is not None:
        attach_activations(pool, driver, chosen, copies.weights)
    driver.on_close = copies.close
    if not copier.waiter_copies:
        # Nothing is placed yet, and the start measures loads to the first pages: they
        # are to cross the link, and not to stay in memory.
        end = min(plan.num_pages, plan.num_layer_pages) + 1
        driver.transfers[:, :end] = np.arange(end)
    pool.driver = driver
    return PlacedLayers(driver, copies.device_pool(driver))


def attach_scheduler(scheduler: Any, runtime: LayeredRuntime) -> None:
    """Let layers have their say in a scheduler's admission and decode steps."""
    longest = runtime.layers.plan.longest_tokens
    if longest < scheduler.max_req_len:
        # SGLang's own limits, which follow from logical pages, are further off.
        scheduler.max_req_input_len -= scheduler.max_req_len - longest
        scheduler.max_req_len = longest
    driver, config = runtime.layers, runtime.config
    agreement, manager = runtime.agreement, runtime.layers.manager
    cost = StreamingCost(first_decode_cost(config, runtime.cost.prefill))

    def link() -> float:
        return runtime.cost.link_figures(TierId.HOST)[1]

    def learn(
        batch: int, contexts: int, seconds: float, streamed: float, stall_s: float
    ) -> None:
        cost.observe(batch, contexts, seconds, streamed, stall_s, link())

    runtime.step_times = StepTimes(
        agreement.learned(learn),
        lambda: (float(manager.bytes_streamed), manager.stall_s),
    )
    if driver.plan.acts is not None:
        learn_lines(manager, agreement, runtime.cost)
    decoders = Decoders(config, runtime.lengths, agreement)
    forecast = LayerForecast(driver, decoders.tokens_left)
    driver.decision_counters = forecast.counters
    admission = LayerAdmission(
        driver, runtime, forecast, keeps_none=runtime.sources is not None
    )
    policy = make_turns(driver.plan.settings.decode)
    facts = LayerFacts(
        manager, driver.plan, policy, decoders, cost, link, runtime.clock
    )
    runtime.attach(admission, decoders, facts)
    turns = DecodeTurns(driver, admission, policy, facts, forecast)

    def choose(reqs: Sequence[Any]) -> list[int]:
        chosen = turns.choose(reqs)
        agreement.note(chosen)
        if not chosen:
            # SGLang asks again at once, and what is waited for needs the core.
            runtime.nap()
        return chosen

    def waits() -> bool:
        is_held = turns.waits()
        agreement.note(is_held)
        if is_held:
            runtime.nap()
        return is_held

    scheduler.update_running_batch = PausingDecode(
        scheduler.update_running_batch, choose, waits
    )
    worker = scheduler.tp_worker
    worker.forward_batch_generation = RepeatedForward(
        worker.forward_batch_generation, driver, is_alone=not agreement.is_shared
    )


def _guard(
    plan: LayerPlan, pool: Any, clock: Clock, num_ranks: int
) -> ContentionGuard | None:
    """Return what copies ask before each sub-unit; None where they need not."""
    from sglang.srt.distributed import parallel_state

    if not plan.settings.has_guard:
        return None
    guard = make_guard(
        num_ranks,
        pool.k_buffer[0].device.type,
        clock,
        nvlink=group_has_nvlink(parallel_state.get_tp_group()),
    )
    if guard is not None:
        hook_collectives()
    return guard
