"""Why pages are gone: a table of fixed size, by page key, without their tokens.

A page that leaves the last tier leaves no row behind. Here its key gets a cell with the
cause, the tier and the time. The table is direct-mapped and the newer entry wins, so it
takes 13 bytes per cell whatever happens, and an entry is remembered for about as many
others as there are cells. A key is chained under the digest of its namespace
(core/keys.py), which a tenant's salt is part of: who does not know the salt cannot ask
for the key, so nobody learns of pages that are not his own.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import UInt8s

__all__ = ["CELL_BYTES", "Cause", "Tombstones", "cells_for"]

CELL_BYTES = 13
_CELLS_PER_SLOT = 2
_MIN_CELLS, _MAX_CELLS = 1 << 12, 1 << 21
"""From 53 kB to 27 MB: two million pages of 16 tokens are the prompts of some hours."""
_TIER_BITS = 3
_TIER_MASK = (1 << _TIER_BITS) - 1


class Cause(IntEnum):
    """What took a page's copy away, or kept it from getting one."""

    EVICTED = 1
    """To make room."""
    FAILED_CHECK = 2
    """Its bytes were wrong or unreadable."""
    NOT_WRITTEN = 3
    """The copy did not arrive."""
    BACK_PRESSURE = 4
    """The copy was left out: too many waited, or writes rested after failures."""
    NO_ROOM = 5
    """The tier had no room that it would give."""
    DROPPED = 6
    """Somebody emptied the tier."""
    NEVER_COPIED = 7
    """The device lost it before its copy was due (write policy ``on-evict``)."""

    @property
    def label(self) -> str:
        """The word used in reports."""
        return self.name.lower().replace("_", " ")


def cells_for(num_slots: int) -> int:
    """Return how many cells go with tiers of so many slots: a power of two."""
    wanted = max(_CELLS_PER_SLOT * num_slots, _MIN_CELLS)
    return min(1 << (wanted - 1).bit_length(), _MAX_CELLS)


class Tombstones:
    """The table.

    Args:
        num_cells: a power of two.
        now_s: clock value at the start; times are kept relative to it.
    """

    def __init__(self, num_cells: int, now_s: float) -> None:
        assert num_cells > 0, num_cells
        assert num_cells & (num_cells - 1) == 0, f"{num_cells} is no power of two"
        self._mask = np.uint64(num_cells - 1)
        self._start_s = now_s
        self._names: npt.NDArray[np.uint64] = np.zeros(num_cells, np.uint64)
        self._causes: UInt8s = np.zeros(num_cells, np.uint8)
        self._times: npt.NDArray[np.float32] = np.zeros(num_cells, np.float32)

    @property
    def num_bytes(self) -> int:
        """Bytes of the table."""
        return self._names.nbytes + self._causes.nbytes + self._times.nbytes

    def add(self, keys: UInt8s, cause: Cause, tier: TierId, now_s: float) -> None:
        """Note what became of pages.

        Args:
            keys: uint8 [n, 16].
            cause: why.
            tier: where.
            now_s: when.
        """
        names = _names(keys)
        cells = names & self._mask
        self._names[cells] = names
        self._causes[cells] = cause << _TIER_BITS | tier
        self._times[cells] = now_s - self._start_s

    def find(self, keys: UInt8s) -> tuple[UInt8s, UInt8s, npt.NDArray[np.float64]]:
        """Look pages up.

        Args:
            keys: uint8 [n, 16].

        Returns:
            For each page the ``Cause``, 0 where nothing is known; the ``TierId``; and
            the clock value, to a hundredth of a second after a day.
        """
        names = _names(keys)
        cells = names & self._mask
        codes = self._causes[cells]
        codes[self._names[cells] != names] = 0
        times = self._times[cells].astype(np.float64) + self._start_s
        causes = (codes >> _TIER_BITS).astype(np.uint8)
        tiers = (codes & _TIER_MASK).astype(np.uint8)
        return causes, tiers, times

    def clear(self) -> None:
        """Forget everything."""
        self._causes[:] = 0


def _names(keys: UInt8s) -> npt.NDArray[np.uint64]:
    """Return half of each key: 64 bits of a good hash."""
    return np.ascontiguousarray(keys).view(np.uint64)[:, 0]
