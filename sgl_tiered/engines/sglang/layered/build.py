"""Puts the layers of one pool together: manager, mover, copies, driver."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from sgl_tiered.core.clock import Clock
from sgl_tiered.core.ids import TierId
from sgl_tiered.cost.decode import DecodeCost
from sgl_tiered.engines.sglang.config import TieredConfig
from sgl_tiered.engines.sglang.layered.admission import LayerAdmission
from sgl_tiered.engines.sglang.layered.cache import LayeredRuntime
from sgl_tiered.engines.sglang.layered.capacity import LayerPlan
from sgl_tiered.engines.sglang.layered.copier import CpuLayerCopier, FaultyCopier
from sgl_tiered.engines.sglang.layered.device_pool import LayeredDevicePool
from sgl_tiered.engines.sglang.layered.driver import LayerDriver
from sgl_tiered.engines.sglang.layered.pausing import PausingDecode
from sgl_tiered.engines.sglang.layered.recovery import RepeatedForward
from sgl_tiered.engines.sglang.layered.turns import DecodeTurns
from sgl_tiered.engines.sglang.step_times import StepTimes
from sgl_tiered.errors import EngineCompatibilityError
from sgl_tiered.layered.binding import LayerBinding
from sgl_tiered.layered.manager import LayerManager
from sgl_tiered.layered.mover import LayerMover
from sgl_tiered.tiers.emulator import Emulator
from sgl_tiered.tiers.fault_switch import FaultSwitch
from sgl_tiered.tiers.throttled import Pace

__all__ = ["PlacedLayers", "attach_scheduler", "connect", "place_layers"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlacedLayers:
    """What the factory goes on with."""

    driver: LayerDriver
    device: LayeredDevicePool


def place_layers(
    pool: Any,
    config: TieredConfig,
    clock: Clock,
    emulator: Emulator,
) -> PlacedLayers:
    """Make what places the layers of a `LayeredPool`, and give it to the pool.

    Raises:
        EngineCompatibilityError: SGLang has made a pool of another kind.
    """
    plan = getattr(pool, "plan", None)
    if plan is None or pool.k_buffer[0].device.type != "cpu":
        raise EngineCompatibilityError(
            f"--tiered-layerkv does not work with SGLang's {type(pool).__name__} on "
            f"{pool.k_buffer[0].device.type!r}: leave it out."
        )
    logger.warning(
        "sgl-tiered: layer-wise KV (--tiered-layerkv) is experimental: its answers are "
        "tested on a CPU, its speed is not measured yet."
    )
    return connect(
        pool,
        plan,
        clock,
        emulator.pace(TierId.HOST),
        breaks_staging=config.breaks_staging,
        faults=emulator.faults(TierId.HOST),
    )


def connect(
    pool: Any,
    plan: LayerPlan,
    clock: Clock,
    pace: Pace | None,
    *,
    breaks_staging: bool = False,
    faults: FaultSwitch | None = None,
) -> PlacedLayers:
    """Give a `LayeredPool` of SGLang's its driver.

    Args:
        pool: on the CPU.
        plan: that it was made by.
        clock: times copies.
        pace: of the emulated link; None for as fast as it goes.
        breaks_staging: for tests: stream wrongly.
        faults: for tests: let copies fail.
    """
    layout = plan.layout
    copier = CpuLayerCopier(pool, layout, breaks_staging=breaks_staging)
    moving = copier if faults is None else FaultyCopier(copier, faults)
    mover = LayerMover(moving, layout.layer_page_bytes, clock, pace=pace)
    # Page 0 of the tensor and logical page 0 are those of padding.
    binding = LayerBinding(
        layout.num_layers,
        plan.num_pages + 1,
        plan.num_layer_pages,
        first_physical=1,
    )
    manager = LayerManager(binding, mover, layout.page_tokens, plan.half_pages)
    driver = LayerDriver(manager, plan)
    pool.driver = driver
    return PlacedLayers(driver, LayeredDevicePool(copier, driver, layout))


def attach_scheduler(scheduler: Any, runtime: LayeredRuntime) -> None:
    """Let layers have their say in a scheduler's admission and decode steps."""
    longest = runtime.layers.plan.longest_tokens
    if longest < scheduler.max_req_len:
        # SGLang's own limits, which follow from logical pages, are further off.
        scheduler.max_req_input_len -= scheduler.max_req_len - longest
        scheduler.max_req_len = longest
    driver = runtime.layers
    admission = runtime.layer_admission = LayerAdmission(driver, runtime)
    decode = DecodeCost.guessed(runtime.cost.prefill)
    runtime.step_times = StepTimes(decode.observe)
    turns = DecodeTurns(driver, runtime, admission, decode, runtime.clock)
    scheduler.update_running_batch = PausingDecode(
        scheduler.update_running_batch, turns.choose
    )
    worker = scheduler.tp_worker
    worker.forward_batch_generation = RepeatedForward(
        worker.forward_batch_generation,
        driver,
        # A rank that ran alone would wait for the others' collectives.
        may_repeat=not runtime.agreement.is_shared,
    )
