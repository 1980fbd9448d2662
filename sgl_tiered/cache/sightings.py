"""Which pages were seen by one request, and which by two: a memory of fixed size.

Pages that no tier has leave no row behind, so "seen before" needs a memory of its own.
It is a counting Bloom filter over page keys in two generations: a page is remembered
while one to two times ``capacity_pages`` others are seen, in 16 bytes per page of the
capacity, and at most one page in twenty counts a sighting too many.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.plans import Int64s, UInt8s

__all__ = ["Sightings"]

_CELLS_PER_PAGE = 8
_NUM_HASHES = 4
"""With 8 cells and 4 hashes a full generation mistakes (1 - exp(-1/2))^4 = 2.4 % of the
new pages for known ones; the older generation may as well."""
_NUM_DEPTHS = 32


class Sightings:
    """Counts requests per page, up to two, and how often pages come again by depth.

    Args:
        capacity_pages: different pages that one generation holds.
    """

    def __init__(self, capacity_pages: int) -> None:
        self._capacity_pages = capacity_pages
        num_cells = _CELLS_PER_PAGE * max(capacity_pages, _NUM_HASHES)
        self._young: UInt8s = np.zeros(num_cells, np.uint8)
        self._old: UInt8s = np.zeros(num_cells, np.uint8)
        self._num_new = 0
        # By floor(log2(depth + 1)): pages seen, and those that were seen again.
        self._first: Int64s = np.zeros(_NUM_DEPTHS, np.int64)
        self._again: Int64s = np.zeros(_NUM_DEPTHS, np.int64)

    @property
    def num_bytes(self) -> int:
        """Bytes of the filter."""
        return self._young.nbytes + self._old.nbytes

    def see(self, keys: UInt8s, first_page: int) -> None:
        """Note that one request has these pages.

        Args:
            keys: uint8 [n, 16], different page keys.
            first_page: pages of the prompt before the first of them.
        """
        if not len(keys):
            return
        cells = self._cells(keys)
        before = self._count(cells)
        num_new = int(np.count_nonzero(self._young[cells].min(axis=1) == 0))
        # In the young generation also what only the old one knows: used is young.
        now = np.minimum(before + 1, 2).astype(np.uint8)
        np.maximum.at(self._young, cells, now[:, None])
        depths = _depths(first_page, len(keys))
        self._first += np.bincount(depths[before == 0], minlength=_NUM_DEPTHS)
        self._again += np.bincount(depths[before == 1], minlength=_NUM_DEPTHS)
        self._num_new += num_new
        if self._num_new >= self._capacity_pages:
            self._young, self._old = self._old, self._young
            self._young[:] = 0
            self._num_new = 0
            # What was long ago counts half, and so on.
            self._first //= 2
            self._again //= 2

    @property
    def num_seen(self) -> int:
        """Different pages seen; those of former generations count less and less."""
        return int(self._first.sum())

    @property
    def num_again(self) -> int:
        """Pages that a second request had, counted likewise."""
        return int(self._again.sum())

    def count(self, keys: UInt8s) -> UInt8s:
        """Return for each page 0, 1, or 2 for two or more sightings."""
        return self._count(self._cells(keys))

    def reuse_rates(self, first_page: int, num_pages: int) -> npt.NDArray[np.float64]:
        """Return for pages at these depths the share of their like seen again."""
        rates = self._again / np.maximum(self._first, 1)
        found: npt.NDArray[np.float64] = rates[_depths(first_page, num_pages)]
        return found

    def clear(self) -> None:
        """Forget every sighting."""
        for array in (self._young, self._old, self._first, self._again):
            array[:] = 0
        self._num_new = 0

    def _cells(self, keys: UInt8s) -> npt.NDArray[np.intp]:
        """Return the cells of each key, [n, hashes]: double hashing of its halves."""
        halves = np.ascontiguousarray(keys).view(np.uint64)
        steps = np.arange(_NUM_HASHES, dtype=np.uint64)
        # Odd, so that the steps of a key differ; sums wrap, which is as good.
        hashes = halves[:, :1] + steps * (halves[:, 1:] | np.uint64(1))
        return (hashes % np.uint64(len(self._young))).astype(np.intp)

    def _count(self, cells: npt.NDArray[np.intp]) -> UInt8s:
        counts: UInt8s = np.maximum(
            self._young[cells].min(axis=1), self._old[cells].min(axis=1)
        )
        return counts


def _depths(first_page: int, num_pages: int) -> Int64s:
    """Return floor(log2(depth + 1)) of pages, bounded."""
    places = np.arange(first_page + 1, first_page + num_pages + 1)
    depths: Int64s = np.log2(places).astype(np.int64)
    np.minimum(depths, _NUM_DEPTHS - 1, out=depths)
    return depths
