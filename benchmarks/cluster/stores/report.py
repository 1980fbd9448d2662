"""From blocks to figures: what ``make bench-store`` says, from records alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from against.intervals import Statistic, Times, figure, mean, percentile, ratio
from sgl_tiered_workloads.records import RequestRecord
from stores.arms import ARMS, MOONCAKE_STORE, POOLS, RECOMPUTE
from stores.loads import LENGTHS, RESTART_AT, length_of

__all__ = ["WANTED_REPEATS", "arm_block", "missed", "summary", "table"]

WANTED_REPEATS = 5
AT_MOST = {"ttft_vs_recompute": 0.9, "ttft_vs_mooncake_store": 0.9}
_SEED = 25
_STATISTICS: Mapping[str, Statistic] = {
    "": mean,
    "_p95": percentile(95),
    "_p99": percentile(99),
}
Block = Mapping[str, Any]


def arm_block(records: Iterable[RequestRecord]) -> dict[str, Any]:
    """Return an arm's times in milliseconds by ask, as they are written down.

    Also how many tokens of each prompt were not computed, and where they came from in
    all.
    """
    times: dict[str, float] = {}
    cached: dict[str, int] = {}
    tiers: Counter[str] = Counter()
    for record in records:
        if record.error is None:
            name = record.key.removesuffix(".ask")
            times[name] = round(record.ttft_s * 1e3, 2)
            cached[name] = record.cached_tokens
            tiers.update(record.cached_by_tier)
    return {"ttft_ms": times, "cached_tokens": cached, "by_tier": dict(tiers)}


def summary(blocks: Sequence[Block]) -> dict[str, Any]:
    """Return the figures of all blocks, what must not be, and the targets missed."""
    told: dict[str, Any] = {}
    names = [name for name in ARMS if all(name in block["arms"] for block in blocks)]
    if blocks:
        ours = [name for name in POOLS if name in names]
        for rival in (RECOMPUTE, MOONCAKE_STORE):
            if rival in names:
                for name in ours:
                    told |= _ratios(blocks, name, rival)
    wrong = {
        name: sum(block["arms"][name]["wrong"] for block in blocks) for name in names
    }
    told |= {
        "wrong": sum(wrong.values()),
        "wrong_by_arm": wrong,
        "lost": sum(block["arms"][name]["lost"] for block in blocks for name in names),
        "judged": sum(
            block["arms"][name]["judged"] for block in blocks for name in names
        ),
        "shared_hits_by_arm": {name: _shared_hits(blocks, name) for name in names},
        "blocks": len(blocks),
        "alone": bool(blocks) and all(block["alone"] for block in blocks),
        "complete": len(blocks) >= WANTED_REPEATS and names == list(ARMS),
    }
    return told | {"targets_missed": missed(told)}


def missed(told: Mapping[str, Any]) -> list[str]:
    """Return the names of figures that are not as wanted; one that is not there is.

    An arm that found nothing at its neighbour has not shared, and is no rival.
    """
    wanted = {
        name: name in told and told[name] <= limit for name, limit in AT_MOST.items()
    }
    hits = told["shared_hits_by_arm"]
    wanted |= {
        "wrong": told["wrong"] == 0,
        "lost": told["lost"] == 0,
        "judged": told["judged"] > 0,
        "shared_hits_by_arm": all(
            share > 0.0 for name, share in hits.items() if name != RECOMPUTE
        ),
        "complete": told["complete"],
    }
    return [name for name, is_right in wanted.items() if not is_right]


def table(blocks: Sequence[Block]) -> Iterable[str]:
    """Give the lines of a table: times in milliseconds, pooled over repeats."""
    yield (
        f"{'arm':16s} {'asks':>14s} {'n':>5s} {'mean':>8s} {'P50':>8s} {'P95':>8s} "
        f"{'P99':>8s} {'shared':>7s}"
    )
    parts = {
        "all": lambda place, key: True,
        **{f"{n} tokens": _of_length(n) for n in LENGTHS},
        "before restart": lambda place, key: place < RESTART_AT,
        "after restart": lambda place, key: place >= RESTART_AT,
    }
    for name in ARMS:
        for label, wanted in parts.items():
            times = {
                f"{block['repeat']}/{key}": [value]
                for block in blocks
                if name in block["arms"]
                for key, value in _chosen(block, name, wanted).items()
            }
            if times:
                row = " ".join(
                    f"{figure(times, statistic):8.1f}"
                    for statistic in (
                        mean,
                        percentile(50),
                        percentile(95),
                        percentile(99),
                    )
                )
                hits = _shared_hits(blocks, name, wanted)
                yield f"{name:16s} {label:>14s} {len(times):5d} {row} {hits:7.1%}"


def _ratios(blocks: Sequence[Block], ours: str, rival: str) -> dict[str, Any]:
    """Return one of our transports over a rival, in all and by length."""
    generator = np.random.default_rng(_SEED)
    # The first transport is the one that figures are named after.
    suffix = "" if ours == POOLS[0] else f"_{ours.removeprefix('pool-')}"
    key = f"ttft{suffix}_vs_{rival.replace('-', '_')}"
    told: dict[str, Any] = {}
    for word, statistic in _STATISTICS.items():
        found = ratio(
            _times(blocks, ours), [_times(blocks, rival)], statistic, generator
        )
        told[key + word] = round(found.value, 4)
        told[f"{key}{word}_interval"] = _bounds(found.interval)
    by_length = {}
    for length in LENGTHS:
        times = [
            {k: each for k, each in _times(blocks, name).items() if _is_of(k, length)}
            for name in (ours, rival)
        ]
        if times[0]:
            found = ratio(times[0], times[1:], mean, generator)
            by_length[str(length)] = [round(found.value, 4), *_bounds(found.interval)]
    return told | {f"{key}_by_length": by_length}


def _bounds(interval: Any) -> list[float]:
    return [round(interval.low, 4), round(interval.high, 4)]


def _times(blocks: Sequence[Block], name: str) -> Times:
    """Return times by document; a repeat's documents are its own.

    What one of the arms has not answered is left out for all.
    """
    found: dict[str, list[float]] = {}
    for block in blocks:
        answered = set.intersection(
            *(set(arm["ttft_ms"]) for arm in block["arms"].values())
        )
        for key, value in block["arms"][name]["ttft_ms"].items():
            if key in answered:
                found[f"{block['repeat']}/{key}"] = [value]
    return found


def _is_of(key: str, length: int) -> bool:
    return length_of(key.partition("/")[2]) == length


def _of_length(length: int) -> Any:
    return lambda place, key: length_of(key) == length


def _chosen(block: Block, name: str, wanted: Any) -> Mapping[str, float]:
    """Return the asks that are wanted, by their place from 0 to 1 and their key."""
    times = block["arms"][name]["ttft_ms"]
    most = max(len(times), 1)
    return {
        key: value
        for place, (key, value) in enumerate(times.items())
        if wanted(place / most, key)
    }


def _shared_hits(
    blocks: Sequence[Block], name: str, wanted: Any = lambda place, key: True
) -> float:
    """Return the share of asks of which at least half a document was not computed."""
    hits = total = 0
    for block in blocks:
        if name in block["arms"]:
            cached = block["arms"][name]["cached_tokens"]
            for key in _chosen(block, name, wanted):
                hits += cached[key] >= length_of(key) / 2
                total += 1
    return round(hits / total, 4) if total else 0.0
