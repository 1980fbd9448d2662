"""Tiers below a pool whose layers lie singly, on a device that runs in any order."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_tiered.engines.device.layer_stream_pool import LayeredStreamPool
from sgl_tiered.testing.fake_streams import FakeDevice, FakeLayerOps
from tests.unit.pipelines.pipeline_support import LAYOUT, SLOT

NUM_PAGES, NUM_PHYSICAL, NUM_ROWS = 8, 20, 6
LAYERS, WIDTH = LAYOUT.num_layers, LAYOUT.layer_page_bytes
SEEDS = st.integers(0, 2**32 - 1)


class Machine:
    """A fake device, a host region, rows of a tier, and where pages lie."""

    def __init__(self, seed, *, pinned=True, by_kernel=False):
        self.rng = np.random.default_rng(seed)
        self.device = FakeDevice(np.random.default_rng(seed + 1))
        self.ops = FakeLayerOps(self.device, LAYOUT, NUM_PHYSICAL)
        self.ours = self.noise((NUM_PAGES, SLOT))
        self.tier = self.noise((NUM_ROWS, SLOT))
        if not pinned:
            self.ops.unpinned.append(self.tier)
        transfers = np.full((LAYERS, NUM_PAGES), -1, np.int32)
        self.places = SimpleNamespace(transfers=transfers)
        self.pool = LayeredStreamPool(
            self.ops, self.ours, self.places, by_kernel=by_kernel
        )
        count = int(self.rng.integers(1, NUM_ROWS + 1))
        self.rows = self.rng.permutation(NUM_ROWS)[:count].astype(np.int64)
        self.pages = self.rng.permutation(NUM_PAGES)[:count].astype(np.int64)
        free = iter(self.rng.permutation(NUM_PHYSICAL).tolist())
        for layer in range(LAYERS):
            for page in self.pages:
                if self.rng.random() < 0.5 and (place := next(free, None)) is not None:
                    transfers[layer, page] = place

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.device.settle()
        self.pool.close()

    def noise(self, shape):
        return self.rng.integers(0, 256, shape, np.uint8)

    def part(self, layer):
        begin = LAYOUT.key_offset(layer)
        return slice(begin, begin + WIDTH)

    def held(self, layer, page):
        """Return one layer of a page, from where it lies."""
        place = self.places.transfers[layer, page]
        if place >= 0:
            return self.ops.tensor[place]
        return self.ours[page, self.part(layer)]


@given(seed=SEEDS, pinned=st.booleans())
@settings(max_examples=60)
def test_a_page_goes_down_from_where_its_layers_lie(seed, pinned):
    """As the marked work left them; rows are whole when the call returns."""
    with Machine(seed, pinned=pinned) as machine:
        others = machine.tier.copy()
        fresh = machine.noise(machine.ops.tensor.shape)
        machine.device.engine.run(
            lambda: machine.ops.tensor.__setitem__(slice(None), fresh)
        )
        mark = machine.pool.mark()
        machine.pool.store_pages(machine.tier, machine.rows, machine.pages, mark)
        for row, page in zip(machine.rows, machine.pages, strict=True):
            for layer in range(LAYERS):
                found = machine.tier[row, machine.part(layer)]
                np.testing.assert_array_equal(found, machine.held(layer, page))
        rest = np.setdiff1d(np.arange(NUM_ROWS), machine.rows)
        np.testing.assert_array_equal(machine.tier[rest], others[rest])


@given(seed=SEEDS, pinned=st.booleans(), by_kernel=st.booleans())
@settings(max_examples=60)
def test_a_page_comes_up_to_where_its_layers_are_to_lie(seed, pinned, by_kernel):
    """After reads of what was there, and before work that waits for the last layer."""
    with Machine(seed, pinned=pinned, by_kernel=by_kernel and pinned) as machine:
        before, seen = machine.ops.tensor.copy(), []
        machine.device.engine.run(lambda: seen.append(machine.ops.tensor.copy()))
        mark = machine.pool.mark()
        for layer in range(LAYERS):
            arrival = machine.pool.load_layer(
                layer, machine.tier, machine.rows, machine.pages, after=mark
            )
        # As the tiers wait for a whole load: by the last arrival alone.
        arrival.order()
        machine.device.engine.run(lambda: seen.append(machine.ops.tensor.copy()))
        machine.device.settle()
        np.testing.assert_array_equal(seen[0], before)
        machine.ops.tensor[:] = seen[1]
        for row, page in zip(machine.rows, machine.pages, strict=True):
            for layer in range(LAYERS):
                wanted = machine.tier[row, machine.part(layer)]
                np.testing.assert_array_equal(machine.held(layer, page), wanted)


def test_a_load_without_its_mark_is_caught():
    """The negative control: some order of the device then shows later bytes."""

    def reads_right(seed):
        with Machine(seed) as machine:
            machine.places.transfers[0, machine.pages] = np.arange(len(machine.pages))
            before, seen = machine.ops.tensor.copy(), []
            machine.device.engine.run(lambda: seen.append(machine.ops.tensor.copy()))
            machine.pool.load_layer(0, machine.tier, machine.rows, machine.pages)
            machine.device.settle()
            return np.array_equal(seen[0], before)

    results = [reads_right(seed) for seed in range(30)]
    assert any(results)
    assert not all(results)


@pytest.mark.parametrize("pinned", [True, False])
def test_a_store_that_fails_has_ended_when_it_says_so(pinned):
    """Rows and layer-pages may be used again as soon as the error is known."""
    with Machine(3, pinned=pinned) as machine:
        machine.places.transfers[0, machine.pages] = np.arange(len(machine.pages))
        machine.ops.fail_store = True
        mark = machine.pool.mark()
        with pytest.raises(RuntimeError, match="told to fail"):
            machine.pool.store_pages(machine.tier, machine.rows, machine.pages, mark)
        assert not any(stream.queue for stream in machine.device.streams)


def test_it_is_a_device_with_streams():
    """The loader queues, and the model's thread copies nothing."""
    with Machine(0) as machine:
        assert machine.pool.layout is LAYOUT
        assert machine.pool.waiter_copies is False
