"""Activations on streams: nothing is read before it is there, or written while read."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_tiered.core.layout import PageLayout
from sgl_tiered.pipelines.stream_acts import StreamActCopier, act_layout_token_bytes
from sgl_tiered.pipelines.stream_weights import WeightSlots
from sgl_tiered.testing.fake_streams import (
    FakeActOps,
    FakeDevice,
    FakeEvent,
    FakeLayerOps,
    fake_kv,
)
from tests.unit.pipelines.pipeline_support import LAYOUT

NUM_PHYSICAL, NUM_ROWS, NUM_PLACES = 12, 10, 9
PAGE, LAYERS = LAYOUT.page_tokens, LAYOUT.num_layers
ACTS = PageLayout(LAYERS, PAGE, LAYOUT.token_bytes // 2)
WIDTH = ACTS.layer_page_bytes
SEEDS = st.integers(0, 2**32 - 1)
NUM_ORDERS = 40


class Machine:
    """A fake device with an act area, host rows, and the copier between them."""

    def __init__(self, seed, *, pinned=True, **how):
        self.rng = np.random.default_rng(seed)
        self.device = FakeDevice(np.random.default_rng(seed + 1))
        self.kv = FakeLayerOps(self.device, LAYOUT, NUM_PHYSICAL)
        self.ops = FakeActOps(self.device, ACTS, NUM_PLACES, self.kv)
        self.region = self.noise((NUM_ROWS, ACTS.page_bytes))
        if not pinned:
            self.ops.unpinned.append(self.region)
        self.copier = StreamActCopier(self.ops, self.region, NUM_PLACES, **how)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.device.settle()
        self.copier.close()

    def noise(self, shape):
        return self.rng.integers(0, 256, shape, np.uint8)

    def mark(self):
        return [self.device.engine.record_event()]

    def draw(self, count):
        rows = self.rng.permutation(NUM_ROWS)[:count].astype(np.int64)
        acts = 1 + self.rng.permutation(NUM_PLACES - 1)[:count].astype(np.int32)
        physical = self.rng.permutation(NUM_PHYSICAL)[:count].astype(np.int32)
        return rows, acts, physical, PAGE * self.rng.permutation(50)[:count]

    def part(self, layer, rows):
        begin = ACTS.key_offset(layer)
        return self.region[rows, begin : begin + WIDTH]

    def wanted(self, layer, rows, positions):
        """Return the KV of host rows, as layer-pages."""
        return kv_pages(self.part(layer, rows), layer, positions)

    def attend(self, physical, seen):
        """Queue on the engine's stream a kernel that reads layer-pages."""
        self.device.engine.run(lambda: seen.append(self.kv.tensor[physical].copy()))


def test_a_rebuild_runs_once_before_it_is_needed():
    """Into the page of padding, with weights on the device and with others."""
    with Machine(3) as machine:
        weights = WeightSlots(machine.ops, [1])
        copier = StreamActCopier(
            machine.ops, machine.region, NUM_PLACES, weights=weights
        )
        before = machine.kv.tensor.copy()
        copier.warm([0, 1])
        assert machine.ops.kernels == ["rebuild from weights", "rebuild from a slot"]
        changed = (machine.kv.tensor != before).any(axis=1)
        assert np.flatnonzero(changed).tolist() == [0]
        copier.close()


def kv_pages(pages, layer, positions):
    """Return uint8 [n, layer_page_bytes] of pages of activations."""
    tokens = (positions[:, None] + np.arange(PAGE)).reshape(-1)
    flat = pages.reshape(len(tokens), WIDTH // PAGE)
    both = fake_kv(flat, layer, tokens, LAYOUT.token_bytes)
    keys, values = (one.reshape(len(pages), LAYOUT.part_bytes) for one in both)
    return np.concatenate([keys, values], axis=1)


def read_layers(machine, count, *, marks=True):
    """Bring all layers through the same places; return (seen, wanted) of each."""
    rows, acts, physical, positions = machine.draw(count)
    seen = []
    after = machine.mark()
    for layer in range(LAYERS):
        machine.copier.acts_to_device(layer, rows, acts, after)
        # Queued while the load is: nobody has waited for it.
        built = machine.copier.rebuild(layer, acts, physical, positions, after)
        built.order()
        machine.attend(physical, seen)
        after = machine.mark() if marks else None
    machine.device.settle()
    return [
        (read, machine.wanted(layer, rows, positions))
        for layer, read in enumerate(seen)
    ]


def orders(run):
    """Return whether a run was right, for many orders of the device."""
    return [run(seed) for seed in range(NUM_ORDERS)]


def all_right(pairs):
    return all(np.array_equal(read, wanted) for read, wanted in pairs)


def is_caught(results):
    """Some order shows the fault; that none is right would be another fault."""
    return not all(results)


@given(
    seed=SEEDS,
    pinned=st.booleans(),
    layer=st.integers(0, LAYERS - 1),
    count=st.integers(1, NUM_PLACES - 1),
)
@settings(max_examples=50)
def test_a_capture_goes_down_as_the_marked_work_left_it(seed, pinned, layer, count):
    """Rows are whole when the call returns; other layers and rows are untouched."""
    with Machine(seed, pinned=pinned) as machine:
        rows, acts, _, _ = machine.draw(count)
        data, others = machine.noise((count, WIDTH)), machine.region.copy()
        machine.device.engine.run(
            lambda: machine.ops.tensor.__setitem__(acts, data), 1.0
        )
        machine.copier.acts_to_host(layer, acts, rows, machine.mark())
        np.testing.assert_array_equal(machine.part(layer, rows), data)
        machine.part(layer, slice(None))[rows] = others[
            rows, ACTS.key_offset(layer) : ACTS.key_offset(layer) + WIDTH
        ]
        np.testing.assert_array_equal(machine.region, others)


def test_a_capture_sent_down_before_it_was_written_is_caught():
    """The negative control: a mark that was made ahead of the capture."""

    def is_right(seed):
        with Machine(seed) as machine:
            rows, acts, _, _ = machine.draw(3)
            data, mark = machine.noise((3, WIDTH)), machine.mark()
            machine.device.engine.run(
                lambda: machine.ops.tensor.__setitem__(acts, data)
            )
            machine.copier.acts_to_host(1, acts, rows, mark)
            return np.array_equal(machine.part(1, rows), data)

    assert is_caught(orders(is_right))


@given(seed=SEEDS, pinned=st.booleans(), count=st.integers(1, NUM_PLACES - 1))
@settings(max_examples=50)
def test_layers_are_rebuilt_through_the_same_places(seed, pinned, count):
    """As two halves are used: loads, rebuilds and reads in any order of the device."""
    with Machine(seed, pinned=pinned) as machine:
        assert all_right(read_layers(machine, count))


def test_a_rebuild_before_its_load_has_landed_is_caught(monkeypatch):
    """The negative control: an event that nobody recorded holds nothing back."""

    def is_right(seed):
        with Machine(seed) as machine:
            pool = machine.copier.copies.pool
            monkeypatch.setattr(pool, "loaded", lambda: FakeEvent(machine.device))
            return all_right(read_layers(machine, 3))

    assert is_caught(orders(is_right))


def test_a_half_overwritten_under_its_reader_is_caught():
    """The negative control: layers that wait for no mark of the attention."""

    def is_right(seed):
        with Machine(seed) as machine:
            return all_right(read_layers(machine, 3, marks=False))

    assert is_caught(orders(is_right))


@pytest.mark.parametrize("forgets", [False, True])
def test_places_are_not_loaded_anew_under_a_rebuild(forgets):
    """No mark tells of it, where two rebuilds follow each other without a reader."""

    def is_right(seed):
        with Machine(seed) as machine:
            rows, acts, _, positions = machine.draw(3)
            targets = np.arange(6, dtype=np.int32).reshape(2, 3)
            for layer, physical in enumerate(targets):
                if forgets:
                    machine.copier._read = [None] * NUM_PLACES
                machine.copier.acts_to_device(layer, rows, acts, None)
                machine.copier.rebuild(layer, acts, physical, positions, None)
            machine.device.settle()
            return all(
                np.array_equal(
                    machine.kv.tensor[physical], machine.wanted(layer, rows, positions)
                )
                for layer, physical in enumerate(targets)
            )

    assert is_caught(orders(is_right)) is forgets


def test_a_rebuild_waits_only_for_the_loads_of_its_places():
    """The link goes on with a later sub-unit while the first is rebuilt."""
    with Machine(5) as machine:
        rows, acts, physical, positions = machine.draw(4)
        machine.copier.acts_to_device(0, rows[:2], acts[:2], None)
        built = machine.copier.rebuild(0, acts[:2], physical[:2], positions[:2], None)
        blocked = FakeEvent(machine.device)
        blocked.num_recorded = 1
        machine.copier.acts_to_device(0, rows[2:], acts[2:], [blocked])
        assert built.finish() >= 1e-3
        wanted = machine.wanted(0, rows[:2], positions[:2])
        np.testing.assert_array_equal(machine.kv.tensor[physical[:2]], wanted)
        blocked.num_passed = 1


@pytest.mark.parametrize("ahead", [True, False])
def test_with_a_guard_a_load_has_landed_when_the_call_returns(ahead):
    """What the guard has let go has ended before it is asked again."""
    with Machine(2, ahead=ahead) as machine:
        rows, acts, _, _ = machine.draw(4)
        machine.copier.acts_to_device(0, rows, acts, machine.mark())
        has_landed = np.array_equal(machine.ops.tensor[acts], machine.part(0, rows))
        assert has_landed is not ahead


def test_a_rebuild_that_fails_says_so_when_it_is_finished():
    """Not when it is queued: nobody knows then."""
    with Machine(4) as machine:
        rows, acts, physical, positions = machine.draw(2)
        machine.copier.acts_to_device(0, rows, acts, None)
        machine.ops.fail_rebuild = True
        built = machine.copier.rebuild(0, acts, physical, positions, None)
        with pytest.raises(RuntimeError, match="told to fail"):
            built.finish()


def test_what_cannot_be_queued_leaves_nothing_behind(monkeypatch):
    """The caller may give the places to others as soon as it knows."""
    with Machine(4) as machine:
        rows, acts, physical, positions = machine.draw(2)
        machine.copier.acts_to_device(0, rows, acts, None)

        def refuse(*args):
            raise RuntimeError("no launch")

        monkeypatch.setattr(machine.ops, "rebuild", refuse)
        with pytest.raises(RuntimeError, match="no launch"):
            machine.copier.rebuild(0, acts, physical, positions, None)
        assert not machine.copier._stream.queue


def test_a_broken_copier_leaves_one_page_in_four_out():
    """So that the gate has something to find."""
    with Machine(6, breaks_staging=True) as machine:
        rows, acts, physical, positions = machine.draw(5)
        machine.copier.acts_to_device(0, rows, acts, None)
        before = machine.kv.tensor.copy()
        machine.copier.rebuild(0, acts, physical, positions, None).finish()
        changed = (machine.kv.tensor != before).any(axis=1)[physical]
        assert changed.tolist() == [False, True, True, True, False]


def test_a_layout_of_activations_has_no_halves_but_even_tokens():
    """One number less than a half of a page would be lost below the device."""
    assert act_layout_token_bytes(WIDTH, PAGE) == ACTS.token_bytes
    with pytest.raises(ValueError, match="7 B"):
        act_layout_token_bytes(7, 1)
