"""Slots with addresses: what growth changes, and what it does not."""

from __future__ import annotations

import numpy as np

from sgl_tiered.core.ids import TierId
from sgl_tiered.pool.block_slots import BlockSlots


def test_growth_within_the_room_that_there_is_copies_nothing() -> None:
    """A slot is had, and its address known, once it is there."""
    slots = BlockSlots(2, 3, TierId.HOST, most=5)
    arrays = slots.names, slots.entry_at, slots.holds, slots.dying, slots._is_free
    whole = BlockSlots(5, 3, TierId.HOST)
    assert (slots.capacity, slots.free_slots, slots.used_slots) == (2, 2, 0)
    assert slots.alloc(3) is None
    assert slots.reserve(np.arange(5)).tolist() == [True, True, False, False, False]
    late = slots.names[2:].copy()
    assert not slots.are_in_use(np.arange(2, 5), late)
    slots.grow(4)
    assert slots.alloc_addresses(2) is not None
    assert slots.are_in_use(np.array([2, 3]), late[:2])
    slots.grow(5)
    now = slots.names, slots.entry_at, slots.holds, slots.dying, slots._is_free
    assert all(one is other for one, other in zip(arrays, now, strict=True))
    assert (slots.names == whole.names).all()
    slots.grow(7)
    assert (slots.capacity, slots.free_slots, len(slots.names)) == (7, 3, 7)
    assert slots.entry_at.tolist() == [-1] * 7
