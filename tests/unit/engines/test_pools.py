"""SGLang's KV pool as bytes: pages survive the way down and up, layer by layer."""

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sgl_tiered.engines.device.pools import CpuDevicePool, make_device_pool, page_layout  # noqa: E402
from sgl_tiered.errors import EngineCompatibilityError  # noqa: E402

NUM_LAYERS, HEADS, HEAD_DIM = 3, 2, 8
NUM_PAGES = 10


def fake_pool(page_tokens, *, spare=0, dtype=torch.bfloat16):
    """Return buffers as SGLang's MHA pool has them: [slots, heads, head_dim]."""
    torch.manual_seed(page_tokens)
    slots = NUM_PAGES * page_tokens + spare

    def buffers():
        shape = (slots, HEADS, HEAD_DIM)
        return [torch.randn(shape).to(dtype) for _ in range(NUM_LAYERS)]

    return SimpleNamespace(k_buffer=buffers(), v_buffer=buffers())


def region(layout, num_rows):
    return np.full((num_rows, layout.slot_bytes), 0xEE, np.uint8)


def copies(pool):
    return [buffer.clone() for buffer in pool.k_buffer + pool.v_buffer]


@pytest.mark.parametrize("page_tokens", [1, 16, 64])
def test_layout_is_read_off_the_pool(page_tokens):
    """Layers and bytes of a token follow from the buffers."""
    layout = page_layout(fake_pool(page_tokens), page_tokens)
    assert layout.num_layers == NUM_LAYERS
    assert layout.page_tokens == page_tokens
    assert layout.token_bytes == HEADS * HEAD_DIM * 2


@pytest.mark.parametrize("spare", [0, 1])
@pytest.mark.parametrize("page_tokens", [1, 16, 64])
def test_pages_survive_host_and_back(page_tokens, spare):
    """What was stored comes back bit for bit, elsewhere, and nothing else moves."""
    pool = fake_pool(page_tokens, spare=spare)
    layout = page_layout(pool, page_tokens)
    device = make_device_pool(pool, layout, None)
    assert isinstance(device, CpuDevicePool)
    before = copies(pool)
    rows = np.array([4, 0, 2], np.int64)
    sources = np.array([1, 5, 9], np.int64)
    targets = np.array([7, 2, 3], np.int64)
    memory = region(layout, 6)
    device.store_pages(memory, rows, sources, device.mark())
    for after, old in zip(copies(pool), before, strict=True):
        assert torch.equal(after, old), "storing only reads the device"
    assert (memory[[1, 3, 5]] == 0xEE).all(), "other rows stay as they are"
    for layer in range(NUM_LAYERS):
        device.load_layer(layer, memory, rows, targets)
    others = np.setdiff1d(np.arange(NUM_PAGES), targets)
    for after, old in zip(copies(pool), before, strict=True):
        paged = after[: NUM_PAGES * page_tokens].view(NUM_PAGES, page_tokens, -1)
        former = old[: NUM_PAGES * page_tokens].view(NUM_PAGES, page_tokens, -1)
        assert torch.equal(paged[targets], former[sources])
        assert torch.equal(paged[others], former[others])
        end = NUM_PAGES * page_tokens
        assert torch.equal(after[end:], old[end:])


def test_one_layer_at_a_time():
    """Loading a layer leaves every other layer as it was."""
    pool = fake_pool(16)
    layout = page_layout(pool, 16)
    device = make_device_pool(pool, layout, None)
    memory = region(layout, 1)
    row, page = np.array([0], np.int64), np.array([3], np.int64)
    before = copies(pool)
    device.load_layer(1, memory, row, page)
    changed = [
        not torch.equal(after.view(torch.uint8), old.view(torch.uint8))
        for after, old in zip(copies(pool), before, strict=True)
    ]
    assert changed == [False, True, False, False, True, False]


def test_a_page_in_memory_is_layer_by_layer_keys_then_values():
    """Each layer's keys and values lie at the offsets that the layout says."""
    pool = fake_pool(16)
    layout = page_layout(pool, 16)
    memory = region(layout, 1)
    device = make_device_pool(pool, layout, None)
    device.store_pages(memory, np.array([0]), np.array([2]), device.mark())
    for layer in range(NUM_LAYERS):
        for offset, buffers in (
            (layout.key_offset(layer), pool.k_buffer),
            (layout.value_offset(layer), pool.v_buffer),
        ):
            expected = buffers[layer][32:48].contiguous().view(torch.uint8).numpy()
            part = memory[0, offset : offset + layout.part_bytes]
            assert np.array_equal(part, expected.reshape(-1))


def test_other_shapes_are_refused():
    """A pool that is not rows of tokens, or of uneven keys and values, is refused."""
    flat = fake_pool(16)
    flat.k_buffer = [buffer.view(-1) for buffer in flat.k_buffer]
    with pytest.raises(EngineCompatibilityError, match="laid out"):
        page_layout(flat, 16)
    strided = fake_pool(16)
    strided.v_buffer = [buffer.transpose(1, 2) for buffer in strided.v_buffer]
    with pytest.raises(EngineCompatibilityError, match="laid out"):
        page_layout(strided, 16)
    uneven = fake_pool(16)
    uneven.v_buffer = [buffer[:, :1].contiguous() for buffer in uneven.v_buffer]
    with pytest.raises(EngineCompatibilityError, match="differ in size"):
        page_layout(uneven, 16)


def test_other_devices_are_refused():
    """Devices whose memory we cannot copy are refused by name."""
    pool = fake_pool(16)
    layout = page_layout(pool, 16)
    pool.k_buffer = [buffer.to("meta") for buffer in pool.k_buffer]
    with pytest.raises(EngineCompatibilityError, match="'meta'"):
        make_device_pool(pool, layout, None)
