"""The Pareto pictures: bytes against quality, a line per method."""

from __future__ import annotations

from pathlib import Path

from offline.report import DENSE, OURS, Figures

__all__ = ["draw"]


def draw(figures: Figures, path: Path) -> None:
    """Write a picture of both qualities to ``path`` (its ending says the format)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines: dict[str, list] = {}
    for (name, _, encoding), point in figures.points.items():
        label = name if encoding == DENSE[2] else f"{name}, {encoding}"
        lines.setdefault(label, []).append(point)
    lines.pop(DENSE[0], None)
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5))
    kinds = (
        ("ppl_increase", "perplexity over dense, %", 100.0),
        ("recall_ratio", "recall over dense", 1.0),
    )
    for axis, (field, label, scale) in zip(axes, kinds, strict=True):
        # There are more methods than colours in the usual ten.
        axis.set_prop_cycle(color=pyplot.get_cmap("tab20").colors)
        for name, points in lines.items():
            ordered = sorted(points, key=lambda point: point.bytes_ratio)
            axis.plot(
                [100.0 * point.bytes_ratio for point in ordered],
                [scale * getattr(point, field) for point in ordered],
                marker="o",
                markersize=3,
                linewidth=2.2 if name == OURS else 1.0,
                label=name,
            )
        axis.set_xlabel("bytes of the prefix's KV, % of dense")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_yscale("symlog", linthresh=1.0)
    axes[1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
