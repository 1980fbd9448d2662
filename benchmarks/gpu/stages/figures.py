"""Figures from records of raw seconds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

__all__ = ["median"]


def median(record: Mapping[str, Any], name: str) -> float:
    """Return the median of a record's list."""
    return float(statistics.median(record[name]))
