"""From blocks to figures: what ``make bench-router`` says, from records alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from against.intervals import Ratio, Times, figure, mean, median_of, percentile, ratio
from routers.arms import BACKENDS, OURS, ROUTERS, SESSION, SGLANG
from routers.loads import LOADS, document_of
from sgl_tiered_workloads.records import RequestRecord

__all__ = [
    "SHARES",
    "WANTED_REPEATS",
    "arm_block",
    "is_right",
    "next_cells",
    "summary",
    "table",
]

SHARES = (0.45, 0.7)
"""Offered, of what three tiered servers do behind ``least-load``."""
WANTED_REPEATS = 5
_SEED = 25
Block = Mapping[str, Any]
Cell = tuple[str, str, float]
"""Servers, load, share."""


def arm_block(
    records: Iterable[RequestRecord], documents: Iterable[str]
) -> dict[str, Any]:
    """Return a router's times in milliseconds by document, as they are written down.

    Args:
        records: of all requests; those without an answer have no time.
        documents: all there are.
    """
    times: dict[str, list[float]] = {name: [] for name in documents}
    tokens = 0
    for record in records:
        if record.error is None:
            times[document_of(record.key)].append(round(record.ttft_s * 1e3, 2))
            tokens += record.num_prompt_tokens
    return {"ttft_ms": times, "prompt_tokens": tokens}


def next_cells(
    blocks: Sequence[Block], backends: Sequence[str], loads: Sequence[str]
) -> list[tuple[Cell, int]]:
    """Return the cells with the number of their next repeat, least measured first.

    Cells with the same servers come after each other, as to change them takes a while.
    """
    times = Counter(_cell(block) for block in blocks)
    cells = [
        (backend, load, share)
        for backend in backends
        for load in loads
        for share in SHARES
    ]
    least = {
        backend: min(times[cell] for cell in cells if cell[0] == backend)
        for backend in backends
    }
    return sorted(
        ((cell, times[cell]) for cell in cells),
        key=lambda each: (least[each[0][0]], backends.index(each[0][0]), each[1]),
    )


def summary(blocks: Sequence[Block]) -> dict[str, Any]:
    """Return the figures of all blocks, and what must not be."""
    generator = np.random.default_rng(_SEED)
    told: dict[str, Any] = {}
    for backend in BACKENDS:
        cells = {
            cell: _times(found)
            for cell, found in _by_cell(blocks).items()
            if cell[0] == backend
        }
        if cells:
            suffix = "" if backend == BACKENDS[0] else f"_{backend}"
            told |= _ratios(cells, suffix, generator)
    lost, broken = _sums(blocks, "lost"), _sums(blocks, "broken")
    evictions = {
        name: min(
            (block["arms"][name]["evicted_tokens"] for block in blocks), default=0
        )
        for name in ROUTERS
    }
    repeats = Counter(_cell(block) for block in blocks)
    wrong = sum(_sums(blocks, "wrong").values())
    return told | {
        "evictions": min(evictions.values(), default=0),
        "evictions_by_router": evictions,
        "lost": lost[OURS],
        "lost_by_router": lost,
        "unsent_by_router": _sums(blocks, "unsent"),
        "broken_by_router": broken,
        "wrong": wrong,
        "judged": sum(_sums(blocks, "judged").values()),
        "blocks": len(blocks),
        "alone": bool(blocks) and all(block["alone"] for block in blocks),
        "cells": len(repeats),
        "repeats_least": min(repeats.values(), default=0),
        "complete": _is_complete(repeats),
    }


def is_right(told: Mapping[str, Any]) -> bool:
    """Return whether no answer was wrong, none of ours lost, and all evicted."""
    return not told["wrong"] and not told["lost"] and bool(told["evictions"])


def table(blocks: Sequence[Block]) -> Iterable[str]:
    """Give the lines of a table: times in milliseconds, pooled over repeats."""
    yield (
        f"{'servers':8s} {'load':10s} {'share':>5s} {'router':22s} {'n':>5s} "
        f"{'mean':>8s} {'P95':>8s} {'P99':>8s} {'cached':>7s} {'lost':>4s} "
        f"{'broken':>6s}"
    )
    for (backend, load, share), found in sorted(_by_cell(blocks).items()):
        for name, times in _times(found).items():
            arms = [block["arms"][name] for block in found]
            tokens = sum(arm["prompt_tokens"] for arm in arms)
            cached = sum(sum(arm["cached"].values()) for arm in arms)
            count = sum(len(each) for each in times.values())
            row = " ".join(
                f"{figure(times, statistic):8.1f}"
                for statistic in (mean, percentile(95), percentile(99))
            )
            yield (
                f"{backend:8s} {load:10s} {share:5.2f} {name:22s} {count:5d} {row} "
                f"{cached / max(tokens, 1):7.1%} {sum(arm['lost'] for arm in arms):4d} "
                f"{sum(arm['broken'] for arm in arms):6d}"
            )


def _ratios(
    cells: Mapping[Cell, Mapping[str, Times]],
    suffix: str,
    generator: np.random.Generator,
) -> dict[str, Any]:
    """Return P95 and P99 of the prompt tree over others', the median over cells."""
    told: dict[str, Any] = {}
    rivals = {"session": (SESSION,), "sglang_router": SGLANG}
    for share in (99, 95):
        for name, theirs in rivals.items():
            found: dict[str, Ratio] = {}
            for (_, load, offered), times in cells.items():
                found[f"{load} {offered}"] = ratio(
                    times[OURS],
                    [times[each] for each in theirs],
                    percentile(share),
                    generator,
                )
            key = f"router{suffix}_p{share}_vs_{name}"
            middle = median_of(list(found.values()))
            told[key] = round(middle.value, 4)
            told[f"{key}_interval"] = _bounds(middle)
            told[f"{key}_by_cell"] = {
                cell: [round(each.value, 4), *_bounds(each)]
                for cell, each in found.items()
            }
    return told


def _bounds(each: Ratio) -> list[float]:
    interval = each.interval
    return [round(interval.low, 4), round(interval.high, 4)]


def _cell(block: Block) -> Cell:
    return block["backend"], block["load"], block["share"]


def _by_cell(blocks: Sequence[Block]) -> Mapping[Cell, list[Block]]:
    found: dict[Cell, list[Block]] = defaultdict(list)
    for block in blocks:
        found[_cell(block)].append(block)
    return found


def _times(blocks: Sequence[Block]) -> dict[str, Times]:
    """Return times by router and document; a repeat's documents are its own."""
    return {
        name: {
            f"{block['repeat']}/{document}": times
            for block in blocks
            for document, times in block["arms"][name]["ttft_ms"].items()
        }
        for name in ROUTERS
    }


def _sums(blocks: Sequence[Block], what: str) -> dict[str, int]:
    return {
        name: sum(block["arms"][name][what] for block in blocks) for name in ROUTERS
    }


def _is_complete(repeats: Mapping[Cell, int]) -> bool:
    wanted = len(BACKENDS) * len(LOADS) * len(SHARES)
    least = min(repeats.values(), default=0)
    return len(repeats) == wanted and least >= WANTED_REPEATS
