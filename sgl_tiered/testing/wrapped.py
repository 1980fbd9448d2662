"""A tier that hands everything on to another one: what the wrappers stand on."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import FoundPages, TransferResult
from sgl_tiered.tiers.base import KeptTier, MemoryTier, Tier, TierHealth, TierIO

__all__ = ["WrappedMemory", "WrappedTier"]


class WrappedTier:
    """Delegates the ``Tier`` methods; wrappers override some."""

    def __init__(self, tier: Tier) -> None:
        self.inner = tier

    @property
    def tier_id(self) -> TierId:
        """Which tier this is."""
        return self.inner.tier_id

    @property
    def slot_bytes(self) -> int:
        """Bytes set aside for one page."""
        return self.inner.slot_bytes

    @property
    def num_slots(self) -> int:
        """Capacity in pages."""
        return self.inner.num_slots

    def load(self, io: TierIO) -> TransferResult:
        """Read pages into the buffer."""
        return self.inner.load(io)

    def store(self, io: TierIO) -> TransferResult:
        """Write pages from the buffer."""
        return self.inner.store(io)

    def recover(self) -> FoundPages:
        """Return what a former process left."""
        return self.inner.recover()

    def holds(self, addresses: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return beside which slots something is kept."""
        return self.inner.holds(addresses)

    def forget(self, addresses: npt.NDArray[np.int64]) -> None:
        """Drop what is kept beside these slots."""
        self.inner.forget(addresses)

    def relabel(self, fingerprint: str) -> None:
        """Mark the tier with another fingerprint, if it is one that is kept."""
        if isinstance(self.inner, KeptTier):
            self.inner.relabel(fingerprint)

    def health(self) -> TierHealth:
        """Return whether the tier can be used now."""
        return self.inner.health()

    def close(self) -> None:
        """Release everything; may be called twice."""
        self.inner.close()


class WrappedMemory(WrappedTier):
    """Delegates the methods of a ``MemoryTier`` as well."""

    inner: MemoryTier

    @property
    def region(self) -> npt.NDArray[np.uint8]:
        """The slots themselves."""
        return self.inner.region

    def read_view(
        self, addresses: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """Return an array, and its rows at which these slots can be read."""
        return self.inner.read_view(addresses)

    def charge(self, num_bytes: int, *, is_store: bool = False) -> None:
        """Account for a copy done in place."""
        self.inner.charge(num_bytes, is_store=is_store)
