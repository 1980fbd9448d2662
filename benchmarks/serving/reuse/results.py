"""Figures, table and verdict, derived from records and from nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from reuse.schedules import HIT_CACHED_TOKENS
from reuse.statistics import (
    Interval,
    PenaltyError,
    penalty,
    penalty_ratio,
    quantiles,
    share_of_bound,
)
from sgl_tiered_workloads.records import RequestRecord

__all__ = ["Findings", "good_hits", "markdown", "summary"]

Records = Mapping[str, Sequence[RequestRecord]]

HOST_PEERS = ("hicache-sync", "hicache-async")
MS = 1e3


@dataclass(slots=True)
class Findings:
    """Everything that was measured; parts that were not run stay empty.

    Attributes:
        sets: by label of the working set and system, the TTFT in seconds of the
            requests that could hit.
        sources: by the same, prompt tokens by where their KV came from.
        device_s: TTFT of plain SGLang's device hits, the baseline of all penalties.
        recompute_s: TTFT of plain SGLang where nothing of such a prompt was cached.
        hits_s: by label (``tiered``, ``hicache-file cold``), TTFT of good hits.
        resident: largest share of a store that was in the page cache before a cold
            hit, by system.
        outputs_identical: the gate.
        problems: why the run fails.
    """

    sets: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    sources: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    device_s: list[float] = field(default_factory=list)
    recompute_s: list[float] = field(default_factory=list)
    hits_s: dict[str, list[float]] = field(default_factory=dict)
    resident: dict[str, float] = field(default_factory=dict)
    outputs_identical: bool = True
    problems: list[str] = field(default_factory=list)


def good_hits(records: Sequence[RequestRecord], tier: str) -> list[float]:
    """Return the TTFT of requests that found all they could in one tier."""
    return [
        record.ttft_s
        for record in records
        if record.cached_tokens == HIT_CACHED_TOKENS
        and record.cached_by_tier.get(tier) == HIT_CACHED_TOKENS
    ]


def summary(findings: Findings, seed: int = 0) -> dict[str, Any]:
    """Return the machine-readable result; no speed-up where the gate is red.

    Adds to ``findings.problems`` a peer whose penalty is not positive.
    """
    rng = np.random.default_rng(seed)
    result: dict[str, Any] = {"outputs_identical": findings.outputs_identical}
    if findings.outputs_identical:
        result |= _speedups(findings)
        result |= _host_penalties(findings, rng)
        result |= _disk_penalties(findings, rng)
        result |= _of_bound(findings, rng)
        penalties = {
            name: _ms(penalty(hits, findings.device_s, rng)) | {"hits": len(hits)}
            for name, hits in findings.hits_s.items()
            if hits and findings.device_s
        }
        result["penalties_ms"] = penalties
        if findings.device_s:
            result["device_hit_ms"] = round(float(np.median(findings.device_s)) * MS, 2)
            result["device_hits"] = len(findings.device_s)
        result["resident_before_cold_hits"] = findings.resident
    result["problems"] = list(findings.problems)
    return result


def _speedups(findings: Findings) -> dict[str, Any]:
    found: dict[str, Any] = {}
    gains: dict[str, float] = {}
    for label, systems in findings.sets.items():
        p50 = {name: quantiles(times)[0] for name, times in systems.items()}
        ours = "tiered" if "tiered" in p50 else "tiered-disk"
        if "plain" in p50 and ours in p50:
            gains[label] = p50["plain"] / p50[ours]
    if gains:
        found["ttft_p50_speedup_by_set"] = {n: round(g, 2) for n, g in gains.items()}
        # In "0.5 pools" nothing has to come from below; "beyond host" is the disk's.
        sizes = {n: float(n.split()[0]) for n in gains if n.endswith(" pools")}
        asked = [gains[name] for name, pools in sizes.items() if pools > 1]
        if asked:
            found["ttft_p50_speedup_vs_plain"] = round(min(asked), 2)
    return found


def _host_penalties(findings: Findings, rng: np.random.Generator) -> dict[str, Any]:
    peers = {n: findings.hits_s[n] for n in HOST_PEERS if findings.hits_s.get(n)}
    ours = findings.hits_s.get("tiered")
    if not ours or not peers or not findings.device_s:
        return {}
    # The better form is the one with the lower median; the baseline is common.
    best = min(peers, key=lambda name: float(np.median(peers[name])))
    ratio = _ratio(findings, best, ours, peers[best], rng)
    return _named("host_hit_penalty_vs_hicache", ratio) | {"better_hicache_form": best}


def _disk_penalties(findings: Findings, rng: np.random.Generator) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for state, key in (
        ("cold", "disk_hit_penalty_vs_hicache_file"),
        ("warm", "disk_hit_penalty_vs_hicache_file_warm"),
    ):
        ours = findings.hits_s.get(f"tiered-disk {state}")
        theirs = findings.hits_s.get(f"hicache-file {state}")
        if ours and theirs and findings.device_s:
            ratio = _ratio(findings, f"hicache-file {state}", ours, theirs, rng)
            found |= _named(key, ratio)
    return found


def _of_bound(findings: Findings, rng: np.random.Generator) -> dict[str, Any]:
    """Return the share of the best speed-up, and what it is a share of."""
    found: dict[str, Any] = {}
    device_s, recompute_s = findings.device_s, findings.recompute_s
    for label, end in (("tiered", ""), ("tiered-disk cold", "_disk")):
        ours_s = findings.hits_s.get(label)
        if not ours_s or not device_s:
            continue
        share = share_of_bound(ours_s, device_s, rng)
        found |= _named(f"ttft_speedup_of_bound{end}", share)
        if recompute_s:
            speedup = float(np.median(recompute_s) / np.median(ours_s))
            found[f"ttft_speedup_of_hits{end}"] = round(speedup, 2)
    if device_s and recompute_s:
        bound = float(np.median(recompute_s) / np.median(device_s))
        found["ttft_speedup_bound"] = round(bound, 2)
    return found


def _ratio(
    findings: Findings,
    peer: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    rng: np.random.Generator,
) -> Interval | None:
    try:
        return penalty_ratio(ours, theirs, findings.device_s, rng)
    except PenaltyError as error:
        findings.problems.append(f"{peer}: {error}")
        return None


def _named(key: str, interval: Interval | None) -> dict[str, Any]:
    if interval is None:
        return {key: None}
    low, high = interval.low, interval.high
    return {
        key: round(interval.value, 3),
        f"{key}_interval": [
            round(low, 3),
            # JSON has no infinity.
            round(high, 3) if math.isfinite(high) else None,
        ],
    }


def _ms(interval: Interval) -> dict[str, float]:
    return {
        "value": round(interval.value * MS, 2),
        "low": round(interval.low * MS, 2),
        "high": round(interval.high * MS, 2),
    }


def markdown(findings: Findings, result: Mapping[str, Any]) -> str:
    """Return the tables, or the sentence that there are none on a red gate."""
    if not findings.outputs_identical:
        return "The equality gate is red: no speed is claimed.\n"
    lines: list[str] = []
    if findings.sets:
        head = ("working set", "system", "TTFT p50 ms", "p99 ms", "KV came from")
        lines += _rows(head, list(_set_rows(findings)))
    penalties = result.get("penalties_ms", {})
    if penalties:
        base = (
            f"Hits of a 6,000-token prompt; plain's device hit takes "
            f"{result['device_hit_ms']} ms (median of {result['device_hits']})"
        )
        rows = [
            (n, p["hits"], p["value"], f"{p['low']} to {p['high']}")
            for n, p in penalties.items()
        ]
        head = ("hit", "number", "penalty ms", "95 % interval")
        lines += [base, "", *_rows(head, rows)]
    return "\n".join(lines)


def _set_rows(findings: Findings) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for label, systems in findings.sets.items():
        for name, times in systems.items():
            p50, p99 = quantiles(times)
            tokens = findings.sources.get(label, {}).get(name, {})
            total = sum(tokens.values())
            text = ", ".join(f"{s} {n / total:.0%}" for s, n in tokens.items())
            rows.append((label, name, f"{p50 * MS:.1f}", f"{p99 * MS:.1f}", text))
    return rows


def _rows(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(str(c) for c in line) + " |" for line in lines] + [""]
