"""Markdown of records that ``recorded.py`` keeps: prints, and keys of last lines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["by_command", "key_line", "printed", "seen_and_predicted", "times"]

Record = Mapping[str, Any]
_RUN = re.compile(r"^python (?:-m )?(?:benchmarks/(?:sim|micro)/)?")


def by_command(records: Iterable[Record]) -> dict[str, Record]:
    """Return the last record of each command, by the command without its folder."""
    return {_RUN.sub("", str(record["command"])): record for record in records}


def printed(records: Iterable[Record]) -> str:
    """Return what programs printed as Markdown, the last run of each command.

    Headings come one level lower, and a table gets the empty lines that it needs.
    """
    parts = []
    for command, record in by_command(records).items():
        lines: list[str] = []
        for line in (line.rstrip() for line in record["printed"]):
            told = "#" + line if line.startswith("#") else line
            if lines and lines[-1] and (lines[-1][0] == "|") != (told[:1] == "|"):
                lines.append("")
            lines.append(told)
        text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines).strip())
        ended = f" (exit status {record['exit_code']})" if record["exit_code"] else ""
        parts.append(f"`{command}`{ended}:\n\n{text}")
    return "\n\n".join(parts)


def seen_and_predicted(record: Record) -> str:
    """Return the table that ``benchmarks/sim/fidelity.py`` prints at its end."""
    # Earlier records lack the print.
    lines = list(record.get("printed", ()))
    ends = (at for at, line in enumerate(lines) if line.startswith("Each cell"))
    first = max(ends, default=0)
    return "\n".join(line for line in lines[first:] if line.startswith("|"))


def key_line(figures: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Return some keys of a last line and what was missed; empty where none is there.

    Of figures whose comparison of answers, or whose run, had problems only these are
    told.
    """
    if figures.get("problems"):
        problems = "; ".join(map(str, figures["problems"]))
        return "no figure counts: " + " ".join(problems.replace("|", "/").split())
    told = [f"`{key}` {_value(figures[key])}" for key in keys if key in figures]
    missed = figures.get("targets_missed") or figures.get("missed")
    if told and missed:
        told.append("missed: " + ", ".join(f"`{name}`" for name in missed))
    return ", ".join(told)


def times(figures: Mapping[str, Any]) -> str:
    """Return the times and the numbers of a micro benchmark's last line."""
    told = []
    for key, value in figures.items():
        if isinstance(value, Mapping):
            unit = next((unit for unit in ("us", "ms") if f"p50_{unit}" in value), None)
            if unit:
                p50, p99 = value[f"p50_{unit}"], value[f"p99_{unit}"]
                told.append(f"{key} {_value(p50)} {unit} (p99 {_value(p99)} {unit})")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            told.append(f"{key.replace('_', ' ')} {_value(value)}")
    return "; ".join(told)


def _value(value: object) -> str:
    """Return a value of a last line in few digits."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and abs(value) < 1000:
        return f"{value:.3g}"
    if isinstance(value, int | float):
        return f"{value:,.0f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_value(each)}" for name, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(_value, value)) or "none"
    return "none" if value is None else str(value)
