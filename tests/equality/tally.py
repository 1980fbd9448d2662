"""Records of calls: one file each, and what all calls on one source add up to."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.equality.plan import FEATURES, INERT, TIERS, empty_cells

__all__ = [
    "LONG_MINUTES",
    "SOURCES",
    "is_right",
    "read_calls",
    "refused_pairs",
    "summary",
    "times_run",
    "write_call",
]

SOURCES = ("sgl_tiered", "kernels", "platform_dist", "tests/equality")
"""Folders whose source decides what is answered, and how it is asked and judged."""
LONG_MINUTES = 45.0
"""A call of so many over all pairs has the time for every cell and every pair."""
_SUMS = (
    "judged",
    "compared",
    "exact",
    "strict",
    "wrong",
    "errors",
    "kills",
    "planted",
    "planted_caught",
)

World = Mapping[str, Any]
"""What came of one world: its pair, tiers, features that were on, and the counts."""


def write_call(path: Path, call: Mapping[str, Any]) -> None:
    """Write the record of a call, in place of what was written of it before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(call, indent=1) + "\n")
    partial.replace(path)


def read_calls(folder: Path, source: str) -> list[dict[str, Any]]:
    """Return the records of calls on a source, oldest first."""
    calls = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return [call for call in calls if call["source"] == source]


def times_run(calls: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return how often each pair was run, refused ones included."""
    return Counter(world["pair"] for call in calls for world in call["worlds"])


def refused_pairs(calls: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the pairs that the product was seen to refuse, with its sentences."""
    worlds = (world for call in calls for world in call["worlds"])
    return {w["pair"]: w["refused"] for w in worlds if w.get("refused")}


def summary(calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the last call came to, and all of them together.

    Args:
        calls: on one source, at least one.
    """
    last = [world for world in calls[-1]["worlds"] if not world.get("refused")]
    run = [w for call in calls for w in call["worlds"] if not w.get("refused")]
    refused = refused_pairs(calls)
    sums, totals = _sums(last), _sums(run)
    cells = _cells(run)
    return {
        "source": calls[-1]["source"],
        "calls": len(calls),
        "worlds": len(last),
        **sums,
        "exact_share": _share(totals),
        "exact_share_call": _share(sums),
        "compared_total": totals["compared"],
        "kills_total": totals["kills"],
        "wrong_total": totals["wrong"],
        "errors_total": totals["errors"],
        "cells": cells,
        "cells_empty": len(empty_cells(cells, refused)),
        "cells_empty_call": len(empty_cells(_cells(last), refused)),
        "empty": empty_cells(cells, refused),
        "is_whole": _is_whole(calls[-1]),
        "idle_features": _idle(run),
        "idle_pairs": _idle_pairs(run),
        "pairs_inert": _inert(run),
        "pairs_run": len({world["pair"] for world in run}),
        "pairs_refused": refused,
        "faults": dict(sorted(Counter(s for w in run for s in w["struck"]).items())),
        "minutes": calls[-1]["minutes"],
    }


def is_right(told: Mapping[str, Any]) -> bool:
    """Return whether nothing was wrong in the last call, and its check works.

    Of a whole call also whether every cell has its answers and every feature acted.
    """
    is_caught = told["planted"] == told["planted_caught"]
    is_clean = told["wrong"] == told["errors"] == 0
    is_full = not (told["empty"] or told["idle_features"] or told["idle_pairs"])
    is_enough = is_full or not told["is_whole"]
    return bool(is_clean and is_caught and told["compared"] and is_enough)


def _is_whole(call: Mapping[str, Any]) -> bool:
    """Return whether a call had the time for all pairs, and was to run all."""
    asked = call.get("asked", {})
    return bool(asked.get("minutes", 0.0) >= LONG_MINUTES and not asked["pairs"])


def _sums(worlds: Iterable[World]) -> dict[str, int]:
    told = list(worlds)
    return {name: sum(int(world[name]) for world in told) for name in _SUMS}


def _share(sums: Mapping[str, int]) -> float:
    return round(sums["exact"] / sums["compared"], 4) if sums["compared"] else 0.0


def _acts(world: World) -> dict[str, int]:
    """Return by feature that was on in a world how much it did there."""
    acts = {name: int(world["evidence"].get(name, 0)) for name in world["on"]}
    if "splits" in acts:
        acts["splits"] += int(world["split"])
    return acts


def _cells(worlds: Iterable[World]) -> dict[str, dict[str, int]]:
    """Return compared answers by tier, then by feature that did something there."""
    cells = {tier: dict.fromkeys(FEATURES, 0) for tier in TIERS}
    for world in worlds:
        for tier, count in world["by_tier"].items():
            for feature, acted in _acts(world).items():
                cells[tier][feature] += count if acted else 0
    return cells


def _idle(worlds: Iterable[World]) -> list[str]:
    """Return features that were on and never did anything."""
    did: Counter[str] = Counter()
    for world in worlds:
        did.update(_acts(world))
    return [name for name in FEATURES if did.get(name) == 0]


def _idle_of(worlds: Iterable[World]) -> list[tuple[str, str]]:
    """Return pairs with a feature that was on in none of their worlds for anything."""
    did: dict[str, Counter[str]] = {}
    for world in worlds:
        did.setdefault(world["pair"], Counter()).update(_acts(world))
    return [
        (pair, n) for pair, acts in did.items() for n in FEATURES if acts.get(n) == 0
    ]


def _idle_pairs(worlds: Iterable[World]) -> list[str]:
    """Return idle pairs, such as ``orders+pd: orders``, those left out that must be."""
    return [
        f"{pair}: {name}"
        for pair, name in _idle_of(worlds)
        if name not in INERT.get(pair, {})
    ]


def _inert(worlds: Iterable[World]) -> dict[str, str]:
    """Return why a feature does nothing in pairs that ran, by their names."""
    idle = _idle_of(worlds)
    return {
        pair: INERT[pair][name] for pair, name in idle if name in INERT.get(pair, {})
    }
