"""From records of runs to figures: what ``make bench-router`` says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from against.intervals import Ratio, Times, figure, mean, median_of, percentile, ratio
from routers.arms import BACKENDS, OURS, ROUTERS, SESSION, SGLANG
from routers.loads import KINDS, document_of, kind_of
from sgl_tiered_workloads.harness.turns import rotated
from sgl_tiered_workloads.records import RequestRecord

__all__ = [
    "SHARES",
    "WANTED_REPEATS",
    "Run",
    "arm_block",
    "missed",
    "runs_left",
    "summary",
    "table",
    "waiting",
]

SHARES = (0.45, 0.7)
"""Offered, of what three servers do behind ``least-load`` on the same load."""
WANTED_REPEATS: Mapping[str, int] = {"tiered": 5, "hicache": 2}
"""Fewer before HiCache's servers, whose figures no target is set for."""
AT_MOST = {"router_p99_vs_sglang_router": 0.85, "router_p99_vs_session": 0.6}
BELOW_ONE = "router_p99_vs_sglang_router_interval"
"""Its upper end: ours is the lower one beyond the noise."""
MIDDLE, END = (0.4, 0.6), (0.8, 1.0)
"""Parts of the time in which sessions begin, whose waiting requests are compared."""
_MOST_GROWTH, _NOISE = 1.5, 1.0
"""So many times as many requests and one more may wait at the end of a run."""
_SEED = 25
Block = Mapping[str, Any]
Cell = tuple[str, float]
"""Servers, share."""
Repeats = Mapping[int, Mapping[str, Block]]
"""Records by repeat and router."""


class Run(NamedTuple):
    """One router before one kind of servers, once."""

    backend: str
    share: float
    repeat: int
    router: str


def arm_block(
    records: Sequence[RequestRecord], documents: Iterable[str]
) -> dict[str, Any]:
    """Return a run's times in milliseconds by document, as they are written down.

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
    return {"ttft_ms": times, "prompt_tokens": tokens, "waiting": waiting(records)}


def waiting(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Return how many requests wait for a first token, in the mean over two parts.

    If more and more do, the load is beyond what the servers can do, and times say how
    long the run was.
    """
    first = [record.targeted_s for record in records if record.key.endswith(".t0")]
    begin_s, span_s = min(first), max(first) - min(first)

    def between(part: tuple[float, float]) -> float:
        since_s, until_s = (begin_s + share * span_s for share in part)
        waited_s = sum(
            max(0.0, min(r.token_times_s[0], until_s) - max(r.started_s, since_s))
            for r in records
            if r.token_times_s
        )
        return round(waited_s / max(until_s - since_s, 1e-9), 3)

    return {"middle": between(MIDDLE), "end": between(END)}


def runs_left(blocks: Sequence[Block], backends: Sequence[str]) -> list[Run]:
    """Return the runs that have no record yet, in the order in which they are due.

    One kind of servers after the other, as to change them takes a while. In a repeat
    the routers take turns at one load, and in the opposite order at the other, so that
    what changes with time meets them alike; each repeat begins with another one.
    """
    done = {Run(*(block[name] for name in Run._fields)) for block in blocks}
    return [run for run in _plan(backends) if run not in done]


def _plan(backends: Sequence[str]) -> Iterator[Run]:
    for backend in backends:
        for repeat in range(WANTED_REPEATS[backend]):
            order = rotated(ROUTERS, repeat)
            first, second = SHARES if repeat % 2 == 0 else SHARES[::-1]
            yield from (Run(backend, first, repeat, name) for name in order)
            yield from (Run(backend, second, repeat, name) for name in reversed(order))


def summary(blocks: Sequence[Block]) -> dict[str, Any]:
    """Return the figures of all runs, what must not be, and the targets missed.

    Ratios are of repeats that all routers have had.
    """
    generator = np.random.default_rng(_SEED)
    told: dict[str, Any] = {}
    whole = {cell: _whole(found) for cell, found in _by_cell(blocks).items()}
    for backend in BACKENDS:
        cells = {
            share: repeats
            for (servers, share), repeats in whole.items()
            if servers == backend and repeats
        }
        if cells:
            suffix = "" if backend == BACKENDS[0] else f"_{backend}"
            told |= _ratios(cells, suffix, generator)
    queues = _queues(blocks)
    lost = _by_router(blocks, "lost")
    evictions = {
        name: min(b["evicted_tokens"] for b in blocks if b["router"] == name)
        for name in lost
    }
    told |= {
        "evictions": min(evictions.values(), default=0),
        "evictions_by_router": evictions,
        "lost": sum(lost.values()),
        "lost_by_router": lost,
        "unsent_by_router": _by_router(blocks, "unsent"),
        "broken_by_router": _by_router(blocks, "broken"),
        "wrong": sum(block["wrong"] for block in blocks),
        "judged": sum(block["judged"] for block in blocks),
        "kills": sum(block["killed_s"] is not None for block in blocks),
        "adds": sum(block["added_s"] is not None for block in blocks),
        "served_by_added": min(
            (block["served"][block["added"]] for block in blocks), default=0
        ),
        "waiting": queues,
        "queues_grew": [
            name
            for name, (middle, end) in queues.items()
            if end > _MOST_GROWTH * middle + _NOISE
        ],
        "runs": len(blocks),
        "repeats": {f"{b} {share}": len(each) for (b, share), each in whole.items()},
        "requests": {
            f"{b} {share}": sum(len(t) for t in _times(each, OURS).values())
            for (b, share), each in whole.items()
        },
        "alone": bool(blocks) and all(block["alone"] for block in blocks),
        "complete": not runs_left(blocks, BACKENDS),
    }
    return told | {"targets_missed": missed(told)}


def missed(told: Mapping[str, Any]) -> list[str]:
    """Return the names of figures that are not as wanted; one that is not there is."""
    wanted = {
        name: name in told and told[name] <= limit for name, limit in AT_MOST.items()
    }
    wanted |= {
        BELOW_ONE: BELOW_ONE in told and told[BELOW_ONE][1] < 1.0,
        "evictions": told["evictions"] > 0,
        "lost": told["lost"] == 0,
        "wrong": told["wrong"] == 0,
        "judged": told["judged"] > 0,
        "kills": told["kills"] == told["runs"],
        "adds": told["adds"] == told["runs"],
        "served_by_added": told["served_by_added"] > 0,
        "queues_grew": not told["queues_grew"],
        "complete": told["complete"],
    }
    return [name for name, is_right in wanted.items() if not is_right]


def table(blocks: Sequence[Block]) -> Iterable[str]:
    """Give the lines of a table: times in milliseconds, pooled over repeats."""
    yield (
        f"{'servers':8s} {'share':>5s} {'router':22s} {'kind':10s} {'n':>5s} "
        f"{'mean':>8s} {'P95':>8s} {'P99':>8s} {'cached':>7s} {'lost':>4s} "
        f"{'broken':>6s}"
    )
    for (backend, share), found in sorted(_by_cell(blocks).items()):
        for name in ROUTERS:
            runs = {b["repeat"]: {name: b} for b in found if b["router"] == name}
            arms = [run[name] for run in runs.values()]
            tokens = sum(arm["prompt_tokens"] for arm in arms)
            cached = sum(sum(arm["cached"].values()) for arm in arms)
            counts = (
                f"{cached / max(tokens, 1):7.1%} {sum(arm['lost'] for arm in arms):4d} "
                f"{sum(arm['broken'] for arm in arms):6d}"
            )
            for kind in ("", *KINDS):
                times = _times(runs, name, kind)
                if not any(times.values()):
                    continue
                row = " ".join(
                    f"{figure(times, statistic):8.1f}"
                    for statistic in (mean, percentile(95), percentile(99))
                )
                count = sum(len(each) for each in times.values())
                line = (
                    f"{backend:8s} {share:5.2f} {name:22s} {kind or 'all':10s} "
                    f"{count:5d} {row} {'' if kind else counts}"
                )
                yield line.rstrip()


def _ratios(
    cells: Mapping[float, Repeats], suffix: str, generator: np.random.Generator
) -> dict[str, Any]:
    """Return P95 and P99 of the prompt tree over others', the median over rates.

    By kind as well, pooled over repeats.
    """
    told: dict[str, Any] = {}
    rivals = {"session": (SESSION,), "sglang_router": SGLANG}
    for percent in (99, 95):
        for name, theirs in rivals.items():
            found: dict[str, dict[str, Ratio]] = {"": {}}
            for share, repeats in cells.items():
                for kind in ("", *KINDS):
                    times = [_times(repeats, r, kind) for r in (OURS, *theirs)]
                    # A router that has answered nothing has no percentile.
                    if all(any(each.values()) for each in times):
                        found.setdefault(kind, {})[str(share)] = ratio(
                            times[0], times[1:], percentile(percent), generator
                        )
            if not found[""]:
                continue
            key = f"router{suffix}_p{percent}_vs_{name}"
            middle = median_of(list(found[""].values()))
            told[key] = round(middle.value, 4)
            told[f"{key}_interval"] = _bounds(middle)
            told[f"{key}_by_rate"] = _told(found.pop(""))
            told[f"{key}_by_kind"] = {
                kind: _told(ratios) for kind, ratios in found.items()
            }
    return told


def _told(ratios: Mapping[str, Ratio]) -> dict[str, list[float]]:
    return {
        name: [round(each.value, 4), *_bounds(each)] for name, each in ratios.items()
    }


def _bounds(each: Ratio) -> list[float]:
    interval = each.interval
    return [round(interval.low, 4), round(interval.high, 4)]


def _by_cell(blocks: Sequence[Block]) -> Mapping[Cell, list[Block]]:
    found: dict[Cell, list[Block]] = defaultdict(list)
    for block in blocks:
        found[block["backend"], block["share"]].append(block)
    return found


def _whole(blocks: Sequence[Block]) -> Repeats:
    """Return the repeats of a cell that all routers have had."""
    found: dict[int, dict[str, Block]] = defaultdict(dict)
    for block in blocks:
        found[block["repeat"]][block["router"]] = block
    return {n: runs for n, runs in sorted(found.items()) if len(runs) == len(ROUTERS)}


def _times(repeats: Repeats, router: str, kind: str = "") -> Times:
    """Return a router's times by document, of a kind or all of them.

    A repeat's documents are its own.
    """
    return {
        f"{repeat}/{document}": times
        for repeat, runs in repeats.items()
        for document, times in runs[router]["ttft_ms"].items()
        if not kind or kind_of(document) == kind
    }


def _queues(blocks: Sequence[Block]) -> dict[str, list[float]]:
    """Return waiting requests in the middle and at the end, the mean over repeats."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for block in blocks:
        name = f"{block['backend']} {block['share']} {block['router']}"
        found[name].append((block["waiting"]["middle"], block["waiting"]["end"]))
    return {
        name: [round(float(each), 3) for each in np.mean(rows, axis=0)]
        for name, rows in found.items()
    }


def _by_router(blocks: Sequence[Block], what: str) -> dict[str, int]:
    return {
        name: sum(block[what] for block in blocks if block["router"] == name)
        for name in ROUTERS
        if any(block["router"] == name for block in blocks)
    }
