"""Puts the layers of one pool together: manager, mover, copies, driver."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from sgl_tiered.core.clock import Clock
from sgl_tiered.core.ids import TierId
from sgl_tiered.cost.decode import DecodeCost
from sgl_tiered.engines.sglang.config import TieredConfig
from sgl_tiered.engines.sglang.layered.admission import LayerAdmission
from sgl_tiered.engines.sglang.layered.cache import LayeredRuntime
from sgl_tiered.engines.sglang.layered.capacity import LayerPlan
from sgl_tiered.engines.sglang.layered.copies import layer_copies
from sgl_tiered.engines.sglang.layered.driver import LayerDriver
from sgl_tiered.engines.sglang.layered.pausing import PausingDecode
from sgl_tiered.engines.sglang.layered.turns import DecodeTurns
from sgl_tiered.engines.sglang.step_times import StepTimes
from sgl_tiered.errors import ConfigError, EngineCompatibilityError
from sgl_tiered.layered.base import SwapGuard
from sgl_tiered.layered.binding import LayerBinding
from sgl_tiered.layered.manager import LayerManager
from sgl_tiered.layered.mover import LayerMover
from sgl_tiered.pipelines.base import DevicePool
from sgl_tiered.tiers.emulator import Emulator
from sgl_tiered.tiers.throttled import Pace

__all__ = ["PlacedLayers", "attach_scheduler", "connect", "place_layers"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlacedLayers:
    """What the factory goes on with."""

    driver: LayerDriver
    device: DevicePool


def place_layers(
    pool: Any,
    config: TieredConfig,
    clock: Clock,
    emulator: Emulator,
    forward_stream: Any = None,
) -> PlacedLayers:
    """Make what places the layers of a `LayeredPool`, and give it to the pool.

    Args:
        pool: of SGLang's model runner, on a CPU or on CUDA.
        config: of the server.
        clock: times copies.
        emulator: of the tiers; copies of layers go over the host tier's link.
        forward_stream: on which SGLang's overlap scheduler runs the model; or None.

    Raises:
        EngineCompatibilityError: SGLang has made a pool of another kind.
        ConfigError: a setting does not go with layer-wise KV.
    """
    plan = getattr(pool, "plan", None)
    if plan is None:
        raise EngineCompatibilityError(
            f"--tiered-layerkv does not work with SGLang's {type(pool).__name__}: "
            "leave it out."
        )
    if config.prefetch_to == "device":
        raise ConfigError(
            "--tiered-prefetch-to",
            "device does not go with --tiered-layerkv yet",
            "give host",
        )
    placed = connect(
        pool,
        plan,
        clock,
        emulator.pace(TierId.HOST),
        forward_stream=forward_stream,
        breaks_staging=config.breaks_staging,
    )
    if placed.device.waiter_copies:
        # On a device with streams, the attention backend has said something stronger.
        logger.warning(
            "sgl-tiered: layer-wise KV (--tiered-layerkv) is experimental: its answers "
            "are tested on a CPU, its speed is not measured yet."
        )
    return placed


def connect(
    pool: Any,
    plan: LayerPlan,
    clock: Clock,
    pace: Pace | None,
    *,
    forward_stream: Any = None,
    guard: SwapGuard | None = None,
    breaks_staging: bool = False,
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

    Raises:
        EngineCompatibilityError: see ``layer_copies``.
    """
    layout = plan.layout
    copies = layer_copies(
        pool,
        layout,
        forward_stream,
        guarded=guard is not None,
        breaks_staging=breaks_staging,
    )
    copier = copies.copier
    mover = LayerMover(copier, layout.layer_page_bytes, clock, pace=pace, guard=guard)
    # Page 0 of the tensor and logical page 0 are those of padding.
    binding = LayerBinding(
        layout.num_layers,
        plan.num_pages + 1,
        plan.num_layer_pages,
        first_physical=1,
    )
    manager = LayerManager(binding, mover, layout.page_tokens, plan.half_pages)
    driver = LayerDriver(manager, plan)
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
    driver = runtime.layers
    admission = runtime.layer_admission = LayerAdmission(driver, runtime)
    decode = DecodeCost.guessed(runtime.cost.prefill)
    runtime.step_times = StepTimes(decode.observe)
    turns = DecodeTurns(driver, runtime, admission, decode, runtime.clock)
    scheduler.update_running_batch = PausingDecode(
        scheduler.update_running_batch, turns.choose
    )
