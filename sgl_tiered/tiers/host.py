"""The host tier: slots in one region of this machine's memory."""

from __future__ import annotations

from collections.abc import Callable

from sgl_tiered.core.clock import Clock
from sgl_tiered.core.ids import TierId
from sgl_tiered.tiers.memory import MemoryRegion, Register, check_available
from sgl_tiered.tiers.region import RegionTier, check_slots

__all__ = ["HostTier"]


class HostTier(RegionTier):
    """A ``MemoryTier`` over anonymous memory.

    Args:
        layout_slot_bytes: bytes of one slot, a multiple of ``ALIGNMENT_BYTES``.
        num_slots: capacity in pages, at least 1.
        register: pins the region for a device; see ``MemoryRegion``.
        in_steps: until all of it is pinned, only the first ``num_ready`` slots may be
            used; else it is, or all of it is left, when the constructor returns.
        node: of NUMA, near the device; None for anywhere.
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
        in_steps: bool = True,
        node: int | None = None,
        page_bytes: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        check_slots("host", layout_slot_bytes, num_slots)
        check_available("host size", num_slots * layout_slot_bytes)
        self._own_region = MemoryRegion(
            num_slots,
            layout_slot_bytes,
            register=register,
            in_steps=in_steps,
            node=node,
        )
        super().__init__(
            TierId.HOST, self._own_region, page_bytes=page_bytes, clock=clock
        )

    @property
    def num_ready(self) -> int:
        """Slots, from the first on, that may be used now."""
        return self._own_region.num_ready

    def watch_ready(self, told: Callable[[int], None], since: int = 0) -> None:
        """Tell of each step of ``num_ready`` behind ``since``; see ``Pinning``."""
        self._own_region.watch_ready(told, since)
