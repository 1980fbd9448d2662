"""Ports from a given range, for who may not take any other."""

from __future__ import annotations

from sgl_tiered_workloads.cluster.ports import Ports

__all__ = ["Range"]


class Range(Ports):
    """Free ports of a range, none given twice.

    Args:
        text: ``FIRST-LAST``.

    Raises:
        ValueError: the text is no range.
    """

    def __init__(self, text: str) -> None:
        first, last = (int(word) for word in text.split("-"))
        if first > last:
            raise ValueError(f"{text}: the first port is above the last")
        self._untried = iter(range(first, last + 1))
