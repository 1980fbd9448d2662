"""Pieces of a transfer against copying element by element, for any partition."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_tiered.errors import ConfigError
from sgl_tiered.pool.layouts import KVShape, MemoryForm, Shard, Way, batches, shares

NUM_SLOTS = 5


@dataclass(frozen=True)
class Side:
    """The ranks of an instance, their memories and the pages meant."""

    shards: tuple[Shard, ...]
    forms: tuple[MemoryForm, ...]
    slots: np.ndarray


@st.composite
def shapes(draw: st.DrawFn) -> KVShape:
    """A small model whose heads go into 1, 2 or 4 ranks."""
    return KVShape(
        draw(st.integers(2, 5)),
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from([1, 3])),
        draw(st.integers(1, 3)),
    )


def sides(draw: st.DrawFn, shape: KVShape, way: Way, num_pages: int) -> Side:
    """One side: any partition, and the form that fits the way, or any other."""
    shards = Shard.split(
        shape, draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 2))
    )
    agg = draw(st.booleans()) or way is Way.BY_REQUEST_AGG
    padding = draw(st.integers(0, 4))
    forms = tuple(
        MemoryForm.aggregated(shape, s, s.layout(shape).page_bytes + padding)
        if agg
        else MemoryForm.discrete(shape, s, NUM_SLOTS)
        for s in shards
    )
    slots = draw(
        st.lists(
            st.integers(0, NUM_SLOTS - 1),
            min_size=num_pages,
            max_size=num_pages,
            unique=True,
        )
    )
    return Side(shards, forms, np.array(slots, np.int64))


def element(shape: KVShape, form: MemoryForm, *at: int) -> int:
    """Offset of a byte by the definition; ``at``: slot, layer, half, token, head, x."""
    slot, layer, half, token, head, x = at
    return (
        slot * form.slot_stride
        + (layer - form.shard.first_layer) * form.layer_stride
        + half * form.value_offset
        + token * form.token_stride
        + (head - form.shard.first_head) * shape.head_bytes
        + x
    )


def elements(shape: KVShape, shard: Shard) -> list[tuple[int, int, int, int, int]]:
    """Layer, half, token, head and byte of everything in one page of a rank."""
    grid = np.ndindex(
        shard.num_layers, 2, shape.page_tokens, shard.num_heads, shape.head_bytes
    )
    return [
        (i + shard.first_layer, half, token, head + shard.first_head, x)
        for i, half, token, head, x in grid
    ]


def memory(shape: KVShape, form: MemoryForm) -> np.ndarray:
    """A region of a rank that is large enough, all -1."""
    page = form.shard.layout(shape).page_bytes
    return np.full(NUM_SLOTS * max(page, form.slot_stride), -1, np.int64)


@given(st.data(), shapes(), st.sampled_from(Way), st.integers(1, 3))
def test_every_element_arrives_and_nothing_else_changes(
    data: st.DataObject, shape: KVShape, way: Way, num_pages: int
) -> None:
    """Whatever the partitions and forms: each rank gets its part of each page, once."""
    source = sides(data.draw, shape, way, num_pages)
    target = sides(data.draw, shape, way, num_pages)
    names: dict[tuple[int, ...], int] = {}
    memories = []
    for form in source.forms:
        region = memory(shape, form)
        for page, slot in enumerate(source.slots.tolist()):
            for at in elements(shape, form.shard):
                name = names.setdefault((page, *at), len(names))
                region[element(shape, form, slot, *at)] = name
        memories.append(region)
    arrived = [memory(shape, form) for form in target.forms]
    num_written = [np.zeros(len(region), np.int64) for region in arrived]
    for share in shares(source.shards, target.shards):
        found = batches(
            way,
            shape,
            source.forms[share.source],
            target.forms[share.target],
            share.part,
            source.slots,
            target.slots,
        )
        assert len(found) == (share.part.num_layers if way is Way.BY_LAYER else 1)
        for pieces in found:
            for a, b, n in zip(
                pieces.local, pieces.remote, pieces.lengths, strict=True
            ):
                arrived[share.target][b : b + n] = memories[share.source][a : a + n]
                num_written[share.target][b : b + n] += 1
    for form, region, counts in zip(target.forms, arrived, num_written, strict=True):
        expected = memory(shape, form)
        for page, slot in enumerate(target.slots.tolist()):
            for at in elements(shape, form.shard):
                expected[element(shape, form, slot, *at)] = names[(page, *at)]
        assert region.tolist() == expected.tolist()
        assert counts.tolist() == (expected >= 0).astype(int).tolist()


def test_number_of_pieces_is_that_of_the_paper() -> None:
    """2L per page by request, one per page aggregated, 2 per page and layer by layer.

    Neighbouring pages would be joined, so the pages here are apart.
    """
    shape = KVShape(num_layers=6, num_heads=4, head_bytes=64, page_tokens=16)
    (shard,) = Shard.split(shape, 1, 1)
    slots, others = np.array([0, 2, 4]), np.array([5, 1, 3])
    discrete = MemoryForm.discrete(shape, shard, 8)
    whole = MemoryForm.aggregated(shape, shard)
    (by_request,) = batches(
        Way.BY_REQUEST, shape, discrete, discrete, shard, slots, others
    )
    assert len(by_request) == 3 * 2 * 6
    by_layer = batches(Way.BY_LAYER, shape, discrete, discrete, shard, slots, others)
    assert [len(pieces) for pieces in by_layer] == [3 * 2] * 6
    (agg,) = batches(Way.BY_REQUEST_AGG, shape, whole, whole, shard, slots, others)
    assert agg.lengths.tolist() == [6 * 2 * 16 * 4 * 64] * 3


def test_neighbouring_pages_travel_as_one_piece() -> None:
    """Aggregated pages without gaps, in the same order on both sides: one range."""
    shape = KVShape(2, 2, 8, 4)
    (shard,) = Shard.split(shape, 1, 1)
    form = MemoryForm.aggregated(shape, shard)
    (pieces,) = batches(
        Way.BY_REQUEST_AGG, shape, form, form, shard, np.arange(3), np.arange(5, 8)
    )
    assert pieces.lengths.tolist() == [3 * form.slot_stride]


def test_copies_of_a_head_share_the_work() -> None:
    """One KV head on 4 ranks, sent to 4: each source sends to one target."""
    shape = KVShape(2, 1, 8, 4)
    ranks = Shard.split(shape, 4, 1)
    assert [(s.source, s.target) for s in shares(ranks, ranks)] == [
        (i, i) for i in range(4)
    ]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (KVShape(2, 2, 8, 32), "instance 7 has pages of 32 tokens and this one of 16"),
        (KVShape(2, 2, 4, 16), "another model or KV type"),
    ],
)
def test_unequal_pages_are_refused_in_one_sentence(other: KVShape, words: str) -> None:
    """The page size by its name, everything else as another model."""
    with pytest.raises(ConfigError, match=words):
        KVShape(2, 2, 8, 16).check_same(other, 7)


def test_heads_that_do_not_divide_are_refused() -> None:
    """Three ranks cannot share two heads."""
    with pytest.raises(ConfigError, match="2 heads"):
        Shard.split(KVShape(2, 2, 8, 16), 3, 1)
