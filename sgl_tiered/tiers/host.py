"""The host tier: slots in one region of this machine's memory.

Transfers to and from the device work on ``region`` in place; ``load`` and ``store`` are
for everybody else. A slot's content is not checked unless the caller gives checksums:
memory is trusted as SGLang trusts it. Nothing survives the process.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.clock import Clock, SystemClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.layout import ALIGNMENT_BYTES
from sgl_tiered.core.plans import PageRecords, TransferResult
from sgl_tiered.errors import ConfigError
from sgl_tiered.tiers.base import TierHealth, TierIO
from sgl_tiered.tiers.checks import check_io, checksum
from sgl_tiered.tiers.memory import MemoryRegion, Register, check_available

__all__ = ["HostTier"]


class HostTier:
    """A ``MemoryTier`` over anonymous memory.

    Args:
        layout_slot_bytes: bytes of one slot, a multiple of ``ALIGNMENT_BYTES``.
        num_slots: capacity in pages, at least 1.
        register: pins the region for a device; see ``MemoryRegion``.
        page_bytes: bytes that a checksum covers; the whole slot if None.
        clock: times ``load`` and ``store``.

    Raises:
        ConfigError: the size is not positive, or more than the memory available.
    """

    def __init__(
        self,
        layout_slot_bytes: int,
        num_slots: int,
        *,
        register: Register | None = None,
        page_bytes: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        if layout_slot_bytes <= 0 or layout_slot_bytes % ALIGNMENT_BYTES:
            raise ConfigError(
                "host slot size",
                f"{layout_slot_bytes} B is not a positive multiple of "
                f"{ALIGNMENT_BYTES} B",
                "use PageLayout.slot_bytes",
            )
        if num_slots < 1:
            raise ConfigError(
                "host size",
                f"room for {num_slots} pages of {layout_slot_bytes} B",
                "ask for at least one page",
            )
        check_available("host size", num_slots * layout_slot_bytes)
        self._slot_bytes = layout_slot_bytes
        self._num_slots = num_slots
        self._page_bytes = page_bytes or layout_slot_bytes
        self._clock = clock or SystemClock()
        self._memory = MemoryRegion(num_slots, layout_slot_bytes, register=register)
        self._lock = threading.Lock()
        self._closed = False

    @property
    def tier_id(self) -> TierId:
        """``TierId.HOST``."""
        return TierId.HOST

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

    def recover(self) -> list[PageRecords]:
        """Return nothing: memory does not survive its process."""
        return []

    def forget(self, addresses: npt.NDArray[np.int64]) -> None:
        """Do nothing: nothing is kept beside the slots."""

    def health(self) -> TierHealth:
        """Return usable until closed."""
        return TierHealth(usable=not self._closed)

    def close(self) -> None:
        """Unpin the region; views that others hold stay readable."""
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
