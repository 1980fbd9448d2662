"""The CXL tier: slots in CXL memory, read and written in place like the host's.

One class; what differs between a NUMA node, a device-DAX node and a stand-in is where
the region comes from. A stand-in says what it is in its health, from where it reaches
every report.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sgl_tiered.core.clock import Clock
from sgl_tiered.core.ids import TierId
from sgl_tiered.tiers.base import TierHealth
from sgl_tiered.tiers.cxl_source import CxlSource
from sgl_tiered.tiers.devdax import DaxRegion
from sgl_tiered.tiers.memory import MemoryRegion, Register, check_available
from sgl_tiered.tiers.numa import SYSFS, NumaRegion
from sgl_tiered.tiers.region import Region, RegionTier, check_slots
from sgl_tiered.tiers.tmpfs import TmpfsRegion

__all__ = ["CxlTier"]


class CxlTier(RegionTier):
    """A ``MemoryTier`` over memory from a ``CxlSource``.

    Args:
        source: where the memory comes from.
        slot_bytes: bytes of one slot, a multiple of ``ALIGNMENT_BYTES``.
        num_slots: capacity in pages, at least 1.
        register: pins the region for a device, so that it copies to and from CXL
            memory without a bounce through the host's; in parts, see ``RegionTier``.
        page_bytes: bytes that a checksum covers; the whole slot if None.
        clock: times ``load`` and ``store``.
        sysfs: for tests.

    Raises:
        ConfigError: the source does not fit the machine, is too small, or the kernel
            placed the memory elsewhere.
    """

    def __init__(
        self,
        source: CxlSource,
        slot_bytes: int,
        num_slots: int,
        *,
        register: Register | None = None,
        page_bytes: int | None = None,
        clock: Clock | None = None,
        sysfs: Path = SYSFS,
    ) -> None:
        check_slots("cxl", slot_bytes, num_slots)
        if source.is_machine_memory:
            check_available("--tiered-cxl-size", num_slots * slot_bytes)
        region: Region
        detail = source.describe()
        if source.nodes:
            region = numa = NumaRegion(
                num_slots, slot_bytes, source.nodes, register=register, sysfs=sysfs
            )
            detail += f", {numa.policy}; {numa.placement.describe()}"
        elif source.path is None:
            region = MemoryRegion(
                num_slots, slot_bytes, register=register, in_steps=True
            )
        elif source.emulated:
            region = TmpfsRegion(num_slots, slot_bytes, source.path, register=register)
        else:
            region = DaxRegion(
                num_slots,
                slot_bytes,
                source.path,
                offset_bytes=source.offset_bytes,
                register=register,
                sysfs=sysfs,
            )
        self._detail = detail
        self._emulated = source.emulated
        super().__init__(TierId.CXL, region, page_bytes=page_bytes, clock=clock)

    def health(self) -> TierHealth:
        """Return usable until closed, with where the memory lies or what stands in."""
        return replace(super().health(), detail=self._detail, emulated=self._emulated)
