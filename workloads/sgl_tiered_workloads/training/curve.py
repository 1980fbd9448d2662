"""The loss curve: one row per few steps, as CSV and as a picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

__all__ = ["COLUMNS", "draw_curve", "write_rows"]

COLUMNS = (
    "step",
    "tokens",
    "elapsed_s",
    "length",
    "rate",
    "text_loss",
    "answer_loss",
    "answer_accuracy",
)
"""Losses in nats per token, means since the row before; accuracy per answer token."""


def write_rows(path: Path, rows: Sequence[Sequence[float]]) -> None:
    """Write all rows as CSV, with a header."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for row in rows:
            writer.writerow(f"{value:.6g}" for value in row)


def draw_curve(rows: Sequence[Sequence[float]]) -> bytes:
    """Return a PNG: loss on text and accuracy on answers against tokens."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    columns = dict(zip(COLUMNS, zip(*rows, strict=True), strict=True))
    tokens = [count / 1e6 for count in columns["tokens"]]
    above.plot(tokens, columns["text_loss"], color="#0072b2")
    above.set_ylabel("loss on text (nats/token)")
    below.plot(tokens, columns["answer_accuracy"], color="#d55e00")
    below.set_ylabel("answer tokens right")
    below.set_ylim(0, 1)
    below.set_xlabel("million tokens trained on")
    lengths = columns["length"]
    for axes in (above, below):
        axes.grid(alpha=0.3)
        for at in range(1, len(rows)):
            if lengths[at] != lengths[at - 1]:
                axes.axvline(tokens[at], color="#666666", linestyle=":")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
