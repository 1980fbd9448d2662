"""What a soak is judged by: slopes, growth and limits. Pure functions.

**Slope.** Resident memory does not grow in a straight line: an allocator takes a piece
from the system now and then, and a process that grew once stays grown. So the slope is
Theil's and Sen's, the median over the slopes of all pairs of samples, which a few jumps
do not move. What is judged is the slope of the difference of two servers that were
sampled at the same moments under the same load: what SGLang itself keeps, and what the
machine did meanwhile, is in both.

**Its interval.** Steps of an allocator stay, so the samples are no independent errors
around a line, and an interval that takes them for such is far too narrow. But what
memory gained in one stretch of time tells little of the next. So the time is cut into
pieces, each gives a slope of its own, and the spread of these gives the interval
(Student's t). It is wide where a run is short, and says so.

**What can be found.** A leak of b bytes a request at r requests a second is 0.0036 b r
MB per hour: 716 bytes are above a limit of 20 MB per hour from 7.8 requests a second
on. Below that rate no statistic can tell them from what is allowed, so a run whose load
was too slow has not caught its planted leak, whatever it has measured.

**Step times.** A machine that becomes a third faster during a run makes every step a
third shorter, and hides as much growth. Both servers decode in every round, so what is
judged is the tiered server's growth over plain's; the growth alone is told beside it.
Its interval is made as that of the slope: the first third and the last are cut into
pieces, each pair of which gives a growth of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = [
    "LEAK_BYTES",
    "MAX_RSS_MB_PER_HOUR",
    "Growth",
    "Slope",
    "expected_mb_per_hour",
    "failures",
    "growth",
    "growth_over_plain",
    "slope",
]

LEAK_BYTES = 716
"""What the planted leak keeps of each request."""
MAX_RSS_MB_PER_HOUR = 20.0
MAX_STEP_TIME_GROWTH = 0.05
NUM_PIECES = 6
_T_95 = 2.571
"""Student's t, both tails 5 % together, one degree of freedom less than pieces."""
_ZEROS = (
    "flows",
    "pins",
    "empty_namespaces",
    "fd_growth",
    "thread_growth",
    "wrong",
    "errors",
)


@dataclass(frozen=True, slots=True)
class Slope:
    """Growth per hour, and half of its 95 % interval (infinite if too few samples)."""

    per_hour: float
    half_width: float


@dataclass(frozen=True, slots=True)
class Growth:
    """A share, and half of its 95 % interval (infinite if too few values)."""

    share: float
    half_width: float


def slope(times_s: Sequence[float], values: Sequence[float]) -> Slope:
    """Return how fast values grow.

    Args:
        times_s: when they were sampled, ascending, seconds.
        values: as many.

    Raises:
        ValueError: fewer than two samples, or not as many values as times.
    """
    hours = np.asarray(times_s, np.float64) / 3600
    data = np.asarray(values, np.float64)
    if hours.shape != data.shape or hours.size < 2:
        raise ValueError(f"no slope of {data.size} values at {hours.size} times")
    half_width = float("inf")
    if hours.size >= 3 * NUM_PIECES:
        pieces = [
            _theil_sen(hours[part], data[part])
            for part in np.array_split(np.arange(hours.size), NUM_PIECES)
        ]
        half_width = _half_width(pieces)
    return Slope(_theil_sen(hours, data), half_width)


def _half_width(pieces: Sequence[float]) -> float:
    """Return half of the interval of the mean of ``NUM_PIECES`` values."""
    return _T_95 * float(np.std(pieces, ddof=1)) / NUM_PIECES**0.5


def _theil_sen(hours: np.ndarray, data: np.ndarray) -> float:
    first, second = np.triu_indices(hours.size, 1)
    return float(
        np.median((data[second] - data[first]) / (hours[second] - hours[first]))
    )


def growth(values: Sequence[float]) -> float:
    """Return the median of the last third over that of the first, less 1.

    Raises:
        ValueError: fewer than three values.
    """
    if len(values) < 3:
        raise ValueError(f"{len(values)} values have no thirds")
    third = len(values) // 3
    first, last = np.median(values[:third]), np.median(values[-third:])
    return float(last / first) - 1


def growth_over_plain(ours: Sequence[float], plain: Sequence[float]) -> Growth:
    """Return (1 + growth of ours) / (1 + growth of plain's) - 1.

    Args:
        ours: one value a round, in their order.
        plain: of the same rounds, and so of the same machine.

    Raises:
        ValueError: fewer than three values, or not as many of either.
    """
    if len(ours) != len(plain):
        raise ValueError(f"{len(ours)} values beside {len(plain)} of plain's")
    share = (1 + growth(ours)) / (1 + growth(plain)) - 1
    third = len(ours) // 3
    if third < 3 * NUM_PIECES:
        return Growth(share, float("inf"))

    def pieces(values: Sequence[float]) -> np.ndarray:
        ends = (values[:third], values[-third:])
        first, last = (
            np.array([np.median(part) for part in np.array_split(end, NUM_PIECES)])
            for end in ends
        )
        return last / first

    return Growth(share, _half_width(list(pieces(ours) / pieces(plain))))


def expected_mb_per_hour(num_bytes: float, requests_per_s: float) -> float:
    """Return what a leak of so many bytes a request comes to."""
    return num_bytes * requests_per_s * 3600 / 1e6


def failures(figures: Mapping[str, Any]) -> list[str]:
    """Return what is not as it must be, a sentence each.

    Args:
        figures: of a run, as its last line has them.
    """
    found = [f"{name} is {figures[name]}, not 0" for name in _ZEROS if figures[name]]
    for name, most in (
        ("rss_mb_per_hour", MAX_RSS_MB_PER_HOUR),
        ("step_time_growth_over_plain", MAX_STEP_TIME_GROWTH),
    ):
        # So that what is no number is no success.
        if not figures[name] <= most:
            found.append(f"{name} is {figures[name]}, more than {most}")
    planted = figures["planted"]
    if not planted["expected_mb_per_hour"] > MAX_RSS_MB_PER_HOUR:
        found.append(
            f"the load was too slow: {planted['expected_mb_per_hour']} MB per hour of "
            f"the planted leak are no more than the limit"
        )
    elif not planted["caught"]:
        found.append(
            f"the planted leak was not caught: {planted['rss_mb_per_hour']} MB per hour"
        )
    found += [f"nothing was reused from the {t} tier" for t in _unused(figures)]
    if not figures["judged"]:
        found.append("no answer was compared")
    return found


def _unused(figures: Mapping[str, Any]) -> list[str]:
    return [tier for tier in ("host", "disk") if not figures["reused"].get(tier)]
