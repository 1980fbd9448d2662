"""Copies of activations and rebuilds between a pool's act area, host rows and KV."""

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sgl_tiered_kernels.kv_gen import KVProjection, Rotary  # noqa: E402
from sgl_tiered_kernels.kv_gen.reference import rebuild_reference  # noqa: E402

from sgl_tiered.core.ids import TierId  # noqa: E402
from sgl_tiered.engines.sglang.layered.activations.capture import (  # noqa: E402
    hook_captures,
    rows_of_pages,
)
from sgl_tiered.engines.sglang.layered.activations.copier import (  # noqa: E402
    CpuActCopier,
    FaultyActCopier,
)
from sgl_tiered.errors import EngineCompatibilityError  # noqa: E402
from sgl_tiered.serving.emulation import parse_emulation  # noqa: E402
from sgl_tiered.testing.fault_switch import FaultSwitch  # noqa: E402

LAYERS, PAGE, HIDDEN, HEADS, DIM = 3, 4, 12, 2, 6
NUM_ACTS, NUM_ROWS, NUM_PHYSICAL, NUM_POSITIONS = 9, 5, 8, 64


@pytest.fixture
def pool():
    """An act area and host rows, as a `LayeredPool` has them, and its KV."""
    gen = torch.Generator().manual_seed(3)
    slots = (NUM_PHYSICAL * PAGE, HEADS, DIM)
    row_bytes = LAYERS * PAGE * HIDDEN * 4
    return SimpleNamespace(
        acts=torch.randn((NUM_ACTS + 1, PAGE, HIDDEN), generator=gen),
        act_region=SimpleNamespace(array=np.zeros((NUM_ROWS, row_bytes), np.uint8)),
        k_buffer=[torch.zeros(slots)] * LAYERS,
        v_buffer=[torch.zeros(slots)] * LAYERS,
    )


@pytest.fixture
def projections():
    """One for each layer, with rotary positions."""
    gen = torch.Generator().manual_seed(4)
    table = torch.rand((NUM_POSITIONS, DIM), generator=gen)
    width = 2 * HEADS * DIM
    return [
        KVProjection(
            torch.randn((width, HIDDEN), generator=gen), None, HEADS, DIM, Rotary(table)
        )
        for _ in range(LAYERS)
    ]


def int32s(*numbers):
    return np.array(numbers, np.int32)


def int64s(*numbers):
    return np.array(numbers, np.int64)


def test_a_layer_goes_to_its_part_of_the_rows_and_back(pool, projections):
    """Bit by bit, and nothing beside it."""
    copier = CpuActCopier(pool, projections)
    before = pool.acts.clone()
    copier.acts_to_host(1, int32s(2, 5), int64s(4, 0), None)
    rows = pool.act_region.array.reshape(NUM_ROWS, LAYERS, -1)
    assert not rows[:, [0, 2]].any()
    assert not rows[1:4].any()
    copier.acts_to_device(1, int64s(0, 4), int32s(7, 8), None)
    assert torch.equal(pool.acts[7], before[5])
    assert torch.equal(pool.acts[8], before[2])
    assert torch.equal(pool.acts[:7], before[:7])


@pytest.mark.parametrize("in_inference", [False, True])
def test_pages_are_rebuilt_at_their_positions(pool, projections, in_inference):
    """Each token's K is rotated to where it stands in its text, by its own layer."""
    if in_inference:
        with torch.inference_mode():
            pool.k_buffer = [torch.zeros_like(pool.k_buffer[0])] * LAYERS
    copier = CpuActCopier(pool, projections)
    copier.rebuild(2, int32s(6, 1), int32s(3, 7), int64s(8, 40), None)
    rows = torch.cat([torch.arange(PAGE) + 6 * PAGE, torch.arange(PAGE) + PAGE])
    positions = torch.cat([torch.arange(PAGE) + 8, torch.arange(PAGE) + 40])
    wanted = rebuild_reference(
        pool.acts.view(-1, HIDDEN), rows, projections[2], positions
    )
    slots = torch.cat([torch.arange(PAGE) + 3 * PAGE, torch.arange(PAGE) + 7 * PAGE])
    for out, one in zip((pool.k_buffer[0], pool.v_buffer[0]), wanted, strict=True):
        torch.testing.assert_close(out[slots], one)
        untouched = torch.ones(len(out), dtype=torch.bool)
        untouched[slots] = False
        assert not out[untouched].any()


def test_a_broken_copier_leaves_one_page_in_four_out(pool, projections):
    """So that the gate has something to find."""
    copier = CpuActCopier(pool, projections, breaks_staging=True)
    copier.rebuild(0, int32s(1, 2, 3, 4, 5), int32s(1, 2, 3, 4, 5), int64s(*[0] * 5), 0)
    pages = pool.v_buffer[0].view(NUM_PHYSICAL, -1).any(1).tolist()
    assert pages == [False, False, True, True, True, False, False, False]
    copier.rebuild(0, int32s(1), int32s(6), int64s(0), None)
    assert not pool.v_buffer[0].view(NUM_PHYSICAL, -1)[6].any()


def test_faults_strike_activations_too(pool, projections):
    """Every call of a copier that is to fail does."""
    sections = parse_emulation("host:fault=error", (TierId.HOST,))
    switch = FaultSwitch()
    switch.set([fault for one in sections for fault in one.faults])
    faulty = FaultyActCopier(CpuActCopier(pool, projections), switch)
    one, row = int32s(1), int64s(0)
    for call in (
        lambda: faulty.acts_to_host(0, one, row, None),
        lambda: faulty.acts_to_device(0, row, one, None),
        lambda: faulty.rebuild(0, one, one, row, None),
    ):
        with pytest.raises(OSError, match="injected"):
            call()
    switch.set(())
    assert faulty.acts_to_device(0, row, one, None) is None


def test_rows_of_pages_that_are_kept():
    """None where nothing is, all of them, or those of some pages."""
    index = torch.tensor([0, 0, 1, 1, 2])
    offsets = torch.tensor([2, 3, 0, 1, 0])
    assert rows_of_pages(int32s(-1, -1, -1), index, offsets, PAGE) is None
    source, target = rows_of_pages(int32s(3, 1, 7), index, offsets, PAGE)
    assert source is None
    assert target.tolist() == [14, 15, 4, 5, 28]
    source, target = rows_of_pages(int32s(-1, 1, 7), index, offsets, PAGE)
    assert source.tolist() == [2, 3, 4]
    assert target.tolist() == [4, 5, 28]


class Projected:
    """Stands in for the projections: one linear module for each layer."""

    def __init__(self):
        self.modules = [torch.nn.Linear(HIDDEN, 2) for _ in range(LAYERS)]

    def __len__(self):
        return LAYERS

    def module(self, layer):
        return self.modules[layer]


def test_a_capture_takes_the_inputs_of_each_layer(pool):
    """Where the driver says, and only in forwards that write act pages."""
    projected, asked = Projected(), []
    wanted = {
        0: (None, torch.tensor([5, 6])),
        1: (torch.tensor([1]), torch.tensor([9])),
    }
    driver = SimpleNamespace(num_write_rows=2, has_rows_behind=False)
    driver.acts_for_write = lambda layer: asked.append(layer) or wanted.get(layer)
    hook_captures(projected, pool.acts, driver)
    before = pool.acts.view(-1, HIDDEN).clone()
    inputs = [torch.randn((2, HIDDEN)) for _ in range(LAYERS)]
    for layer in range(LAYERS):
        projected.module(layer)(inputs[layer])
    after = pool.acts.view(-1, HIDDEN)
    assert asked == [0, 1, 2]
    assert torch.equal(after[5:7], inputs[0])
    assert torch.equal(after[9], inputs[1][1])
    changed = (after != before).any(1).nonzero()[:, 0].tolist()
    assert changed == [5, 6, 9]
    # A model that pads or cuts its rows is none that these are taken of.
    with pytest.raises(EngineCompatibilityError, match="projects"):
        projected.module(0)(torch.zeros((3, HIDDEN)))
