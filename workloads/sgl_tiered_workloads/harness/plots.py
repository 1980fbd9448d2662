"""Pictures of a comparison, from records: distributions, time, hits per tier."""

from __future__ import annotations

import io
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from sgl_tiered_workloads.harness.metrics import in_window, span
from sgl_tiered_workloads.records import RequestRecord

if TYPE_CHECKING:
    # It brings the clients' packages, and who draws other figures needs none.
    from sgl_tiered_workloads.harness.results import Results, SystemResult

__all__ = ["COLOURS", "draw_all", "new_figure", "tidy", "to_png"]

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#666666")
"""Okabe and Ito's palette, told apart by colour-blind readers too."""
_TIER_COLOURS = {
    "device": "#0072b2",
    "host": "#56b4e9",
    "cxl": "#e69f00",
    "disk": "#009e73",
    "storage": "#009e73",
    "unattributed": "#cc79a7",
}
_COMPUTED = "#dddddd"
_LOGARITHMIC = ("TTFT", "E2E")
"""Times of hits and of misses are a decade or two apart; a TPOT may be 0."""

Samples = Callable[[RequestRecord], list[float]]


def draw_all(results: Results) -> dict[str, bytes]:
    """Return PNG files by name."""
    return {
        "latency": _latency(results),
        "timeline": _timeline(results),
        "hits": _hits(results),
    }


def new_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure, in inches."""
    # The canvas is made directly: pyplot would keep global state and may look for a
    # display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def to_png(figure: Any) -> bytes:
    """Return a figure's PNG file; equal figures give equal bytes."""
    buffer = io.BytesIO()
    # No date or version inside: equal records give equal files.
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _steady(results: Results, system: SystemResult) -> list[RequestRecord]:
    """Answered requests of the steady state, all repeats."""
    chosen: list[RequestRecord] = []
    for repeat in sorted({record.repeat for record in system.records}):
        every = [record for record in system.records if record.repeat == repeat]
        chosen.extend(in_window(every, results.window))
    return [record for record in chosen if record.error is None]


def _latency(results: Results) -> bytes:
    """Distribution functions of TTFT, TPOT, ITL and E2E."""
    kinds: dict[str, tuple[Samples, float | None]] = {
        "TTFT": (lambda r: [r.ttft_s], results.slos.ttft_s),
        "TPOT": (lambda r: [r.tpot_s], results.slos.tpot_s),
        "ITL": (lambda r: [b - a for a, b in pairwise(r.token_times_s)], None),
        "E2E": (lambda r: [r.e2e_s], results.slos.e2e_s),
    }
    figure = new_figure(11, 3.2)
    every_axes = figure.subplots(1, len(kinds), sharey=True)
    for axes, (name, (samples, limit_s)) in zip(every_axes, kinds.items(), strict=True):
        for place, system in enumerate(results.systems):
            steady = _steady(results, system)
            values = np.sort([value for r in steady for value in samples(r)]) * 1e3
            if not values.size:
                continue
            share = np.arange(1, values.size + 1) / values.size
            axes.step(values, share, where="post", color=_colour(place))
        if limit_s is not None:
            axes.axvline(limit_s * 1e3, color="#222222", linestyle=":", linewidth=1)
        axes.set_xlabel(f"{name}, ms" + (" (dotted: SLO)" if limit_s else ""))
        if name in _LOGARITHMIC:
            axes.set_xscale("log")
        else:
            axes.set_xlim(0, axes.get_xlim()[1] * 1.02)
        tidy(axes)
    every_axes[0].set_ylabel("share of requests (ITL: gaps)")
    _name_systems(figure, results)
    return to_png(figure)


def _timeline(results: Results) -> bytes:
    """TTFT over the targeted start, one panel per repeat, the window shaded."""
    repeats = sorted({r.repeat for system in results.systems for r in system.records})
    figure = new_figure(11, 3.2)
    every_axes = figure.subplots(1, len(repeats), sharey=True, squeeze=False)[0]
    for axes, repeat in zip(every_axes, repeats, strict=True):
        for place, system in enumerate(results.systems):
            every = [r for r in system.records if r.repeat == repeat]
            if not every:
                continue
            begin_s, end_s = span(every, results.window)
            axes.axvspan(begin_s, end_s, color=_colour(place), alpha=0.06, linewidth=0)
            good = [r for r in every if r.error is None]
            axes.scatter(
                [r.targeted_s for r in good],
                [r.ttft_s * 1e3 for r in good],
                s=10,
                color=_colour(place),
                alpha=0.7,
            )
        axes.set_xlabel(f"targeted start in repeat {repeat}, s")
        tidy(axes)
    every_axes[0].set_yscale("log")
    every_axes[0].set_ylabel("TTFT, ms (shaded: steady)")
    _name_systems(figure, results)
    return to_png(figure)


def _hits(results: Results) -> bytes:
    """Share of prompt tokens by tier, one bar per system."""
    figure = new_figure(11, 1.1 + 0.45 * len(results.systems))
    axes = figure.subplots()
    drawn: dict[str, Any] = {}
    for row, system in enumerate(results.systems):
        left = 0.0
        rates = dict(system.metrics.hit_rate_by_tier)
        rates["computed"] = max(0.0, 1.0 - sum(rates.values()))
        for tier, share in rates.items():
            colour = _COMPUTED if tier == "computed" else _tier_colour(tier)
            drawn[tier] = axes.barh(
                row, share * 100, left=left, color=colour, edgecolor="white"
            )
            left += share * 100
    axes.set_yticks(range(len(results.systems)), [s.name for s in results.systems])
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of prompt tokens, %")
    tidy(axes)
    drawn["computed"] = drawn.pop("computed")
    figure.legend(drawn.values(), drawn, loc="outside upper center", ncols=len(drawn))
    return to_png(figure)


def _name_systems(figure: Any, results: Results) -> None:
    from matplotlib.lines import Line2D

    names = [system.name for system in results.systems]
    lines = [Line2D([], [], color=_colour(place)) for place in range(len(names))]
    figure.legend(lines, names, loc="outside upper center", ncols=len(names))


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def _tier_colour(tier: str) -> str:
    return _TIER_COLOURS.get(tier, "#888888")


def tidy(axes: Any) -> None:
    """Leave out what carries no data, and draw a light grid behind."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#eeeeee")
    axes.set_axisbelow(True)
