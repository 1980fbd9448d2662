"""Rates of copies from the records of a GPU session, by size of a piece and way."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sgl_tiered.cli.gpu_session import LackError, number, numbers, text

__all__ = ["DIRECTIONS", "HICACHE", "PLAIN", "Case", "cases", "rate", "widest"]

DIRECTIONS = ("up", "down")
PLAIN, HICACHE = "plain", "hicache"
_PRODUCT = "product_"
_KERNEL = "kernel_"

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """Copies of as many pieces of one size.

    Attributes:
        direction: ``up`` to the device, or ``down``.
        piece_bytes: of a piece.
        pieces: how many.
        num_bytes: in all.
        rates: GB/s by way.
        is_product: by the product's own pool, and not by each way in itself.
    """

    direction: str
    piece_bytes: int
    pieces: int
    num_bytes: int
    rates: Mapping[str, float]
    is_product: bool = False

    @property
    def roof(self) -> float | None:
        """GB/s of one plain copy of as many bytes."""
        return self.rates.get(PLAIN)

    @property
    def hicache(self) -> float | None:
        """GB/s of HiCache's kernel."""
        return self.rates.get(HICACHE)

    def ours(self) -> tuple[str, float] | None:
        """Return the best of our ways, and its GB/s."""
        found = {
            way: value
            for way, value in self.rates.items()
            if way not in (PLAIN, HICACHE)
        }
        if not found:
            return None
        best = max(found, key=lambda way: found[way])
        return best, found[best]

    def kernel(self) -> tuple[str, float] | None:
        """Return our kernel by its best number of programs."""
        found = {
            way: value
            for way, value in self.rates.items()
            if way.startswith(_KERNEL) and way.removeprefix(_KERNEL).isdigit()
        }
        if not found:
            return None
        best = max(found, key=lambda way: found[way])
        return best, found[best]


def rate(num_bytes: float, seconds: Sequence[float]) -> float:
    """Return GB/s by the median of some runs.

    Raises:
        LackError: the runs took no time.
    """
    median = statistics.median(seconds)
    if median <= 0:
        raise LackError("copies took no time")
    return num_bytes / median / 1e9


def cases(records: Iterable[Record], problems: list[str]) -> list[Case]:
    """Return the cases of a session, small pieces first.

    Args:
        records: of the stage ``copies``; those without times are passed over.
        problems: gets a sentence for each kind of record that lacks something.
    """
    found: dict[tuple[str, bool, int, int], dict[str, float]] = {}
    sizes: dict[tuple[str, bool, int, int], int] = {}
    for record in records:
        if record.get("kind") != "copy" or "seconds" not in record:
            continue
        try:
            way, direction = text(record, "way"), text(record, "direction")
            if not way or direction not in DIRECTIONS:
                raise LackError("a record of kind 'copy' has no way or direction")
            is_product = way.startswith(_PRODUCT)
            num_bytes = int(number(record, "num_bytes"))
            piece_bytes = int(number(record, "piece_bytes"))
            key = (direction, is_product, piece_bytes, int(number(record, "pieces")))
            rates = {way: rate(num_bytes, numbers(record, "seconds"))}
            if is_product:
                rates[PLAIN] = rate(num_bytes, numbers(record, "plain_s"))
        except LackError as lack:
            sentence = f"Copies are left out: {lack}."
            if sentence not in problems:
                problems.append(sentence)
            continue
        entry = found.setdefault(key, {})
        for name, value in rates.items():
            # Each record of the product's has a plain copy beside it.
            entry[name] = max(value, entry.get(name, 0.0))
        sizes[key] = num_bytes
    return [
        Case(direction, piece_bytes, pieces, sizes[key], found[key], is_product)
        for key in sorted(found)
        for direction, is_product, piece_bytes, pieces in [key]
    ]


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
