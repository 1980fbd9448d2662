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
    """Hands out slot numbers, in ascending order and in runs as long as it can.

    The free slots are kept as runs. An allocation gets the shortest run that holds it,
    from its start, so that long runs stay whole for those who need them; where no run
    does, the longest ones, whole. A disk reads neighbours in one I/O.

    O(runs + n log n): a tier that evicts what was written together has few runs.

    Args:
        capacity: slots at first, which ``grow`` adds to.
        most: slots for which there is memory from the start: up to them growth copies
            nothing. ``capacity`` if that is more.
    """

    def __init__(self, capacity: int, most: int = 0) -> None:
        # Slots that are not there yet are not free.
        self._is_free = np.zeros(max(capacity, most), np.bool_)
        self._is_free[:capacity] = True
        self._capacity = self._num_free = capacity
        # Runs of free slots, ascending; none touches the next.
        self._starts = np.zeros(min(capacity, 1), np.int64)
        self._lengths = np.full(min(capacity, 1), capacity, np.int64)

    @property
    def capacity(self) -> int:
        """Slots in all."""
        return self._capacity

    @property
    def most(self) -> int:
        """Slots for which there is memory."""
        return len(self._is_free)

    @property
    def free_slots(self) -> int:
        """Slots that can be allocated now."""
        return self._num_free

    @property
    def used_slots(self) -> int:
        """Slots handed out and not yet freed."""
        return self._capacity - self._num_free

    @property
    def longest_run(self) -> int:
        """Slots in the longest run of free ones."""
        return int(self._lengths.max(initial=0))

    def alloc(self, num_slots: int) -> Int64s | None:
        """Return ``num_slots`` ascending slots, or None and change nothing."""
        if num_slots > self._num_free:
            return None
        if num_slots == 0:
            return np.zeros(0, np.int64)
        fits = np.flatnonzero(self._lengths >= num_slots)
        if len(fits):
            return self._take(int(fits[self._lengths[fits].argmin()]), num_slots)
        by_length = np.argsort(-self._lengths, kind="stable")
        reached = np.cumsum(self._lengths[by_length])
        runs = by_length[: int(np.searchsorted(reached, num_slots)) + 1]
        lengths = self._lengths[runs].copy()
        # All are taken whole but the last one.
        lengths[-1] -= int(lengths.sum()) - num_slots
        taken = np.sort(_slots_of(self._starts[runs], lengths))
        self._starts[runs] += lengths
        self._lengths[runs] -= lengths
        used_up = runs[self._lengths[runs] == 0]
        self._starts = np.delete(self._starts, used_up)
        self._lengths = np.delete(self._lengths, used_up)
        self._is_free[taken] = False
        self._num_free -= num_slots
        return taken

    def free(self, slots: Int64s) -> None:
        """Give slots back; freeing one that is free is a broken invariant."""
        if not len(slots):
            return
        ordered = np.sort(slots)
        num_free = int(np.count_nonzero(self._is_free[ordered]))
        breaks = ordered[1:] - ordered[:-1]
        num_twice = int(np.count_nonzero(breaks == 0))
        assert num_free + num_twice == 0, (
            f"{num_free} of {len(slots)} slots were free already, {num_twice} twice"
        )
        self._is_free[ordered] = True
        self._num_free += len(ordered)
        ends = np.flatnonzero(breaks != 1) + 1
        firsts = np.concatenate([[0], ends])
        new_lengths = np.concatenate([ends, [len(ordered)]]) - firsts
        # Two sorted lists in one: a third of the time of two insertions.
        starts = np.concatenate([self._starts, ordered[firsts]])
        by_start = starts.argsort(kind="stable")
        starts = starts[by_start]
        lengths = np.concatenate([self._lengths, new_lengths])[by_start]
        # A run that begins where the one before it ends goes on with it.
        begins = np.ones(len(starts), np.bool_)
        begins[1:] = starts[1:] != starts[:-1] + lengths[:-1]
        heads = np.flatnonzero(begins)
        self._starts = starts[heads]
        self._lengths = np.add.reduceat(lengths, heads)

    def reserve(self, slots: Int64s) -> Bools:
        """Take these very slots where they are free; return which were taken."""
        taken = (slots >= 0) & (slots < self.capacity)
        if not (slots[1:] > slots[:-1]).all():
            # The first of equal numbers wins: it is written last.
            inside = np.flatnonzero(taken)[::-1]
            winner = np.empty(self.capacity, np.int64)
            winner[slots[inside]] = inside
            taken[inside] = winner[slots[inside]] == inside
        # A mask is not needed, and takes as long as the rest, where all are there.
        asked = slots if taken.all() else slots[taken]
        is_free = self._is_free[asked]
        taken[taken] = is_free
        self._is_free[asked] = False
        self._num_free -= int(np.count_nonzero(is_free))
        self._find_runs()
        return taken

    def bind(self, slots: Int64s, entries: Int64s) -> None:
        """Take note of the table's entries that have these slots: nothing here."""

    def is_free(self, slots: Int64s) -> Bools:
        """Return for each slot whether it can be allocated."""
        return self._is_free[slots]

    def grow(self, capacity: int) -> None:
        """Add slots so that there are ``capacity``."""
        more = capacity - self.capacity
        assert more >= 0, f"{self.capacity} slots cannot become {capacity}"
        if capacity > self.most:
            self._is_free = np.pad(self._is_free, (0, capacity - self.most))
        self._is_free[self._capacity : capacity] = True
        self._capacity = capacity
        self._num_free += more
        ends = self._starts[-1:] + self._lengths[-1:]
        if more and len(ends) and int(ends[0]) == capacity - more:
            self._lengths[-1] += more
        elif more:
            self._starts = np.append(self._starts, capacity - more)
            self._lengths = np.append(self._lengths, more)

    def _take(self, run: int, num_slots: int) -> Int64s:
        """Take the first slots of one run that has as many or more."""
        first = int(self._starts[run])
        if self._lengths[run] == num_slots:
            self._starts = np.delete(self._starts, run)
            self._lengths = np.delete(self._lengths, run)
        else:
            self._starts[run] += num_slots
            self._lengths[run] -= num_slots
        self._is_free[first : first + num_slots] = False
        self._num_free -= num_slots
        return np.arange(first, first + num_slots)

    def _find_runs(self) -> None:
        """Find the runs of free slots anew: O(capacity)."""
        edges = np.diff(self._is_free.astype(np.int8), prepend=0, append=0)
        self._starts = np.flatnonzero(edges == 1)
        self._lengths = np.flatnonzero(edges == -1) - self._starts


def _slots_of(starts: Int64s, lengths: Int64s) -> Int64s:
    """Return the numbers in runs, run after run."""
    before = np.cumsum(lengths) - lengths
    numbers: Int64s = np.repeat(starts - before, lengths)
    numbers += np.arange(len(numbers))
    return numbers
