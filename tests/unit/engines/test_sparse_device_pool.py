"""Pages of which tokens are dropped, as bytes: what is kept goes up bit for bit."""

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sgl_tiered.core.layout import PageLayout  # noqa: E402
from sgl_tiered.engines.device.sparse_pool import SparseDevicePool  # noqa: E402
from sgl_tiered.sparse.rows import RowBinding  # noqa: E402

LAYERS, TOKENS, PAGES = 3, 4, 6


def made(heads):
    """Return a device pool, its pool, and a region of pages with random bytes."""
    dim, num_rows = 8, PAGES * LAYERS * TOKENS
    layout = PageLayout(LAYERS, TOKENS, heads * dim * 2)
    torch.manual_seed(heads)
    both = torch.randn(2, num_rows + 1, heads, dim).to(torch.bfloat16)
    pool = SimpleNamespace(
        binding=RowBinding(LAYERS, 3 * PAGES, TOKENS, num_rows),
        k_buffer=[both[0]] * LAYERS,
        v_buffer=[both[1]] * LAYERS,
    )
    rng = np.random.default_rng(heads)
    region = rng.integers(0, 256, (5, layout.slot_bytes)).astype(np.uint8)
    return SparseDevicePool(pool, layout), pool, region


def part(region, layout, row, layer, token):
    """Return the bytes of a token's keys and values in a page of the region."""
    at = token * layout.token_bytes
    offsets = (layout.key_offset(layer) + at, layout.value_offset(layer) + at)
    return [region[row, o : o + layout.token_bytes].tobytes() for o in offsets]


def on_device(pool, layer, page, token):
    """Return the bytes of a token's keys and values on the device; None: dropped."""
    row = int(pool.binding.table[layer, page * TOKENS + token])
    if row < 0:
        return None
    buffers = (pool.k_buffer[layer], pool.v_buffer[layer])
    return [b[row].contiguous().view(torch.uint8).numpy().tobytes() for b in buffers]


# Tokens of 3 heads do not divide a region's row, so they are copied one by one.
@pytest.mark.parametrize("heads", [2, 3])
@pytest.mark.parametrize("by_waiter", [False, True])
def test_kept_tokens_are_loaded_and_no_others(heads, by_waiter):
    """Each to its own row; rows of other pages stay as they are."""
    device, pool, region = made(heads)
    binding, layout = pool.binding, device.layout
    other = np.array([9])
    binding.bind(other)
    before = [on_device(pool, n, 9, t) for n in range(LAYERS) for t in range(TOKENS)]
    pages, rows = np.array([2, 17, 5]), np.array([4, 0, 2])
    rng = np.random.default_rng(1)
    kept = [np.flatnonzero(rng.random(3 * TOKENS) < 0.6) for _ in range(LAYERS)]
    binding.bind_kept(pages, kept)
    for layer in range(LAYERS):
        device.load_layer(layer, region, rows, pages, by_waiter=by_waiter)
    num_kept = 0
    for layer in range(LAYERS):
        for place, page in enumerate(pages.tolist()):
            for token in range(TOKENS):
                found = on_device(pool, layer, page, token)
                assert (found is not None) == (place * TOKENS + token in kept[layer])
                if found is not None:
                    assert found == part(region, layout, rows[place], layer, token)
                    num_kept += 1
    after = [on_device(pool, n, 9, t) for n in range(LAYERS) for t in range(TOKENS)]
    assert after == before
    assert device.load_bytes(pages).sum() == num_kept * 2 * layout.token_bytes


@pytest.mark.parametrize("heads", [2, 3])
def test_whole_pages_go_down_and_come_up(heads):
    """Wherever their rows lie, and whatever was freed in between."""
    device, pool, region = made(heads)
    binding, layout = pool.binding, device.layout
    binding.bind(np.array([1, 2, 3]))
    binding.release(np.array([2]))
    pages, rows = np.array([7, 8]), np.array([3, 1])
    binding.bind(pages)
    untouched = region[[0, 2, 4]].copy()
    device.store_pages(region, rows, pages, device.mark())
    assert (region[[0, 2, 4]] == untouched).all()
    for place, page in enumerate(pages.tolist()):
        for layer in range(LAYERS):
            for token in range(TOKENS):
                wanted = on_device(pool, layer, page, token)
                assert part(region, layout, rows[place], layer, token) == wanted
    assert device.load_bytes(pages).tolist() == [layout.page_bytes] * 2


def test_a_sparse_page_is_not_stored_as_a_whole_one():
    """A slip of the cache fails the copy; nothing is written."""
    device, pool, region = made(2)
    pool.binding.bind(np.array([1]))
    kept = [np.arange(TOKENS)] * (LAYERS - 1) + [np.arange(TOKENS - 1)]
    pool.binding.bind_kept(np.array([2]), kept)
    before = region.copy()
    with pytest.raises(ValueError, match="sparse"):
        device.store_pages(region, np.array([0, 1]), np.array([1, 2]), None)
    assert (region == before).all()
