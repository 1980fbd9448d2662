"""What a comparison of orders found: TTFTs by load and arm, as ratios with a spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sgl_tiered_workloads.records import RequestRecord

__all__ = ["AGAIN", "ALLOWED", "BASE", "LoadFindings", "order_summary"]

BASE, AGAIN = "fcfs", "fcfs-again"
"""Two servers of one kind: how far two runs of one thing are apart. Not one server
twice: the second run would find the first one's prompts."""
ALLOWED = 1.02


@dataclass(slots=True)
class LoadFindings:
    """Records of one load, by arm.

    Attributes:
        rate_per_s: of arrivals.
        records: all repeats together.
        sources: prompt tokens by where their KV came from, by arm.
    """

    rate_per_s: float
    records: dict[str, list[RequestRecord]] = field(default_factory=dict)
    sources: dict[str, dict[str, int]] = field(default_factory=dict)

    def ttft_s(self, arm: str) -> tuple[float, float]:
        """Return mean and 99th percentile."""
        times = np.array([record.ttft_s for record in self.records[arm]])
        return float(times.mean()), float(np.percentile(times, 99))

    def ratios(self, arm: str) -> tuple[float, float]:
        """Return both relative to ``BASE``."""
        ours, base = self.ttft_s(arm), self.ttft_s(BASE)
        return ours[0] / base[0], ours[1] / base[1]


def order_summary(loads: dict[str, LoadFindings], arm: str) -> dict[str, Any]:
    """Return the keys of the result: the worst ratios, and the gain of each load."""
    per_load: dict[str, Any] = {}
    for name, found in loads.items():
        mean, p99 = found.ratios(arm)
        again = found.ratios(AGAIN)
        # Two runs of fcfs differ in either direction.
        spread = [max(ratio, 1.0 / ratio) for ratio in again]
        per_load[name] = {
            "num_requests": len(found.records[arm]),
            "rate_per_s": found.rate_per_s,
            "mean_ttft_vs_fcfs": mean,
            "p99_ttft_vs_fcfs": p99,
            "fcfs_again_mean": again[0],
            "fcfs_again_p99": again[1],
            "is_no_worse": mean <= max(ALLOWED, spread[0])
            and p99 <= max(ALLOWED, spread[1]),
            "ttft_s": {a: found.ttft_s(a) for a in found.records},
            "sources": found.sources,
        }
    return {
        "worst_mean_ttft_vs_fcfs": _worst(per_load, "mean_ttft_vs_fcfs"),
        "worst_p99_ttft_vs_fcfs": _worst(per_load, "p99_ttft_vs_fcfs"),
        "cost_mean_ttft_gain": {
            name: 1.0 - found["mean_ttft_vs_fcfs"] for name, found in per_load.items()
        },
        "no_worse_on_every_load": all(f["is_no_worse"] for f in per_load.values()),
        "loads": per_load,
    }


def _worst(per_load: dict[str, Any], key: str) -> float | None:
    values: Sequence[float] = [found[key] for found in per_load.values()]
    return max(values, default=None)
