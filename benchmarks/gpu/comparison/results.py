"""From cells to figures: one row per figure and system, as pure functions.

Figures of a system whose answers the gate found wrong are withheld. Where a system is
said to have found KV in a place, the answers said so: a planner may have computed it
instead, which is then told in the row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from comparison.measure import COMPUTED, DEVICE, HOST, ON_DISK
from comparison.plan import LOAD_NAMES
from comparison.store import FAILED, NOT_THERE, OK
from comparison.systems import DISK, GATE, NO_REUSE, PLAIN, SYSTEMS, TIERED, TTFT
from sgl_tiered_workloads.gate import (
    Spread,
    check_equality,
    measure_spread,
    widest_spread,
)
from sgl_tiered_workloads.harness.statistics import (
    Interval,
    draw_interval,
    median_interval,
    quantiles,
    resampled_medians,
)
from sgl_tiered_workloads.records import RequestRecord, read_records

__all__ = ["Findings", "Row", "find", "identical_share"]

MS = 1e3
_STATES = (COMPUTED, DEVICE, HOST, ON_DISK)
_LEAST_SAMPLES = 5
"""Fewer give no interval of a median that is worth its name."""

Cells = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one system.

    Attributes:
        figure: what it is.
        system: whose.
        unit: of the value.
        value: the median; None where it is withheld, or there is none.
        low, high: its 95 % interval, where there are samples enough.
        samples: behind it.
        source: where the KV of the prompts came from.
        identical: share of answers that equal plain SGLang's to the same prompts; of
            plain's own, how often it agrees with itself. None where none was compared.
        gate: ``green``, ``red``, or why it was not judged.
        part, tokens, state: for pictures.
    """

    figure: str
    system: str
    unit: str
    value: float | None
    low: float | None
    high: float | None
    samples: int
    source: str
    identical: float | None
    gate: str
    part: str
    tokens: int = 0
    state: str = ""


@dataclass(slots=True)
class Findings:
    """All of a comparison.

    Attributes:
        rows: figures.
        gates: by system, ``green``, ``red``, or why it was not judged.
        compared: by system, what the gate compared.
        memory: by system, what it had.
        missing: cells that failed or are not there, and why.
        samples: raw ratios of the runs without reuse, for the picture.
        problems: why the run is not in order.
    """

    rows: list[Row] = field(default_factory=list)
    gates: dict[str, str] = field(default_factory=dict)
    compared: dict[str, str] = field(default_factory=dict)
    memory: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    samples: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def find(cells: Cells, records: Path, page_size: int) -> Findings:
    """Return what the cells show.

    Args:
        cells: as they were written.
        records: folder of the gate's records.
        page_size: tokens per page.
    """
    found = Findings()
    good = [cell for cell in cells if cell["status"] == OK]
    for cell in cells:
        name = f"{cell['system']}.{cell['part']}.{cell['case']}"
        if cell["status"] in (FAILED, NOT_THERE):
            found.missing[name] = cell["why"]
        if cell["status"] == FAILED:
            # A server that does not start fails all of its cells with one sentence.
            sentence = f"{cell['system']}: {cell['why']}"
            if sentence not in found.problems:
                found.problems.append(sentence)
        if cell["status"] == OK and cell.get("memory"):
            found.memory[cell["system"]] = cell["memory"]
    _judge(found, good, records, page_size)
    _compare_pools(found)
    try:
        _find_ttft(found, good)
        _find_no_reuse(found, good)
        _find_loads(found, good)
    except (KeyError, TypeError, ValueError) as problem:
        found.problems.append(
            f"a cell does not have what it should ({type(problem).__name__}: {problem})"
        )
    order = {name: place for place, name in enumerate(SYSTEMS)}
    for told in (found.memory, found.gates):
        in_order = sorted(told.items(), key=lambda one: order[one[0]])
        told.clear()
        told.update(in_order)
    # Rows of one figure stand together, in the order of the systems.
    figures = list(dict.fromkeys(row.figure for row in found.rows))
    found.rows.sort(key=lambda row: (figures.index(row.figure), order[row.system]))
    return found


def identical_share(
    answers: Sequence[Any], reference: Sequence[Any | None]
) -> float | None:
    """Return the share of answers that equal those of a reference.

    Args:
        answers: one per request.
        reference: of the same requests; None where it has none.
    """
    pairs = [
        (ours, theirs)
        for ours, theirs in zip(answers, reference, strict=True)
        if theirs is not None
    ]
    if not pairs:
        return None
    return sum(ours == theirs for ours, theirs in pairs) / len(pairs)


def _judge(found: Findings, cells: Cells, records: Path, page_size: int) -> None:
    """Compare the gate's records of each system with plain's."""
    gates = {
        (cell["system"], cell["case"]): cell for cell in cells if cell["part"] == GATE
    }
    try:
        plain, spread, forced = _reference(found, gates, records, page_size)
        why = ""
    except (OSError, KeyError, TypeError, ValueError) as problem:
        why = f"not judged: {problem}"
    for (name, _), cell in gates.items():
        if name == PLAIN:
            found.gates.setdefault(name, "the reference")
            continue
        if why:
            found.gates[name] = why
            continue
        try:
            _, ours = read_records(records / cell["records"])
        except (OSError, KeyError, TypeError, ValueError) as problem:
            found.gates[name] = f"not judged: its records cannot be read ({problem})"
            continue
        result = check_equality(
            plain,
            ours,
            page_size=page_size,
            spread=spread,
            forced=forced,
            min_exact_fraction=0.0,
        )
        found.gates[name] = "green" if result.passed else "red"
        found.compared[name] = result.summary().partition("\n")[0]
        if not result.passed:
            found.problems.append(f"{name}: {result.summary()}")


def _reference(
    found: Findings,
    gates: Mapping[tuple[str, int], Mapping[str, Any]],
    records: Path,
    page_size: int,
) -> tuple[list[RequestRecord], Spread, bool]:
    """Return plain's answers, how far they move, and whether bits may be asked.

    Raises:
        ValueError: plain has no answers, or a wrong page would not be caught.
        OSError: its records cannot be read.
    """
    first = gates.get((PLAIN, 0))
    if first is None:
        raise ValueError("plain SGLang has no answers")
    if not first.get("spread"):
        raise ValueError(first.get("why_no_spread") or "plain has no spread")
    _, plain = read_records(records / first["records"])
    spread = Spread(**first["spread"])
    second = gates.get((PLAIN, 1))
    if second is None:
        return plain, spread, True
    _, again = read_records(records / second["records"])
    # Of two servers of plain SGLang: answers that were computed alike.
    itself = check_equality(plain, again, page_size=page_size, min_exact_fraction=0.0)
    if itself.passed:
        found.compared[PLAIN] = f"the reference; bits twice: {itself.summary()}"
        return plain, spread, True
    found.compared[PLAIN] = (
        "the reference; two of its servers do not give the same bits, so that the "
        f"near-tie rule holds for all: {itself.summary()}"
    )
    return plain, widest_spread([spread, measure_spread(plain, again)]), False


def _compare_pools(found: Findings) -> None:
    """Say so where systems did not get the same."""
    plain = found.memory.get(PLAIN)
    if plain is None:
        return
    for name, memory in found.memory.items():
        for key in ("pool_tokens", "attention_backend", "page_size"):
            if memory.get(key) != plain.get(key):
                found.problems.append(
                    f"{name} has {key} {memory.get(key)}, plain {plain.get(key)}"
                )


def _find_ttft(found: Findings, cells: Cells) -> None:
    chosen = [cell for cell in cells if cell["part"] in (TTFT, DISK)]
    plain = {
        cell["case"]: _first_answers(cell)
        for cell in chosen
        if cell["system"] == PLAIN and cell["part"] == TTFT
    }
    for length in sorted({cell["case"] for cell in chosen}):
        for state in _STATES:
            for cell in chosen:
                if cell["case"] != length:
                    continue
                # What a disk's prompts took to compute is no figure of its own.
                if cell["part"] == DISK and state == COMPUTED:
                    continue
                seen = [one for one in cell["requests"] if one["state"] == state]
                if seen:
                    _add_ttft(found, cell, state, seen, plain.get(length, {}))


def _first_answers(cell: Mapping[str, Any]) -> dict[int, list[int]]:
    """Return what plain answered to each prompt when it computed it first."""
    answers: dict[int, list[int]] = {}
    for one in cell["requests"]:
        if one["state"] == COMPUTED:
            answers.setdefault(one["prompt"], one["output"])
    return answers


def _add_ttft(
    found: Findings,
    cell: Mapping[str, Any],
    state: str,
    seen: Sequence[Mapping[str, Any]],
    plain: Mapping[int, list[int]],
) -> None:
    name, length = cell["system"], cell["case"]
    is_itself = name == PLAIN and state == COMPUTED
    reference = [None if is_itself else plain.get(one["prompt"]) for one in seen]
    _add(
        found,
        figure=f"TTFT, {length:,} tokens, {state}",
        system=name,
        unit="ms",
        samples=[one["ttft_s"] * MS for one in seen],
        source=_source(seen, length),
        identical=identical_share([one["output"] for one in seen], reference),
        part=cell["part"],
        tokens=length,
        state=state,
    )


def _source(seen: Sequence[Mapping[str, Any]], length: int) -> str:
    """Return where the hits' KV came from, as shares of the hits' length."""
    sums: dict[str, int] = {}
    for one in seen:
        for tier, tokens in one["cached_by_tier"].items():
            sums[tier] = sums.get(tier, 0) + tokens
    total = length * len(seen)
    parts = [f"{tier} {num / total:.0%}" for tier, num in sums.items() if num]
    left = total - sum(sums.values())
    if left > 0:
        parts.append(f"computed {left / total:.0%}")
    return ", ".join(parts)


def _find_no_reuse(found: Findings, cells: Cells) -> None:
    """Pair the runs of equal cases: the same prompts, next to each other in time."""
    chosen = {
        (cell["system"], cell["case"]): cell["runs"]
        for cell in cells
        if cell["part"] == NO_REUSE
    }
    rates: dict[str, list[float]] = {PLAIN: [], TIERED: []}
    answers: list[Any] = []
    reference: list[Any] = []
    for (name, case), runs in sorted(chosen.items()):
        if name != PLAIN or (TIERED, case) not in chosen:
            continue
        for theirs, ours in zip(runs, chosen[TIERED, case], strict=True):
            pair = [one["tokens"] / one["seconds"] for one in (theirs, ours)]
            rates[PLAIN].append(pair[0])
            rates[TIERED].append(pair[1])
            found.samples.append(pair[1] / pair[0])
            answers += ours["outputs"]
            reference += theirs["outputs"]
    if not found.samples:
        return
    share = identical_share(answers, reference)
    for name, values in rates.items():
        is_plain = name == PLAIN
        _add(
            found,
            figure="without reuse, throughput",
            system=name,
            unit="tokens/s",
            samples=values,
            source="",
            identical=None if is_plain else share,
            part=NO_REUSE,
        )
    _add(
        found,
        figure="without reuse, throughput over plain's",
        system=TIERED,
        unit="ratio",
        samples=found.samples,
        source="",
        identical=share,
        part=NO_REUSE,
    )


def _find_loads(found: Findings, cells: Cells) -> None:
    for load in LOAD_NAMES:
        chosen = [cell for cell in cells if cell["part"] == load]
        plain = [cell for cell in chosen if cell["system"] == PLAIN]
        for name in dict.fromkeys(cell["system"] for cell in chosen):
            mine = [cell for cell in chosen if cell["system"] == name]
            answers: list[str] = []
            reference: list[str | None] = []
            for cell in mine:
                if name == PLAIN and cell is plain[0]:
                    continue
                answers += cell["answers"]
                known = plain[0]["answers"] if plain else []
                is_known = len(known) == len(cell["answers"])
                reference += known if is_known else [None] * len(cell["answers"])
            share = identical_share(answers, reference)
            _add_load(found, load, name, mine, share)


def _add_load(
    found: Findings, load: str, name: str, cells: Cells, share: float | None
) -> None:
    word = load.replace("_", "-")
    times = [1e3 * second for cell in cells for second in cell["ttfts"]]
    common: dict[str, Any] = {
        "system": name,
        "source": _load_source(cells),
        "identical": share,
        "part": load,
    }
    _add(found, figure=f"{word}, TTFT p50", unit="ms", samples=times, **common)
    if times:
        # The interval is that of the median; a tail of so few has none.
        p99 = quantiles(times)[1]
        _put(found, f"{word}, TTFT p99", "ms", Interval(p99, p99, p99), times, common)
    rates = [cell["figures"]["output_throughput"] for cell in cells]
    _add(
        found,
        figure=f"{word}, answer tokens/s",
        unit="tokens/s",
        samples=rates,
        **common,
    )


def _load_source(cells: Cells) -> str:
    total = sum(cell["cache_report"].get("total_prompt_tokens") or 0 for cell in cells)
    if not total:
        return ""
    parts = []
    for tier in ("device", "host", "storage"):
        key = f"{tier}_cached_tokens"
        num = sum(cell["cache_report"].get(key) or 0 for cell in cells)
        if num:
            parts.append(f"{tier} {num / total:.0%}")
    cached = sum(cell["cache_report"].get("total_cached_tokens") or 0 for cell in cells)
    parts.append(f"computed {1 - cached / total:.0%}")
    return ", ".join(parts)


def _add(
    found: Findings,
    *,
    figure: str,
    system: str,
    unit: str,
    samples: Sequence[float],
    source: str,
    identical: float | None,
    part: str,
    tokens: int = 0,
    state: str = "",
) -> None:
    """Add the median of samples."""
    common = {
        "system": system,
        "source": source,
        "identical": identical,
        "part": part,
        "tokens": tokens,
        "state": state,
    }
    _put(found, figure, unit, _interval(samples, unit), samples, common)


def _put(
    found: Findings,
    figure: str,
    unit: str,
    interval: Interval | None,
    samples: Sequence[float],
    common: Mapping[str, Any],
) -> None:
    gate = found.gates.get(common["system"], "not judged")
    told = None if gate == "red" else interval
    has_bounds = told is not None and told.high > told.low
    found.rows.append(
        Row(
            figure=figure,
            unit=unit,
            value=None if told is None else told.value,
            low=told.low if told is not None and has_bounds else None,
            high=told.high if told is not None and has_bounds else None,
            samples=len(samples),
            gate=gate,
            **common,
        )
    )


def _interval(samples: Sequence[float], unit: str) -> Interval | None:
    if not samples:
        return None
    value = float(np.median(samples))
    if len(samples) < _LEAST_SAMPLES:
        return Interval(value, value, value)
    if unit == "ratio":
        try:
            return median_interval(samples)
        except ValueError:
            return Interval(value, value, value)
    draws = resampled_medians(samples, np.random.default_rng(0))
    return draw_interval(value, draws)
