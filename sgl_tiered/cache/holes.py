"""Which pages of a prompt an offload may copy, where the device lacks parts of some."""

from __future__ import annotations

import numpy as np

from sgl_tiered.cache.table import CacheTable
from sgl_tiered.core.plans import Bools, Int32s, Int64s

__all__ = ["lacking_copies"]


def lacking_copies(
    table: CacheTable, known: Int32s, num_new: int, leave: Bools | None
) -> Int64s:
    """Return the positions of pages that have no copy in the first tier, ascending.

    Args:
        table: of the cache.
        known: int32, rows of the prompt's leading pages.
        num_new: pages behind them that have no row.
        leave: bool [len(known) + num_new], pages that cannot be copied now. Where one
            of them is in no tier at all, nothing behind it could be found again, so
            that is left as well. None for no such page.
    """
    missing = np.flatnonzero(table.entry_of[0].take(known) < 0)
    if num_new:
        new = np.arange(len(known), len(known) + num_new)
        missing = np.concatenate([missing, new])
    if leave is None or not leave[missing].any():
        return missing
    nowhere = np.ones(len(leave), np.bool_)
    nowhere[: len(known)] = table.copies.take(known) == 0
    holes = np.flatnonzero(leave & nowhere)
    if len(holes):
        missing = missing[missing < holes[0]]
    return missing[~leave[missing]]
