"""Figures, table and verdict of the reloads, from what was seen and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sgl_tiered_workloads.harness.statistics import (
    Interval,
    draw_interval,
    resampled_medians,
)
from sgl_tiered_workloads.records import RequestRecord

__all__ = ["TARGETS", "Block", "Findings", "block_of", "summary", "table"]

BASE = "dense"
TARGETS: Mapping[str, float] = {"ttft_speedup_at_50": 1.8}
"""What was promised, at least."""
MOST_DEVICE_SHARE_AT_50 = 0.55
"""Half of the prefix, and all of what is new."""
MS = 1e3


@dataclass(frozen=True, slots=True)
class Block:
    """Reloads on one server.

    Attributes:
        arm: its name.
        repeat: which server of that arm, from 0.
        ttft_s: of the requests whose whole prefix came from the host, in order.
        num_missed: other requests.
        loaded_bytes: that came to the device for all of them.
    """

    arm: str
    repeat: int
    ttft_s: tuple[float, ...]
    num_missed: int
    loaded_bytes: int


@dataclass(slots=True)
class Findings:
    """All that was seen.

    Attributes:
        blocks: in the order of measuring.
        identical: by whose answers were compared with plain SGLang's: ``off``, of the
            dense server, and ``refuse``, on the server that drops tokens.
        device_share: by arm, rows on the device after a reload over those after a
            reload of the same prompt for who refuses.
        dense_bytes: of a prefix: what a dense reload has to bring.
        facts: further figures and settings, as they go into the result.
        problems: sentences.
    """

    blocks: list[Block] = field(default_factory=list)
    identical: dict[str, bool] = field(default_factory=dict)
    device_share: dict[str, float] = field(default_factory=dict)
    dense_bytes: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def arms(self) -> list[str]:
        """Return the arms that were measured, in the order of their first server."""
        return list(dict.fromkeys(block.arm for block in self.blocks))

    def ttft_s(self, arm: str, repeat: int | None = None) -> list[float]:
        """Return an arm's samples, of all its servers or of one."""
        return [
            seconds
            for block in self.blocks
            if block.arm == arm and repeat in (None, block.repeat)
            for seconds in block.ttft_s
        ]

    def bytes_per_request(self, arm: str) -> float:
        """Return the mean that one request of an arm brought to the device."""
        blocks = [block for block in self.blocks if block.arm == arm]
        count = sum(len(block.ttft_s) + block.num_missed for block in blocks)
        return sum(block.loaded_bytes for block in blocks) / max(count, 1)


def block_of(
    arm: str,
    repeat: int,
    records: Sequence[RequestRecord],
    prefix_tokens: int,
    loaded_bytes: int,
) -> Block:
    """Return a server's block: a hit counts if all its prefix came from the host."""
    hits = [
        record.ttft_s
        for record in records
        if record.error is None
        and record.cached_tokens == prefix_tokens
        and record.cached_by_tier.get("host") == prefix_tokens
    ]
    missed = len(records) - len(hits)
    return Block(arm, repeat, tuple(hits), missed, loaded_bytes)


def summary(findings: Findings, min_hits: int) -> dict[str, Any]:
    """Return the machine-readable result; no speed where answers were not equal.

    Args:
        findings: of all arms.
        min_hits: an arm with fewer has no figure.
    """
    problems = [*findings.problems, *_doubts(findings, min_hits)]
    equal = {
        f"outputs_identical_{who}": findings.identical.get(who)
        for who in ("off", "refuse")
    }
    result: dict[str, Any] = {**equal, **findings.facts}
    if all(equal.values()):
        enough = [
            arm for arm in findings.arms() if len(findings.ttft_s(arm)) >= min_hits
        ]
        result |= _figures(findings, enough)
    else:
        problems.append("serving: answers were not shown to be equal: no speed")
    missed = [key for key, least in TARGETS.items() if result.get(key, 0.0) < least]
    if result.get("device_kv_share_at_50", 1.0) > MOST_DEVICE_SHARE_AT_50:
        missed.append("device_kv_share_at_50")
    return result | {"missed": missed, "problems": problems}


def _figures(findings: Findings, arms: Sequence[str]) -> dict[str, Any]:
    """Return the figures of the arms that have enough samples."""
    found: dict[str, Any] = {}
    rng = np.random.default_rng(0)
    for arm in [arm for arm in arms if arm != BASE and BASE in arms]:
        ratio = _speedup(findings, arm, rng)
        found[f"ttft_speedup_{arm}"] = round(ratio.value, 3)
        found[f"ttft_speedup_{arm}_interval"] = [
            round(ratio.low, 3),
            round(ratio.high, 3),
        ]
        found[f"ttft_speedup_{arm}_by_repeat"] = [
            round(value, 3) for value in _by_repeat(findings, arm)
        ]
    for arm, share in findings.device_share.items():
        found[f"device_kv_share_{arm}"] = round(share, 4)
    found["reloads"] = {arm: _row(findings, arm) for arm in arms}
    return found


def _speedup(findings: Findings, arm: str, rng: np.random.Generator) -> Interval:
    """Return dense p50 over the arm's, with the bootstrap interval of both medians."""
    base, ours = findings.ttft_s(BASE), findings.ttft_s(arm)
    draws = resampled_medians(base, rng) / resampled_medians(ours, rng)
    return draw_interval(float(np.median(base) / np.median(ours)), draws)


def _by_repeat(findings: Findings, arm: str) -> list[float]:
    """Return the ratio of each repeat that has both servers."""
    found = []
    for repeat in sorted({block.repeat for block in findings.blocks}):
        base, ours = (findings.ttft_s(name, repeat) for name in (BASE, arm))
        if base and ours:
            found.append(float(np.median(base) / np.median(ours)))
    return found


def _row(findings: Findings, arm: str) -> dict[str, float]:
    p50, p90 = np.percentile(findings.ttft_s(arm), [50, 90])
    num_bytes = findings.bytes_per_request(arm)
    return {
        "hits": len(findings.ttft_s(arm)),
        "ttft_p50_s": round(float(p50), 4),
        "ttft_p90_s": round(float(p90), 4),
        "bytes_per_request": round(num_bytes),
        "bytes_share": round(num_bytes / max(findings.dense_bytes, 1), 4),
    }


def _doubts(findings: Findings, min_hits: int) -> list[str]:
    """Return why the figures may not mean what they say."""
    found = []
    for arm in findings.arms():
        num_hits = len(findings.ttft_s(arm))
        if num_hits < min_hits:
            found.append(f"serving: {arm} has {num_hits} reloads of {min_hits} asked")
    if BASE in findings.arms():
        num_bytes = findings.bytes_per_request(BASE)
        if num_bytes != findings.dense_bytes:
            found.append(
                f"serving: a dense reload brought {num_bytes:.0f} bytes, the prefix "
                f"has {findings.dense_bytes}"
            )
    return found


def table(result: Mapping[str, Any]) -> str:
    """Return the figures as Markdown, or the sentence that there are none."""
    if "reloads" not in result:
        return "The answers were not shown to be equal: no speed is claimed."
    lines = [
        "| reload | requests | TTFT p50 | p90 | over dense | 95 % | MB each | "
        "of dense | device KV |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for arm, row in result["reloads"].items():
        gain = result.get(f"ttft_speedup_{arm}")
        low, high = result.get(f"ttft_speedup_{arm}_interval", (None, None))
        share = result.get(f"device_kv_share_{arm}")
        cells = (
            arm,
            row["hits"],
            f"{row['ttft_p50_s'] * MS:.0f} ms",
            f"{row['ttft_p90_s'] * MS:.0f} ms",
            "1" if gain is None else f"{gain:.2f}",
            "" if low is None else f"{low:.2f} to {high:.2f}",
            f"{row['bytes_per_request'] / 1e6:.2f}",
            f"{row['bytes_share']:.1%}",
            "" if share is None else f"{share:.1%}",
        )
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)
