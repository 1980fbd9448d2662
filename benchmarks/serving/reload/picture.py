"""One picture: bytes that a reload brings against TTFT."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["draw"]

MS = 1e3


def draw(path: Path, result: Mapping[str, Any]) -> None:
    """Draw TTFT p50, with p90 above it, by the share of the dense bytes."""
    # The canvas is made directly: pyplot would keep global state and may look
    # for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for arm, row in result.get("reloads", {}).items():
        share, p50, p90 = (
            row["bytes_share"],
            row["ttft_p50_s"] * MS,
            row["ttft_p90_s"] * MS,
        )
        axes.plot([share, share], [p50, p90], color="#9a9a9a", linewidth=1)
        axes.plot(share, p50, "o", color="#2a6f97")
        axes.annotate(arm, (share, p50), xytext=(6, -10), textcoords="offset points")
    if "computed_ttft_s" in result:
        axes.axhline(result["computed_ttft_s"] * MS, color="#e07a5f", label="computed")
        axes.legend(frameon=False, fontsize=8)
    axes.set_xlim(0.0, 1.1)
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel("bytes of a reload, of dense")
    axes.set_title("TTFT p50 to p90 over an emulated link, ms", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
