"""Interface of a tier: slots of equal size that hold pages, and I/O over many of them.

A tier stores bytes at addresses that the cache chooses (0 .. num_slots - 1); it decides
nothing. ``load`` and ``store`` block and are called from pipeline threads, several at a
time; they never raise for a full, slow, failing or corrupt medium: the result says it.
``forget`` and ``health`` are called by the engine's own thread and touch no medium.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import FoundPages, PageRecords, TransferResult

__all__ = ["KeptTier", "MemoryTier", "Tier", "TierHealth", "TierIO"]


@dataclass(frozen=True, slots=True, eq=False)
class TierIO:
    """Pages to move between a tier and rows of a buffer in memory.

    Attributes:
        addresses: int64 [n], slots in the tier.
        buffer: uint8 [num_rows, >= slot_bytes], C-contiguous, page aligned.
        rows: int64 [n], the row of ``buffer`` for each page.
        records: for a store, what to keep beside the bytes; for a load, the checksums
            that the bytes must agree with (0: unknown; None: nothing to compare). A
            load looks at checksums only; keys, parents and tokens may have no rows.
    """

    addresses: npt.NDArray[np.int64]
    buffer: npt.NDArray[np.uint8]
    rows: npt.NDArray[np.int64]
    records: PageRecords | None = None


@dataclass(frozen=True, slots=True)
class TierHealth:
    """State of a tier for reports.

    Attributes:
        usable: it can be used now.
        detail: one sentence: why it cannot be used, what stands in for the real
            medium, or where a real one lies; empty where there is nothing to say.
        emulated: medium or speed are not those that the tier is named after.
        age_s: for how long nobody has looked, or the medium has not answered.
        errors: operations that failed so far, by name of the error, such as EMFILE.
        pinned_bytes: of the slots, those that a device reaches in place by now.
    """

    usable: bool
    detail: str = ""
    emulated: bool = False
    age_s: float = 0.0
    errors: Mapping[str, int] = field(default_factory=dict)
    pinned_bytes: int = 0


class Tier(Protocol):
    """A place for pages below the device."""

    @property
    def tier_id(self) -> TierId:
        """Which tier this is."""
        ...

    @property
    def slot_bytes(self) -> int:
        """Bytes set aside for one page."""
        ...

    @property
    def num_slots(self) -> int:
        """Capacity in pages."""
        ...

    def load(self, io: TierIO) -> TransferResult:
        """Read pages into the buffer; a page that fails a check is not ok."""
        ...

    def store(self, io: TierIO) -> TransferResult:
        """Write pages from the buffer; the result carries their checksums."""
        ...

    def recover(self) -> FoundPages:
        """Return what a former process left; may take long, on a thread of its own.

        Until it has returned nothing may be stored.
        """
        ...

    def holds(self, addresses: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return beside which of these few slots something is kept, by anybody."""
        ...

    def forget(self, addresses: npt.NDArray[np.int64]) -> None:
        """Drop what is kept beside these slots, so that ``recover`` omits them.

        Never blocks; the medium is written to in the background.
        """
        ...

    def health(self) -> TierHealth:
        """Return whether the tier can be used, as last known; never blocks."""
        ...

    def close(self) -> None:
        """Finish running I/O and release everything; may be called twice."""
        ...


@runtime_checkable
class KeptTier(Tier, Protocol):
    """A tier whose pages outlive the process, marked with what they belong to."""

    def relabel(self, fingerprint: str) -> None:
        """Mark the tier with another fingerprint, in the background.

        Everything in it has been forgotten: the next process finds what is stored from
        now on, if it asks for this fingerprint.
        """
        ...


@runtime_checkable
class MemoryTier(Tier, Protocol):
    """A tier whose slots can be read and written in place."""

    @property
    def region(self) -> npt.NDArray[np.uint8]:
        """The slots themselves: uint8 [num_slots, slot_bytes], page aligned."""
        ...

    def read_view(
        self, addresses: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """Return an array, and its rows at which these slots can be read in place.

        Normally ``(region, addresses)``. Loads to the device go through it, so that a
        wrapper can show them other bytes; everything else uses ``region``.
        """
        ...

    def charge(self, num_bytes: int, *, is_store: bool = False) -> None:
        """Account for a copy done in place: out of the tier, or into it.

        A throttled tier makes it take its time, a failing one raises OSError: then
        the copy counts as not done.
        """
        ...
