"""Weights brought for rebuilds: never read before they are there, or written over."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_tiered.pipelines.stream_weights import NUM_SLOTS, WeightSlots
from sgl_tiered.testing.fake_streams import FakeEvent
from tests.unit.pipelines.test_stream_acts import (
    LAYERS,
    Machine,
    all_right,
    is_caught,
    orders,
    read_layers,
)

SEEDS = st.integers(0, 2**32 - 1)


class Weighted(Machine):
    """A device whose projections are in host memory, those of some layers at least."""

    def __init__(self, seed, away=range(LAYERS), **how):
        super().__init__(seed, **how)
        self.copier.close()
        self.weights = WeightSlots(self.ops, away)
        self.copier = type(self.copier)(
            self.ops, self.region, len(self.ops.tensor), weights=self.weights, **how
        )

    def forward(self, layer, seen):
        """Queue a forward of a layer, which reads what it was lent."""
        slot = self.weights.lend(layer)
        if slot is not None:
            self.device.engine.run(
                lambda: seen.append((layer, int(self.ops.slots[slot])))
            )
        self.weights.take_back()
        return slot


@given(seed=SEEDS, away=st.sets(st.integers(0, LAYERS - 1)))
@settings(max_examples=40)
def test_rebuilds_read_their_own_weights(seed, away):
    """Layer after layer through two slots, in any order of the streams."""
    with Weighted(seed, away) as machine:
        assert all_right(read_layers(machine, 3))
        assert machine.weights.num_bytes == 8 * len(away)


@given(seed=SEEDS, jobs=st.lists(st.tuples(st.booleans(), st.integers(0, 4))))
@settings(max_examples=80)
def test_forwards_and_rebuilds_of_any_layers_share_two_slots(seed, jobs):
    """Whoever reads a slot reads the layer that it was given it for."""
    with Weighted(seed, range(5)) as machine:
        seen, read = [], []
        stream = machine.ops.new_stream(urgent=False)
        for is_forward, layer in jobs:
            if is_forward:
                machine.forward(layer, seen)
                continue
            slot = machine.weights.use(layer, stream)

            def work(layer=layer, slot=slot):
                read.append((layer, int(machine.ops.slots[slot])))

            stream.run(work)
            machine.weights.read(slot, stream.record_event())
        machine.device.settle()
        assert len(read) == sum(not is_forward for is_forward, _ in jobs)
        assert all(wanted == found for wanted, found in seen + read)


def test_a_layer_crosses_once_for_rebuilds_and_for_the_forward():
    """What was brought ahead is lent; the next layer comes meanwhile."""
    with Weighted(1, range(3)) as machine:
        stream, seen = machine.device.engine, []
        for layer in range(3):
            slot = machine.weights.use(layer, stream)
            assert machine.weights.use(layer, stream) == slot
            machine.weights.read(slot, stream.record_event())
            assert machine.forward(layer, seen) == slot
        machine.device.settle()
        assert machine.weights.num_bytes == 3 * 8
        assert seen == [(layer, layer) for layer in range(3)]


def test_what_a_forward_reads_is_not_written_over():
    """While it is lent another slot is taken, whoever is next in turn."""
    with Weighted(2, range(4)) as machine:
        stream, weights = machine.device.engine, machine.weights
        first = weights.use(0, stream)
        weights.read(first, stream.record_event())
        assert weights.lend(0) == first
        others = set()
        for layer in (1, 2, 3):
            slot = weights.use(layer, stream)
            weights.read(slot, stream.record_event())
            others.add(slot)
        assert others == set(range(NUM_SLOTS)) - {first}
        weights.take_back()
        weights.take_back()
        assert weights.use(1, stream) == first


def test_nothing_is_lent_that_is_not_there():
    """Then the engine copies for itself; nor is anything that is on the device."""
    with Weighted(3, [1]) as machine:
        weights = machine.weights
        assert weights.lend(1) is None
        assert weights.use(0, machine.device.engine) is None
        weights.read(weights.use(1, machine.device.engine), machine.mark()[0])
        assert weights.lend(1) is not None
        weights.forget()
        assert weights.lend(1) is None


def test_another_forward_brings_weights_anew():
    """They may have been replaced in between."""
    with Weighted(4) as machine:
        stream, weights = machine.device.engine, machine.weights
        weights.read(weights.use(0, stream), stream.record_event())
        weights.forget()
        weights.read(weights.use(0, stream), stream.record_event())
        assert weights.num_bytes == 2 * 8


def test_a_copy_that_cannot_be_queued_fails_the_rebuild_and_no_later_one():
    """And leaves no slot that would seem to hold the layer."""
    with Weighted(5) as machine:
        rows, acts, physical, positions = machine.draw(2)
        machine.copier.acts_to_device(0, rows, acts, machine.mark())
        machine.ops.refuse_weights = True
        with pytest.raises(RuntimeError, match="were refused"):
            machine.copier.rebuild(0, acts, physical, positions, machine.mark())
        assert machine.weights.lend(0) is None
        machine.ops.refuse_weights = False
        seen = []
        built = machine.copier.rebuild(0, acts, physical, positions, machine.mark())
        built.order()
        machine.attend(physical, seen)
        machine.device.settle()
        assert np.array_equal(seen[0], machine.wanted(0, rows, positions))


def test_a_rebuild_that_does_not_wait_for_its_weights_is_seen():
    """The negative control."""

    def is_right(seed):
        with Weighted(seed) as machine:
            machine.weights._landed = _Never(machine.device)
            return all_right(read_layers(machine, 3))

    assert is_caught(orders(is_right))


def test_weights_that_come_before_a_slot_was_read_are_seen():
    """The other one: nobody waits for what reads the slot."""

    def is_right(seed):
        with Weighted(seed) as machine:
            machine.weights.read = lambda slot, event: None
            return all_right(read_ahead(machine))

    assert is_caught(orders(is_right))


def test_layers_whose_rebuilds_are_queued_ahead_are_right():
    """The same without the fault."""
    for seed in range(20):
        with Weighted(seed) as machine:
            assert all_right(read_ahead(machine))


class _Never(list):
    """Events that nobody records."""

    def __init__(self, device):
        super().__init__()
        self._device = device

    def __getitem__(self, slot):
        return FakeEvent(self._device)

    def __setitem__(self, slot, event):
        pass


def read_ahead(machine):
    """Queue rebuilds of all layers at once, each to places of its own."""
    seen, truth = [], []
    for _ in range(200):
        # The forward is long: rebuilds wait for it, and weights do not.
        machine.device.engine.run(lambda: None)
    after = machine.mark()
    physical = np.arange(LAYERS, dtype=np.int32)
    for layer in range(LAYERS):
        rows, acts, _, positions = machine.draw(1)
        machine.copier.acts_to_device(layer, rows, acts, after)
        to = physical[layer : layer + 1]
        built = machine.copier.rebuild(layer, acts, to, positions, after)
        truth.append(machine.wanted(layer, rows, positions))
    built.order()
    machine.attend(physical, seen)
    machine.device.settle()
    return [(seen[0][n : n + 1], wanted) for n, wanted in enumerate(truth)]
