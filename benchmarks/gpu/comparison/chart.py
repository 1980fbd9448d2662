"""One chart of a comparison: hits by length, loads, and streams without reuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from comparison.measure import COMPUTED, DEVICE, HOST, ON_DISK
from comparison.page import DRY_WORDS
from comparison.plan import LOAD_NAMES
from comparison.results import Findings, Row
from comparison.systems import SYSTEMS
from sgl_tiered_workloads.harness.plots import COLOURS, new_figure, tidy, to_png

__all__ = ["draw"]

_COLOURS = dict(zip(SYSTEMS, ("#666666", "#000000", *COLOURS), strict=False))
_LINES = {COMPUTED: ":", DEVICE: "-.", HOST: "-", ON_DISK: "--"}


def draw(path: Path, header: Mapping[str, Any], findings: Findings) -> None:
    """Draw the chart; bars are from the least to the most of what was repeated.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure = new_figure(17, 5.2)
    hits, times, rates, stream = figure.subplots(1, 4, width_ratios=(1.9, 1, 1, 0.9))
    rows = [row for row in findings.rows if row.value is not None]
    _draw_hits(hits, rows)
    loads = [name.replace("_", "-") for name in LOAD_NAMES]
    p50 = [f"{name}, TTFT p50" for name in loads]
    tokens = [f"{name}, answer tokens/s" for name in loads]
    _draw_bars(times, rows, dict(zip(p50, loads, strict=True)), "TTFT p50, ms")
    _draw_bars(rates, rows, dict(zip(tokens, loads, strict=True)), "Answer tokens/s")
    ratio = {"without reuse, throughput over plain's": "no reuse"}
    _draw_bars(stream, rows, ratio, "Throughput over plain's")
    stream.axhline(1.0, color="#555555", linewidth=0.8)
    names = {row.system: None for row in rows}
    handles = [_handle(name) for name in names]
    figure.legend(handles, names, loc="outside lower center", ncols=8, frameon=False)
    model = header["model"]["path"]
    cards = [one["name"] for one in header["machine"]["accelerators"]]
    title = f"{model} on {', '.join(cards) or 'a CPU'}"
    if header["dry_run"]:
        title += f" ({DRY_WORDS.upper()}: no figure says anything of a system)"
    figure.suptitle(title, fontsize=11)
    path.write_bytes(to_png(figure))


def _handle(name: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=_COLOURS[name])


def _errors(rows: Sequence[Row]) -> list[list[float]]:
    """Return how far the least and the most are from each value."""
    lows, highs = [], []
    for row in rows:
        assert row.value is not None
        assert row.low is not None
        assert row.high is not None
        lows.append(row.value - row.low)
        highs.append(row.high - row.value)
    return [lows, highs]


def _draw_hits(axes: Any, rows: Sequence[Row]) -> None:
    """Draw TTFT by the hit's length, a line per system and place."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FixedLocator, NullLocator

    lines: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.state:
            lines.setdefault((row.system, row.state), []).append(row)
    for (system, state), points in lines.items():
        points.sort(key=lambda row: row.tokens)
        axes.errorbar(
            [row.tokens for row in points],
            [row.value for row in points],
            _errors(points),
            fmt=_LINES[state],
            marker="o",
            markersize=3,
            capsize=2,
            linewidth=1,
            color=_COLOURS[system],
        )
    if lines:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        every = sorted({row.tokens for points in lines.values() for row in points})
        axes.xaxis.set_major_locator(FixedLocator(every))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticklabels([f"{tokens:,}" for tokens in every])
        states = list(dict.fromkeys(state for _, state in lines))
        styles = [Line2D([], [], color="black", ls=_LINES[state]) for state in states]
        axes.legend(styles, states, frameon=False, fontsize=8)
    axes.set_xlabel("tokens of the hit")
    axes.set_title("TTFT by where the KV lay, ms", loc="left", fontsize=10)
    tidy(axes)


def _draw_bars(
    axes: Any, rows: Sequence[Row], figures: Mapping[str, str], title: str
) -> None:
    """Draw a group of bars per figure, one per system, with its range."""
    chosen = [row for row in rows if row.figure in figures]
    names = list(dict.fromkeys(row.system for row in chosen))
    width = 0.8 / max(len(names), 1)
    for row in chosen:
        place = list(figures).index(row.figure) - 0.4
        place += (names.index(row.system) + 0.5) * width
        colour = _COLOURS[row.system]
        axes.bar(place, row.value, width, color=colour, yerr=_errors([row]), capsize=2)
    axes.set_xticks(range(len(figures)), list(figures.values()))
    axes.set_title(title, loc="left", fontsize=10)
    tidy(axes)
