"""The gate: answers of each system against plain SGLang's, from the gate's records.

Plain's answers count if a wrong page was seen to be caught. A system is green if its
answers are plain's, and if those that should have come from below the device did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comparison.systems import GATE, PLAIN, SYSTEMS
from sgl_tiered_workloads.gate import (
    Spread,
    check_equality,
    measure_spread,
    widest_spread,
)
from sgl_tiered_workloads.records import RequestRecord, read_records

__all__ = ["GREEN", "REFERENCE", "Verdicts", "judge"]

GREEN, REFERENCE = "green", "the reference"
_BROKEN = (OSError, LookupError, TypeError, ValueError, AttributeError)
"""What reading records and cells ends with that lack something."""


@dataclass(slots=True)
class Verdicts:
    """What the gate says.

    Attributes:
        gates: by system, ``green``, ``the reference``, ``red``, or why it was not
            judged.
        compared: by system, what was compared.
        problems: of systems that are red.
    """

    gates: dict[str, str] = field(default_factory=dict)
    compared: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def allows(self, system: str) -> bool:
        """Whether a system's figures may be told."""
        return self.gates.get(system) in (GREEN, REFERENCE)


def judge(cells: Sequence[Mapping[str, Any]], folder: Path, page_size: int) -> Verdicts:
    """Compare the gate's records of each system with plain's.

    Args:
        cells: that are done.
        folder: of the records.
        page_size: tokens per page.
    """
    found = Verdicts()
    gates = {
        (cell["system"], cell["start"]): cell for cell in cells if cell["part"] == GATE
    }
    why = ""
    try:
        plain, spread, forced = _reference(found, gates, folder, page_size)
    except _BROKEN as problem:
        why = f"not judged: {problem}"
    for (name, start), cell in gates.items():
        if name == PLAIN:
            if start == 0:
                found.gates[name] = why or REFERENCE
            continue
        if why:
            found.gates[name] = why
            continue
        try:
            _, ours = read_records(folder / cell["records"])
            result = check_equality(
                plain,
                ours,
                page_size=page_size,
                spread=spread,
                forced=forced,
                min_exact_fraction=0.0,
                must_cover=[_tier(name, ours)],
            )
        except _BROKEN as problem:
            found.gates[name] = f"not judged: its records cannot be read ({problem})"
            continue
        found.gates[name] = GREEN if result.passed else "red"
        found.compared[name] = result.summary().partition("\n")[0]
        if not result.passed:
            found.problems.append(f"{name}: {result.summary()}")
    return found


def _tier(name: str, records: Sequence[RequestRecord]) -> str:
    """Return where a system's answers must have come from, as it calls the place."""
    tiers = SYSTEMS[name].tiers or ("device",)
    return max(
        tiers, key=lambda tier: sum(one.cached_by_tier.get(tier, 0) for one in records)
    )


def _reference(
    found: Verdicts,
    gates: Mapping[tuple[str, int], Mapping[str, Any]],
    folder: Path,
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
    _, plain = read_records(folder / first["records"])
    spread = Spread(**first["spread"])
    second = gates.get((PLAIN, 1))
    if second is None:
        return plain, spread, True
    _, again = read_records(folder / second["records"])
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
