"""From what the servers did to the figures, what they missed, and what is doubtful."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hybrid.arms import MODEL, PAGE, TOKEN_BYTES, Scale
from hybrid.relation import device_bytes_of
from hybrid.servers import Decode, Reloads
from hybrid.window import num_equal
from movement.tools import interval

__all__ = ["MOST", "PARTS_OF", "TARGETS", "Findings", "device_bytes", "summary"]

TARGETS = {
    "throughput_vs_kv_only": 1.5,
    "throughput_vs_act_only": 1.15,
    "traffic_vs_kv_only": 1.45,
    "reload_ttft_vs_kv_only": 1.4,
    "balance_efficiency": 0.9,
}
MOST = {"auto_regret": 0.02}
"""Least and most of each."""
PARTS_OF = {
    "a": ("throughput_vs_kv_only", "throughput_vs_act_only", "traffic_vs_kv_only"),
    "reload": ("reload_ttft_vs_kv_only",),
    "b": ("balance_efficiency",),
    "regret": ("auto_regret",),
}
NEAR_SHARE = 0.07
"""How far the share that ``auto`` chose may be from the one that these figures ask for:
each has sampled T_kv_gen for itself."""
LEAST_EQUAL = 0.75
"""Of the answers of two arms: rebuilding rounds like the model's own forward but for
products of few rows, and a near tie then goes on differently."""
LEAST_LOADED = 0.5
"""Of a prefix's bytes, or half of them as activations: less was on the device still."""
_LAYERS = MODEL.num_layers


@dataclass(slots=True)
class Findings:
    """What was seen.

    Attributes:
        resident: the batch on a server that streams nothing.
        a, b: by arm, one per server.
        reloads: by arm, one per server.
        pairs: tokens per second without an emulated link: (off, auto) of each pair.
        balance_share: activations' share that the figures ask for, by part.
        bound_s: shortest step of (B) by the regressions.
        facts: what else the result says.
        problems: one sentence each.
    """

    resident: Decode | None = None
    a: dict[str, list[Decode]] = field(default_factory=dict)
    b: dict[str, list[Decode]] = field(default_factory=dict)
    reloads: dict[str, list[Reloads]] = field(default_factory=dict)
    pairs: list[tuple[float, float]] = field(default_factory=list)
    balance_share: dict[str, float] = field(default_factory=dict)
    bound_s: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def device_bytes(layers: Mapping[str, Any], num_requests: int) -> int:
    """Return the device's bytes for whole pages of one layer, by a server's stats."""
    acts = layers.get("activations", {})
    num_acts = acts.get("device_layer_pages", 0) - acts.get("staging_layer_pages", 0)
    return device_bytes_of(
        layers["layer_pages"]["total"],
        num_acts,
        num_requests,
        _LAYERS,
        PAGE * TOKEN_BYTES,
    )


def summary(findings: Findings, parts: Sequence[str], scale: Scale) -> dict[str, Any]:
    """Return the JSON object: facts, figures, targets missed and problems."""
    result: dict[str, Any] = dict(findings.facts)
    problems = list(findings.problems)
    if "a" in parts:
        result |= _part_a(findings, scale, problems)
    if "reload" in parts:
        result |= _reload(findings, scale, problems)
    if "b" in parts:
        result |= _part_b(findings, problems)
    if "regret" in parts:
        result |= _regret(findings, problems)
    wanted = [key for part in parts for key in PARTS_OF[part]]
    missed = [
        key
        for key in wanted
        if key not in result
        or (key in TARGETS and result[key] < TARGETS[key])
        or (key in MOST and result[key] > MOST[key])
    ]
    return result | {"missed": missed, "problems": problems}


def _part_a(findings: Findings, scale: Scale, problems: list[str]) -> dict[str, Any]:
    runs = findings.a
    lacking = [arm for arm in ("kv_only", "act_only", "hybrid") if not runs.get(arm)]
    if lacking:
        problems.append(f"a: {', '.join(lacking)} did not run")
        return {}
    kv, act, hybrid = (runs[arm] for arm in ("kv_only", "act_only", "hybrid"))
    result: dict[str, Any] = {
        "throughput_vs_kv_only": round(_ratio(hybrid, kv), 3),
        "throughput_vs_act_only": round(_ratio(hybrid, act), 3),
        "throughput_vs_kv_only_by_repeat": [
            round(ours.window.tokens_per_s / theirs.window.tokens_per_s, 3)
            for ours, theirs in zip(hybrid, kv, strict=False)
        ],
        "traffic_vs_kv_only": round(_traffic(kv) / _traffic(hybrid), 3),
        "a": {arm: _row(found) for arm, found in runs.items()},
        "outputs_equal": _equal(findings, problems),
    }
    result |= _check_share("a", findings, hybrid, problems)
    streamed = kv[0].bytes_per_token * scale.num_requests
    whole = sum(scale.contexts) * TOKEN_BYTES * _LAYERS
    result["streamed_share_of_context"] = round(streamed / whole, 3)
    return result


def _part_b(findings: Findings, problems: list[str]) -> dict[str, Any]:
    runs = findings.b
    if not runs.get("hybrid") or not findings.bound_s:
        problems.append("b: the hybrid did not run")
        return {}
    step_s = _median([one.window.step_s for one in runs["hybrid"]])
    result: dict[str, Any] = {
        "balance_efficiency": round(findings.bound_s / step_s, 3),
        "bound_step_s": round(findings.bound_s, 4),
        "b": {arm: _row(found) for arm, found in runs.items()},
    }
    result |= _check_share("b", findings, runs["hybrid"], problems)
    if runs.get("kv_only"):
        gain = _ratio(runs["hybrid"], runs["kv_only"])
        result["b_throughput_vs_kv_only"] = round(gain, 3)
    return result


def _reload(findings: Findings, scale: Scale, problems: list[str]) -> dict[str, Any]:
    found = findings.reloads
    if not found.get("kv_only") or not found.get("hybrid"):
        problems.append("reload: an arm did not run")
        return {}
    whole = scale.prefix_tokens * TOKEN_BYTES * _LAYERS
    rows = {}
    for arm, runs in found.items():
        cached = min(min(one.cached_tokens) for one in runs)
        loaded = min(one.bytes_each for one in runs) / whole
        if cached < scale.prefix_tokens // PAGE * PAGE:
            problems.append(f"reload: {arm} found {cached} tokens of a prefix")
        if loaded < LEAST_LOADED * (1.0 if arm == "kv_only" else 0.5):
            problems.append(f"reload: {arm} loaded {loaded:.0%} of a prefix's bytes")
        times = [time_s for one in runs for time_s in one.ttft_s]
        rows[arm] = {
            "requests": len(times),
            "ttft_p50_s": round(float(np.median(times)), 4),
            "ttft_p90_s": round(float(np.percentile(times, 90)), 4),
            "bytes_share": round(loaded, 3),
        }
    gain = rows["kv_only"]["ttft_p50_s"] / rows["hybrid"]["ttft_p50_s"]
    return {"reload_ttft_vs_kv_only": round(gain, 3), "reload": rows}


def _regret(findings: Findings, problems: list[str]) -> dict[str, Any]:
    if not findings.pairs:
        problems.append("regret: nothing ran")
        return {}
    ratio = interval([auto / off for off, auto in findings.pairs])
    return {
        "auto_regret": round(1.0 - ratio.value, 4),
        "auto_regret_interval": [round(1.0 - ratio.high, 4), round(1.0 - ratio.low, 4)],
        "auto_regret_pairs": len(findings.pairs),
    }


def _check_share(
    part: str, findings: Findings, hybrid: Sequence[Decode], problems: list[str]
) -> dict[str, Any]:
    """Return the share by the balance and as kept; doubt where they are far apart."""
    wanted = findings.balance_share.get(part)
    if wanted is None:
        return {}
    chosen = float(hybrid[-1].layers.get("activations", {}).get("share", 0.0))
    kept = hybrid[-1].moved.act_share
    if abs(chosen - wanted) > NEAR_SHARE:
        problems.append(
            f"{part}: the hybrid keeps {chosen:.2f} as activations, and the balance is "
            f"at {wanted:.2f}"
        )
    return {
        f"{part}_share": round(chosen, 3),
        f"{part}_share_kept": round(kept, 3),
        f"{part}_share_of_balance": round(wanted, 3),
    }


def _equal(findings: Findings, problems: list[str]) -> dict[str, Any]:
    """Return how many answers of the hybrid are the others', of how many."""
    ours = findings.a["hybrid"][0].records
    found: dict[str, Any] = {"of": len(ours)}
    for arm in ("kv_only", "act_only"):
        found[arm] = num_equal(ours, findings.a[arm][0].records)
    if findings.resident is not None:
        found["resident"] = num_equal(ours, findings.resident.records)
    for arm, count in found.items():
        if arm != "of" and count < LEAST_EQUAL * len(ours):
            problems.append(f"a: {count} of {len(ours)} answers are those of {arm}")
    return found


def _ratio(ours: Sequence[Decode], theirs: Sequence[Decode]) -> float:
    """Return the ratio of the medians of tokens per second."""
    one, other = (
        _median([run.window.tokens_per_s for run in runs]) for runs in (ours, theirs)
    )
    return one / other


def _traffic(runs: Sequence[Decode]) -> float:
    return _median([run.bytes_per_token for run in runs])


def _row(runs: Sequence[Decode]) -> dict[str, Any]:
    """Return an arm's figures; medians of its servers."""
    row: dict[str, Any] = {
        "servers": len(runs),
        "tokens_per_s": round(_median([run.window.tokens_per_s for run in runs]), 3),
        "step_s": round(_median([run.window.step_s for run in runs]), 4),
        "steps": min(run.window.num_steps for run in runs),
        "mb_per_token": round(_traffic(runs) / 1e6, 3),
        "mb_offloaded": round(
            _median([run.moved.figures["bytes_offloaded"] for run in runs]) / 1e6, 1
        ),
        "stall_s": round(_median([run.moved.figures["stall_s"] for run in runs]), 2),
    }
    overlaps = [run.moved.overlap for run in runs]
    known = [overlap for overlap in overlaps if overlap is not None]
    if known:
        row["overlap"] = round(_median(known), 3)
        row["act_share"] = round(runs[-1].moved.act_share, 3)
        row["mb_saved"] = round(
            _median([run.moved.figures.get("bytes_saved", 0.0) for run in runs]) / 1e6,
            1,
        )
        row["rebuild_s"] = round(
            _median([run.moved.figures["rebuild_s"] for run in runs]), 2
        )
    return row


def _median(values: Sequence[float]) -> float:
    return float(np.median(values))
