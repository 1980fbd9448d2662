"""The watches of collectives and the guard's wait."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_tiered.core.clock import ManualClock, SystemClock
from sgl_tiered.pipelines.contention import (
    MIN_POLL_S,
    ContentionGuard,
    CountedCollectives,
    LatencyBook,
    QueuedCollectives,
)
from sgl_tiered.testing.fake_streams import FakeDevice, FakeEvent
from tests.unit.pipelines.pipeline_support import PATIENCE_S

MB = 1 << 20


class Always:
    """A link on which a collective never ends."""

    def in_flight_s(self):
        return 0.0


def queued_on(device):
    return QueuedCollectives(lambda: FakeEvent(device), lambda: device.engine)


def test_a_counted_collective_is_in_flight_until_it_returns():
    """Also where two of them overlap; the time of the first ones is remembered."""
    clock = ManualClock()
    watch = CountedCollectives(clock)
    assert watch.in_flight_s() is None
    first = watch.begin(MB)
    assert watch.in_flight_s() == 0.0
    second = watch.begin(MB)
    clock.advance(0.004)
    watch.end(first)
    assert watch.in_flight_s() == 0.004
    watch.end(second)
    assert watch.in_flight_s() is None
    assert watch.num_seen == 2


def test_latencies_are_told_apart_by_size():
    """A decode step's collective is not expected to take as long as a prefill's."""
    book = LatencyBook()
    for seconds in (0.002, 0.5, 0.002):
        book.learn(32 * MB, seconds)
    book.learn(16 << 10, 0.0001)
    assert book.usual_s(32 * MB) == 0.002
    assert book.usual_s(33 * MB) == 0.002
    assert book.usual_s(16 << 10) == 0.0001
    assert book.usual_s(1) == 0.0


def test_a_queued_collective_counts_once_the_device_has_reached_it():
    """Not when the thread queues it, which is many layers ahead."""
    device = FakeDevice(np.random.default_rng(0))
    watch = queued_on(device)
    device.engine.run(lambda: None, cost_ms=5.0)
    begun = watch.begin(MB)
    device.engine.run(lambda: None, cost_ms=2.0)
    watch.end(begun)
    assert watch.in_flight_s() is None
    assert device.step()
    assert watch.in_flight_s() is None
    assert device.step()
    assert watch.in_flight_s() == 0.0
    device.settle()
    assert watch.in_flight_s() is None
    begun = watch.begin(MB)
    device.settle()
    assert watch.in_flight_s() == pytest.approx(0.002)
    watch.end(begun)


def test_one_that_is_launched_but_not_closed_is_in_flight():
    """Between the launch and the second event an idle device already runs it."""
    device = FakeDevice(np.random.default_rng(0))
    watch = queued_on(device)
    begun = watch.begin(MB)
    device.settle()
    assert watch.in_flight_s() is not None
    watch.end(begun)
    device.settle()
    assert watch.in_flight_s() is None


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 30), ahead=st.booleans())
def test_events_are_used_again_and_never_too_early(seed, count, ahead):
    """At every step of the device the watch says what really runs."""
    device = FakeDevice(np.random.default_rng(seed))
    made, running = [], set()

    def new_event():
        made.append(FakeEvent(device))
        return made[-1]

    watch = QueuedCollectives(new_event, lambda: device.engine)
    for number in range(count):
        device.engine.run(lambda: None, cost_ms=1.0)
        begun = watch.begin(MB)
        device.engine.run(lambda number=number: running.add(number), cost_ms=1.0)
        device.engine.run(lambda number=number: running.discard(number))
        watch.end(begun)
        while not ahead and device.step():
            if running:
                assert watch.in_flight_s() is not None
    while device.step():
        if running:
            assert watch.in_flight_s() is not None
    assert watch.in_flight_s() is None
    assert watch.num_seen == count
    assert len(made) == (2 * count if ahead else 2)


def test_a_guard_waits_for_the_end_and_no_longer():
    """A thread that asks is held while the collective runs, and released by its end."""
    clock = SystemClock()
    watch = CountedCollectives(clock)
    guard = ContentionGuard(watch, clock, max_wait_s=PATIENCE_S)
    begun, gone = watch.begin(MB), threading.Event()

    def swap():
        assert guard.wait(threading.Event())
        gone.set()

    thread = threading.Thread(target=swap)
    thread.start()
    assert not gone.wait(0.05)
    watch.end(begun)
    thread.join(PATIENCE_S)
    assert gone.is_set()
    assert (guard.num_waits, guard.num_expired) == (1, 0)
    assert guard.waited_s > 0.0


def test_a_guard_lets_go_when_the_wait_was_long_enough():
    """A collective that never ends holds a sub-unit for a bounded time."""
    guard = ContentionGuard(Always(), SystemClock(), max_wait_s=1e-3)
    assert guard.wait(threading.Event())
    assert (guard.num_waits, guard.num_expired) == (1, 1)
    assert guard.delay_s(0.0) == MIN_POLL_S


def test_a_guard_gives_up_when_it_is_told_to_stop():
    """A shutdown does not wait for a collective that hangs."""
    guard = ContentionGuard(Always(), SystemClock(), max_wait_s=PATIENCE_S)
    stop = threading.Event()
    threading.Timer(0.01, stop.set).start()
    assert not guard.wait(stop)


def test_an_own_link_is_never_waited_for():
    """With one device, or NVLink between all, there is nothing to ask."""
    guard = ContentionGuard(None, ManualClock())
    stop = threading.Event()
    assert guard.wait(stop)
    assert guard.delay_s(0.0) == 0.0
    assert guard.num_waits == 0
    stop.set()
    assert not guard.wait(stop)
