"""Figures of a cell (one system on one load), from its records alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from sgl_tiered_workloads.records import RequestRecord

__all__ = ["METRICS", "figures", "ratio", "table"]

METRICS = ("ttft", "tpot", "jct")


def figures(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return mean and P99 of TTFT, TPOT and JCT in seconds, and the cached share.

    TPOT is over answers of more than one token. JCT is the time to the last token.
    """
    samples = {
        "ttft": [record.ttft_s for record in records],
        "tpot": [record.tpot_s for record in records if len(record.output) > 1],
        "jct": [record.e2e_s for record in records],
    }
    found: dict[str, Any] = {}
    for name, values in samples.items():
        found[f"{name}_mean_s"] = float(np.mean(values)) if values else 0.0
        found[f"{name}_p99_s"] = float(np.percentile(values, 99)) if values else 0.0
    prompts = sum(record.num_prompt_tokens for record in records)
    found["cached_share"] = sum(r.cached_tokens for r in records) / max(prompts, 1)
    found["requests"] = len(records)
    return found


def ratio(
    ours: Sequence[RequestRecord], theirs: Sequence[RequestRecord], figure: str
) -> float:
    """Return ours over theirs of a figure such as ``ttft_mean_s``."""
    return float(figures(ours)[figure]) / float(figures(theirs)[figure])


def table(cells: Mapping[tuple[str, str], Sequence[RequestRecord]]) -> Iterable[str]:
    """Give the lines of a table, one cell (load, system) a line; times in ms."""
    names = [f"{metric} {which}" for metric in METRICS for which in ("mean", "p99")]
    head = " ".join(f"{name:>10s}" for name in names)
    yield f"{'load':10s} {'system':16s} {'n':>4s} {head} {'cached':>7s}"
    for (load, system), records in cells.items():
        told = figures(records)
        times = [
            told[f"{metric}_{which}_s"] * 1e3
            for metric in METRICS
            for which in ("mean", "p99")
        ]
        row = " ".join(f"{value:10.1f}" for value in times)
        share = told["cached_share"]
        yield f"{load:10s} {system:16s} {len(records):4d} {row} {share:7.1%}"
