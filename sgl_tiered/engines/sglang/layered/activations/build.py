"""Joins a pool's activations to its layers: captures, and the order of requests."""

from __future__ import annotations

from typing import Any

from sgl_tiered.engines.sglang.layered.activations.batches import Packing
from sgl_tiered.engines.sglang.layered.activations.capture import hook_captures
from sgl_tiered.engines.sglang.layered.activations.choosing import Chosen
from sgl_tiered.engines.sglang.layered.driver import LayerDriver

__all__ = ["attach_activations"]


def attach_activations(pool: Any, driver: LayerDriver, chosen: Chosen) -> None:
    """Let forwards capture what a pool's pages are made of, and balance their reads.

    Args:
        pool: a `LayeredPool` with an act area.
        driver: of it.
        chosen: how activations are used.
    """
    assert chosen.projections is not None, "activations without projections"
    assert chosen.kv_gen is not None, "activations without their times"
    assert chosen.load_kv is not None, "activations without their times"
    hook_captures(chosen.projections, pool.acts, driver)
    driver.packing = Packing(
        driver.manager.staged_kinds,
        driver.plan.half_pages,
        chosen.share,
        chosen.kv_gen,
        chosen.load_kv,
    )
