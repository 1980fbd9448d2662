"""Copies to ordinary memory in two stages: right bytes, and who waits for whom."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_tiered.pipelines.host_copies import HostCopier
from sgl_tiered.testing.fake_streams import FakeDevice
from tests.unit.pipelines.pipeline_support import PATIENCE_S

WIDTH = 64


class Machine:
    """A fake device whose copies go to ordinary memory."""

    def __init__(self, seed=0, *, num_buffers=2, num_bytes=WIDTH):
        self.device = FakeDevice(np.random.default_rng(seed))
        self.stream = self.device.new_stream("store")
        self.copier = HostCopier(
            lambda size: np.full(size, 0xEE, np.uint8),
            num_buffers=num_buffers,
            num_bytes=num_bytes,
        )

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.device.going.set()
        assert self.copier.close(PATIENCE_S)

    def put(self, source, target, *, land=None):
        """Copy ``source``, as it is when the device comes to it, to ``target``."""

        def queue(buffer):
            self.stream.run(lambda: np.copyto(buffer, source))
            return self.stream.record_event()

        def copy(buffer):
            np.copyto(target, buffer)

        return self.copier.put(len(source), queue, land or copy)


@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(st.integers(1, 3 * WIDTH), min_size=1, max_size=12),
    num_buffers=st.integers(1, 3),
)
@settings(max_examples=40)
def test_every_byte_lands(seed, sizes, num_buffers):
    """Also where a copy is larger than a buffer, and copies outnumber the buffers."""
    rng = np.random.default_rng(seed)
    sources = [rng.integers(0, 256, size, np.uint8) for size in sizes]
    targets = [np.zeros(size, np.uint8) for size in sizes]
    with Machine(seed, num_buffers=num_buffers) as machine:
        landings = [
            machine.put(source, target)
            for source, target in zip(sources, targets, strict=True)
        ]
        assert landings[-1].wait(PATIENCE_S)
        assert all(landing.ended for landing in landings)
        for source, target in zip(sources, targets, strict=True):
            np.testing.assert_array_equal(target, source)


def test_who_queues_copies_waits_for_none():
    """While the device stands still, as many copies as buffers are queued at once."""
    with Machine(num_buffers=3) as machine:
        machine.device.going.clear()
        landings = [
            machine.put(np.full(WIDTH, n, np.uint8), np.zeros(WIDTH, np.uint8))
            for n in range(3)
        ]
        assert not any(landing.ended for landing in landings)
        assert not landings[-1].wait(0.01)
        machine.device.going.set()
        assert landings[-1].wait(PATIENCE_S)


def test_a_buffer_is_not_lent_before_its_bytes_have_landed():
    """The device having written it is not enough: the host thread still reads it."""
    first, second = np.full(WIDTH, 1, np.uint8), np.full(WIDTH, 2, np.uint8)
    target, go, held = np.zeros(WIDTH, np.uint8), threading.Event(), threading.Event()

    def slow(buffer):
        held.set()
        assert go.wait(PATIENCE_S)
        np.copyto(target, buffer)

    with Machine(num_buffers=1) as machine:
        landing = machine.put(first, target, land=slow)
        assert held.wait(PATIENCE_S)
        other = threading.Thread(
            target=machine.put, args=(second, np.zeros(WIDTH, np.uint8))
        )
        other.start()
        other.join(0.05)
        assert other.is_alive()
        go.set()
        assert landing.wait(PATIENCE_S)
        other.join(PATIENCE_S)
        assert not other.is_alive()
        np.testing.assert_array_equal(target, first)


@pytest.mark.parametrize("stage", ["device", "host"])
def test_a_failure_is_told_to_its_own_landing(stage):
    """The copies before and after it, through the same buffer, are not touched."""

    def fail(*_):
        raise RuntimeError("told to fail")

    source, target = np.full(WIDTH, 7, np.uint8), np.zeros(WIDTH, np.uint8)
    with Machine(num_buffers=1) as machine:
        assert machine.put(source, np.zeros(WIDTH, np.uint8)).wait(PATIENCE_S)
        if stage == "device":
            machine.stream.run(fail)
            failed = machine.put(source, target)
        else:
            failed = machine.put(source, target, land=fail)
        with pytest.raises(RuntimeError, match="told to fail"):
            failed.wait(PATIENCE_S)
        machine.stream.error = ""
        assert machine.put(source, target).wait(PATIENCE_S)
        np.testing.assert_array_equal(target, source)


def test_a_closed_copier_says_so():
    """Nobody waits for a landing that no thread will ever do."""
    with Machine() as machine:
        assert machine.copier.close(PATIENCE_S)
        landing = machine.put(np.zeros(WIDTH, np.uint8), np.zeros(WIDTH, np.uint8))
        with pytest.raises(RuntimeError, match="closed"):
            landing.wait(PATIENCE_S)
