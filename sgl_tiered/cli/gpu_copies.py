"""Copies of a GPU session: rates by size of a piece and way, and their sections."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from sgl_tiered_workloads.harness.page import Section

from sgl_tiered.cli.gpu_sections import Found, Rows, figure, less, section
from sgl_tiered.cli.gpu_session import Record, Session

__all__ = [
    "DIRECTIONS",
    "HICACHE",
    "PLAIN",
    "WORDS",
    "Case",
    "Rate",
    "cases",
    "copy_sections",
    "plain_rate",
    "widest",
]

DIRECTIONS = ("up", "down")
PLAIN, HICACHE = "plain", "hicache"
WORDS = {"up": "host to device", "down": "device to host"}
_KIB = 1 << 10
_PRODUCT = "product_"
_CHOSEN = {"up": "kernel_by_layer", "down": "gather_pages"}
"""As the product loads by its kernel, a layer at a time, and stores whole pages."""
_CHOSEN_POOL = "kernel"
"""Where no record says what the product's pool chose by measuring."""


@dataclass(frozen=True, slots=True)
class Rate:
    """GB/s over all runs of a case: the median, and the 20th and 80th percentile."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, num_bytes: int, seconds: Iterable[float]) -> Rate:
        """Return that of runs of so many seconds each."""
        rates = num_bytes / 1e9 / np.maximum(np.array(list(seconds)), 1e-9)
        median, low, high = np.percentile(rates, [50, 20, 80]).tolist()
        return cls(median, low, high)


@dataclass(frozen=True, slots=True)
class Case:
    """Copies of as many pieces of one size.

    Attributes:
        direction: ``up`` to the device, or ``down``.
        piece_bytes: of a piece.
        pieces: how many.
        num_bytes: in all.
        rates: by way; HiCache's are of as many pieces and bytes.
        chosen: the way that the product takes.
        is_product: by the product's own pool, and not by each way in itself.
    """

    direction: str
    piece_bytes: int
    pieces: int
    num_bytes: int
    rates: Mapping[str, Rate]
    chosen: str
    is_product: bool = False

    @property
    def roof(self) -> Rate | None:
        """Of one plain copy of as many bytes."""
        return self.rates.get(PLAIN)

    @property
    def hicache(self) -> Rate | None:
        """Of HiCache's kernels."""
        return self.rates.get(HICACHE)

    @property
    def ours(self) -> Rate | None:
        """Of the way that the product takes."""
        return self.rates.get(self.chosen)


def cases(records: Iterable[Record]) -> list[Case]:
    """Return the cases of a session, small pieces first.

    Args:
        records: of the stage ``copies``; those without times are passed over.
    """
    every = list(records)
    copies = [one for one in every if one["kind"] == "copy" and "seconds" in one]
    chosen = {
        one["piece_bytes"]: one["way"] for one in every if one["kind"] == "chosen"
    }
    # Records of one case and way count together, whenever they were made.
    seconds: dict[tuple[str, bool, int, int, int], dict[str, list[float]]] = {}
    for one in copies:
        is_product = one["way"].startswith(_PRODUCT)
        sizes = (one["piece_bytes"], one["pieces"], one["num_bytes"])
        runs = seconds.setdefault((one["direction"], is_product, *sizes), {})
        way = HICACHE if one["way"] == _PRODUCT + HICACHE else one["way"]
        runs.setdefault(way, []).extend(one["seconds"])
        if "plain_s" in one:
            # Each record of the product's has a plain copy beside it.
            runs.setdefault(PLAIN, []).extend(one["plain_s"])
    found = []
    for key in sorted(seconds):
        direction, is_product, piece_bytes, pieces, num_bytes = key
        way = _CHOSEN[direction]
        if is_product:
            way = chosen.get(piece_bytes, _PRODUCT + _CHOSEN_POOL)
        rates = {name: Rate.of(num_bytes, runs) for name, runs in seconds[key].items()}
        if is_product and way not in rates:
            # A CPU has one way, and not that of a kernel.
            way = next((one for one in rates if one.startswith(_PRODUCT)), way)
        found.append(
            Case(direction, piece_bytes, pieces, num_bytes, rates, way, is_product)
        )
    return found


def widest(every: Iterable[Case], direction: str, *, is_product: bool) -> list[Case]:
    """Return the case of most pieces for each size, small pieces first."""
    found: dict[int, Case] = {}
    for case in every:
        if case.direction != direction or case.is_product != is_product:
            continue
        former = found.get(case.piece_bytes)
        if former is None or former.pieces < case.pieces:
            found[case.piece_bytes] = case
    return [found[size] for size in sorted(found)]


def plain_rate(copies: Sequence[Case], direction: str) -> float | None:
    """Return the GB/s of one plain copy in a direction: that of the largest case."""
    rates = [
        (case.num_bytes, case.roof.median)
        for case in copies
        if case.direction == direction and case.roof is not None
    ]
    return max(rates)[1] if rates else None


def copy_sections(
    session: Session, copies: Sequence[Case], link: float | None, found: Found
) -> list[Section]:
    """Tell of both directions: all ways by size, the product's by number, its pool."""
    told = [
        f"{way}: {record[way]}."
        for record in session.records("copies", "ways")[:1]
        for way in ("batch", HICACHE)
        if record.get(way, "there") != "there"
    ]
    made = []
    for direction in DIRECTIONS:
        words = WORDS[direction]
        every = widest(copies, direction, is_product=False)
        if every:
            note = (
                "GB/s by the size of a piece, in the case of most pieces: median, and "
                "20th to 80th percentile of the runs."
            )
            title = f"Copies, {words}"
            made.append(_ways(title, every, link, " ".join([*told, note])))
            made.append(_counts(direction, copies))
            _ways_gap(every, direction, found)
        product = widest(copies, direction, is_product=True)
        if product:
            title = f"Copies, {words}: the product's own pool"
            made.append(_ways(title, product, link))
            for case in product:
                _product_gap(case, found)
    return made


def _ways(
    title: str, chosen: Sequence[Case], link: float | None, note: str = ""
) -> Section:
    ways = list(dict.fromkeys(way for case in chosen for way in case.rates))
    middle = [way for way in ways if way not in (PLAIN, HICACHE)]
    has_hicache = HICACHE in ways
    head = ["piece", "pieces", "plain (roof)", *middle]
    head += [HICACHE] if has_hicache else []
    head += ["the product's way", "of the roof"]
    head += ["of the link"] if link is not None else []
    head += ["over HiCache's"] if has_hicache else []
    rows: Rows = []
    for case in chosen:
        row = [_size(case.piece_bytes), str(case.pieces), _rate(case.roof)]
        row += [_rate(case.rates.get(way)) for way in middle]
        row += [_rate(case.hicache)] if has_hicache else []
        row.append(case.chosen if case.ours else "")
        row.append(_over(case.ours, case.roof, ".1%"))
        if link is not None:
            row.append("" if case.ours is None else f"{case.ours.median / link:.1%}")
        row += [_over(case.ours, case.hicache, ".2f")] if has_hicache else []
        rows.append(tuple(row))
    return section(title, head, rows, note)


def _counts(direction: str, copies: Sequence[Case]) -> Section:
    """Return the rates of the product's way by the number of pieces."""
    chosen = [one for one in copies if one.direction == direction if not one.is_product]
    counts = sorted({case.pieces for case in chosen})
    ours = {(case.piece_bytes, case.pieces): case.ours for case in chosen}
    rows: Rows = [
        (_size(size), *(_rate(ours.get((size, count))) for count in counts))
        for size in sorted({case.piece_bytes for case in chosen})
    ]
    head = ("piece", *(f"{count} pieces" for count in counts))
    title = f"Copies, {WORDS[direction]}: by the number of pieces"
    return section(title, head, rows, f"GB/s by {chosen[0].chosen}.")


def _ways_gap(every: Sequence[Case], direction: str, found: Found) -> None:
    """Say between which bounds the product's way lies over all sizes."""
    roofs: tuple[tuple[str, Callable[[Case], Rate | None]], ...] = (
        ("one plain copy", lambda case: case.roof),
        ("HiCache's kernels", lambda case: case.hicache),
    )
    for name, roof_of in roofs:
        shares = [
            (case.ours.median / roof.median, _size(case.piece_bytes))
            for case in every
            if case.ours is not None and (roof := roof_of(case)) is not None
        ]
        if shares:
            (low, least), (high, most) = min(shares), max(shares)
            told = f"{low:.1%} ({least})"
            told += f" to {high:.1%} ({most})" if least != most else ""
            found.gaps.append(
                f"{WORDS[direction]}: {every[0].chosen}, the product's way, has "
                f"{told} of {name}"
            )


def _product_gap(case: Case, found: Found) -> None:
    """Say how far the product's own pool is from the roof, and from HiCache."""
    ours, roof, hicache = case.ours, case.roof, case.hicache
    if ours is None or roof is None:
        return
    size = _size(case.piece_bytes)
    gap = (
        f"{WORDS[case.direction]}, {case.pieces} pieces of {size}: the product's pool "
        f"({case.chosen}) has {figure(ours.median)} GB/s, "
        f"{less(ours.median, roof.median)} one plain copy ({figure(roof.median)})"
    )
    if hicache is not None:
        gap += f", {less(ours.median, hicache.median)} HiCache's kernels "
        gap += f"({figure(hicache.median)})"
    found.gaps.append(gap)
    share = ours.median / roof.median
    found.shares[f"{case.direction}, {size}, {case.chosen}"] = share


def _size(num_bytes: int) -> str:
    if num_bytes >= 1 << 20 and num_bytes % (1 << 20) == 0:
        return f"{num_bytes >> 20} MiB"
    return f"{num_bytes / _KIB:g} KiB"


def _rate(rate: Rate | None) -> str:
    if rate is None:
        return ""
    return f"{figure(rate.median)} ({figure(rate.low)} to {figure(rate.high)})"


def _over(ours: Rate | None, theirs: Rate | None, form: str) -> str:
    if ours is None or theirs is None:
        return ""
    return format(ours.median / theirs.median, form)
