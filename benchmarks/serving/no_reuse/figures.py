"""The figures of prompts without reuse, as pure functions of windows.

A block gives one ratio: the work is the same, so it is plain SGLang's time over ours,
or our CPU seconds over plain SGLang's. Plain SGLang is the geometric mean of the two
plain servers, which halves the variance that it brings in. A figure is the geometric
mean of the blocks' ratios, its interval Student's at 95 % over their logarithms: a
block in which we stalled counts in full. The interval of plain against plain is that
over the starts of the servers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from no_reuse.windows import PARTS, Window
from scipy import stats
from sgl_tiered_workloads.harness.statistics import Interval

__all__ = [
    "AGAIN",
    "COMPARED",
    "PLAIN",
    "SYSTEMS",
    "by_start",
    "figures",
    "missed",
    "throughputs",
]

PLAIN, AGAIN = "plain", "plain-again"
SYSTEMS = {"tiered": "", "tiered-disk": "_disk"}
"""Ours, and what the names of their figures end with."""
THROUGHPUT = "no_reuse_throughput_vs_plain"
CPU = "cpu_per_prompt_vs_plain"
CONTROL = "plain_vs_plain"
COMPARED = (
    *(f"{key}{end}" for key in (THROUGHPUT, CPU) for end in SYSTEMS.values()),
    CONTROL,
    f"{CONTROL}_cpu",
)
"""Of each start: how far these are apart is what a process brings with it."""
LEAST_THROUGHPUT, LEAST_LOW = 0.985, 0.97
LEAST_DISK_THROUGHPUT = 0.98
MOST_CPU, MOST_CPU_HALF_WIDTH = 1.015, 0.005

Floats = npt.NDArray[np.float64]


def _ratios(
    windows: Sequence[Window], what: Callable[[Window], float]
) -> dict[str, Floats]:
    """Return by system, and for the control, the logarithm of each block's ratio."""
    blocks = sorted({window.block for window in windows})
    sums = {name: dict.fromkeys(blocks, 0.0) for name in (PLAIN, AGAIN, *SYSTEMS)}
    for window in windows:
        sums[window.server][window.block] += what(window)
    logs = {name: np.log(list(by_block.values())) for name, by_block in sums.items()}
    plain = (logs[PLAIN] + logs[AGAIN]) / 2
    ratios = {name: logs[name] - plain for name in SYSTEMS}
    return {**ratios, CONTROL: logs[AGAIN] - logs[PLAIN]}


def _interval(logs: Floats) -> Interval:
    """Return the geometric mean; as wide as can be where there is one block only."""
    value = float(np.exp(logs.mean()))
    if logs.size < 2:
        return Interval(value, 0.0, float("inf"))
    bounds = stats.ttest_1samp(logs, 0.0).confidence_interval(0.95)
    return Interval(value, float(np.exp(bounds.low)), float(np.exp(bounds.high)))


def _named(key: str, logs: Floats) -> dict[str, Any]:
    """Return value, interval and half-width; JSON has no infinity, so None for it."""
    interval = _interval(logs)
    is_finite = np.isfinite(interval.high)
    bounds = [round(interval.low, 4), round(interval.high, 4)]
    return {
        key: round(interval.value, 4),
        f"{key}_interval": bounds if is_finite else None,
        f"{key}_half_width": round(interval.half_width, 4) if is_finite else None,
    }


def by_start(windows: Sequence[Window]) -> list[list[Window]]:
    """Return the windows of each start of the servers."""
    starts = sorted({window.start for window in windows})
    return [[one for one in windows if one.start == start] for start in starts]


def throughputs(windows: Sequence[Window], end: str = "") -> dict[str, Any]:
    """Return throughput over plain SGLang's; ``end`` is the end of the names."""
    ratios = _ratios(windows, _seconds)
    found: dict[str, Any] = {}
    for name, suffix in SYSTEMS.items():
        found |= _named(f"{THROUGHPUT}{suffix}{end}", -ratios[name])
    return found | _named(f"{CONTROL}{end}", -ratios[CONTROL])


def figures(windows: Sequence[Window]) -> dict[str, Any]:
    """Return what the windows of the steady state say; at least one whole block."""
    found = throughputs(windows)
    cpu = _ratios(windows, lambda window: window.cpu_s)
    for name, suffix in SYSTEMS.items():
        found |= _named(f"{CPU}{suffix}", cpu[name])
    found |= _named(f"{CONTROL}_cpu", cpu[CONTROL])
    starts = by_start(windows)
    if len(starts) > 1:
        # Two plain servers of one start may differ for as long as they live, so that
        # only starts say whether the two are measured alike.
        means = [_ratios(one, _seconds)[CONTROL].mean() for one in starts]
        found |= _named(CONTROL, -np.array(means))
    found["throughput_by_part"] = {
        part.name: {
            name: round(_interval(-logs).value, 4)
            for name, logs in _ratios(windows, _of_part(part.name)).items()
        }
        for part in PARTS
    }
    plain = [window for window in windows if window.server == PLAIN]
    num = sum(window.prompts for window in plain)
    plain_s = sum(sum(window.seconds.values()) for window in plain)
    found["plain_prompts_per_s"] = round(num / plain_s, 3)
    plain_cpu_s = sum(window.cpu_s for window in plain)
    found["plain_cpu_s_per_prompt"] = round(plain_cpu_s / num, 4)
    found["blocks"] = len({window.block for window in windows})
    found["prompts_of_each"] = num
    return found


def _seconds(window: Window) -> float:
    return sum(window.seconds.values())


def _of_part(name: str) -> Callable[[Window], float]:
    return lambda window: window.seconds[name]


def missed(found: Mapping[str, Any]) -> list[str]:
    """Return the names of figures that are not as wanted."""

    def low_high(key: str) -> tuple[float, float]:
        low, high = found[f"{key}_interval"] or (0.0, float("inf"))
        return low, high

    low, high = low_high(CONTROL)
    width = found[f"{CPU}_half_width"]
    wanted = {
        "outputs_identical": found["outputs_identical"],
        THROUGHPUT: found[THROUGHPUT] >= LEAST_THROUGHPUT,
        f"{THROUGHPUT}_interval": low_high(THROUGHPUT)[0] >= LEAST_LOW,
        f"{THROUGHPUT}_disk": found[f"{THROUGHPUT}_disk"] >= LEAST_DISK_THROUGHPUT,
        CPU: found[CPU] <= MOST_CPU,
        f"{CPU}_half_width": width is not None and width <= MOST_CPU_HALF_WIDTH,
        # Else the two sides were not measured alike.
        f"{CONTROL}_interval": low <= 1.0 <= high,
    }
    return [name for name, is_right in wanted.items() if not is_right]
