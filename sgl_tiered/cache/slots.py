"""Free slots of one tier (also used for the rows of the table).

Owns which of the numbers 0 .. capacity - 1 are in use, and nothing about their
contents. Allocation is all or nothing; ``free_slots + used_slots == capacity`` holds
after every call. Called on the engine's scheduler thread only.
"""

from __future__ import annotations

import numpy as np

from sgl_tiered.core.plans import Bools, Int64s

__all__ = ["SlotAllocator"]


class SlotAllocator:
    """Hands out slot numbers, in ascending order and in runs where it can.

    The free slots are a stack: what was freed last is handed out first, so a victim's
    run of slots goes as a whole to whoever evicted it, in O(n log n) whatever the
    capacity. The stack is put in order again after capacity / 8 freed slots, which
    costs O(1) per freed slot and keeps scattered frees from scattering for good.
    """

    def __init__(self, capacity: int) -> None:
        self._is_free = np.ones(capacity, np.bool_)
        self._num_free = capacity
        # The first _num_free numbers are the free slots, unless out of date.
        self._stack = np.empty(0, np.int64)
        self._is_current = False
        self._freed_since_order = 0

    @property
    def capacity(self) -> int:
        """Slots in all."""
        return len(self._is_free)

    @property
    def free_slots(self) -> int:
        """Slots that can be allocated now."""
        return self._num_free

    @property
    def used_slots(self) -> int:
        """Slots handed out and not yet freed."""
        return len(self._is_free) - self._num_free

    def alloc(self, num_slots: int) -> Int64s | None:
        """Return ``num_slots`` ascending slots, or None and change nothing."""
        if num_slots > self._num_free:
            return None
        is_worn = self._freed_since_order * 8 > self.capacity
        if not self._is_current or (is_worn and self._is_scattered(num_slots)):
            self._order()
        start = self._num_free - num_slots
        taken = np.sort(self._stack[start : self._num_free])
        self._is_free[taken] = False
        self._num_free = start
        return taken

    def free(self, slots: Int64s) -> None:
        """Give slots back; freeing one that is free is a broken invariant."""
        if not len(slots):
            return
        descending = np.sort(slots)[::-1]
        num_free = int(np.count_nonzero(self._is_free[descending]))
        num_twice = int(np.count_nonzero(descending[1:] == descending[:-1]))
        assert num_free + num_twice == 0, (
            f"{num_free} of {len(slots)} slots were free already, {num_twice} twice"
        )
        self._is_free[descending] = True
        stop = self._num_free + len(descending)
        if self._is_current:
            self._stack[self._num_free : stop] = descending
        self._num_free = stop
        self._freed_since_order += len(descending)

    def reserve(self, slots: Int64s) -> Bools:
        """Take these very slots where they are free; return which were taken."""
        taken = np.zeros(len(slots), np.bool_)
        inside = np.flatnonzero((slots >= 0) & (slots < self.capacity))
        # The first of equal numbers wins.
        _, first = np.unique(slots[inside], return_index=True)
        candidates = inside[first]
        taken[candidates] = self._is_free[slots[candidates]]
        self._is_free[slots[taken]] = False
        self._num_free -= int(np.count_nonzero(taken))
        self._is_current = False
        return taken

    def is_free(self, slots: Int64s) -> Bools:
        """Return for each slot whether it can be allocated."""
        return self._is_free[slots]

    def grow(self, capacity: int) -> None:
        """Add slots so that there are ``capacity``."""
        more = capacity - self.capacity
        assert more >= 0, f"{self.capacity} slots cannot become {capacity}"
        self._is_free = np.concatenate([self._is_free, np.ones(more, np.bool_)])
        self._num_free += more
        self._is_current = False

    def _is_scattered(self, num_slots: int) -> bool:
        taken = self._stack[self._num_free - num_slots : self._num_free]
        return num_slots > 1 and bool(taken.max() - taken.min() != num_slots - 1)

    def _order(self) -> None:
        free = np.flatnonzero(self._is_free)[::-1]
        assert len(free) == self._num_free, (len(free), self._num_free)
        self._stack = np.empty(self.capacity, np.int64)
        self._stack[: len(free)] = free
        self._is_current = True
        self._freed_since_order = 0
