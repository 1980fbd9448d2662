"""Charts of a GPU session: copies by the size of a piece, and shares of the roofs."""

from __future__ import annotations

from typing import Any

from sgl_tiered_workloads.harness.plots import COLOURS, new_figure, tidy, to_png

from sgl_tiered.cli.gpu_copies import DIRECTIONS, HICACHE, PLAIN, Rate, widest
from sgl_tiered.cli.gpu_page import Page

__all__ = ["draw"]

_GREY = COLOURS[-1]
_BY_WAY = {
    PLAIN: _GREY,
    HICACHE: COLOURS[1],
    "kernel_by_layer": COLOURS[0],
    "gather_pages": COLOURS[0],
    "engines": COLOURS[2],
    "batch": COLOURS[4],
}
_PRODUCT = COLOURS[3]


def draw(page: Page) -> dict[str, bytes]:
    """Return PNG files by name; none of what was not measured.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    pictures = {}
    if page.copies:
        pictures["copies"] = _copies(page)
    if page.shares:
        pictures["shares"] = _shares(page)
    return pictures


def _copies(page: Page) -> bytes:
    """Draw the median by size, with the 20th to 80th percentile."""
    from matplotlib.ticker import FixedLocator, NullLocator

    figure = new_figure(12, 4.6)
    for axes, direction in zip(figure.subplots(1, 2), DIRECTIONS, strict=True):
        lines: dict[str, list[tuple[int, Rate]]] = {}
        for is_product in (False, True):
            for case in widest(page.copies, direction, is_product=is_product):
                ways = {PLAIN, HICACHE, case.chosen, "engines", "batch"}
                if is_product:
                    # Roof and baseline are drawn for the ways in themselves.
                    ways = {case.chosen}
                for way in sorted(ways & case.rates.keys()):
                    point = (case.piece_bytes, case.rates[way])
                    lines.setdefault(way, []).append(point)
        for way, points in lines.items():
            sizes = [size for size, _ in points]
            rates = [rate for _, rate in points]
            axes.errorbar(
                sizes,
                [rate.median for rate in rates],
                [
                    [rate.median - rate.low for rate in rates],
                    [rate.high - rate.median for rate in rates],
                ],
                fmt="--" if way == PLAIN else "-",
                marker="o",
                markersize=3,
                capsize=2,
                color=_BY_WAY.get(way, _PRODUCT),
                label="one plain copy (roof)" if way == PLAIN else way,
            )
        if page.link_gb_per_s is not None:
            axes.axhline(page.link_gb_per_s, color="#bbbbbb", linewidth=1, label="link")
        every = sorted({size for points in lines.values() for size, _ in points})
        if every:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_locator(FixedLocator(every))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xticklabels([f"{size / 1024:g}" for size in every])
            axes.legend(frameon=False, fontsize=7)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("piece, KiB (the case of most pieces)")
        axes.set_title(f"Copies {direction}, GB/s", loc="left", fontsize=10)
        tidy(axes)
    return _png(figure, page)


def _shares(page: Page) -> bytes:
    figure = new_figure(9, 1.2 + 0.28 * len(page.shares))
    axes = figure.subplots()
    names = list(page.shares)
    values = [100 * page.shares[name] for name in names]
    axes.barh(range(len(names)), values, 0.7, color=COLOURS[0])
    axes.axvline(100, color=_GREY, linewidth=1, linestyle="--")
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("share of the roof, %")
    tidy(axes)
    return _png(figure, page)


def _png(figure: Any, page: Page) -> bytes:
    if page.is_dry_run:
        figure.suptitle("DRY RUN: no figure says anything of a GPU", fontsize=11)
    return to_png(figure)
