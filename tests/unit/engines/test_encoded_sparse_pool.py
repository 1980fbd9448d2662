"""Encoded pages of which tokens are dropped: what is kept comes up as from whole ones.

Whatever is kept of a page, its tokens are those that the reference decodes, the bytes
charged are those of what had to be read, and nothing else is written.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from sgl_tiered_kernels.kv_codec import reference  # noqa: E402

from sgl_tiered.core.encoded import encoded_layout, kept_bytes  # noqa: E402
from sgl_tiered.core.ids import Encoding  # noqa: E402
from sgl_tiered.core.kept import KeptLayout  # noqa: E402
from sgl_tiered.core.layout import PageLayout  # noqa: E402
from sgl_tiered.engines.device.encoded_pools import EncodedCpuPool  # noqa: E402
from sgl_tiered.engines.device.encoded_sparse_pool import EncodedSparsePool  # noqa: E402
from sgl_tiered.engines.device.encoding_errors import SAMPLE_EVERY  # noqa: E402
from sgl_tiered.sparse.rows import RowBinding  # noqa: E402

LAYERS, TOKENS, HEADS, DIM, PAGES, GROUP = 2, 16, 2, 16, 6, 8
ENCODINGS = [Encoding.FP8, Encoding.INT8, Encoding.INT4]
RAW = PageLayout(LAYERS, TOKENS, HEADS * DIM * 2)


def encoded(encoding, tokens=TOKENS, group=GROUP):
    raw = PageLayout(LAYERS, tokens, RAW.token_bytes)
    return encoded_layout(raw, encoding, HEADS, DIM, key_group=group)


def made(encoding, *, stored=0):
    """Return a device pool and SGLang's, of numbers whose channels differ in size."""
    num_rows = PAGES * LAYERS * TOKENS
    torch.manual_seed(3)
    sizes = torch.linspace(0.1, 8.0, DIM)
    both = (torch.randn(2, num_rows + 1, HEADS, DIM) * sizes).to(torch.bfloat16)
    pool = SimpleNamespace(
        binding=RowBinding(LAYERS, 3 * PAGES, TOKENS, num_rows),
        k_buffer=[both[0]] * LAYERS,
        v_buffer=[both[1]] * LAYERS,
    )
    whole = layout = encoded(encoding)
    if stored:
        inner = encoded(encoding, stored, stored)
        layout = KeptLayout(LAYERS, TOKENS, RAW.token_bytes, inner)
    return EncodedSparsePool(pool, layout, whole), pool


def bits(pool):
    """Return keys and values of all rows of the device as numbers, copied."""
    return [b[0].view(torch.int16).numpy().view(np.uint16).copy() for b in pool]


def state(pool):
    return bits((pool.k_buffer, pool.v_buffer))


def stored_pages(device, pool, numbers):
    """Store some pages from scattered rows; return the region and its rows."""
    binding = pool.binding
    binding.bind(np.array([1, 2, 3]))
    binding.release(np.array([2]))
    binding.bind(numbers)
    region = np.full((5, device.layout.slot_bytes), 0xEE, np.uint8)
    rows = np.array([4, 0, 2])[: len(numbers)]
    device.store_pages(region, rows, numbers, device.mark())
    assert (region[[1, 3]] == 0xEE).all()
    return region, rows


KEPT = {
    "none": [],
    "all": list(range(2 * TOKENS)),
    "one": [5],
    "the last one": [2 * TOKENS - 1],
    "one of each group": [3, GROUP, TOKENS + 1, TOKENS + GROUP + 7],
    "a group and one more": [*range(GROUP, 2 * GROUP), TOKENS + 2],
    "one page only": list(range(TOKENS, 2 * TOKENS, 3)),
}


@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_kept_tokens_are_those_of_the_reference(encoding, kept):
    """Bit for bit, and no other row of the device changes; layers keep other ones."""
    device, pool = made(encoding)
    first = np.array([7, 8])
    region, rows = stored_pages(device, pool, first)
    pool.binding.release(first)
    pages = np.array([9, 4])
    # The second layer keeps what the first one drops.
    sets = [np.array(kept, np.int64), np.setdiff1d(np.arange(2 * TOKENS), kept)]
    pool.binding.bind_kept(pages, sets)
    table = pool.binding.table
    expected = state(pool)
    for layer, tokens in enumerate(sets):
        for place, token in zip(tokens // TOKENS, tokens % TOKENS, strict=True):
            found = reference.decode_page(device.layout, layer, region, rows[place])
            there = table[layer, pages[place] * TOKENS + token]
            for part, floats in zip(expected, found, strict=True):
                numbers = reference.float_as_rows(floats[token], np.uint16)
                part[there] = numbers.reshape(HEADS, DIM)
    for layer in range(LAYERS):
        device.load_layer(layer, region, rows, pages, by_waiter=layer == 1)
    for part, wanted in zip(state(pool), expected, strict=True):
        np.testing.assert_array_equal(part, wanted)


def test_scattered_pages_are_encoded_as_dense_ones():
    """The bytes are those of the pool without sparse KV."""
    device, pool = made(Encoding.INT4)
    pages = np.array([7, 8, 5])
    region, rows = stored_pages(device, pool, pages)
    dense = SimpleNamespace(k_buffer=[], v_buffer=[])
    slots = pool.binding.slots(pages)
    for layer in range(LAYERS):
        there = torch.from_numpy(pool.binding.table[layer, slots]).long()
        dense.k_buffer.append(pool.k_buffer[layer][there].clone())
        dense.v_buffer.append(pool.v_buffer[layer][there].clone())
    other = np.full_like(region, 0xEE)
    EncodedCpuPool(dense, device.layout).store_pages(other, rows, np.arange(3), None)
    np.testing.assert_array_equal(region, other)


def touched(layout, region_row, layer, tokens):
    """Count the bytes of an encoded page of which the reference's result depends.

    Found by turning each byte over, one at a time, and decoding anew. No number may be
    zero, which is zero whatever its scale.
    """
    before = reference.decode_page(layout, layer, region_row, 0)
    count = 0
    begin = layout.key_offset(layer)
    for at in range(begin, begin + layout.layer_page_bytes):
        changed = region_row.copy()
        changed[0, at] ^= 0xFF
        after = reference.decode_page(layout, layer, changed, 0)
        count += any(
            not np.array_equal(was[tokens], now[tokens], equal_nan=True)
            for was, now in zip(before, after, strict=True)
        )
    return count


@pytest.mark.parametrize("tokens", [[], [4], [0, 7], [7, 8]], ids=str)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_bytes_charged_are_those_that_matter(encoding, tokens):
    """As many as there are bytes whose change would change what is loaded."""
    layout = encoded_layout(PageLayout(2, TOKENS, 32), encoding, 1, 16, key_group=GROUP)
    kept = np.zeros((1, 1, TOKENS), np.bool_)
    kept[0, 0, tokens] = True
    # As codes, scales and zeros alike.
    page = np.full((1, layout.page_bytes), 0x41, np.uint8)
    assert kept_bytes(layout, kept).tolist() == [touched(layout, page, 1, tokens)]


@given(seed=st.integers(0, 10_000), share=st.floats(0, 1))
def test_bytes_charged_lie_between_tokens_and_pages(seed, share):
    """All that is kept is paid for, nothing twice, and a whole page costs a page."""
    rng = np.random.default_rng(seed)
    layout = encoded(ENCODINGS[seed % 3], group=(4, 8, 16)[seed % 3])
    kept = rng.random((LAYERS, 3, TOKENS)) < share
    charged = kept_bytes(layout, kept)
    single = kept.sum(axis=(0, 2)) * layout.single_token_bytes
    assert (charged >= single).all()
    assert (charged <= layout.page_bytes).all()
    assert (charged == layout.page_bytes).tolist() == kept.all(axis=(0, 2)).tolist()
    # A token more never costs less, and at most itself and its group's scales.
    more = kept.copy()
    more[rng.integers(LAYERS), :, rng.integers(TOKENS)] = True
    extra = kept_bytes(layout, more) - charged
    assert (extra >= 0).all()
    assert (extra <= layout.single_token_bytes + layout.shared_bytes).all()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_load_is_charged_for_what_it_keeps(encoding):
    """By page, and as the planner expects it where a half of each page is kept."""
    device, pool = made(encoding)
    layout, pages = device.layout, np.array([2, 5])
    halves = np.arange(0, 2 * TOKENS, 2)
    pool.binding.bind_kept(pages, [halves] * LAYERS)
    found = device.load_bytes(pages)
    assert found.tolist() == [found[0]] * 2
    assert found[0] == pytest.approx(device.share_of(0.5) * layout.page_bytes)
    assert layout.page_bytes / 2 < found[0] < layout.page_bytes
    assert device.share_of(1.0) == 1.0
    assert device.whole_bytes == layout.page_bytes


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_choice_of_each_page_goes_down_and_comes_up(encoding):
    """Other tokens in each layer; a row in the tiers is as small as they are few."""
    count = 8
    device, pool = made(encoding, stored=count)
    binding, layout = pool.binding, device.layout
    assert layout.page_bytes < device.whole_bytes
    pages, rows = np.array([7, 8]), np.array([1, 0])
    binding.bind(pages)
    rng = np.random.default_rng(0)
    order = rng.permuted(np.tile(np.arange(TOKENS), (LAYERS, 2, 1)), axis=2)
    kept = (order < count).reshape(LAYERS, -1)
    before, slots = state(pool), binding.slots(pages)
    was = [[part[binding.table[n, slots[kept[n]]]] for part in before] for n in (0, 1)]
    region = np.full((3, layout.slot_bytes), 0xEE, np.uint8)
    with pytest.raises(ValueError, match="not said"):
        device.store_pages(region, rows, pages, None)
    assert (region == 0xEE).all()
    device.choose(pages, kept)
    device.store_pages(region, rows, pages, None)
    assert (region[:, layout.page_bytes :] == 0xEE).all()
    binding.release(pages)
    back = np.array([3, 9])
    binding.bind_kept(back, [np.flatnonzero(layer) for layer in kept])
    assert device.load_bytes(back).tolist() == [layout.page_bytes] * 2
    slots = binding.slots(back)
    for layer in range(LAYERS):
        for part in (pool.k_buffer[0], pool.v_buffer[0]):
            part[torch.from_numpy(binding.table[layer, slots[kept[layer]]]).long()] = 0
        device.load_layer(layer, region, rows, back)
        places = binding.table[layer, slots[kept[layer]]]
        for part, wanted in zip(state(pool), was[layer], strict=True):
            now, old = (reference.rows_as_float(x) for x in (part[places], wanted))
            error = np.sqrt(np.square(now - old).sum() / np.square(old).sum())
            assert 0 < error < 0.25
    whole = np.array([1])
    binding.bind(whole)
    with pytest.raises(ValueError, match="other tokens"):
        device.load_layer(0, region, rows[:1], whole)


def test_errors_are_sampled_by_layer():
    """The first page and one in so many; keys and values apart, and by layer."""
    device, pool = made(Encoding.INT4)
    assert device.errors.stats() == {"pages_sampled": 0}
    # Values of the first layer are small whole numbers: 16 steps or 11 hold them.
    pages = np.array([1])
    pool.binding.bind(pages)
    there = torch.from_numpy(pool.binding.table[0, pool.binding.slots(pages)]).long()
    pool.v_buffer[0][there] = 0.0
    region = np.zeros((1, device.layout.slot_bytes), np.uint8)
    for _ in range(SAMPLE_EVERY + 1):
        device.store_pages(region, np.zeros(1, np.int64), pages, None)
    told = device.errors.stats()
    assert told["pages_sampled"] == 2
    assert told["values_by_layer"][0] == 0.0
    others = [*told["keys_by_layer"], told["values_by_layer"][1]]
    assert all(0.005 < error < 0.25 for error in others)
