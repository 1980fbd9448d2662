"""What is told of activations: of one request, of all, and of the choice."""

from __future__ import annotations

from typing import Any

from sgl_tiered.engines.sglang.layered.activations.choosing import Chosen
from sgl_tiered.layered.base import ActPlan, LayerReport

__all__ = ["COUNTERS", "activation_report", "activation_stats", "count_report"]

COUNTERS = (
    "layerkv_act_pages",
    "layerkv_kv_pages",
    "layerkv_bytes_saved",
)
"""Of ended requests; there where pages are kept as activations."""


def activation_report(report: LayerReport) -> dict[str, Any]:
    """Return what one request's activations did, as JSON can write it."""
    return {
        "act_pages": report.num_act_pages,
        "kv_pages": report.num_kv_pages,
        "bytes_saved": report.bytes_saved,
        "rebuild_s": round(report.rebuild_s, 6),
        "overlap": round(_overlap(report.rebuild_s, report.rebuild_exposed_s), 4),
    }


def count_report(totals: dict[str, float], report: LayerReport) -> None:
    """Add what a request's activations did to the counters of all."""
    figures = (report.num_act_pages, report.num_kv_pages, report.bytes_saved)
    for name, figure in zip(COUNTERS, figures, strict=True):
        totals[name] += figure


def activation_stats(
    chosen: Chosen, acts: ActPlan | None, rebuild_s: float, exposed_s: float
) -> dict[str, Any]:
    """Return the choice, and what came of it, as JSON can write it.

    Args:
        chosen: at the start.
        acts: sizes; None where no page is kept as activations.
        rebuild_s, exposed_s: of all forwards so far.
    """
    told = chosen.stats()
    if acts is not None:
        told |= {
            "host_rows": acts.num_act_rows,
            "device_layer_pages": acts.num_acts,
            "staging_layer_pages": 2 * acts.half_acts,
            "rebuild_s": round(rebuild_s, 6),
            "overlap": round(_overlap(rebuild_s, exposed_s), 4),
        }
    return told


def _overlap(rebuild_s: float, exposed_s: float) -> float:
    """Return the share of rebuilding under loads; 1 where nothing was rebuilt."""
    return 1.0 - exposed_s / rebuild_s if rebuild_s > 0.0 else 1.0
