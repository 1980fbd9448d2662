"""Two record files: what differs, and by how much for sure.

Requests are paired by repeat and key, so both sides answered the same schedule. What
only one side answered in its steady state is left out and counted. An interval is a
bootstrap at 95 %; a difference whose interval holds zero is not shown to exist.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sgl_tiered_workloads.harness.errors import GateRedError, RecordsError
from sgl_tiered_workloads.harness.metrics import Window, in_window
from sgl_tiered_workloads.harness.results import read_side
from sgl_tiered_workloads.harness.statistics import Interval, paired_interval
from sgl_tiered_workloads.records import RequestRecord, RunHeader

__all__ = ["Difference", "Pairing", "compare_files", "format_differences", "pair"]

Floats = npt.NDArray[np.float64]
Key = tuple[int, str]
Side = tuple[RunHeader, Sequence[RequestRecord]]

_SEED = 5
_SHARE = "cached share mean"
_TIMES: Mapping[str, Callable[[RequestRecord], float]] = {
    "TTFT": lambda record: record.ttft_s,
    "TPOT": lambda record: record.tpot_s,
    "E2E": lambda record: record.e2e_s,
}


@dataclass(frozen=True, slots=True)
class Difference:
    """One figure on both sides.

    Attributes:
        name: of the figure.
        unit: of the values.
        base, other: on each side.
        change: other less base, with its interval.
    """

    name: str
    unit: str
    base: float
    other: float
    change: Interval

    @property
    def shown(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.change.excludes(0.0)


@dataclass(frozen=True, slots=True)
class Pairing:
    """The comparison of two files.

    Attributes:
        base, other: their headers.
        num_pairs: requests that both answered.
        num_left_out: requests that one side or both did not answer in steady state.
        num_repeats: repeats that both have.
        differences: figure by figure.
    """

    base: RunHeader
    other: RunHeader
    num_pairs: int
    num_left_out: int
    num_repeats: int
    differences: tuple[Difference, ...]


def compare_files(base: Path, other: Path, different_specs: bool = False) -> Pairing:
    """Compare two record files.

    Args:
        base: the side that changes are counted from.
        other: the other side.
        different_specs: allow files of two specifications; their requests must still
            pair.

    Raises:
        RecordsError: the specifications differ, or nothing pairs.
        GateRedError: a side was recorded under a red gate.
    """
    return pair(read_side(base), read_side(other), different_specs)


def pair(
    base: Side,
    other: Side,
    different_specs: bool = False,
    figures: Collection[str] = (),
) -> Pairing:
    """Compare two sides that were read; as ``compare_files``.

    Args:
        base, other: the sides.
        different_specs: as there.
        figures: names of those wanted; all if empty. Each takes a bootstrap.
    """
    (base_header, base_records), (other_header, other_records) = base, other
    for header in (base_header, other_header):
        if header.facts.get("gate") == "red":
            raise GateRedError(f"The gate was red for {header.system}: no comparison.")
    if base_header.spec_hash != other_header.spec_hash and not different_specs:
        raise RecordsError(
            f"The specifications differ ({base_header.spec_hash or 'none'} and "
            f"{other_header.spec_hash or 'none'}), so the work may too; pass "
            "--different-specs to compare all the same."
        )
    ours = _answered(_steady(base_header, base_records))
    theirs = _answered(_steady(other_header, other_records))
    common = [key for key in ours if key in theirs]
    if not common:
        raise RecordsError("No request was answered on both sides, so nothing pairs.")
    every = {(r.repeat, r.key) for r in (*base_records, *other_records)}
    repeats = sorted({repeat for repeat, _ in common})
    groups = [[key for key in common if key[0] == repeat] for repeat in repeats]
    return Pairing(
        base=base_header,
        other=other_header,
        num_pairs=len(common),
        num_left_out=len(every) - len(common),
        num_repeats=len(repeats),
        differences=tuple(_differences(groups, ours, theirs, figures)),
    )


def format_differences(pairing: Pairing) -> str:
    """Return the comparison as a Markdown table."""
    lines = [
        f"{pairing.other.system} against {pairing.base.system}: {pairing.num_pairs} "
        f"pairs in {pairing.num_repeats} repeats, {pairing.num_left_out} left out",
        "",
        "| figure | base | other | change | 95 % interval | shown |",
        "|---|---|---|---|---|---|",
    ]
    for item in pairing.differences:
        relative = f" ({item.change.value / item.base:+.1%})" if item.base else ""
        change = item.change
        lines.append(
            f"| {item.name} {item.unit} | {item.base:,.2f} | {item.other:,.2f} "
            f"| {change.value:+,.2f}{relative} | {change.low:+,.2f} to "
            f"{change.high:+,.2f} | {'yes' if item.shown else 'no'} |"
        )
    if pairing.num_repeats == 1:
        lines += ["", "One repeat: intervals cannot hold what changes between repeats."]
    return "\n".join(lines)


def _steady(header: RunHeader, records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Return the requests of the windows; all of a file that knows no window."""
    if "spec" not in header.facts:
        return list(records)
    window = Window(**header.facts["spec"]["window"])
    chosen: list[RequestRecord] = []
    for repeat in sorted({record.repeat for record in records}):
        every = [record for record in records if record.repeat == repeat]
        chosen.extend(in_window(every, window))
    return chosen


def _answered(records: Sequence[RequestRecord]) -> dict[Key, RequestRecord]:
    found: dict[Key, RequestRecord] = {}
    for record in records:
        if record.error is not None:
            continue
        key = (record.repeat, record.key)
        if key in found:
            raise RecordsError(f"Repeat {record.repeat} has {record.key} twice.")
        found[key] = record
    return found


def _differences(
    groups: Sequence[Sequence[Key]],
    ours: Mapping[Key, RequestRecord],
    theirs: Mapping[Key, RequestRecord],
    figures: Collection[str],
) -> list[Difference]:
    statistics: dict[str, Callable[[Floats], float]] = {
        "mean": lambda values: float(values.mean()),
        **{f"p{p}": _percentile(p) for p in (50, 90, 99)},
    }
    found = []
    for name, value in _TIMES.items():
        sides = [_arrays(groups, side, value, 1e3) for side in (ours, theirs)]
        for label, statistic in statistics.items():
            title = f"{name} {label}"
            if not figures or title in figures:
                found.append(_difference(title, "ms", sides, statistic))
    if not figures or _SHARE in figures:
        share = [_arrays(groups, side, _hit_share, 100.0) for side in (ours, theirs)]
        found.append(_difference(_SHARE, "%", share, statistics["mean"]))
    return found


def _difference(
    name: str,
    unit: str,
    sides: Sequence[Sequence[Floats]],
    statistic: Callable[[Floats], float],
) -> Difference:
    base, other = sides
    # One generator per figure: a figure does not depend on which others are asked for.
    generator = np.random.default_rng(_SEED)
    return Difference(
        name,
        unit,
        statistic(np.concatenate(base)),
        statistic(np.concatenate(other)),
        paired_interval(base, other, statistic, generator),
    )


def _arrays(
    groups: Sequence[Sequence[Key]],
    side: Mapping[Key, RequestRecord],
    value: Callable[[RequestRecord], float],
    scale: float,
) -> list[Floats]:
    return [
        np.array([value(side[key]) * scale for key in keys], dtype=np.float64)
        for keys in groups
    ]


def _hit_share(record: RequestRecord) -> float:
    return record.cached_tokens / max(1, record.num_prompt_tokens)


def _percentile(percent: int) -> Callable[[Floats], float]:
    return lambda values: float(np.percentile(values, percent))
