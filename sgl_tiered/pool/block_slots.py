"""Slots of one medium as addresses: generations, entries, holds.

A ``SlotAllocator`` that the cache table can use like any other, and that knows of each
slot besides whether it is free:

- its *generation*, which grows when it is freed, whoever frees it: an eviction as well;
- the *entry* of the table that it belongs to, if its block is in the index;
- how often it is *held*: by transfers under way, and by quarantine after failed ones;
- whether it is *dying*: freed by its owner while held; the last release frees it.

Allocations of a few blocks are cut from an open run whose addresses are there already,
so that one block costs no arithmetic: half a microsecond instead of seven.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from sgl_tiered.cache.slots import SlotAllocator
from sgl_tiered.core.addresses import (
    GENERATION_BITS,
    MAX_GENERATION,
    MAX_SLOT,
    NEXT_GENERATION,
    pack,
)
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import Bools, Int32s, Int64s, UInt64s

__all__ = ["NO_ADDRESSES", "BlockSlots", "RunSlots"]

_OPEN_SLOTS = 1024
"""Length of the open run: opening one costs 15 us, which its blocks share."""
_STRIDE = 1021
"""From one incarnation's first generation to the next one's; odd, so that 4,096 starts
have different ones."""
NO_ADDRESSES: UInt64s = np.zeros(0, np.uint64)
_NO_SLOTS: Int64s = np.zeros(0, np.int64)


class RunSlots(SlotAllocator):
    """A ``SlotAllocator`` that cuts small allocations from a run set aside for them.

    The open run counts as free, and goes back whenever it does not suffice.
    """

    def __init__(self, capacity: int, most: int = 0) -> None:
        super().__init__(capacity, most)
        # Slots that nobody has, from _next on.
        self._open: Int64s = _NO_SLOTS
        self._next = 0
        self._num_open = 0

    @property
    def free_slots(self) -> int:
        """Slots that can be allocated now, those of the open run included."""
        return super().free_slots + self._num_open - self._next

    @property
    def used_slots(self) -> int:
        """Slots handed out and not yet freed."""
        return self.capacity - self.free_slots

    def alloc(self, num_slots: int) -> Int64s | None:
        """Return ``num_slots`` ascending slots, or None and change nothing."""
        if self._next + num_slots > self._num_open and not self._open_run(num_slots):
            return super().alloc(num_slots)
        start, self._next = self._next, self._next + num_slots
        return self._open[start : self._next].copy()

    def reserve(self, slots: Int64s) -> Bools:
        """Take these very slots where they are free; return which were taken."""
        self._close_run()
        return super().reserve(slots)

    def is_free(self, slots: Int64s) -> Bools:
        """Return for each slot whether it can be allocated."""
        free = super().is_free(slots)
        if self._next < self._num_open:
            first, last = self._open[self._next], self._open[-1]
            free |= (slots >= first) & (slots <= last)
        return free

    def grow(self, capacity: int) -> None:
        """Add slots so that there are ``capacity``."""
        self._close_run()
        super().grow(capacity)

    def _open_run(self, num_slots: int) -> bool:
        """Set a run aside that holds so many slots and more; False if none does."""
        self._close_run()
        num_open = min(_OPEN_SLOTS, self.longest_run)
        if num_open <= num_slots:
            return False
        slots = super().alloc(num_open)
        assert slots is not None, f"no {num_open} slots in a run of as many"
        self._open, self._next, self._num_open = slots, 0, num_open
        return True

    def _close_run(self) -> None:
        if self._next < self._num_open:
            SlotAllocator.free(self, self._open[self._next :])
        self._next = self._num_open = 0


class BlockSlots(RunSlots):
    """The slots of one medium of one instance.

    Args:
        num_blocks: capacity, which ``grow`` adds to.
        instance: id of the instance, part of every address.
        medium: which medium, part of every address.
        incarnation: of the instance; the next one counts from another generation on,
            so that addresses of this one do not fit there by chance.
        most: blocks for which there is memory from the start: up to them growth copies
            nothing. ``num_blocks`` if that is more.

    Attributes:
        names: uint64 [most], the address of each slot as it is now.
        entry_at: int32 [most], the table's entry of each slot, -1 for none.
        holds: uint16 [most], how often each slot is held.
        dying: bool [most], freed while held.
        num_holds, num_dying: sums of these two.
    """

    def __init__(
        self,
        num_blocks: int,
        instance: int,
        medium: TierId,
        incarnation: int = 1,
        most: int = 0,
    ) -> None:
        super().__init__(num_blocks, most)
        self._name = partial(
            pack, instance, medium, incarnation * _STRIDE & MAX_GENERATION
        )
        # Whole addresses, so that one comparison tells a stale one or a foreign one.
        self.names: UInt64s = np.zeros(0, np.uint64)
        self.entry_at: Int32s = np.zeros(0, np.int32)
        self.holds: npt.NDArray[np.uint16] = np.zeros(0, np.uint16)
        self.dying: Bools = np.zeros(0, np.bool_)
        self.num_holds = 0
        self.num_dying = 0
        self._open_addresses = NO_ADDRESSES
        self._make_room()

    def alloc_addresses(self, num_blocks: int) -> UInt64s | None:
        """Return addresses of ``num_blocks`` new blocks, or None and change nothing.

        The array is read-only.
        """
        start = self._next
        stop = start + num_blocks
        if stop <= self._num_open:
            self._next = stop
            return self._open_addresses[start:stop]
        if self._open_run(num_blocks):
            self._next = num_blocks
            return self._open_addresses[:num_blocks]
        slots = SlotAllocator.alloc(self, num_blocks)
        return None if slots is None else self._named(slots)

    def free(self, slots: Int64s) -> None:
        """Give slots back; their addresses are dead from now on."""
        super().free(slots)
        former = self.names[slots]
        later = (former + NEXT_GENERATION) & GENERATION_BITS
        self.names[slots] = (former & ~GENERATION_BITS) | later
        self.entry_at[slots] = -1

    def grow(self, capacity: int) -> None:
        """Add slots so that there are ``capacity``, with the memory behind them."""
        super().grow(capacity)
        self._make_room()

    def addresses_of(self, slots: Int64s) -> UInt64s:
        """Return the addresses of slots as they are now."""
        return self.names.take(slots)

    def are_in_use(self, slots: Int64s, addresses: UInt64s) -> bool:
        """Return whether these are the addresses of slots that are all in use.

        Args:
            slots: of the addresses, at least one.
            addresses: of any medium of any instance.
        """
        last = int(slots.max())
        if last >= self.capacity or not (self.names.take(slots) == addresses).all():
            return False
        if self.num_dying and self.dying[slots].any():
            return False
        if self._next < self._num_open and last >= self._open[self._next]:
            return not self.is_free(slots).any()
        # None is in the open run.
        return not SlotAllocator.is_free(self, slots).any()

    def _make_room(self) -> None:
        """Have as many of everything as there may be slots without growth."""
        assert self.most <= MAX_SLOT + 1, f"{self.most} slots have no 32 bits"
        more = np.arange(len(self.names), self.most)
        if not len(more):
            return
        self.names = np.concatenate([self.names, self._name(more)])
        self.entry_at = np.pad(self.entry_at, (0, len(more)), constant_values=-1)
        self.holds = np.pad(self.holds, (0, len(more)))
        self.dying = np.pad(self.dying, (0, len(more)))

    def _open_run(self, num_slots: int) -> bool:
        if not super()._open_run(num_slots):
            return False
        self._open_addresses = self._named(self._open)
        return True

    def _named(self, slots: Int64s) -> UInt64s:
        addresses = self.addresses_of(slots)
        # Parts of one array go to many callers.
        addresses.flags.writeable = False
        return addresses
