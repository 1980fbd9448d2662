"""Layer-wise KV on CUDA: what can be seen of it without a device, and with one."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sgl_tiered_kernels.page_copy.dma import CopyEngines  # noqa: E402

from sgl_tiered.core.layout import PageLayout  # noqa: E402
from sgl_tiered.engines.device.cuda_ops import as_byte_pages  # noqa: E402
from sgl_tiered.engines.sglang.layered import cuda  # noqa: E402
from sgl_tiered.engines.sglang.layered.cuda import (  # noqa: E402
    CudaLayerOps,
    CudaPlaces,
    cuda_copies,
)
from sgl_tiered.errors import ConfigError  # noqa: E402
from sgl_tiered.tiers.memory import MemoryRegion  # noqa: E402

NUM_LAYERS, NUM_PHYSICAL, PAGE_TOKENS, HEADS, DIM = 3, 12, 16, 2, 8
LAYOUT = PageLayout(NUM_LAYERS, PAGE_TOKENS, HEADS * DIM * 2)


def make_pool(device="cpu"):
    """Return buffers as a `LayeredPool` has them: one tensor under all layers."""
    torch.manual_seed(0)
    shape = (2, (NUM_PHYSICAL + 1) * PAGE_TOKENS, HEADS, DIM)
    both = torch.randn(shape).to(torch.bfloat16).to(device)
    return SimpleNamespace(
        k_buffer=[both[0]] * NUM_LAYERS, v_buffer=[both[1]] * NUM_LAYERS
    )


def layer_pages(pool, numbers):
    """Return layer-pages as they have to lie in a row: uint8 [n, layer_page_bytes]."""
    parts = [
        as_byte_pages(buffers[0], LAYOUT)[torch.from_numpy(numbers)].cpu()
        for buffers in (pool.k_buffer, pool.v_buffer)
    ]
    return torch.cat(parts, dim=1).numpy()


def part(region, layer, rows):
    begin = LAYOUT.key_offset(layer)
    return region[rows, begin : begin + LAYOUT.layer_page_bytes]


def host_ops(pool):
    def one(to, frm, num_bytes, stream):
        ctypes.memmove(to, frm, num_bytes)
        return 0

    return CudaLayerOps(pool, LAYOUT, None, engines=CopyEngines(None, one))


def test_a_layer_goes_down_and_comes_up_elsewhere():
    """The addresses of both directions, in the one tensor that all layers share."""
    pool, stream = make_pool(), SimpleNamespace(cuda_stream=0)
    ops = host_ops(pool)
    region = np.zeros((6, LAYOUT.slot_bytes), np.uint8)
    rows, pages, to = np.array([4, 0, 2]), np.array([1, 5, 12]), np.array([7, 3, 2])
    wanted = layer_pages(pool, pages)
    for layer in range(NUM_LAYERS):
        first = LAYOUT.key_offset(layer)
        ops.store_by_engines(stream, layer, region, rows, first, pages)
        np.testing.assert_array_equal(part(region, layer, rows), wanted)
        assert not region[[1, 3, 5]].any()
        ops.load_by_engines(stream, layer, region, rows, first, to)
        np.testing.assert_array_equal(layer_pages(pool, to), wanted)
        region[:] = 0


def test_layers_of_their_own_are_no_layered_pool():
    """Physical numbers mean nothing where each layer has a tensor."""
    pool = make_pool()
    pool.k_buffer = [buffer.clone() for buffer in pool.k_buffer]
    with pytest.raises(ValueError, match="share"):
        host_ops(pool)


class Planned:
    """What ``capacity.pool_class`` returns, as far as the places go."""

    def __init__(self):
        self.page_size, self.device = PAGE_TOKENS, "cpu"
        pool = make_pool()
        self.k_buffer, self.v_buffer = pool.k_buffer, pool.v_buffer
        self.written = []
        manager = SimpleNamespace(layer_written=self.written.append)
        self.driver = SimpleNamespace(manager=manager)


class OnCuda(CudaPlaces, Planned):
    """Made as ``cuda.py`` makes it."""


def test_new_tokens_go_where_the_backend_says_and_padding_to_page_0():
    """The pool reads nothing back from the device to find out."""
    pool = OnCuda()
    new = torch.ones(3, HEADS, DIM, dtype=torch.bfloat16)
    pool._store_kv_layer(1, torch.tensor([35, 0, 1]), new, new)
    assert torch.equal(pool.k_buffer[0][[3, 0, 1]], new)
    assert pool.written == []
    pool.write_slots = lambda layer: torch.tensor([100 + layer, 50])
    pool._store_kv_layer(2, torch.tensor([35, 16, 0]), 2 * new, 3 * new)
    assert torch.equal(pool.k_buffer[0][[102, 50, 0]], 2 * new)
    assert torch.equal(pool.v_buffer[0][[102, 50, 0]], 3 * new)
    assert pool.written == [2]


def test_the_host_region_is_pinned_or_ordinary(monkeypatch, caplog):
    """Where CUDA cannot pin so much, pageable memory and the host thread serve."""
    pool, pinned = OnCuda(), []

    def register(address, num_bytes):
        pinned.append((address, num_bytes))
        return lambda: pinned.remove((address, num_bytes))

    def refuse(address, num_bytes):
        raise ConfigError("--tiered-layerkv-host-size", "cannot be pinned", "give less")

    monkeypatch.setattr(cuda, "cuda_register", lambda setting, device: register)
    region = pool._host_region(2, 4096)
    assert pinned == [(region.array.ctypes.data, 2 * 4096)]
    region.close()
    assert pinned == []
    assert not caplog.records
    monkeypatch.setattr(cuda, "cuda_register", lambda setting, device: refuse)
    region = pool._host_region(2, 4096)
    assert region.array.shape == (2, 4096)
    region.close()
    (record,) = caplog.records
    assert "--tiered-layerkv-host-size: cannot be pinned" in record.getMessage()
    assert pool.pinning_refused_bytes == 2 * 4096


def test_the_hooks_answer_as_before_where_nothing_is_planned(monkeypatch):
    """And for kinds of pool that layers are not placed in."""
    kinds, registered = [], []
    ours = SimpleNamespace(register_layered_flashinfer=lambda: registered.append(1))
    name = "sgl_tiered.engines.sglang.layered.flashinfer"
    monkeypatch.setitem(sys.modules, name, ours)

    def original(platform, *, kind):
        kinds.append(kind)

    monkeypatch.setattr(cuda, "pool_class", lambda: None)
    monkeypatch.setattr(cuda, "allocator_class", lambda: None)
    assert cuda._pool_class(original, "platform", kind="mha") is None
    assert cuda._allocator_class(lambda platform: int, "platform") is int
    monkeypatch.setattr(cuda, "pool_class", lambda: Planned)
    monkeypatch.setattr(cuda, "allocator_class", lambda: str)
    assert cuda._pool_class(original, "platform", kind="mla") is None
    assert registered == []
    assert kinds == ["mha", "mla"]
    made = cuda._pool_class(original, "platform", kind="mha")
    assert made.__mro__[1:3] == (CudaPlaces, Planned)
    # The backend that reads it comes in with it.
    assert registered == [1]
    assert cuda._allocator_class(lambda platform: int, "platform") is str


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({}, "flashinfer"),
        ({"attention_backend": None, "page_size": 16}, "flashinfer"),
        ({"attention_backend": "fa3"}, None),
        ({"decode_attention_backend": "fa3"}, None),
    ],
)
def test_flashinfer_is_chosen_where_nobody_has_chosen(tmp_path, given, chosen):
    """And only where layers are asked for."""
    asked = []

    def original(platform, server_args):
        asked.append(platform)

    args = {"_raw_input": given, "attention_backend": None}
    on = SimpleNamespace(tiered_layerkv="on", **args)
    off = SimpleNamespace(tiered_layerkv=None, **args)
    file = tmp_path / "tiered.toml"
    file.write_text('layerkv = "on"')
    by_file = SimpleNamespace(tiered_config=str(file), **args)
    for each in (on, off, by_file):
        cuda._defaults(original, "platform", each)
    assert on.attention_backend == by_file.attention_backend == chosen
    assert off.attention_backend is None
    assert asked == ["platform"] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("pinned", [True, False])
def test_layers_survive_the_device(pinned):
    """Down from work that is queued, and up before work that is, bit for bit."""
    pool = make_pool("cuda")
    memory = MemoryRegion(8, LAYOUT.slot_bytes, register=_register if pinned else None)
    pool.region = memory
    copier = cuda_copies(pool, LAYOUT, None).copier
    rows, pages = np.array([4, 0, 2]), np.array([1, 5, 12], np.int32)
    halves = (np.array([7, 3, 2], np.int32), np.array([8, 4, 9], np.int32))
    index = torch.from_numpy(pages.astype(np.int64)).cuda()
    keys = as_byte_pages(pool.k_buffer[0], LAYOUT)
    values = as_byte_pages(pool.v_buffer[0], LAYOUT)
    wanted = []
    for layer in range(NUM_LAYERS):
        torch.cuda._sleep(20_000_000)
        keys[index], values[index] = 3 * layer + 1, 3 * layer + 2
        copier.to_host(layer, pages, rows, copier.mark())
        wanted.append(layer_pages(pool, pages.astype(np.int64)))
        np.testing.assert_array_equal(part(memory.array, layer, rows), wanted[-1])
    read = []
    for layer in range(NUM_LAYERS):
        half = halves[layer % 2]
        arrival = copier.to_device(layer, rows, half, copier.mark())
        arrival.order()
        where = torch.from_numpy(half.astype(np.int64)).cuda()
        torch.cuda._sleep(20_000_000)
        read.append(torch.cat([keys[where], values[where]], dim=1))
    for layer in range(NUM_LAYERS):
        np.testing.assert_array_equal(read[layer].cpu().numpy(), wanted[layer])
    copier.close()
    memory.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("pinned", [True, False])
def test_pages_of_tiers_survive_the_device(pinned):
    """Down from device and memory alike, and up to other places, bit for bit."""
    pool = make_pool("cuda")
    ours = MemoryRegion(8, LAYOUT.slot_bytes, register=_register)
    tier = MemoryRegion(4, LAYOUT.slot_bytes, register=_register if pinned else None)
    pool.region = ours
    copies = cuda_copies(pool, LAYOUT, None)
    ours.array[:] = np.random.default_rng(0).integers(0, 256, ours.array.shape)
    transfers = np.full((NUM_LAYERS, 8), -1, np.int32)
    transfers[0, 1], transfers[1, 3], transfers[2, 1] = 5, 7, 2
    device = copies.device_pool(SimpleNamespace(transfers=transfers))
    pages, rows = np.array([1, 3]), np.array([2, 0])
    noise = make_pool("cpu")
    torch.cuda._sleep(20_000_000)
    pool.k_buffer[0].copy_(noise.k_buffer[0], non_blocking=True)
    pool.v_buffer[0].copy_(noise.v_buffer[0], non_blocking=True)
    device.store_pages(tier.array, rows, pages, device.mark())

    def lie_right():
        for layer in range(NUM_LAYERS):
            for row, page in zip(rows, pages, strict=True):
                place = transfers[layer, page]
                held = (
                    layer_pages(pool, np.array([place]))[0]
                    if place >= 0
                    else part(ours.array, layer, page)
                )
                np.testing.assert_array_equal(part(tier.array, layer, row), held)

    lie_right()
    transfers[:, pages] = [[9, -1], [-1, 8], [3, 11]]
    ours.array[:] = 0
    mark = device.mark()
    for layer in range(NUM_LAYERS):
        arrival = device.load_layer(layer, tier.array, rows, pages, after=mark)
    arrival.finish()
    lie_right()
    device.close()
    copies.close()
    ours.close()
    tier.close()


def _register(address, num_bytes):
    cudart = torch.cuda.cudart()
    assert int(cudart.cudaHostRegister(address, num_bytes, 0)) == 0
    return lambda: cudart.cudaHostUnregister(address)
