"""Several directories, best on several devices, as one disk tier.

Slots are dealt out in chunks: neighbours share a directory up to ``CHUNK_BYTES``, so
that a run is read in large I/Os from all of them at once. Each directory is a whole
``DiskTier`` with its own lock, index, breakers and way back: where one fails, its pages
are not ok and the others go on. Nothing of one directory is written in another, so the
set and the order of directories may change from one start to the next; what is found
keeps its place in its directory and gets the address that this makes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.clock import Clock, SystemClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import FoundPages, TransferResult
from sgl_tiered.tiers.base import KeptTier, Tier, TierHealth, TierIO
from sgl_tiered.tiers.checks import check_io
from sgl_tiered.tiers.disk import DiskTier

__all__ = ["StripedTier", "open_disk_tier"]

Int64s = npt.NDArray[np.int64]
CHUNK_BYTES = 2 << 20
"""Two of the longest single I/Os of ``DiskTier``: a shorter chunk makes more of them
where a run does not begin with a chunk."""
_CALLS_AT_A_TIME = 3
"""Two staging readers and a demoter."""


def open_disk_tier(
    paths: Sequence[Path], *, max_bytes: int, slot_bytes: int, **settings: Any
) -> Tier:
    """Open a ``DiskTier``, or as many as there are paths, striped.

    Args:
        paths: directories; each gets an equal share of the size.
        max_bytes: what all of them may take together.
        slot_bytes: bytes of one slot.
        settings: the other arguments of ``DiskTier.open``.

    Raises:
        ConfigError: a size is wrong.
        TierUnavailableError: a directory is in use, foreign or not accessible.
    """
    tiers: list[DiskTier] = []
    try:
        for path in paths:
            share = max_bytes // len(paths)
            tier = DiskTier.open(
                path, max_bytes=share, slot_bytes=slot_bytes, **settings
            )
            tiers.append(tier)
    except BaseException:
        for tier in tiers:
            tier.close()
        raise
    return tiers[0] if len(tiers) == 1 else StripedTier(tiers)


class StripedTier:
    """A ``Tier`` over others of equal slots.

    Args:
        tiers: at least one; closed with this.
        chunk_bytes: neighbours that stay together.
        clock: times transfers.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        chunk_bytes: int = CHUNK_BYTES,
        clock: Clock | None = None,
    ) -> None:
        sizes = {tier.slot_bytes for tier in tiers}
        if len(sizes) != 1:
            raise ValueError(f"tiers with slots of {sorted(sizes)} B make no stripes")
        self._tiers = list(tiers)
        self._clock = clock or SystemClock()
        smallest = min(tier.num_slots for tier in tiers)
        self._chunk = min(max(1, chunk_bytes // tiers[0].slot_bytes), smallest)
        self._slots_each = smallest // self._chunk * self._chunk
        self._threads = ThreadPoolExecutor(
            _CALLS_AT_A_TIME * len(tiers), "tiered-disk-stripe"
        )

    @property
    def tier_id(self) -> TierId:
        """That of the tiers."""
        return self._tiers[0].tier_id

    @property
    def slot_bytes(self) -> int:
        """Bytes set aside for one page."""
        return self._tiers[0].slot_bytes

    @property
    def num_slots(self) -> int:
        """Capacity in pages: each tier gives as many as the smallest has."""
        return self._slots_each * len(self._tiers)

    def load(self, io: TierIO) -> TransferResult:
        """Read from all tiers at once; pages of one that fails are not ok."""
        return self._each(io, [tier.load for tier in self._tiers])

    def store(self, io: TierIO) -> TransferResult:
        """Write to all tiers at once."""
        return self._each(io, [tier.store for tier in self._tiers])

    def recover(self) -> FoundPages:
        """Return what the tiers hold.

        No clock is common to them: pages are dealt out evenly, so their rank in their
        own tier tells the age.
        """
        parts = []
        for number, tier in enumerate(self._tiers):
            found = tier.recover()
            outside = found.addresses >= self._slots_each
            # A directory that was larger: what no address leads to is given up.
            if outside.any():
                tier.forget(found.addresses[outside])
            inside = np.flatnonzero(~outside)
            addresses = self._addresses(number, found.addresses[inside])
            parts.append(_ranked(found.part(inside, addresses)))
        return _joined(parts)

    def holds(self, addresses: Int64s) -> npt.NDArray[np.bool_]:
        """Return beside which slots something is kept."""
        numbers, local = self._places(addresses)
        held = np.zeros(len(addresses), np.bool_)
        for number, tier in enumerate(self._tiers):
            mine = np.flatnonzero(numbers == number)
            if len(mine):
                held[mine] = tier.holds(local[mine])
        return held

    def forget(self, addresses: Int64s) -> None:
        """Drop what is kept beside these slots."""
        numbers, local = self._places(addresses)
        for number, tier in enumerate(self._tiers):
            mine = local[numbers == number]
            if len(mine):
                tier.forget(mine)

    def relabel(self, fingerprint: str) -> None:
        """Mark all tiers with another fingerprint, in the background."""
        for tier in self._tiers:
            if isinstance(tier, KeptTier):
                tier.relabel(fingerprint)

    def health(self) -> TierHealth:
        """Return usable while one of them is; the detail names those that are not."""
        states = [tier.health() for tier in self._tiers]
        bad = [
            f"directory {number}: {state.detail}"
            for number, state in enumerate(states, 1)
            if not state.usable
        ]
        num_usable = len(states) - len(bad)
        detail = f"{num_usable} of {len(states)} directories"
        details = {state.detail for state in states if state.usable}
        return TierHealth(
            usable=num_usable > 0,
            detail="; ".join([detail, *sorted(details), *bad]),
            emulated=any(state.emulated for state in states),
            age_s=max(state.age_s for state in states),
            errors=sum((Counter(state.errors) for state in states), Counter()),
        )

    def close(self) -> None:
        """Close all tiers; may be called twice."""
        for tier in self._tiers:
            tier.close()
        self._threads.shutdown(wait=True)

    def _places(self, addresses: Int64s) -> tuple[Int64s, Int64s]:
        """Return for each address the number of its tier and the slot there."""
        chunks, within = np.divmod(addresses, self._chunk)
        rounds, numbers = np.divmod(chunks, len(self._tiers))
        return numbers, rounds * self._chunk + within

    def _addresses(self, number: int, slots: Int64s) -> Int64s:
        """Return the addresses of slots of a tier."""
        rounds, within = np.divmod(slots, self._chunk)
        chunks: Int64s = rounds * len(self._tiers) + number
        addresses: Int64s = chunks * self._chunk + within
        return addresses

    def _each(
        self, io: TierIO, transfers: list[Callable[[TierIO], TransferResult]]
    ) -> TransferResult:
        """Give each tier its pages, all at once, and join the results."""
        check_io(io, self.num_slots, self.slot_bytes)
        started_s = self._clock.now()
        numbers, local = self._places(io.addresses)
        parts: list[tuple[Int64s, Future[TransferResult]]] = []
        for number in np.unique(numbers).tolist():
            where = np.flatnonzero(numbers == number)
            records = io.records
            if records is not None:
                records = records.part(where, local[where])
            part = TierIO(local[where], io.buffer, io.rows[where], records)
            parts.append((where, self._threads.submit(transfers[number], part)))
        num_pages = len(io.addresses)
        ok = np.zeros(num_pages, np.bool_)
        sums = np.zeros(num_pages, np.uint64)
        errors: list[str] = []
        num_bytes = 0
        # All have to end before anything is raised: they use the caller's buffer.
        wait([future for _, future in parts])
        for where, future in parts:
            result = future.result()
            ok[where], sums[where] = result.ok, result.checksums
            num_bytes += result.num_bytes
            errors += [result.error] if result.error else []
        return TransferResult(
            ok=ok,
            num_bytes=num_bytes,
            seconds=self._clock.now() - started_s,
            checksums=sums,
            error="; ".join(errors),
        )


def _ranked(found: FoundPages) -> FoundPages:
    """Return pages with ages that compare with another tier's: of a billion."""
    ranks = np.empty(len(found), np.int64)
    ranks[np.argsort(found.ages, kind="stable")] = np.arange(len(found))
    ages = (2 * ranks + 1) * (10**9 // 2) // max(1, len(found))
    return replace(found, ages=ages)


def _joined(parts: list[FoundPages]) -> FoundPages:
    """Join the columns of several tiers; one that was not read has none."""
    parts = [part for part in parts if len(part)] or parts[:1]
    names = [field.name for field in fields(FoundPages)]
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in names
    }
    return FoundPages(**columns)
