"""Which pages were seen by one request, and which by two: a memory of fixed size.

Pages that no tier has leave no row behind, so "seen before" needs a memory of its own.
It is a counting Bloom filter over page keys in two generations: a page is remembered
while one to two times ``capacity_pages`` others are seen, in 16 bytes per page of the
capacity, and one page in ten thousand at most counts a sighting too many.

It also tells whether prompts come again at all, for all those who would rather not copy
what nobody asks for twice (write policy ``auto``, disk admission ``auto``). The law, in
pages: there is a credit of ``trust_pages`` at the start. A page that is seen for the
first time takes one off; a page that is seen for the second time, or that a tier has at
its first or second sight, puts ``WORTH`` on. What has been earned adds up to
``trust_pages`` or to what one prompt has earned, whichever is more. While anything is
left, pages come again. A prompt's own pages are counted before it is asked whether they
are to be copied.

- Traffic without reuse is copied for ``trust_pages`` and no longer: whoever asks gives
  the reuse distance that his tiers could have served.
- A single prompt that comes again is enough for copies to begin anew, and they go on
  while one new page in ``WORTH`` comes again; the prompt itself is copied as well, as
  its pages are seen for the second time. So a page is missed once at most for lack of
  a copy, whenever reuse begins and however large the tiers are.
- At most ``trust_pages + WORTH * (pages seen again)`` pages are copied at their first
  sight.

A third sight counts for nothing: a beginning that all prompts share says nothing of the
rest of them. Copies that the device makes unnecessary do count as reuse: the distance
grows with the load. So do the pages of a request that was retracted and runs again, and
those of several answers to one prompt (``n`` > 1). Nothing here reads a clock or draws
a number, so that ranks that are told of the same requests agree.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.plans import Int64s, UInt8s

__all__ = ["WORTH", "Sightings"]

WORTH = 50
"""New pages whose copies one page that comes again is worth. A copy takes 2 to 4 % of
the time in which its page is computed on a CPU, less on a GPU; on a disk fifty pages
written for one that is read is more wear than any medium should have."""
_CELLS_PER_BYTE = 4
_BYTES_PER_PAGE = 8
_NUM_HASHES = 6
"""With 32 cells and 6 hashes a full generation mistakes (1 - exp(-6/32))^6 = 0.003 % of
the new pages for known ones; the older generation may as well."""
_NUM_DEPTHS = 32


class Sightings:
    """Counts requests per page, up to two, and how often pages come again by depth.

    Args:
        capacity_pages: different pages that one generation holds.
        trust_pages: pages without reuse after which none is expected.
    """

    def __init__(self, capacity_pages: int, trust_pages: int = 0) -> None:
        self._capacity_pages = capacity_pages
        num_bytes = _BYTES_PER_PAGE * max(capacity_pages, _NUM_HASHES)
        # Four cells to a byte: 00 for never seen, 01 for once, 11 for twice.
        self._young: UInt8s = np.zeros(num_bytes, np.uint8)
        self._old: UInt8s = np.zeros(num_bytes, np.uint8)
        self._num_new = 0
        self.trust_pages = self.credit = trust_pages
        # By floor(log2(depth + 1)): pages seen, and those that were seen again.
        self._first: Int64s = np.zeros(_NUM_DEPTHS, np.int64)
        self._again: Int64s = np.zeros(_NUM_DEPTHS, np.int64)

    @property
    def num_bytes(self) -> int:
        """Bytes of the filter."""
        return self._young.nbytes + self._old.nbytes

    def see(self, keys: UInt8s, first_page: int, num_held: int = 0) -> None:
        """Note that one request has these pages.

        Args:
            keys: uint8 [n, 16], different page keys.
            first_page: pages of the prompt before the first of them.
            num_held: leading pages that a tier has: somebody had them before, if only
                a former process.
        """
        if not len(keys):
            return
        cells = self._cells(keys)
        before = self._count(cells)
        where, shifts = cells // _CELLS_PER_BYTE, cells % _CELLS_PER_BYTE * 2
        is_new = (np.bitwise_and.reduce(self._young[where] >> shifts, axis=1) & 1) == 0
        # In the young generation also what only the old one knows: used is young.
        codes = np.where(before > 0, 3, 1).astype(np.uint8)
        np.bitwise_or.at(self._young, where, codes[:, None] << shifts.astype(np.uint8))
        self._weigh(before, num_held)
        depths = _depths(first_page, len(keys))
        self._first += np.bincount(depths[before == 0], minlength=_NUM_DEPTHS)
        self._again += np.bincount(depths[before == 1], minlength=_NUM_DEPTHS)
        self._num_new += int(np.count_nonzero(is_new))
        if self._num_new >= self._capacity_pages:
            self._young, self._old = self._old, self._young
            self._young[:] = 0
            self._num_new = 0
            # What was long ago counts half, and so on.
            self._first //= 2
            self._again //= 2

    @property
    def comes_again(self) -> bool:
        """Whether pages that are new may be expected to be asked for again."""
        return self.credit > 0

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
        self.credit = self.trust_pages

    def _weigh(self, before: UInt8s, num_held: int) -> None:
        """Move the credit by one request's pages; ``before``: their sightings so far.

        A page's key stands for all that precedes it, so that behind the first page that
        is new all are, whatever the filter says.
        """
        is_known = before > 0
        is_known[:num_held] = True
        num_known = len(before) if is_known.all() else int(is_known.argmin())
        num_again = int(np.count_nonzero(before[:num_known] < 2))
        worth = WORTH * num_again
        # Many small earnings are bounded, one of a long prompt is not: it pays for as
        # much that is new as lies between two prompts like it.
        most = max(self.trust_pages, self.credit, worth)
        earned = min(self.credit + worth, most)
        self.credit = max(earned - (len(before) - num_known), 0)

    def _cells(self, keys: UInt8s) -> npt.NDArray[np.intp]:
        """Return the cells of each key, [n, hashes]: double hashing of its halves."""
        halves = np.ascontiguousarray(keys).view(np.uint64)
        steps = np.arange(_NUM_HASHES, dtype=np.uint64)
        # Odd, so that the steps of a key differ; sums wrap, which is as good.
        hashes = halves[:, :1] + steps * (halves[:, 1:] | np.uint64(1))
        num_cells = np.uint64(_CELLS_PER_BYTE * len(self._young))
        return (hashes % num_cells).astype(np.intp)

    def _count(self, cells: npt.NDArray[np.intp]) -> UInt8s:
        where, shifts = cells // _CELLS_PER_BYTE, cells % _CELLS_PER_BYTE * 2
        # A page has what all its cells have.
        young = np.bitwise_and.reduce(self._young[where] >> shifts, axis=1)
        old = np.bitwise_and.reduce(self._old[where] >> shifts, axis=1)
        codes = young | old
        counts: UInt8s = ((codes & 1) + (codes >> 1 & 1)).astype(np.uint8)
        return counts


def _depths(first_page: int, num_pages: int) -> Int64s:
    """Return floor(log2(depth + 1)) of pages, bounded."""
    places = np.arange(first_page + 1, first_page + num_pages + 1)
    depths: Int64s = np.log2(places).astype(np.int64)
    np.minimum(depths, _NUM_DEPTHS - 1, out=depths)
    return depths
