"""The picture of a capacity plan: hits and time to the first token over the cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from sgl_tiered_workloads.harness.plots import COLOURS, new_figure, tidy, to_png

from sgl_tiered.cli.capacity_advice import CapacityPoint, Recommendation, frontier

__all__ = ["draw"]

_INK = "#222222"
_GREY = COLOURS[-1]

Value = Callable[[CapacityPoint], float]


def draw(
    points: Sequence[CapacityPoint],
    advice: Recommendation,
    ttft_slo_s: float,
    unit: str,
) -> bytes:
    """Return a PNG file: a curve per host size, cost to the right.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure = new_figure(9, 7)
    upper, lower = figure.subplots(2, 1, sharex=True)
    _curves(upper, points, lambda point: point.hits, advice)
    _curves(lower, points, lambda point: point.ttft_mean_s, advice)
    best = frontier(points)
    costs = [point.cost for point in best]
    lower.step(
        costs, [point.ttft_mean_s for point in best], where="post",
        color=_INK, linewidth=1, alpha=0.6, zorder=1,
    )  # fmt: skip
    _note(lower, costs[-1:], [p.ttft_mean_s for p in best[-1:]], "Pareto frontier", -12)
    bounds = [point.opt_hits for point in points if not math.isnan(point.opt_hits)]
    if bounds:
        _level(upper, max(bounds), "OPT: the most that any eviction could hit")
    if ttft_slo_s:
        _level(lower, ttft_slo_s, f"target of the P99: {ttft_slo_s:g} s")
    upper.set_ylabel("prompt tokens not computed, share")
    upper.set_ylim(bottom=0)
    lower.set_yscale("log")
    for which in (lower.yaxis.set_major_formatter, lower.yaxis.set_minor_formatter):
        which("{x:g}")
    lower.set_ylabel("mean TTFT, s (open: overloaded)")
    lower.set_xlabel(f"cost of the tiers, {unit}")
    for axes in (upper, lower):
        tidy(axes)
        axes.margins(x=0.14, y=0.14)
    return to_png(figure)


def _curves(
    axes: Any, points: Sequence[CapacityPoint], value: Value, advice: Recommendation
) -> None:
    """Draw a curve per host size through its disk sizes, and name it at its end."""
    hosts = sorted({point.host_gb for point in points})
    for place, host in enumerate(hosts):
        colour = COLOURS[place % (len(COLOURS) - 1)]
        curve = sorted(
            (p for p in points if p.host_gb == host and not math.isnan(value(p))),
            key=lambda point: point.cost,
        )
        costs, values = [p.cost for p in curve], [value(p) for p in curve]
        axes.plot(costs, values, "-", color=colour, linewidth=1.6, zorder=2)
        for point in curve:
            face = "none" if point.is_overloaded else colour
            axes.plot(
                [point.cost], [value(point)], "o", color=colour,
                markerfacecolor=face, zorder=3,
            )  # fmt: skip
        name = f"host {host:g} GB" if host else "no tier"
        _note(axes, costs[-1:], values[-1:], name, 6, colour)
    chosen = advice.point
    if chosen is not None:
        axes.plot(
            [chosen.cost], [value(chosen)], "o", markersize=15, markerfacecolor="none",
            markeredgecolor=_INK, markeredgewidth=1.4, zorder=4,
        )  # fmt: skip
        _note(axes, [chosen.cost], [value(chosen)], "recommended", -18, _INK)


def _level(axes: Any, height: float, text: str) -> None:
    axes.axhline(height, color=_GREY, linestyle="--", linewidth=1, zorder=1)
    axes.annotate(
        text, (0.01, height), (0, 3), xycoords=("axes fraction", "data"),
        textcoords="offset points", fontsize=8, color=_GREY,
    )  # fmt: skip


def _note(
    axes: Any,
    costs: Sequence[float],
    values: Sequence[float],
    text: str,
    above: float,
    colour: str = _INK,
) -> None:
    for cost, height in zip(costs, values, strict=True):
        axes.annotate(
            text, (cost, height), (8, above), textcoords="offset points",
            fontsize=8, color=colour,
        )  # fmt: skip
