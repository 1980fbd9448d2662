"""From cells to figures: one row per figure and system, as pure functions.

A cell gives pieces: samples of one start of a server. A row is made of the pieces of
all starts: its value is the median of theirs, beside which each stands. Where a hit is
said to have come from a place, the answer said so; all others are left out, and the row
says how many. Figures of a system that the gate does not allow are withheld.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import eq
from pathlib import Path
from typing import Any

import numpy as np
from comparison.judging import judge
from comparison.measure import COMPUTED, DEVICE, HOST, ON_DISK
from comparison.plan import LOAD_NAMES
from comparison.store import FAILED, NOT_THERE, OK
from comparison.systems import (
    DISK,
    NO_REUSE,
    PLAIN,
    SYSTEMS,
    TTFT,
    UNCAPPED,
)
from sgl_tiered_workloads.harness.statistics import quantiles
from sgl_tiered_workloads.usage import tokens_by_tier

__all__ = ["Findings", "Row", "find"]

MS = 1e3
_LEAST_SHARE = 0.95
"""Of a hit, that must have come from the place that the figure names."""
_MOST_RESIDENT = 0.03
"""Of a store, that may lie in the page cache before a hit that is called cold."""
_MUST_EQUAL = ("pool_tokens", "attention_backend", "page_size")
_BROKEN = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)

Told = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one system.

    Attributes:
        figure: what it is.
        system: whose.
        unit: of the value.
        value: the median of ``starts``; None where it is withheld, or there is none.
        starts: the median of each start, in order.
        low, high: the least and the most of what was repeated: starts, or runs.
        samples: behind it.
        source: where the KV of the prompts came from.
        identical: share of answers that equal plain SGLang's to the same prompts; of
            plain's own, how often it agrees with itself. None where none was compared.
        gate: what the gate says of the system.
        note: what was left out, and what else must be known.
        part, tokens, state: for pictures.
    """

    figure: str
    system: str
    unit: str
    value: float | None
    starts: tuple[float, ...]
    low: float | None
    high: float | None
    samples: int
    source: str
    identical: float | None
    gate: str
    note: str
    part: str
    tokens: int = 0
    state: str = ""


@dataclass(slots=True)
class Findings:
    """All of a comparison.

    Attributes:
        rows: figures.
        gates: by system, what the gate says.
        compared: by system, what the gate compared.
        memory: by system, what it had.
        moved: by system, bytes moved in the streams without reuse by edge, and
            ``drain_s``, the longest drain after one; empty where a system cannot tell.
        missing: cells that failed or are not there, and why.
        failed: attempts that failed by cell, also of those that then were measured.
        dates: on which cells were measured.
        problems: why the run is not in order.
    """

    rows: list[Row] = field(default_factory=list)
    gates: dict[str, str] = field(default_factory=dict)
    compared: dict[str, str] = field(default_factory=dict)
    memory: dict[str, Told] = field(default_factory=dict)
    moved: dict[str, dict[str, float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    failed: dict[str, list[str]] = field(default_factory=dict)
    dates: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Piece:
    """Samples of one figure in one start.

    Attributes:
        key: figure, unit, part, tokens and state of the row.
        system: whose.
        start: of its server.
        samples: behind ``values``; 0 for as many as there are of these.
        values: one, or one per repeat.
        tiers: cached tokens by where they came from.
        tokens: that might have been cached.
        equal: answers that equal plain's, by request; those that can be compared.
        left_out: why samples do not count, one each.
        note: what else is to be known.
        date: of the cell.
    """

    key: tuple[str, str, str, int, str]
    system: str
    start: int
    values: list[float]
    samples: int = 0
    tiers: Mapping[str, int] = field(default_factory=dict)
    tokens: int = 0
    equal: list[bool] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    note: str = ""
    date: str = ""


class _References:
    """What plain SGLang answered and reached, for others to be compared with."""

    def __init__(self, cells: Sequence[Told]) -> None:
        mine = [cell for cell in cells if cell["system"] == PLAIN]
        self._cells = {(one["part"], one["start"], one["case"]): one for one in mine}

    def outputs(self, length: int) -> dict[int, Any]:
        """Return what was answered to each prompt of a length, the first time."""
        cell = self._cells.get((TTFT, 0, length)) or {"requests": ()}
        outputs: dict[int, Any] = {}
        for one in cell["requests"]:
            outputs.setdefault(one["prompt"], one["output"])
        return outputs

    def stream(self, start: int) -> Told | None:
        """Return the stream without reuse of a start, of the same prompts."""
        return self._cells.get((NO_REUSE, start, 0))

    def load(self, name: str) -> Told | None:
        """Return the first run of a load."""
        return self._cells.get((name, 0, 0))


def find(cells: Sequence[Told], records: Path, page_size: int) -> Findings:
    """Return what the cells show; one that lacks something is a problem of its own.

    Args:
        cells: as they were written.
        records: folder of the gate's records.
        page_size: tokens per page.
    """
    found = Findings()
    good = [cell for cell in cells if cell["status"] == OK]
    _tell_states(found, cells)
    verdicts = judge(good, records, page_size)
    found.gates, found.compared = verdicts.gates, verdicts.compared
    found.problems += verdicts.problems
    _compare_pools(found)
    references, pieces = _References(good), []
    for cell in good:
        try:
            pieces += _pieces(cell, references)
            if cell["part"] == NO_REUSE:
                _add_moved(found, cell)
        except _BROKEN as problem:
            found.problems.append(
                f"{_name(cell)} does not have what it should "
                f"({type(problem).__name__}: {problem})"
            )
    order = list(SYSTEMS)
    for told in (found.memory, found.gates, found.moved):
        in_order = sorted(told.items(), key=lambda one: order.index(one[0]))
        told.clear()
        told.update(in_order)
    # Rows of one figure stand together, in the order of the systems.
    pieces.sort(key=lambda one: (*_place(one.key), order.index(one.system)))
    for (key, system), group in groupby(pieces, lambda one: (one.key, one.system)):
        chosen = sorted(group, key=lambda one: one.start)
        allowed = verdicts.allows(system)
        gate = found.gates.get(system, "not judged: its gate was not run")
        found.rows.append(_row(key, system, chosen, gate, allowed, found.dates))
    return found


def _name(cell: Told) -> str:
    return f"{cell['system']}.{cell['part']}.{cell['case']}.{cell['start']}"


def _tell_states(found: Findings, cells: Sequence[Told]) -> None:
    """Tell what failed, what is not there, and what each system had."""
    for cell in cells:
        if failed := cell.get("failed"):
            found.failed[_name(cell)] = list(failed)
        if cell["status"] in (FAILED, NOT_THERE):
            found.missing[_name(cell)] = cell["why"]
        if cell["status"] == FAILED:
            # A server that does not start fails all of its cells with one sentence.
            sentence = f"{cell['system']}: {cell['why']}"
            if sentence not in found.problems:
                found.problems.append(sentence)
        if cell["status"] != OK:
            continue
        if (date := cell.get("date")) and date not in found.dates:
            found.dates.append(date)
        if memory := cell.get("memory"):
            former = found.memory.get(cell["system"], {})
            used = {
                key: max(filter(None, (former.get(key), memory.get(key))), default=None)
                for key in ("gpu_used_gib", "processes_gib", "host_used_gib")
            }
            found.memory[cell["system"]] = {**memory, **used}
    found.dates.sort()


def _compare_pools(found: Findings) -> None:
    """Say so where systems did not get the same."""
    plain = found.memory.get(PLAIN)
    if plain is None:
        return
    for name, memory in found.memory.items():
        for key in _MUST_EQUAL:
            if name == UNCAPPED and key == "pool_tokens":
                continue
            if memory.get(key) != plain.get(key):
                found.problems.append(
                    f"{name} has {key} {memory.get(key)}, plain {plain.get(key)}"
                )


def _add_moved(found: Findings, cell: Told) -> None:
    moved = found.moved.setdefault(cell["system"], {})
    for edge, num_bytes in cell["moved_bytes"].items():
        moved[edge] = moved.get(edge, 0) + num_bytes
    if moved:
        moved["drain_s"] = max(cell["drain_s"], moved.get("drain_s", 0.0))


def _pieces(cell: Told, references: _References) -> list[_Piece]:
    part = cell["part"]
    if part in (TTFT, DISK):
        pieces = _hits(cell, references)
    elif part == NO_REUSE:
        pieces = _stream(cell, references)
    elif part in LOAD_NAMES:
        pieces = _load(cell, references)
    else:
        return []
    for piece in pieces:
        piece.date = cell.get("date", "")
    return pieces


def _hits(cell: Told, references: _References) -> list[_Piece]:
    """Return what was timed, by where the KV lay, if it really came from there."""
    length, pieces = cell["case"], []
    plain = references.outputs(length)
    is_itself = cell["system"] == PLAIN and cell["start"] == 0
    states = (ON_DISK,) if cell["part"] == DISK else (COMPUTED, DEVICE, HOST)
    for state in states:
        seen = [one for one in cell["requests"] if one["state"] == state]
        if not seen:
            continue
        why_not = [_why_not(cell["system"], state, one, length) for one in seen]
        good = [one for one, why in zip(seen, why_not, strict=True) if not why]
        tiers: dict[str, int] = {}
        for one in seen:
            for tier, tokens in tokens_by_tier(one["cached_by_tier"]).items():
                tiers[tier] = tiers.get(tier, 0) + tokens
        pieces.append(
            _Piece(
                (
                    f"TTFT, {length:,} tokens, {state}",
                    "ms",
                    cell["part"],
                    length,
                    state,
                ),
                cell["system"],
                cell["start"],
                # Hits of one start are no independent samples: they are one value.
                [float(np.median([one["ttft_s"] * MS for one in good]))]
                if good
                else [],
                len(good),
                tiers,
                length * len(seen),
                [
                    one["output"] == plain[one["prompt"]]
                    for one in good
                    if one["prompt"] in plain and not (is_itself and state == COMPUTED)
                ],
                [why for why in why_not if why],
                _coldness(seen) if state == ON_DISK else "",
            )
        )
    return pieces


def _why_not(system: str, state: str, request: Told, length: int) -> str:
    """Return why a request is no sample of a state; empty where it is."""
    tiers = tokens_by_tier(request["cached_by_tier"])
    if state == COMPUTED:
        return "" if not sum(tiers.values()) else "found in a cache"
    names = (DEVICE,) if state == DEVICE else SYSTEMS[system].tiers
    if sum(tiers.get(name, 0) for name in names) < _LEAST_SHARE * length:
        return f"not from {state}"
    if state == ON_DISK and request["resident_share"] > _MOST_RESIDENT:
        return "not cold"
    return ""


def _coldness(seen: Sequence[Told]) -> str:
    most = max(one["resident_share"] for one in seen)
    return f"at most {most:.1%} of the store was in the page cache"


def _stream(cell: Told, references: _References) -> list[_Piece]:
    """Return the throughput of a stream, and over plain's of the same start."""
    name, plain = cell["system"], references.stream(cell["start"])
    rate = cell["tokens"] / (cell["seconds"] + cell["drain_s"])
    equal: list[bool] = []
    if plain is not None and name != PLAIN:
        equal = list(map(eq, cell["outputs"], plain["outputs"]))

    def piece(figure: str, unit: str, value: float) -> _Piece:
        key = (figure, unit, NO_REUSE, 0, "")
        count = len(cell["outputs"])
        return _Piece(key, name, cell["start"], [value], count, equal=equal)

    pieces = [piece("without reuse, throughput", "tokens/s", rate)]
    if plain is not None and name != PLAIN:
        theirs = plain["tokens"] / (plain["seconds"] + plain["drain_s"])
        figure = "without reuse, throughput over plain's"
        pieces.append(piece(figure, "ratio", rate / theirs))
    return pieces


def _load(cell: Told, references: _References) -> list[_Piece]:
    """Return the figures of one run of a load."""
    part, plain = cell["part"], references.load(cell["part"])
    equal: list[bool] = []
    if plain is not None and plain is not cell:
        known, answers = plain["answers"], cell["answers"]
        if len(known) == len(answers):
            equal = [
                ours == theirs for ours, theirs in zip(answers, known, strict=True)
            ]
    report = cell["cache_report"]
    names = ("device", "host", "storage")
    tiers = {name: int(report.get(f"{name}_cached_tokens") or 0) for name in names}
    p50, p99 = quantiles(cell["ttfts"])
    figures = (
        ("TTFT p50", "ms", p50 * MS),
        ("TTFT p99", "ms", p99 * MS),
        ("answer tokens/s", "tokens/s", cell["figures"]["output_throughput"]),
    )
    word = part.replace("_", "-")
    return [
        _Piece(
            (f"{word}, {figure}", unit, part, 0, ""),
            cell["system"],
            cell["start"],
            [float(value)],
            len(cell["ttfts"]),
            tiers,
            int(report.get("total_prompt_tokens") or 0),
            equal,
        )
        for figure, unit, value in figures
    ]


def _place(key: tuple[str, str, str, int, str]) -> tuple[int, int, int, str]:
    """Return where a figure stands on the page."""
    figure, _, part, tokens, state = key
    parts = (TTFT, DISK, NO_REUSE, *LOAD_NAMES)
    states = (COMPUTED, DEVICE, HOST, ON_DISK)
    place = 0 if part in (TTFT, DISK) else parts.index(part)
    return place, tokens, states.index(state) if state else 0, figure


def _row(
    key: tuple[str, str, str, int, str],
    system: str,
    pieces: Sequence[_Piece],
    gate: str,
    allowed: bool,
    dates: Sequence[str],
) -> Row:
    figure, unit, part, tokens, state = key
    starts = []
    for _, group in groupby(pieces, lambda one: one.start):
        if values := [value for one in group for value in one.values]:
            starts.append(float(np.median(values)))
    every = [value for one in pieces for value in one.values]
    equal = [same for one in pieces for same in one.equal]
    told = allowed and bool(every)
    return Row(
        figure=figure,
        system=system,
        unit=unit,
        value=float(np.median(starts)) if told else None,
        starts=tuple(starts) if told else (),
        low=min(every) if told else None,
        high=max(every) if told else None,
        samples=sum(one.samples for one in pieces),
        source=_source(pieces),
        identical=sum(equal) / len(equal) if equal else None,
        gate=gate,
        note=_note(pieces, dates),
        part=part,
        tokens=tokens,
        state=state,
    )


def _source(pieces: Iterable[_Piece]) -> str:
    """Return where prompts' KV came from, as shares of what might have been cached."""
    sums: dict[str, int] = {}
    total = 0
    for one in pieces:
        total += one.tokens
        for tier, tokens in one.tiers.items():
            sums[tier] = sums.get(tier, 0) + tokens
    if not total:
        return ""
    told = [f"{tier} {num / total:.0%}" for tier, num in sums.items() if num]
    if (left := total - sum(sums.values())) > 0:
        told.append(f"computed {left / total:.0%}")
    return ", ".join(told)


def _note(pieces: Sequence[_Piece], dates: Sequence[str]) -> str:
    left_out = [why for one in pieces for why in one.left_out]
    every = len(left_out) + sum(one.samples for one in pieces)
    notes = [
        f"{why}: {left_out.count(why)} of {every} left out"
        for why in dict.fromkeys(left_out)
    ]
    notes += dict.fromkeys(one.note for one in pieces if one.note)
    if len(dates) > 1:
        notes.append(", ".join(sorted({one.date for one in pieces})))
    return "; ".join(notes)
