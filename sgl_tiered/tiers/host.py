"""The host tier: slots in one region of this machine's memory."""

from __future__ import annotations

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
        register: pins the region for a device, in parts; see ``RegionTier``.
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
        node: int | None = None,
        page_bytes: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        check_slots("host", layout_slot_bytes, num_slots)
        check_available("host size", num_slots * layout_slot_bytes)
        region = MemoryRegion(
            num_slots, layout_slot_bytes, register=register, in_steps=True, node=node
        )
        super().__init__(TierId.HOST, region, page_bytes=page_bytes, clock=clock)
