"""What the sections of a GPU session's page are made of."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sgl_tiered_workloads.harness.page import Section

from sgl_tiered.cli.gpu_session import Record

__all__ = ["Found", "Rows", "bullets", "figure", "less", "ms", "section"]

Rows = list[tuple[str, ...]]


@dataclass(slots=True)
class Found:
    """What sections tell beside their tables.

    Attributes:
        gaps: sentences with numbers, for the section of that name.
        shares: figures as shares of their roofs, for the picture.
    """

    gaps: list[str] = field(default_factory=list)
    shares: dict[str, float] = field(default_factory=dict)


def bullets(lines: Iterable[str]) -> str:
    """Return a Markdown list."""
    return "\n".join(f"- {line}" for line in lines)


def section(title: str, head: Sequence[str], rows: Rows, note: str = "") -> Section:
    """Return a section with a table."""
    return Section(title, note, tuple(head), tuple(rows))


def ms(record: Record, name: str) -> float:
    """Return the median of a list of seconds, in milliseconds."""
    return 1e3 * float(statistics.median(record[name]))


def less(value: float, roof: float) -> str:
    """Say how far a value is from another one."""
    share = value / roof - 1.0
    if abs(share) < 0.0005:
        return "as much as"
    if share > 1.0:
        return f"{value / roof:.1f} times"
    return f"{abs(share):.1%} {'more' if share > 0 else 'less'} than"


def figure(value: float) -> str:
    """Return a rate with two decimals, a very small one with three digits."""
    return f"{value:.2f}" if value >= 0.1 or value == 0.0 else f"{value:.3g}"
