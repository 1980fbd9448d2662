"""One chart of a comparison: hits by length, loads, and runs without reuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from comparison.measure import COMPUTED, DEVICE, HOST, ON_DISK
from comparison.page import DRY_WORDS
from comparison.plan import LOAD_NAMES
from comparison.results import Findings, Row
from comparison.systems import PLAIN

__all__ = ["draw"]

# Okabe and Ito's palette, told apart by colour-blind readers too.
_COLOURS: Mapping[str, str] = {
    "plain": "#666666",
    "tiered": "#0072b2",
    "hicache": "#d55e00",
    "hicache-direct": "#e69f00",
    "lmcache": "#009e73",
    "tiered-disk": "#56b4e9",
    "hicache-disk": "#cc79a7",
}
_LINES = {COMPUTED: ":", DEVICE: "-.", HOST: "-", ON_DISK: "--"}


def draw(path: Path, header: Mapping[str, Any], findings: Findings) -> None:
    """Draw the chart; raises ModuleNotFoundError without matplotlib."""
    # The canvas is made directly: pyplot would keep global state and may look for a
    # display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    hits, times, rates, ratios = figure.subplots(1, 4, width_ratios=(1.7, 1, 1, 0.8))
    rows = [row for row in findings.rows if row.value is not None]
    _draw_hits(hits, rows)
    _draw_loads(times, rows, "TTFT p50", "TTFT p50 of the loads, ms")
    _draw_loads(rates, rows, "answer tokens/s", "Answer tokens/s of the loads")
    _draw_ratios(ratios, findings.samples)
    for axes in (hits, times, rates, ratios):
        axes.spines[["top", "right"]].set_visible(False)
    name = header["model"]["path"]
    cards = [one["name"] for one in header["machine"]["accelerators"]]
    title = f"{name} on {', '.join(cards) or 'a CPU'}"
    if header["dry_run"]:
        title += f" ({DRY_WORDS.upper()}: no figure says anything of a system)"
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    # No date or version inside: equal cells give equal files.
    figure.savefig(path, metadata={"Software": None})


def _draw_hits(axes: Any, rows: Sequence[Row]) -> None:
    """Draw TTFT by the hit's length; of what all share, plain's line only."""
    from matplotlib.ticker import FixedLocator, NullLocator

    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        if not row.state or row.value is None:
            continue
        if row.state in (COMPUTED, DEVICE) and row.system != PLAIN:
            continue
        lines.setdefault((row.system, row.state), []).append((row.tokens, row.value))
    for (system, state), points in lines.items():
        tokens, values = zip(*sorted(points), strict=True)
        axes.plot(
            tokens,
            values,
            _LINES[state],
            marker="o",
            markersize=3,
            color=_COLOURS[system],
            label=f"{system}, {state}",
        )
    if lines:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        every = sorted({tokens for points in lines.values() for tokens, _ in points})
        axes.xaxis.set_major_locator(FixedLocator(every))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticklabels([f"{tokens:,}" for tokens in every])
        axes.legend(frameon=False, fontsize=7)
    axes.set_xlabel("tokens of the hit")
    axes.set_title("TTFT by where the KV lay, ms", loc="left", fontsize=10)


def _draw_loads(axes: Any, rows: Sequence[Row], ending: str, title: str) -> None:
    chosen = [row for row in rows if row.figure.endswith(f", {ending}")]
    names = list(dict.fromkeys(row.system for row in chosen))
    width = 0.8 / max(len(names), 1)
    for row in chosen:
        place = LOAD_NAMES.index(row.part) - 0.4
        place += (names.index(row.system) + 0.5) * width
        is_first = row.part == chosen[0].part
        label = row.system if is_first else None
        axes.bar(place, row.value, width, color=_COLOURS[row.system], label=label)
    axes.set_xticks(
        range(len(LOAD_NAMES)), [name.replace("_", "-") for name in LOAD_NAMES]
    )
    if chosen:
        axes.legend(frameon=False, fontsize=7)
    axes.set_title(title, loc="left", fontsize=10)


def _draw_ratios(axes: Any, samples: Sequence[float]) -> None:
    if samples:
        spread = np.linspace(-0.2, 0.2, len(samples))
        axes.plot(spread, samples, "o", color=_COLOURS["tiered"], markersize=4)
        middle = float(np.median(samples))
        axes.plot([-0.3, 0.3], [middle, middle], color="black")
    axes.axhline(1.0, color="#555555", linewidth=0.8)
    axes.set_xlim(-0.6, 0.6)
    axes.set_xticks([0], ["tiered"])
    axes.set_title("Without reuse / plain", loc="left", fontsize=10)
