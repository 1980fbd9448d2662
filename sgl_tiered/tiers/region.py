"""A memory tier over a region: the slots are rows of an array, wherever that lies.

Transfers to and from the device work on ``region`` in place; ``load`` and ``store`` are
for everybody else. A slot's content is not checked unless the caller gives checksums:
memory is trusted as SGLang trusts it. Nothing survives the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.clock import Clock, SystemClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.layout import ALIGNMENT_BYTES
from sgl_tiered.core.plans import FoundPages, TransferResult
from sgl_tiered.errors import ConfigError
from sgl_tiered.tiers.base import TierHealth, TierIO
from sgl_tiered.tiers.checks import check_io, checksum
from sgl_tiered.tiers.pinning import Pinning

__all__ = ["Region", "RegionTier", "check_slots"]


class Region(Protocol):
    """Memory for pages; the mapping lives as long as any view of ``array`` does."""

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The memory: uint8 [num_rows, row_bytes], page aligned, C-contiguous."""
        ...

    @property
    def pinning(self) -> Pinning | None:
        """Which rows may be used already, where a device pins them; None for all."""
        ...

    def close(self) -> None:
        """Give back what is not memory (pins, locks, threads); may be called twice."""
        ...


def check_slots(tier: str, slot_bytes: int, num_slots: int) -> None:
    """Raise ConfigError unless there is a slot and slots are aligned."""
    if slot_bytes <= 0 or slot_bytes % ALIGNMENT_BYTES:
        raise ConfigError(
            f"{tier} slot size",
            f"{slot_bytes} B is not a positive multiple of {ALIGNMENT_BYTES} B",
            "use PageLayout.slot_bytes",
        )
    if num_slots < 1:
        raise ConfigError(
            f"{tier} size",
            f"room for {num_slots} pages of {slot_bytes} B",
            "ask for at least one page",
        )


class RegionTier:
    """A ``MemoryTier`` over a region of its own.

    Where a device pins the region, only the first ``num_ready`` slots may be used until
    all of it is pinned.

    Args:
        tier_id: which tier this is.
        region: one row per slot; closed with the tier.
        page_bytes: bytes that a checksum covers; the whole slot if None.
        clock: times ``load`` and ``store``.
    """

    def __init__(
        self,
        tier_id: TierId,
        region: Region,
        *,
        page_bytes: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._tier_id = tier_id
        self._memory = region
        self._num_slots: int = region.array.shape[0]
        self._slot_bytes: int = region.array.shape[1]
        self._page_bytes = page_bytes or self._slot_bytes
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def tier_id(self) -> TierId:
        """As given."""
        return self._tier_id

    @property
    def num_ready(self) -> int:
        """Slots, from the first on, that may be used now."""
        pinning = self._memory.pinning
        return self._num_slots if pinning is None else pinning.num_ready

    def watch_ready(self, told: Callable[[int], None], since: int = 0) -> None:
        """Tell of each step of ``num_ready`` behind ``since``; see ``Pinning``."""
        pinning = self._memory.pinning
        if pinning is not None:
            pinning.watch(told, since)
        elif since < self._num_slots:
            told(self._num_slots)

    @property
    def slot_bytes(self) -> int:
        """Bytes set aside for one page."""
        return self._slot_bytes

    @property
    def num_slots(self) -> int:
        """Capacity in pages."""
        return self._num_slots

    @property
    def region(self) -> npt.NDArray[np.uint8]:
        """The slots: uint8 [num_slots, slot_bytes], page aligned."""
        return self._memory.array

    def read_view(
        self, addresses: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """Return (``region``, ``addresses``): slots are read where they are."""
        return self._memory.array, addresses

    def charge(self, num_bytes: int, *, is_store: bool = False) -> None:
        """Do nothing: the copy itself took its time."""

    def load(self, io: TierIO) -> TransferResult:
        """Copy pages out; where checksums are given, those that differ are not ok."""
        check_io(io, self._num_slots, self._slot_bytes)
        started_s = self._clock.now()
        width = self._slot_bytes
        region = self._memory.array
        for address, row in zip(io.addresses.tolist(), io.rows.tolist(), strict=True):
            io.buffer[row, :width] = region[address]
        ok = np.ones(len(io.addresses), np.bool_)
        sums = np.zeros(len(io.addresses), np.uint64)
        if io.records is not None:
            wanted = io.records.checksums
            for i in np.flatnonzero(wanted).tolist():
                sums[i] = checksum(io.buffer[io.rows[i], : self._page_bytes])
            ok = (wanted == 0) | (sums == wanted)
        return self._result(ok, sums, started_s, "checksum differs")

    def store(self, io: TierIO) -> TransferResult:
        """Copy pages in and compute their checksums."""
        check_io(io, self._num_slots, self._slot_bytes)
        started_s = self._clock.now()
        width = self._slot_bytes
        region = self._memory.array
        sums = np.zeros(len(io.addresses), np.uint64)
        pairs = zip(io.addresses.tolist(), io.rows.tolist(), strict=True)
        for i, (address, row) in enumerate(pairs):
            region[address] = io.buffer[row, :width]
            sums[i] = checksum(region[address, : self._page_bytes])
        return self._result(np.ones(len(sums), np.bool_), sums, started_s, "")

    def recover(self) -> FoundPages:
        """Return nothing: what the slots hold is known to this process only."""
        return FoundPages.of([])

    def holds(self, addresses: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return none."""
        return np.zeros(len(addresses), np.bool_)

    def forget(self, addresses: npt.NDArray[np.int64]) -> None:
        """Do nothing: nothing is kept beside the slots."""

    def health(self) -> TierHealth:
        """Return usable until closed."""
        pinning = self._memory.pinning
        num_bytes = 0 if pinning is None else pinning.pinned_bytes
        return TierHealth(usable=not self._closed, pinned_bytes=num_bytes)

    def close(self) -> None:
        """Close the region; views that others hold stay readable."""
        with self._lock:
            self._closed = True
            self._memory.close()

    def _result(
        self,
        ok: npt.NDArray[np.bool_],
        sums: npt.NDArray[np.uint64],
        started_s: float,
        error: str,
    ) -> TransferResult:
        num_ok = int(ok.sum())
        return TransferResult(
            ok=ok,
            num_bytes=num_ok * self._slot_bytes,
            seconds=self._clock.now() - started_s,
            checksums=sums,
            error="" if num_ok == len(ok) else f"{len(ok) - num_ok} pages: {error}",
        )
