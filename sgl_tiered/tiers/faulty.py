"""A tier that fails on purpose, for tests and for the negative control of the gate.

Corruption is put in after the inner tier's own checks, so that it reaches the device:
the equality gate has to catch it. That a tier finds damage on its own medium is tested
by damaging the medium.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.plans import TransferResult
from sgl_tiered.tiers.base import MemoryTier, Tier, TierIO
from sgl_tiered.tiers.memory import aligned_buffer
from sgl_tiered.tiers.wrapped import WrappedMemory, WrappedTier

__all__ = ["Faults", "FaultyMemoryTier", "FaultyTier"]

UInt8s = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]
CORRUPTIONS = ("", "flip", "zero", "swap")


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong.

    Attributes:
        load_error_rate, store_error_rate: probability that a whole call fails.
        load_errors, store_errors: the next so many calls fail for certain.
        corrupt: what a read does to one page of it: ``flip`` one bit, ``zero`` all
            bytes, ``swap`` in the bytes of another page; empty for nothing.
        corrupt_rate: probability that a read is corrupted.
        corrupt_reads: reads to corrupt at most; -1 for no limit.
        hang_s: each load and store first waits so long, in seconds.
        seed: of the generator that draws all of this.
    """

    load_error_rate: float = 0.0
    store_error_rate: float = 0.0
    load_errors: int = 0
    store_errors: int = 0
    corrupt: str = ""
    corrupt_rate: float = 1.0
    corrupt_reads: int = -1
    hang_s: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.corrupt not in CORRUPTIONS:
            raise ValueError(f"corrupt={self.corrupt!r} is none of {CORRUPTIONS}")


class FaultyTier(WrappedTier):
    """Puts ``Faults`` into a tier; called on a ``MemoryTier`` it stays one.

    ``set_faults`` changes them at run time. ``num_corrupted`` counts corrupted reads.
    Same faults and same calls in the same order give the same damage.
    """

    def __new__(cls, tier: Tier, *_args: object, **_settings: object) -> FaultyTier:
        """Choose ``FaultyMemoryTier`` for a tier that can be read in place."""
        if cls is FaultyTier and isinstance(tier, MemoryTier):
            return super().__new__(FaultyMemoryTier)
        return super().__new__(cls)

    def __init__(
        self,
        tier: Tier,
        faults: Faults,
        *,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        super().__init__(tier)
        self._sleep = sleep or threading.Event().wait
        self._lock = threading.Lock()
        self.num_corrupted = 0
        self.set_faults(faults)

    def set_faults(self, faults: Faults) -> None:
        """Start over with these faults and their seed."""
        with self._lock:
            self._faults = faults
            self._rng = np.random.default_rng(faults.seed)
            self._load_errors = faults.load_errors
            self._store_errors = faults.store_errors
            self._corrupt_reads = faults.corrupt_reads

    def load(self, io: TierIO) -> TransferResult:
        """Read pages, or fail, or damage one of them after the inner tier's check."""
        self._hang()
        if self._draw_error(is_load=True):
            return TransferResult.failed(len(io.addresses), 0.0, "injected load error")
        result = self.inner.load(io)
        self._corrupt(io.buffer, io.rows)
        return result

    def store(self, io: TierIO) -> TransferResult:
        """Write pages, or fail."""
        self._hang()
        if self._draw_error(is_load=False):
            return TransferResult.failed(len(io.addresses), 0.0, "injected store error")
        return self.inner.store(io)

    def _hang(self) -> None:
        if self._faults.hang_s > 0:
            self._sleep(self._faults.hang_s)

    def _draw_error(self, *, is_load: bool) -> bool:
        with self._lock:
            if is_load and self._load_errors > 0:
                self._load_errors -= 1
                return True
            if not is_load and self._store_errors > 0:
                self._store_errors -= 1
                return True
            faults = self._faults
            rate = faults.load_error_rate if is_load else faults.store_error_rate
            return rate > 0 and self._rng.random() < rate

    def _will_corrupt(self, num_pages: int) -> bool:
        """Decide on one read, and count it; the lock is held."""
        faults = self._faults
        if not faults.corrupt or num_pages == 0 or self._corrupt_reads == 0:
            return False
        if faults.corrupt_rate < 1 and self._rng.random() >= faults.corrupt_rate:
            return False
        self._corrupt_reads -= self._corrupt_reads > 0
        self.num_corrupted += 1
        return True

    def _corrupt(self, buffer: UInt8s, rows: Int64s) -> None:
        """Damage one of the rows of a buffer that was just read."""
        with self._lock:
            if not self._will_corrupt(len(rows)):
                return
            victim = int(rows[self._rng.integers(len(rows))])
            others = [row for row in rows.tolist() if row != victim]
            other = others[self._rng.integers(len(others))] if others else None
            self._damage(buffer, victim, None if other is None else buffer[other])

    def _damage(self, buffer: UInt8s, victim: int, other: UInt8s | None) -> None:
        width = self.slot_bytes
        match self._faults.corrupt:
            case "flip":
                position = int(self._rng.integers(width))
                buffer[victim, position] ^= np.uint8(1 << self._rng.integers(8))
            case "swap" if other is not None:
                buffer[victim, :width] = other[:width]
            case _:
                # Also for a swap without a second page to take the bytes from.
                buffer[victim, :width] = 0


class FaultyMemoryTier(FaultyTier, WrappedMemory):
    """A ``MemoryTier`` whose ``read_view`` may show one page with wrong bytes.

    The slots themselves stay right: only that one read sees a damaged private copy.
    """

    inner: MemoryTier

    def read_view(self, addresses: Int64s) -> tuple[UInt8s, Int64s]:
        """Return the slots in place, or a copy of them with one page damaged."""
        with self._lock:
            if not self._will_corrupt(len(addresses)):
                return self.inner.read_view(addresses)
            region, rows = self.inner.read_view(addresses)
            copy = aligned_buffer(len(addresses), region.shape[1])
            copy[:] = region[rows]
            victim = int(self._rng.integers(len(addresses)))
            self._damage(copy, victim, self._other_page(addresses, copy[victim]))
            return copy, np.arange(len(addresses), dtype=np.int64)

    def _other_page(self, addresses: Int64s, page: UInt8s) -> UInt8s | None:
        """Return another written page, best one outside of this read."""
        region = self.inner.region
        written = np.flatnonzero(region[:, :64].any(axis=1))
        outside = np.setdiff1d(written, addresses)
        for slot in [*self._rng.permutation(outside), *addresses]:
            other: UInt8s = region[slot]
            if not np.array_equal(other, page):
                return other
        return None
