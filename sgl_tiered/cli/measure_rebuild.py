"""HybridServe's two regressions for a calibration: T_kv_gen, and T_load_kv.

Rebuilding is sampled in this process, by the kernel and at the shape and type of the
model, with as many threads as the server has: on a CPU, on the server's machine. Loads
are those that were measured anyway, of pages over the link from host to device (an
emulated one, if the server emulates it), shared out to the layers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from sgl_tiered.cost.calibration import MachineFacts, ModelFacts, RebuildFit, TokensFit
from sgl_tiered.cost.fitting import LinkSample, TokensSample, fit_tokens

__all__ = ["layer_loads", "measure_rebuild"]

_DTYPES = ("float32", "bfloat16", "float16")


def measure_rebuild(
    projection: Mapping[str, Any] | None,
    model: ModelFacts,
    machine: MachineFacts,
    here: MachineFacts,
    loads: Sequence[LinkSample],
) -> tuple[RebuildFit | None, list[str]]:
    """Return both lines, and what to know about them.

    Args:
        projection: as ``served.projection_facts`` tells it; None where K and V of the
            model are not plain heads.
        model: what is measured.
        machine: where the model is served.
        here: where this process runs.
        loads: transfers from host to device, of all layers.

    Returns:
        The fit, or None and a note where one of both cannot be measured.
    """
    if (
        projection is None
        or model.dtype not in _DTYPES
        or model.dtype != model.kv_dtype
    ):
        return None, []
    reason = None
    if machine.accelerator != "none":
        reason = "T_kv_gen is measured on CPUs only, so far"
    elif importlib.util.find_spec("torch") is None:
        reason = "T_kv_gen needs torch, which is not installed here"
    elif machine.memory_bytes != here.memory_bytes:
        reason = "T_kv_gen is measured on the machine that serves, which is another one"
    load_kv = fit_tokens(layer_loads(loads, model))
    if reason is None and load_kv is None:
        reason = "T_load_kv needs loads of two sizes from host to device"
    if reason is not None or load_kv is None:
        return None, [f"Rebuilding: {reason}."]
    return RebuildFit(_sampled(projection, model), load_kv), []


def layer_loads(loads: Sequence[LinkSample], model: ModelFacts) -> list[TokensSample]:
    """Return loads of all layers as those of one; K and V of whole tokens."""
    return [
        TokensSample(
            round(load.num_bytes / model.kv_bytes_per_token),
            load.seconds / model.num_layers,
        )
        for load in loads
    ]


def _sampled(projection: Mapping[str, Any], model: ModelFacts) -> TokensFit:
    """Return T_kv_gen, sampled with the threads that the server has."""
    import torch

    from sgl_tiered.engines.device.rebuild_probe import probe_kv_gen

    num_before = torch.get_num_threads()
    torch.set_num_threads(int(projection["num_threads"]))
    try:
        return probe_kv_gen(
            int(projection["hidden"]),
            int(projection["num_kv_heads"]),
            int(projection["head_dim"]),
            getattr(torch, model.dtype),
            model.page_tokens,
            has_rotary=bool(projection["has_rotary"]),
            has_bias=bool(projection["has_bias"]),
        )
    finally:
        torch.set_num_threads(num_before)
