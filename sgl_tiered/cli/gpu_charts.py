"""Charts of a GPU session: copies by the size of a piece, and shares of the roofs."""

from __future__ import annotations

import io
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from sgl_tiered.cli.gpu_copies import DIRECTIONS, HICACHE, PLAIN, widest
from sgl_tiered.cli.gpu_report import Page

__all__ = ["draw"]

# Okabe and Ito's palette, told apart by colour-blind readers too.
_COLOURS = {
    PLAIN: "#666666",
    HICACHE: "#d55e00",
    "engines": "#009e73",
    "batch": "#56b4e9",
    "kernel": "#0072b2",
    "kernel_by_layer": "#000000",
    "pages_scatter": "#cc79a7",
    "gather_pages": "#cc79a7",
}
_OTHER_COLOUR = "#e69f00"
_PRODUCT = "product_"


def draw(page: Page) -> dict[str, bytes]:
    """Return PNG files by name; none of what was not measured."""
    pictures = {}
    if page.copies:
        pictures["copies"] = _copies(page)
    if page.shares:
        pictures["shares"] = _shares(page)
    return pictures


def _copies(page: Page) -> bytes:
    figure = _figure(12, 4.6)
    for axes, direction in zip(figure.subplots(1, 2), DIRECTIONS, strict=True):
        chosen = widest(page.copies, direction, is_product=False)
        lines: dict[str, list[tuple[int, float]]] = {}
        for case in chosen:
            rates = {way: value for way, value in case.rates.items() if _is_named(way)}
            if (kernel := case.kernel()) is not None:
                rates["kernel"] = kernel[1]
            for way, value in rates.items():
                lines.setdefault(way, []).append((case.piece_bytes, value))
        for case in widest(page.copies, direction, is_product=True):
            for way, value in case.rates.items():
                if way != PLAIN:
                    lines.setdefault(way, []).append((case.piece_bytes, value))
        for way, points in lines.items():
            sizes, values = zip(*sorted(points), strict=True)
            axes.plot(sizes, values, marker="o", markersize=3, **_style(way))
        if page.link_gb_per_s is not None:
            axes.axhline(page.link_gb_per_s, color="#bbbbbb", linewidth=1, label="link")
        every = sorted({case.piece_bytes for case in chosen})
        if every:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_locator(FixedLocator(every))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xticklabels([f"{size / 1024:g}" for size in every])
        if lines:
            axes.legend(frameon=False, fontsize=7)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("piece, KiB (the case of most pieces)")
        axes.set_title(f"Copies {direction}, GB/s", loc="left", fontsize=10)
        _tidy(axes)
    return _png(figure, page)


def _is_named(way: str) -> bool:
    """Whether a way has a line of its own: not each number of programs."""
    return not way.removeprefix("kernel_").isdigit()


def _style(way: str) -> dict[str, Any]:
    label = {PLAIN: "one plain copy (roof)", "kernel": "kernel (best)"}.get(way, way)
    own = way.removeprefix(_PRODUCT)
    is_dotted = own != way
    return {
        "label": label,
        "color": _COLOURS.get(own, _OTHER_COLOUR),
        "linestyle": "--" if way == PLAIN else ":" if is_dotted else "-",
    }


def _shares(page: Page) -> bytes:
    figure = _figure(9, 1.2 + 0.28 * len(page.shares))
    axes = figure.subplots()
    names = list(page.shares)
    values = [100 * page.shares[name] for name in names]
    axes.barh(range(len(names)), values, 0.7, color=_COLOURS["kernel"])
    axes.axvline(100, color=_COLOURS[PLAIN], linewidth=1, linestyle="--")
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("share of the roof, %")
    _tidy(axes)
    return _png(figure, page)


def _figure(width: float, height: float) -> Any:
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    # The canvas is made directly: pyplot would keep global state.
    FigureCanvasAgg(figure)
    return figure


def _tidy(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#eeeeee")
    axes.set_axisbelow(True)


def _png(figure: Any, page: Page) -> bytes:
    if page.is_dry_run:
        figure.suptitle("DRY RUN: no figure says anything of a GPU", fontsize=11)
    buffer = io.BytesIO()
    # No date or version inside: equal sessions give equal files.
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
