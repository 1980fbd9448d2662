"""One picture of the reuse benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reuse.results import MS, Findings
from reuse.statistics import quantiles

__all__ = ["draw"]

_COLOURS: Mapping[str, str] = {
    "plain": "#e07a5f",
    "hicache-sync": "#9a9a9a",
    "hicache-async": "#b08968",
    "hicache-file": "#b08968",
    "tiered": "#2a6f97",
    "tiered-disk": "#61a5c2",
}


def draw(path: Path, findings: Findings, result: Mapping[str, Any]) -> None:
    """Draw TTFT by working set, and penalties by kind of hit."""
    # The canvas is made directly: pyplot would keep global state and may look
    # for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.4), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    sets, penalties = figure.subplots(1, 2, width_ratios=(1.5, 1.2))
    _draw_sets(sets, findings)
    _draw_penalties(penalties, result.get("penalties_ms", {}))
    for axes in (sets, penalties):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_sets(axes: Any, findings: Findings) -> None:
    names = [n for n in _COLOURS if any(n in s for s in findings.sets.values())]
    for place, name in enumerate(names):
        spots, p50s = [], []
        for index, systems in enumerate(findings.sets.values()):
            if name in systems:
                spots.append(index + (place - len(names) / 2) * 0.13)
                p50s.append(quantiles(systems[name])[0] * MS)
        axes.bar(spots, p50s, 0.12, color=_COLOURS[name], label=name)
    if names:
        axes.set_yscale("log")
        axes.set_xticks(range(len(findings.sets)), list(findings.sets))
        axes.legend(frameon=False, fontsize=8)
    axes.set_title("TTFT p50 by working set, ms", loc="left", fontsize=10)


def _draw_penalties(axes: Any, penalties: Mapping[str, Mapping[str, float]]) -> None:
    for place, (name, item) in enumerate(penalties.items()):
        colour = _COLOURS[name.split()[0]]
        axes.barh(place, item["value"], 0.6, color=colour)
        axes.plot([item["low"], item["high"]], [place, place], color="black")
    axes.set_yticks(range(len(penalties)), list(penalties))
    axes.invert_yaxis()
    axes.set_title("Time over a device hit, 6,000 tokens, ms", loc="left", fontsize=10)
