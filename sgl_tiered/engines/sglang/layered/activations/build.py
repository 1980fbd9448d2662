"""Joins a pool's activations to its layers: captures, and the order of requests."""

from __future__ import annotations

from typing import Any

from sgl_tiered.cost.model import CostModel
from sgl_tiered.engines.sglang.layered.activations.capture import hook_captures
from sgl_tiered.engines.sglang.layered.activations.choosing import Chosen
from sgl_tiered.engines.sglang.layered.activations.offloaded import hook_offloaded
from sgl_tiered.engines.sglang.layered.driver import LayerDriver
from sgl_tiered.layered.manager import LayerManager
from sgl_tiered.pipelines.stream_weights import WeightSlots
from sgl_tiered.serving.agreement import Agreement
from sgl_tiered.serving.layered.batches import Packing

__all__ = ["attach_activations", "learn_lines"]


def learn_lines(manager: LayerManager, agreement: Agreement, cost: CostModel) -> None:
    """Let T_kv_gen and T_load_kv be refined by what forwards rebuild and load.

    Args:
        manager: of the pool.
        agreement: with the other ranks, which learn what the first one has measured.
        cost: that the planner asks.
    """
    rebuilt = agreement.learned(cost.observe_rebuild)
    loaded = agreement.learned(cost.observe_load_kv)

    def measured(
        rebuild: tuple[int, float] | None, load: tuple[int, float] | None
    ) -> None:
        if rebuild is not None:
            rebuilt(*rebuild)
        if load is not None:
            loaded(*load)

    manager.on_measured = measured


def attach_activations(
    pool: Any, driver: LayerDriver, chosen: Chosen, weights: WeightSlots | None = None
) -> None:
    """Let forwards capture what a pool's pages are made of, and balance their reads.

    Args:
        pool: a `LayeredPool` with an act area.
        driver: of it.
        chosen: how activations are used.
        weights: of projections that are in host memory; None where none are.
    """
    assert chosen.projections is not None, "activations without projections"
    assert chosen.kv_gen is not None, "activations without their times"
    assert chosen.load_kv is not None, "activations without their times"
    hook_captures(chosen.projections, pool.acts, driver)
    if weights is not None:
        assert chosen.offloaded is not None, "slots of no weights"
        linears = chosen.projections.linears
        hook_offloaded(chosen.offloaded, linears, weights, driver)
    driver.packing = Packing(
        driver.manager.staged_kinds,
        driver.plan.half_pages,
        chosen.share,
        chosen.kv_gen,
        chosen.load_kv,
    )
