"""A tier that fails on purpose, for tests and for the negative control of the gate.

Wrong bytes are put in after the inner tier's own checks, so that they reach the device:
the equality gate has to catch them. Damage that the product has to find lies on the
medium: see ``faulty_calls``.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.plans import TransferResult
from sgl_tiered.serving.emulation import Fault
from sgl_tiered.testing.fault_switch import WRONG_BYTES, FaultSwitch
from sgl_tiered.testing.wrapped import WrappedMemory, WrappedTier
from sgl_tiered.tiers.base import MemoryTier, Tier, TierHealth, TierIO
from sgl_tiered.tiers.memory import aligned_buffer

__all__ = ["FaultyMemoryTier", "FaultyTier"]

UInt8s = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]
_STOPS = frozenset({"error", "partial", "hang"})
_INJECTED = "injected error"


class FaultyTier(WrappedTier):
    """Puts faults into a tier; called on a ``MemoryTier`` it stays one.

    Args:
        tier: the tier that does the work.
        faults: the switch, or the faults of one of its own.
        seed: of that one.
    """

    def __new__(cls, tier: Tier, *_args: object, **_settings: object) -> FaultyTier:
        """Choose ``FaultyMemoryTier`` for a tier that can be read in place."""
        if cls is FaultyTier and isinstance(tier, MemoryTier):
            return super().__new__(FaultyMemoryTier)
        return super().__new__(cls)

    def __init__(
        self, tier: Tier, faults: FaultSwitch | Sequence[Fault] = (), seed: int = 0
    ) -> None:
        super().__init__(tier)
        if not isinstance(faults, FaultSwitch):
            faults = FaultSwitch(faults, seed)
        self.switch: FaultSwitch = faults

    def load(self, io: TierIO) -> TransferResult:
        """Read pages; fail, read half of them, or damage one after the check."""
        fault = self.switch.strike(_STOPS | WRONG_BYTES, is_store=False)
        result = self._transfer(io, fault, is_store=False)
        if fault is not None and fault.kind in WRONG_BYTES and len(io.rows):
            rows = io.rows.tolist()
            victim = rows.pop(self.switch.draw(len(rows)))
            other = io.buffer[rows[self.switch.draw(len(rows))]] if rows else None
            self._damage(fault.kind, io.buffer[victim], other)
        return result

    def store(self, io: TierIO) -> TransferResult:
        """Write pages; fail, or write half of them."""
        fault = self.switch.strike(_STOPS, is_store=True)
        return self._transfer(io, fault, is_store=True)

    def health(self) -> TierHealth:
        """Return the inner tier's health, marked where a fault is switched on."""
        health = self.inner.health()
        return replace(health, emulated=True) if self.switch.faults else health

    def close(self) -> None:
        """Let go what hangs, then close."""
        self.switch.set(())
        self.inner.close()

    def _transfer(
        self, io: TierIO, fault: Fault | None, *, is_store: bool
    ) -> TransferResult:
        transfer = self.inner.store if is_store else self.inner.load
        count = len(io.addresses)
        match None if fault is None else fault.kind:
            case "error":
                return TransferResult.failed(count, 0.0, _INJECTED)
            case "partial":
                half = count // 2
                first = transfer(_first(io, half))
                rest = TransferResult.failed(count - half, 0.0, _INJECTED)
                return TransferResult(
                    ok=np.concatenate([first.ok, rest.ok]),
                    num_bytes=first.num_bytes,
                    seconds=first.seconds,
                    checksums=np.concatenate([first.checksums, rest.checksums]),
                    error=first.error or rest.error,
                )
            case "hang":
                assert fault is not None
                self.switch.hold(fault)
        return transfer(io)

    def _damage(self, kind: str, page: UInt8s, other: UInt8s | None) -> None:
        width = self.slot_bytes
        if kind == "corrupt":
            page[self.switch.draw(width)] ^= np.uint8(1 << self.switch.draw(8))
        elif kind == "swap" and other is not None:
            page[:width] = other[:width]
        else:
            # Also for a swap without a second page to take the bytes from.
            page[:width] = 0


class FaultyMemoryTier(FaultyTier, WrappedMemory):
    """A ``MemoryTier`` whose copies fail, hang, or show one page with wrong bytes.

    The slots themselves stay right: only that one read sees a damaged private copy.
    A fault that stops a copy is raised by ``charge``, which follows every copy done in
    place; ``partial`` lets every other copy pass, so that some layers arrive.
    """

    inner: MemoryTier
    _passed = False

    def charge(self, num_bytes: int, *, is_store: bool = False) -> None:
        """Account for a copy done in place, or raise OSError for one that failed."""
        fault = self.switch.strike(_STOPS, is_store=is_store)
        if fault is not None and fault.kind == "hang":
            self.switch.hold(fault)
        elif fault is not None and fault.kind == "partial" and not self._passed:
            self._passed = True
        elif fault is not None:
            self._passed = False
            raise OSError(errno.EIO, os.strerror(errno.EIO) + f" ({_INJECTED})")
        self.inner.charge(num_bytes, is_store=is_store)

    def read_view(self, addresses: Int64s) -> tuple[UInt8s, Int64s]:
        """Return the slots in place, or a copy of them with one page damaged."""
        region, rows = self.inner.read_view(addresses)
        fault = self.switch.strike(WRONG_BYTES, is_store=False)
        if fault is None or not len(addresses):
            return region, rows
        copy = aligned_buffer(len(addresses), region.shape[1])
        copy[:] = region[rows]
        page = copy[self.switch.draw(len(addresses))]
        self._damage(fault.kind, page, self._other_page(addresses, page))
        return copy, np.arange(len(addresses), dtype=np.int64)

    def _other_page(self, addresses: Int64s, page: UInt8s) -> UInt8s | None:
        """Return another written page, best one outside of this read."""
        region = self.inner.region
        written = np.flatnonzero(region[:, :64].any(axis=1))
        outside = np.setdiff1d(written, addresses)
        order = self.switch.permutation(len(outside))
        for slot in [*outside[order], *addresses]:
            other: UInt8s = region[slot]
            if not np.array_equal(other, page):
                return other
        return None


def _first(io: TierIO, count: int) -> TierIO:
    """Return the transfer of the first pages alone."""
    records = io.records
    if records is not None:
        # Those of a load that knows checksums only have no rows but these.
        records = replace(
            records,
            namespaces=records.namespaces[:count],
            keys=records.keys[:count],
            parents=records.parents[:count],
            tokens=records.tokens[:count],
            checksums=records.checksums[:count],
            addresses=records.addresses[:count],
        )
    return TierIO(io.addresses[:count], io.buffer, io.rows[:count], records)
