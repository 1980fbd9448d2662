"""Numbered places of which each has one owner: free, used, adrift or set aside."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["Places"]

Numbers = npt.NDArray[np.integer]
Int32s = npt.NDArray[np.int32]


class Places:
    """Hands out numbers; who used them is known to the caller.

    *Adrift* are those that a copy under way holds, and nobody else.

    Args:
        count: of them.
        first: the lowest number.
    """

    def __init__(self, count: int, first: int = 0) -> None:
        self._first = first
        # A stack, lowest number on top: runs of numbers are copied faster.
        self._free = np.arange(count, dtype=np.int32)[::-1] + first
        self._num_free = count
        self._adrift = np.zeros(count, np.bool_)
        self._set_aside = np.zeros(count, np.bool_)

    def __len__(self) -> int:
        return len(self._free)

    @property
    def num_free(self) -> int:
        """Those that can be taken."""
        return self._num_free

    @property
    def num_adrift(self) -> int:
        """Those held by copies under way only."""
        return int(np.count_nonzero(self._adrift))

    def take(self, count: int) -> Int32s:
        """Return int32 [count] that were free; there have to be so many."""
        assert count <= self._num_free, f"{count} wanted, {self._num_free} free"
        self._num_free -= count
        taken: Int32s = self._free[self._num_free : self._num_free + count][::-1].copy()
        return taken

    def give(self, numbers: Numbers) -> None:
        """Take back what was used."""
        self._free[self._num_free : self._num_free + len(numbers)] = numbers
        self._num_free += len(numbers)

    def set_aside(self, count: int) -> Int32s:
        """Return int32 [count], taken for good."""
        taken = self.take(count)
        self._set_aside[taken - self._first] = True
        return taken

    def cut_loose(self, numbers: Numbers) -> None:
        """Note that only copies under way hold these from now on."""
        self._adrift[numbers - self._first] = True

    def pick_up(self, numbers: Numbers) -> None:
        """Note that no copy holds these by itself any more: used again, or given."""
        self._adrift[numbers - self._first] = False

    def check(self, used: Numbers) -> None:
        """Assert that each has one owner.

        Args:
            used: int [n], what the caller says is in use.
        """
        counts = np.zeros(len(self), np.int64)
        free = self._free[: self._num_free] - self._first
        for some in (free, used - self._first, self._adrift.nonzero()[0]):
            np.add.at(counts, some, 1)
        counts += self._set_aside
        assert np.all(counts == 1), f"owned {np.flatnonzero(counts != 1)} not once"
