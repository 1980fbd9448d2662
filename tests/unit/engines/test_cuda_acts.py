"""Activations on CUDA: what can be seen of them without a device, and with one."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sgl_tiered_kernels.kv_gen import KVProjection, Rotary  # noqa: E402
from sgl_tiered_kernels.kv_gen.reference import rebuild_reference  # noqa: E402
from sgl_tiered_kernels.page_copy.dma import CopyEngines  # noqa: E402

from sgl_tiered.core.layout import PageLayout  # noqa: E402
from sgl_tiered.engines.device.device_rows import DeviceRows  # noqa: E402
from sgl_tiered.engines.sglang.layered.activations.capture import (  # noqa: E402
    hook_captures,
    rows_of_pages,
)
from sgl_tiered.engines.sglang.layered.activations.cuda import (  # noqa: E402
    CudaActOps,
    act_layout,
)
from sgl_tiered.engines.sglang.layered.cuda import cuda_copies  # noqa: E402
from sgl_tiered.errors import EngineCompatibilityError  # noqa: E402
from sgl_tiered.tiers.memory import MemoryRegion  # noqa: E402

LAYERS, PAGE, HIDDEN, HEADS, DIM = 3, 16, 64, 2, 32
NUM_ACTS, NUM_ROWS, NUM_PHYSICAL, NUM_POSITIONS = 9, 6, 12, 512
KV = PageLayout(LAYERS, PAGE, HEADS * DIM * 2)


def make_pool(device="cpu"):
    """Return buffers as a `LayeredPool` with an act area has them."""
    gen = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=gen).to(device, torch.bfloat16)

    both = draw(2, (NUM_PHYSICAL + 1) * PAGE, HEADS, DIM)
    angles = torch.rand((NUM_POSITIONS, DIM // 2), generator=gen)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)
    projections = [
        KVProjection(
            draw(2 * HEADS * DIM, HIDDEN) * HIDDEN**-0.5,
            None,
            HEADS,
            DIM,
            Rotary(table),
        )
        for _ in range(LAYERS)
    ]
    return SimpleNamespace(
        k_buffer=[both[0]] * LAYERS,
        v_buffer=[both[1]] * LAYERS,
        acts=draw(NUM_ACTS + 1, PAGE, HIDDEN),
        plan=SimpleNamespace(
            chosen=SimpleNamespace(projections=projections, offloaded=None)
        ),
    )


class HostActOps(CudaActOps):
    """The product's addresses, and a CPU that does what they say at once."""

    def __init__(self, pool):
        def one(to, frm, num_bytes, stream):
            ctypes.memmove(to, frm, num_bytes)
            return 0

        projections = pool.plan.chosen.projections
        engines = CopyEngines(None, one)
        super().__init__(pool, LAYERS, None, projections, engines=engines)

    def _on(self, stream):
        return contextlib.nullcontext()


def area_bytes(pool):
    return pool.acts.view(len(pool.acts), -1).view(torch.uint8).cpu().numpy()


def wanted_kv(pool, layer, acts, positions):
    """Return K and V of the tokens of pages of the area, on the host."""
    one = pool.plan.chosen.projections[layer]
    table = Rotary(one.rotary.cos_sin.cpu())
    on_host = KVProjection(one.weight.cpu(), None, HEADS, DIM, table)
    rows = (acts[:, None] * PAGE + np.arange(PAGE)).reshape(-1)
    at = (positions[:, None] + np.arange(PAGE)).reshape(-1)
    return rebuild_reference(
        pool.acts.view(-1, HIDDEN).cpu(),
        torch.from_numpy(rows),
        on_host,
        torch.from_numpy(at),
    )


def check_kv(pool, layer, acts, physical, positions):
    slots = (physical[:, None] * PAGE + np.arange(PAGE)).reshape(-1)
    for buffer, wanted in zip(
        (pool.k_buffer[0], pool.v_buffer[0]),
        wanted_kv(pool, layer, acts.astype(np.int64), positions),
        strict=True,
    ):
        found = buffer.cpu()[torch.from_numpy(slots.astype(np.int64))]
        torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)


def test_a_place_goes_to_its_layer_of_the_rows_and_back():
    """One piece a page, each layer behind the other; nothing beside it."""
    pool, stream = make_pool(), SimpleNamespace(cuda_stream=0)
    ops = HostActOps(pool)
    layout = ops.layout
    assert layout == act_layout(pool.acts, LAYERS)
    assert layout.layer_page_bytes == PAGE * HIDDEN * 2
    region = np.zeros((NUM_ROWS, layout.slot_bytes), np.uint8)
    rows, places, to = np.array([4, 0]), np.array([2, 9]), np.array([1, 5])
    before = area_bytes(pool).copy()
    first = layout.key_offset(1)
    ops.store_by_engines(stream, 1, region, rows, first, places)
    width = layout.layer_page_bytes
    np.testing.assert_array_equal(region[rows, first : first + width], before[places])
    assert not region[:, :first].any()
    assert not region[:, first + width :].any()
    ops.load_by_engines(stream, 1, region, rows, first, to)
    np.testing.assert_array_equal(area_bytes(pool)[to], before[places])
    rest = np.setdiff1d(np.arange(NUM_ACTS + 1), to)
    np.testing.assert_array_equal(area_bytes(pool)[rest], before[rest])


def test_tokens_are_rebuilt_by_numbers_of_one_upload():
    """Rows, slots and positions, one behind the other; what is read stays alive."""
    pool = make_pool()
    ops = HostActOps(pool)
    acts, physical = np.array([3, 8]), np.array([5, 1])
    positions = np.array([32, 160])
    pages = np.stack([acts * PAGE, physical * PAGE, positions])
    numbers = torch.from_numpy((pages[:, :, None] + np.arange(PAGE)).reshape(-1))
    kept = ops.rebuild(None, 2, numbers, 2 * PAGE, None)
    assert kept is pool.plan.chosen.projections[2]
    check_kv(pool, 2, acts, physical, positions)


def test_pages_never_leave_as_a_whole():
    """A page's layers do not lie together in an act area."""
    ops = HostActOps(make_pool())
    for call in (ops.gather, ops.copy_out):
        with pytest.raises(NotImplementedError, match="layer by layer"):
            call()


class Uploads:
    """Counts what is brought to the device."""

    def __init__(self):
        self.num_numbers = 0

    def __call__(self, numbers):
        assert numbers.dtype == np.int32
        self.num_numbers += len(numbers)
        return torch.from_numpy(numbers.copy())


@pytest.mark.parametrize(
    "places", [[3, -1, 7], [3, 4, 7], [-1, -1, 2], [-1, -1, -1]], ids=str
)
def test_captured_rows_are_those_that_a_cpu_would_take(places):
    """The same arithmetic as of a forward whose places the host has."""
    index = np.array([0, 0, 1, 2, 2, 2])
    offsets = np.array([2, 3, 0, 0, 1, 2], np.int32)
    rows = DeviceRows(np.array([4, 9, 6]), index, offsets, 4, Uploads())
    assert len(rows) == 6
    numbers = np.array(places, np.int32)
    found = rows.of_layer(numbers)
    wanted = rows_of_pages(
        numbers, torch.from_numpy(index), torch.from_numpy(offsets), 4
    )
    if wanted is None:
        assert found is None
        return
    source = torch.arange(6) if wanted[0] is None else wanted[0]
    assert torch.equal(found[0], source)
    assert torch.equal(found[1], wanted[1])


def test_a_layer_uploads_only_its_places():
    """Which rows are taken is alike in all layers, and there already."""
    uploads = Uploads()
    index, offsets = np.repeat(np.arange(3), 4), np.tile(np.arange(4), 3)
    rows = DeviceRows(np.arange(3), index, offsets.astype(np.int32), 4, uploads)
    rows.of_layer(np.array([5, -1, 2], np.int32))
    first = uploads.num_numbers
    found = rows.of_layer(np.array([1, -1, 8], np.int32))
    assert uploads.num_numbers == first + 2
    assert found[1].tolist() == [4, 5, 6, 7, 32, 33, 34, 35]


class Modules:
    """What captures hook, layer by layer."""

    def __init__(self, modules):
        self._modules = modules

    def __len__(self):
        return len(self._modules)

    def module(self, layer):
        return self._modules[layer]


def test_rows_of_padding_behind_a_forward_are_not_taken():
    """A device may compute more rows than are written, but never fewer."""
    area = torch.zeros((4, 2, HIDDEN))
    modules = [torch.nn.Identity() for _ in range(2)]
    projected = Modules(modules)
    driver = SimpleNamespace(
        num_write_rows=2,
        has_rows_behind=True,
        acts_for_write=lambda layer: (torch.tensor([1]), torch.tensor([3 + layer])),
    )
    hook_captures(projected, area, driver)
    inputs = torch.randn((5, HIDDEN))
    modules[1](inputs)
    assert torch.equal(area.view(-1, HIDDEN)[4], inputs[1])
    with pytest.raises(EngineCompatibilityError, match="projects"):
        modules[0](inputs[:1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("pinned", [True, False])
def test_activations_survive_the_device(pinned):
    """Down from captures that are queued, up again bit for bit, and rebuilt there."""
    pool = make_pool("cuda")
    register = _register if pinned else None
    pool.region = MemoryRegion(2, KV.slot_bytes, register=register)
    row_bytes = act_layout(pool.acts, LAYERS).page_bytes
    pool.act_region = MemoryRegion(NUM_ROWS, row_bytes, register=register)
    copies = cuda_copies(pool, KV, None)
    acts, rows = np.array([1, 4], np.int32), np.array([5, 2])
    halves = np.array([[2, 7], [9, 3]], np.int32)
    targets = np.array([[1, 12], [6, 2]], np.int32)
    positions = np.array([48, 0])
    index = torch.from_numpy(acts.astype(np.int64)).cuda()
    captured = []
    for layer in range(LAYERS):
        fresh = torch.randn((2, PAGE, HIDDEN)).to("cuda", torch.bfloat16)
        torch.cuda._sleep(20_000_000)
        pool.acts[index] = fresh
        copies.acts.acts_to_host(layer, acts, rows, copies.copier.mark())
        captured.append(fresh.cpu())
    read = []
    for layer in range(LAYERS):
        half, physical, mark = (
            halves[layer % 2],
            targets[layer % 2],
            copies.copier.mark(),
        )
        copies.acts.acts_to_device(layer, rows, half, mark)
        built = copies.acts.rebuild(layer, half, physical, positions, mark)
        built.order()
        where = torch.from_numpy(half.astype(np.int64)).cuda()
        torch.cuda._sleep(20_000_000)
        slots = (physical[:, None] * PAGE + np.arange(PAGE)).reshape(-1)
        slots = torch.from_numpy(slots.astype(np.int64)).cuda()
        kv = [one[0][slots] for one in (pool.k_buffer, pool.v_buffer)]
        read.append((pool.acts[where], kv))
    for layer, (found, kv) in enumerate(read):
        assert torch.equal(found.cpu(), captured[layer])
        pool.acts[index] = captured[layer].cuda()
        truth = wanted_kv(pool, layer, acts.astype(np.int64), positions)
        for one, wanted in zip(kv, truth, strict=True):
            torch.testing.assert_close(one.cpu(), wanted, rtol=0.02, atol=0.02)
    copies.close()
    pool.region.close()
    pool.act_region.close()


def _register(address, num_bytes):
    cudart = torch.cuda.cudart()
    assert int(cudart.cudaHostRegister(address, num_bytes, 0)) == 0
    return lambda: cudart.cudaHostUnregister(address)
