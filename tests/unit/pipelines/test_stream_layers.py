"""Layer-pages on streams: right bytes in right rows, whatever the device runs first."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_tiered.pipelines.stream_layers import StreamLayerCopier
from sgl_tiered.testing.fake_streams import FakeDevice, FakeLayerOps
from tests.unit.pipelines.pipeline_support import LAYOUT, SLOT

NUM_PHYSICAL, NUM_ROWS = 12, 10
WIDTH = LAYOUT.layer_page_bytes
SEEDS = st.integers(0, 2**32 - 1)


class Machine:
    """A fake device, host rows, and the copier between them."""

    def __init__(self, seed, *, pinned=True, ahead=True):
        self.rng = np.random.default_rng(seed)
        self.device = FakeDevice(self.rng)
        self.ops = FakeLayerOps(self.device, LAYOUT, NUM_PHYSICAL)
        self.region = np.zeros((NUM_ROWS, SLOT), np.uint8)
        if not pinned:
            self.ops.unpinned.append(self.region)
        self.copier = StreamLayerCopier(
            self.ops,
            self.region,
            ahead=ahead,
            num_buffers=2,
            buffer_bytes=2 * WIDTH,
        )

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.copier.close()

    def noise(self, count):
        return self.rng.integers(0, 256, (count, WIDTH), np.uint8)

    def write(self, pages, data):
        """Queue on the engine's stream a kernel that writes layer-pages."""
        self.device.engine.run(lambda: self.ops.tensor.__setitem__(pages, data))

    def part(self, layer, rows):
        begin = LAYOUT.key_offset(layer)
        return self.region[rows, begin : begin + WIDTH]


def draw(rng, count):
    rows = rng.permutation(NUM_ROWS)[:count].astype(np.int64)
    physical = rng.permutation(NUM_PHYSICAL)[:count].astype(np.int32)
    return rows, physical


@given(
    seed=SEEDS,
    pinned=st.booleans(),
    layer=st.integers(0, LAYOUT.num_layers - 1),
    count=st.integers(1, NUM_ROWS),
)
@settings(max_examples=60)
def test_a_layer_goes_down_as_the_marked_work_left_it(seed, pinned, layer, count):
    """Rows are whole when the call returns, other layers and rows are untouched."""
    with Machine(seed, pinned=pinned) as machine:
        rows, physical = draw(machine.rng, count)
        data = machine.noise(count)
        machine.write(physical, data)
        machine.copier.to_host(layer, physical, rows, machine.copier.mark())
        np.testing.assert_array_equal(machine.part(layer, rows), data)
        machine.part(layer, slice(None))[:] = 0
        others = machine.region.copy()
        begin = LAYOUT.key_offset(layer)
        others[rows, begin : begin + WIDTH] = 0
        assert not others.any()


@given(seed=SEEDS, pinned=st.booleans(), count=st.integers(1, NUM_ROWS))
@settings(max_examples=60)
def test_a_staged_layer_is_read_after_its_copy_and_before_the_next(seed, pinned, count):
    """Two layers through the same places, as a half of the staging memory is used."""
    with Machine(seed, pinned=pinned) as machine:
        rows, physical = draw(machine.rng, count)
        machine.region[:] = machine.rng.integers(0, 256, (NUM_ROWS, SLOT), np.uint8)
        seen = []
        after = machine.copier.mark()
        for layer in range(LAYOUT.num_layers):
            arrival = machine.copier.to_device(layer, rows, physical, after)
            arrival.order()
            machine.device.engine.run(
                lambda: seen.append(machine.ops.tensor[physical].copy())
            )
            after = machine.copier.mark()
        machine.device.settle()
        for layer, read in enumerate(seen):
            np.testing.assert_array_equal(read, machine.part(layer, rows))


def test_without_the_mark_a_layer_is_written_under_its_reader():
    """The negative control: some order of the device then shows wrong bytes."""

    def reads_right(seed):
        with Machine(seed) as machine:
            rows, physical = np.arange(3), np.arange(3, dtype=np.int32)
            machine.region[:] = machine.rng.integers(0, 256, (NUM_ROWS, SLOT), np.uint8)
            seen = []
            machine.copier.to_device(0, rows, physical, machine.copier.mark()).order()
            machine.device.engine.run(
                lambda: seen.append(machine.ops.tensor[physical].copy())
            )
            machine.copier.to_device(1, rows, physical, None)
            machine.device.settle()
            return np.array_equal(seen[0], machine.part(0, rows))

    results = [reads_right(seed) for seed in range(30)]
    assert any(results)
    assert not all(results)


@pytest.mark.parametrize("ahead", [True, False])
def test_with_a_guard_no_copy_is_left_in_the_queue(ahead):
    """What the guard has let go has ended before it is asked again."""
    with Machine(2, ahead=ahead) as machine:
        rows, physical = draw(machine.rng, 4)
        machine.copier.to_device(0, rows, physical, machine.copier.mark())
        load = next(s for s in machine.device.streams if s.name == "load")
        assert bool(load.queue) is ahead
        machine.device.settle()


@pytest.mark.parametrize("pinned", [True, False])
def test_a_store_that_fails_says_so_after_all_of_it_has_ended(pinned):
    """Rows and layer-pages may be used again as soon as the error is known."""
    with Machine(1, pinned=pinned) as machine:
        rows, physical = np.arange(6), np.arange(6, dtype=np.int32)
        machine.ops.fail_store = True
        with pytest.raises(RuntimeError, match="told to fail"):
            machine.copier.to_host(0, physical, rows, machine.copier.mark())
        assert not any(stream.queue for stream in machine.device.streams)
        machine.ops.fail_store = False
        for stream in machine.device.streams:
            stream.error = ""
        data = machine.noise(6)
        machine.write(physical, data)
        machine.copier.to_host(0, physical, rows, machine.copier.mark())
        np.testing.assert_array_equal(machine.part(0, rows), data)


def test_nothing_to_store_touches_no_stream():
    """An empty layer neither waits for the forward nor for the device."""
    with Machine(0) as machine:
        machine.write(0, 7)
        none = np.empty(0, np.int64)
        mark = machine.copier.mark()
        machine.copier.to_host(0, none.astype(np.int32), none, mark)
        assert machine.device.num_run == 0
