"""Addresses of blocks: what is packed comes apart again, and nothing runs over."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_tiered.core.addresses import (
    MAX_GENERATION,
    MAX_INSTANCE,
    MAX_SLOT,
    generations_of,
    instances_of,
    mediums_of,
    pack,
    slots_of,
    unpack,
)
from sgl_tiered.core.ids import TierId

blocks = st.tuples(st.integers(0, MAX_GENERATION), st.integers(0, MAX_SLOT))


@given(
    st.integers(0, MAX_INSTANCE),
    st.sampled_from(TierId),
    st.lists(blocks, max_size=20),
)
def test_what_is_packed_comes_apart(
    instance: int, medium: TierId, parts: list[tuple[int, int]]
) -> None:
    """Every field comes back whole, and the number is what the bits say."""
    generations = np.array([g for g, _ in parts], np.uint16)
    slots = np.array([s for _, s in parts], np.int64)
    addresses = pack(instance, medium, generations, slots)
    assert addresses.dtype == np.uint64
    expected = [
        ((instance * 16 + medium) * 4096 + g) * 2**32 + slot for g, slot in parts
    ]
    assert addresses.tolist() == expected
    whole = unpack(addresses)
    assert whole.instances.tolist() == [instance] * len(parts)
    assert whole.mediums.tolist() == [medium] * len(parts)
    assert whole.generations.tolist() == generations.tolist()
    assert whole.slots.tolist() == slots.tolist()


def test_the_highest_address_has_all_bits() -> None:
    """No field borrows from its neighbour at its limit."""
    # Medium has room for 16, of which TierId uses the first.
    last = pack(MAX_INSTANCE, TierId.PEER, MAX_GENERATION, [MAX_SLOT])
    assert instances_of(last).tolist() == [MAX_INSTANCE]
    assert mediums_of(last).tolist() == [TierId.PEER]
    assert generations_of(last).tolist() == [MAX_GENERATION]
    assert slots_of(last).tolist() == [MAX_SLOT]


def test_an_instance_out_of_range_is_a_broken_invariant() -> None:
    """It would otherwise be cut, and name another instance."""
    with pytest.raises(AssertionError, match="65536"):
        pack(MAX_INSTANCE + 1, TierId.HOST, 0, [0])
