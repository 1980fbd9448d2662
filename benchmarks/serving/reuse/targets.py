"""What the figures of the reuse benchmark have to be, in one run and over several."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["MIN_RUNS", "judged", "missed"]

MIN_RUNS = 3
AT_LEAST = {"ttft_speedup_of_bound": 0.95}
AT_MOST = {
    "host_hit_penalty_vs_hicache": 0.6,
    "disk_hit_penalty_vs_hicache_file": 0.15,
}
PEER = "host_hit_penalty_vs_hicache_interval"
"""Its upper end must be below 1: ours is the lower one beyond the noise."""


def missed(result: Mapping[str, Any]) -> list[str]:
    """Return the names of figures that are not as wanted.

    A figure that a part would have given that was not run is left out; one that could
    not be told (None) is missed.
    """
    wanted: dict[str, bool] = {"outputs_identical": result["outputs_identical"]}
    for limits, sign in ((AT_LEAST, 1), (AT_MOST, -1)):
        for name, limit in limits.items():
            if name in result:
                value = result[name]
                wanted[name] = value is not None and sign * value >= sign * limit
    if PEER in result:
        high = result[PEER][1]
        wanted[PEER] = high is not None and high < 1
    return [name for name, is_right in wanted.items() if not is_right]


def judged(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the medians over the records of one source, and what they miss.

    A record that lacks a figure makes the figure a missed one, and so do fewer records
    than ``MIN_RUNS``: then ``runs`` is missed.
    """
    found: dict[str, Any] = {
        "runs": len(records),
        "outputs_identical": bool(records)
        and all(record["outputs_identical"] for record in records),
    }
    for name in (*AT_LEAST, *AT_MOST):
        found[name] = _median([record.get(name) for record in records])
    ends = [record.get(PEER) or (None, None) for record in records]
    found[PEER] = [_median(column) for column in zip(*ends, strict=True)] or [None] * 2
    too_few = ["runs"] if len(records) < MIN_RUNS else []
    return found | {"targets_missed": too_few + missed(found)}


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if not values or len(known) < len(values):
        return None
    return round(statistics.median(known), 3)
