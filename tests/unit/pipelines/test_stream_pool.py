"""Copies on streams: right bytes and no host wait, whatever the device runs first."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_tiered.core.clock import ManualClock, SystemClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.pipelines.completions import CompletionQueue
from sgl_tiered.pipelines.fetch import FetchTicket
from sgl_tiered.pipelines.layerwise_load import LayerwiseLoader, LoadJob, Segment
from sgl_tiered.pipelines.offload import OffloadWorker
from sgl_tiered.pipelines.stream_pool import LoadWay, StreamPool, scattered
from sgl_tiered.pipelines.worker import prepare_threads
from sgl_tiered.testing.fake_streams import FakeCopyOps, FakeDevice
from sgl_tiered.testing.tier_kit import make_pages
from sgl_tiered.tiers.host import HostTier
from tests.unit.pipelines.pipeline_support import (
    LAYOUT,
    PATIENCE_S,
    SLOT,
    load_plan,
    offload_plan,
)

NUM_PAGES = 16
KERNEL, ENGINES, STAGED = LoadWay.KERNEL, LoadWay.ENGINES, LoadWay.STAGED
WAYS = st.sampled_from(LoadWay)
SEEDS = st.integers(0, 2**32 - 1)


class Machine:
    """A fake device with a pool on it and a loader."""

    def __init__(
        self,
        seed=0,
        way=KERNEL,
        *,
        num_buffers=2,
        buffer_bytes=1,
        staged_bytes=2 * LAYOUT.layer_page_bytes,
        clock=None,
        number=0,
    ):
        self.device = FakeDevice(np.random.default_rng(seed), number)
        self.ops = FakeCopyOps(self.device, LAYOUT, NUM_PAGES)
        self.pool = StreamPool(
            self.ops,
            staging=self.ops,
            way=way,
            staged_bytes=staged_bytes,
            num_buffers=num_buffers,
            buffer_bytes=buffer_bytes,
        )
        self.completions = CompletionQueue()
        self.metrics = MetricsRegistry()
        self.loader = LayerwiseLoader(
            self.pool, self.completions, clock or SystemClock(), self.metrics
        )
        self.seen = []

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.loader.close(PATIENCE_S)

    def reads(self, layer, pages):
        """Queue on the engine's stream a kernel that reads pages of a layer."""
        pages = np.array(pages)

        def kernel():
            self.seen.append((layer, self.ops.layers[layer, pages].copy()))

        self.device.engine.run(kernel)

    def forward(self, ticket, pages):
        """Queue a forward that reads every layer as the model does."""
        for layer in range(LAYOUT.num_layers):
            ticket.wait_layer(layer)
            self.reads(layer, pages)


def job(region, rows, pages, plan_id=1):
    plan = load_plan(rows, plan_id=plan_id)
    segment = Segment(region, plan.addresses, np.arange(len(rows)))
    return LoadJob(plan, (segment,), np.asarray(pages, np.int64))


def layer_of(region, rows, layer, layout=LAYOUT):
    begin = layout.key_offset(layer)
    return region[rows, begin : begin + layout.layer_page_bytes]


@given(seed=SEEDS, way=WAYS, pinned=st.booleans(), count=st.integers(1, 6))
@settings(max_examples=60)
def test_no_layer_is_read_before_its_copy(seed, way, pinned, count):
    """The forward sees the loaded bytes in every order that streams allow."""
    rng = np.random.default_rng(seed)
    region = make_pages(8, SLOT, seed % 1000)
    rows = rng.permutation(8)[:count]
    pages = rng.permutation(NUM_PAGES)[:count]
    with Machine(seed, way) as machine:
        if not pinned:
            machine.ops.unpinned.append(region)
        ticket = machine.loader.submit([job(region, rows, pages)])
        machine.forward(ticket, pages)
        machine.device.settle()
        assert ticket.wait(PATIENCE_S)
        assert [layer for layer, _ in machine.seen] == list(range(LAYOUT.num_layers))
        for layer, read in machine.seen:
            assert np.array_equal(read, layer_of(region, rows, layer))


@given(seed=SEEDS, way=WAYS)
@settings(max_examples=40)
def test_what_was_queued_before_a_load_still_reads_the_old_bytes(seed, way):
    """Slots that a running forward reads are not written before it is through."""
    region = make_pages(2, SLOT, 1)
    with Machine(seed, way) as machine:
        machine.ops.layers[:] = 7
        for layer in range(LAYOUT.num_layers):
            machine.reads(layer, [3, 4])
        ticket = machine.loader.submit([job(region, [0, 1], [3, 4])])
        assert ticket.wait(PATIENCE_S)
        machine.device.settle()
        assert all((read == 7).all() for _, read in machine.seen)
        assert np.array_equal(
            machine.ops.layers[2, [3, 4]], layer_of(region, [0, 1], 2)
        )


@given(seed=SEEDS, way=WAYS, num_loads=st.integers(2, 6), pinned=st.booleans())
@settings(max_examples=40)
def test_no_buffer_is_used_again_before_its_event(seed, way, num_loads, pinned):
    """Many loads through one buffer, queued one behind the other, all land."""
    rng = np.random.default_rng(seed)
    region = make_pages(NUM_PAGES, SLOT, 2)
    with Machine(seed, way, num_buffers=1) as machine:
        if not pinned:
            machine.ops.unpinned.append(region)
        targets = np.array_split(rng.permutation(NUM_PAGES), num_loads)
        sources = np.array_split(rng.permutation(NUM_PAGES), num_loads)
        arrivals = [
            machine.pool.load_layer(layer, region, rows.astype(np.int64), pages)
            for rows, pages in zip(sources, targets, strict=True)
            for layer in range(LAYOUT.num_layers)
        ]
        arrivals[-1].finish()
        for rows, pages in zip(sources, targets, strict=True):
            for layer in range(LAYOUT.num_layers):
                landed = machine.ops.layers[layer, pages]
                assert np.array_equal(landed, layer_of(region, rows, layer))


@given(seed=SEEDS, pinned=st.booleans(), count=st.integers(1, 9))
@settings(max_examples=60)
def test_stored_pages_are_those_of_the_work_before_the_mark(seed, pinned, count):
    """More pages than the halves hold leave whole, after the work that writes them."""
    rng = np.random.default_rng(seed)
    wanted = rng.integers(0, 256, (LAYOUT.num_layers, NUM_PAGES, 384), np.uint8)
    region = np.zeros((12, SLOT), np.uint8)
    with Machine(seed) as machine:
        if not pinned:
            machine.ops.unpinned.append(region)

        def write():
            machine.ops.layers[:] = wanted

        machine.device.engine.run(write)
        mark = machine.pool.mark()
        rows = rng.permutation(12)[:count]
        pages = rng.permutation(NUM_PAGES)[:count]
        machine.pool.store_pages(region, rows, pages, mark)
        for row, page in zip(rows, pages, strict=True):
            whole = wanted[:, page].reshape(-1)
            assert np.array_equal(region[row, : LAYOUT.page_bytes], whole)
        assert not np.delete(region, rows, axis=0).any()


@pytest.mark.parametrize("way", LoadWay)
def test_waiting_for_a_layer_waits_for_no_copy(way):
    """The model's thread goes on at once: its stream does the waiting."""
    region = make_pages(2, SLOT, 3)
    with Machine(way=way, num_buffers=8) as machine:
        machine.device.going.clear()
        ticket = machine.loader.submit([job(region, [0, 1], [3, 4])])
        machine.forward(ticket, [3, 4])
        assert machine.device.num_run == 0
        assert not ticket.done
        machine.device.going.set()
        assert ticket.wait(PATIENCE_S)


@given(seed=SEEDS, way=WAYS)
@settings(max_examples=20)
def test_who_waits_for_the_last_layer_waits_for_all(seed, way):
    """A forward that asks for no layer may read all of them after that one wait."""
    region = make_pages(2, SLOT, 8)
    with Machine(seed, way) as machine:
        ticket = machine.loader.submit([job(region, [0, 1], [3, 4])])
        ticket.wait_last_layer()
        for layer in range(LAYOUT.num_layers):
            machine.reads(layer, [3, 4])
        machine.device.settle()
        for layer, read in machine.seen:
            assert np.array_equal(read, layer_of(region, [0, 1], layer))
        assert ticket.wait(PATIENCE_S)


@pytest.mark.parametrize("way", LoadWay)
def test_a_copy_that_fails_on_the_device_fails_the_ticket(way):
    """The error of a queued copy reaches ``wait`` and the completion."""
    with Machine(1, way) as machine:
        machine.ops.fail_layer = 2
        ticket = machine.loader.submit([job(make_pages(1, SLOT, 4), [0], [5])])
        machine.forward(ticket, [5])
        assert not ticket.wait(PATIENCE_S)
        assert "told to fail" in ticket.failed
        assert machine.loader.drain(PATIENCE_S)
        (finished,) = machine.completions.drain()
        assert not finished.landed
        assert machine.metrics.snapshot()["edges"]["host->device"]["failures"] == 1


@pytest.mark.parametrize("pinned", [True, False])
def test_a_copy_that_cannot_be_queued_ends_after_those_before_it(pinned):
    """When the failure is known, nothing of the load runs on the device any more."""
    region = make_pages(2, SLOT, 5)
    for seed in range(20):
        with Machine(seed, ENGINES) as machine:
            if not pinned:
                machine.ops.unpinned.append(region)
            machine.ops.refuse_layer = 3
            ticket = machine.loader.submit([job(region, [0, 1], [5, 6])])
            assert not ticket.wait(PATIENCE_S)
            assert "refused" in ticket.failed
            load = next(s for s in machine.device.streams if s.name == "load")
            assert not load.queue


def queued(machine, pages):
    """Return page numbers that work of the engine makes, which is queued."""
    on_device = np.full(len(pages), -1, np.int64)

    def take():
        on_device[:] = pages

    machine.device.engine.run(take)
    return machine.pool.queue_pages(on_device)


def queued_job(region, rows, pages, plan_id=1):
    plan = load_plan(rows, plan_id=plan_id)
    half = len(rows) // 2
    positions = np.arange(half), np.arange(half, len(rows))
    segments = tuple(
        Segment(region, plan.addresses[some], some) for some in positions if len(some)
    )
    return LoadJob(plan, segments, pages)


@given(
    seed=SEEDS,
    way=WAYS,
    pinned=st.booleans(),
    counts=st.tuples(*[st.integers(1, 4)] * 2),
)
@settings(max_examples=60)
def test_pages_that_the_host_does_not_know_yet_get_their_bytes(
    seed, way, pinned, counts
):
    """Two requests of a batch, whose slots come of work that is queued."""
    rng = np.random.default_rng(seed)
    region = make_pages(8, SLOT, seed % 1000)
    rows, pages = rng.permutation(8)[: sum(counts)], rng.permutation(NUM_PAGES)
    pages = pages[: sum(counts)]
    parts = [slice(0, counts[0]), slice(counts[0], None)]
    with Machine(seed, way) as machine:
        if not pinned:
            machine.ops.unpinned.append(region)
        jobs = [
            queued_job(region, rows[part], queued(machine, pages[part]), plan_id)
            for plan_id, part in enumerate(parts)
        ]
        ticket = machine.loader.submit(jobs)
        machine.forward(ticket, pages)
        machine.device.settle()
        assert ticket.wait(PATIENCE_S)
        for layer, read in machine.seen:
            assert np.array_equal(read, layer_of(region, rows, layer))


@given(seed=SEEDS, pinned=st.booleans(), count=st.integers(1, 9))
@settings(max_examples=40)
def test_pages_that_the_host_does_not_know_yet_are_stored(seed, pinned, count):
    """Chosen ones of a request's, in chunks, after the work that took them."""
    rng = np.random.default_rng(seed)
    wanted = rng.integers(0, 256, (LAYOUT.num_layers, NUM_PAGES, 384), np.uint8)
    host = HostTier(SLOT, 12)
    with Machine(seed) as machine:
        if not pinned:
            machine.ops.unpinned.append(host.region)
        worker = OffloadWorker(
            machine.pool, host, machine.completions, SystemClock(), machine.metrics
        )

        def write():
            machine.ops.layers[:] = wanted

        machine.device.engine.run(write)
        every = rng.permutation(NUM_PAGES)
        chosen = np.sort(rng.permutation(NUM_PAGES)[:count])
        rows = rng.permutation(12)[:count]
        pages = queued(machine, every)[chosen]
        worker.submit(offload_plan(rows), pages, machine.pool.mark())
        assert worker.drain(PATIENCE_S)
        worker.close(PATIENCE_S)
        (finished,) = machine.completions.drain()
        assert finished.result.ok.all()
        for row, page in zip(rows, every[chosen], strict=True):
            whole = wanted[:, page].reshape(-1)
            assert np.array_equal(host.region[row, : LAYOUT.page_bytes], whole)
    host.close()


@pytest.mark.parametrize("way", LoadWay)
def test_nobody_waits_for_the_numbers_of_pages(way):
    """Behind a forward that has not run, a whole pass with loads is queued.

    Where the copy engines are the better way too: they would need the numbers.
    """
    region = make_pages(4, SLOT, 3)
    with Machine(way=way) as machine:
        machine.device.going.clear()
        for number in range(3):
            pages = np.array([3, 4]) + 2 * number
            numbers = queued(machine, pages)
            ticket = machine.loader.submit([queued_job(region, [0, 1], numbers)])
            machine.forward(ticket, pages)
        assert machine.device.num_run == 0
        # Who sees loads to their ends waits for the first.
        assert set(machine.device.blocked) <= {"tiered-land-0"}
        machine.device.going.set()
        assert ticket.wait(PATIENCE_S)


@pytest.mark.parametrize("way", LoadWay)
def test_who_asks_whether_a_load_is_queued_waits_for_no_copy(way):
    """It is known to be queued whole before the device has run anything of it."""
    with Machine(way=way) as machine:
        machine.device.going.clear()
        ticket = machine.loader.submit([job(make_pages(2, SLOT, 3), [0, 1], [3, 4])])
        assert ticket.wait_queued()
        assert ticket.is_queued
        assert machine.device.num_run == 0
        machine.device.going.set()
        assert ticket.wait(PATIENCE_S)


def test_a_load_that_cannot_be_queued_is_known_to_have_failed():
    """And nothing of it runs any more by then."""
    with Machine(way=ENGINES) as machine:
        machine.ops.refuse_layer = 2
        ticket = machine.loader.submit([job(make_pages(2, SLOT, 3), [0, 1], [3, 4])])
        assert not ticket.wait_queued()
        assert ticket.done
        load = next(s for s in machine.device.streams if s.name == "load")
        assert not load.queue


@pytest.mark.parametrize("way", LoadWay)
def test_a_fetch_behind_a_long_forward_holds_no_load_up(way):
    """Its layer is queued; a load for a pass is queued behind it, and all land."""
    region = make_pages(4, SLOT, 3)
    with Machine(way=way, num_buffers=8) as machine:
        machine.device.going.clear()
        fetch = FetchTicket(job(region, [2, 3], [7, 8]), machine.pool, SystemClock())
        assert machine.loader.submit_steps(fetch)
        ticket = machine.loader.submit([job(region, [0, 1], [3, 4])])
        machine.forward(ticket, [3, 4])
        assert machine.device.num_run == 0
        assert not fetch.ended
        machine.device.going.set()
        assert machine.loader.drain(PATIENCE_S)
        assert fetch.landed
        for layer in range(LAYOUT.num_layers):
            found = machine.ops.layers[layer, [7, 8]]
            assert np.array_equal(found, layer_of(region, [2, 3], layer))


def test_many_fetches_behind_a_long_forward_hold_no_load_up():
    """Each has numbers on their way to the device; a load finds room for its own."""
    region = make_pages(4, SLOT, 3)
    with Machine() as machine:
        machine.device.going.clear()
        for _ in range(40):
            fetch = FetchTicket(
                job(region, [2, 3], [7, 8]), machine.pool, SystemClock()
            )
            assert machine.loader.submit_steps(fetch)
        ticket = machine.loader.submit([job(region, [0, 1], [3, 4])])
        waiting = threading.Thread(target=ticket.wait_queued)
        waiting.start()
        waiting.join(PATIENCE_S / 10)
        was_held = waiting.is_alive()
        machine.device.going.set()
        assert machine.loader.drain(PATIENCE_S)
        waiting.join()
        assert not was_held, "its queueing waited for the device"
        for layer in range(LAYOUT.num_layers):
            found = machine.ops.layers[layer, [3, 4]]
            assert np.array_equal(found, layer_of(region, [0, 1], layer))


@settings(max_examples=20)
@given(seed=SEEDS, way=WAYS)
def test_a_fetch_is_cancelled_without_a_wait_for_the_device(seed, way):
    """A layer is under way behind a forward; who gets its pages works behind it."""
    region = make_pages(4, SLOT, 3)
    with Machine(seed, way) as machine:
        device, pages = machine.device, [7, 8]
        device.going.clear()
        fetch = FetchTicket(job(region, [2, 3], pages), machine.pool, SystemClock())
        assert machine.loader.submit_steps(fetch)
        while not fetch.is_queued:
            threading.Event().wait(0.001)
        cancelling = threading.Thread(target=fetch.cancel)
        cancelling.start()
        cancelling.join(PATIENCE_S / 10)
        was_held = cancelling.is_alive()
        # The pages are somebody else's, whose forward writes and reads them.
        written = np.full((2, LAYOUT.layer_page_bytes), 0xAB, np.uint8)

        def write():
            machine.ops.layers[0, pages] = written

        device.engine.run(write)
        machine.reads(0, pages)
        device.going.set()
        assert machine.loader.drain(PATIENCE_S)
        cancelling.join()
        device.settle()
        assert not was_held, "it was waited for the device"
        assert np.array_equal(machine.seen[0][1], written)
        assert fetch.ended
        assert not fetch.landed


def test_a_fetch_whose_copy_the_device_fails_at_has_failed():
    """With the tier whose bytes it were."""
    with Machine(way=ENGINES) as machine:
        machine.ops.fail_layer = 1
        fetch = FetchTicket(
            job(make_pages(2, SLOT, 3), [0, 1], [7, 8]), machine.pool, SystemClock()
        )
        assert machine.loader.submit_steps(fetch)
        assert machine.loader.drain(PATIENCE_S)
        assert fetch.ended
        assert not fetch.landed
        assert "told to fail" in fetch.failed
        assert fetch.failed_source is TierId.HOST


@given(seed=SEEDS, count=st.integers(1, 9))
@settings(max_examples=20)
def test_stores_can_be_kept_from_running_beside_a_forward(seed, count):
    """On its stream they wait for it and it for them, however many halves they take."""
    region = np.zeros((NUM_PAGES, SLOT), np.uint8)
    with Machine(seed) as machine:
        engine = machine.device.engine
        pool = StreamPool(machine.ops, store_stream=engine)
        rng = np.random.default_rng(seed)
        wanted = rng.integers(0, 256, machine.ops.layers.shape, np.uint8)

        def forward(pages=wanted):
            machine.ops.layers[:] = pages

        machine.device.going.clear()
        engine.run(forward)
        mark = pool.mark()
        storing = threading.Thread(
            target=pool.store_pages,
            args=(region, np.arange(count), np.arange(count), mark),
        )
        storing.start()
        while len(engine.queue) < 3:
            time.sleep(0.001)
        machine.device.going.set()
        storing.join(PATIENCE_S)
        engine.run(lambda: forward(0 * wanted))
        machine.device.settle()
        for page in range(count):
            whole = wanted[:, page].reshape(-1)
            assert np.array_equal(region[page, : LAYOUT.page_bytes], whole)
        stores = [each for each in machine.device.streams if each.name == "store"]
        # Those of the machine's own pool.
        assert len(stores) == 2


@pytest.mark.parametrize("lands", [False, True])
def test_a_cancelled_fetch_can_be_waited_for(lands):
    """Who writes without a stream then finds nothing under way."""
    region = make_pages(4, SLOT, 3)
    with Machine(way=ENGINES) as machine:
        fetch = FetchTicket(job(region, [2, 3], [7, 8]), machine.pool, SystemClock())
        fetch.step()
        fetch.cancel(lands=lands)
        received = np.full((2, LAYOUT.layer_page_bytes), 9, np.uint8)
        machine.ops.layers[0, [7, 8]] = received
        machine.device.settle()
        assert np.array_equal(machine.ops.layers[0, [7, 8]], received) is lands


def test_a_fetch_brings_nothing_twice():
    """Of two tiers and by pages that the host knows, where layers come together."""
    regions = [make_pages(4, SLOT, seed) for seed in (3, 4)]
    plan = load_plan([0, 1, 2, 3])
    segments = tuple(
        Segment(region, plan.addresses[part], np.arange(4)[part])
        for region, part in zip(regions, (slice(0, 3), slice(3, 4)), strict=True)
    )
    with Machine(way=STAGED, staged_bytes=LAYOUT.page_bytes) as machine:
        given = LoadJob(plan, segments, np.array([7, 8, 2, 1]))
        fetch = FetchTicket(given, machine.pool, SystemClock())
        while fetch.step():
            fetch.land()
        assert fetch.landed
        # Three pages and one, through halves of two.
        assert machine.ops.kernels == ["scatter"] * 3


def test_the_better_way_is_taken_once_the_host_knows_the_numbers():
    """An idle device has made them by the time that the load is queued."""
    ways = []
    for is_idle in (True, False):
        with Machine(way=ENGINES) as machine:
            numbers = queued(machine, [3, 4])
            if is_idle:
                machine.device.settle()
            machine.ops.engines_ms, machine.ops.kernel_ms = 1.0, 100.0
            arrival = machine.pool.load_layer(
                0, make_pages(2, SLOT, 3), np.arange(2), numbers
            )
            ways.append(arrival.finish() < 0.05)
    assert ways == [True, False]


@pytest.fixture
def second_device():
    """A machine whose device is not the one that a new thread works under."""
    device = FakeDevice(np.random.default_rng(0), number=1)
    prepare_threads(device.enter)
    yield
    prepare_threads(None)
    FakeDevice(np.random.default_rng(0)).enter()


@pytest.mark.usefixtures("second_device")
@pytest.mark.parametrize("way", LoadWay)
@pytest.mark.parametrize("pinned", [True, False])
def test_copies_are_issued_under_the_device_of_their_memory(way, pinned):
    """By each thread that copies: those of loads and those of offloads."""
    host = HostTier(SLOT, 4)
    region = make_pages(2, SLOT, 3)
    with Machine(1, way, number=1) as machine:
        machine.device.enter()
        if not pinned:
            machine.ops.unpinned += [region, host.region]
        worker = OffloadWorker(
            machine.pool, host, machine.completions, SystemClock(), machine.metrics
        )
        machine.device.issued.clear()
        ticket = machine.loader.submit([job(region, [0, 1], [3, 4])])
        worker.submit(offload_plan([1]), np.array([2]), machine.pool.mark())
        assert ticket.wait(PATIENCE_S)
        assert worker.drain(PATIENCE_S)
        worker.close(PATIENCE_S)
        threads = {name for name, _ in machine.device.issued}
        assert threads == {"tiered-load-0", "tiered-offload-0"}
        assert {number for _, number in machine.device.issued} == {1}
    host.close()


def test_a_store_that_fails_on_the_device_is_a_result():
    """The offload worker posts a failure, and the next store works."""
    host = HostTier(SLOT, 4)
    with Machine(2) as machine:
        worker = OffloadWorker(
            machine.pool, host, machine.completions, SystemClock(), machine.metrics
        )
        machine.ops.fail_store = True
        worker.submit(offload_plan([1]), np.array([2]), machine.pool.mark())
        assert worker.drain(PATIENCE_S)
        (finished,) = machine.completions.drain()
        assert not finished.result.ok.any()
        assert "told to fail" in finished.result.error
        worker.close(PATIENCE_S)
    host.close()


def test_the_seconds_of_a_load_are_the_device_s():
    """Queueing costs nothing, nor does the forward; each layer costs its copy."""
    region = make_pages(1, SLOT, 6)
    with Machine(3, ENGINES, clock=ManualClock()) as machine:
        machine.ops.engines_ms = 5.0
        ticket = machine.loader.submit([job(region, [0], [1])])
        machine.forward(ticket, [1])
        assert ticket.wait(PATIENCE_S)
        assert ticket.seconds == pytest.approx(LAYOUT.num_layers * 5e-3)


def test_a_stall_is_known_once_the_stream_has_gone_on():
    """The first layer's copy holds a forward back that came before it."""
    with Machine(0, ENGINES) as machine:
        arrival = machine.pool.load_layer(
            0, make_pages(1, SLOT, 6), np.array([0]), np.array([1])
        )
        arrival.order()
        assert arrival.stall_s() == 0.0
        # The engine's first record runs before the copy does.
        engine = machine.device.engine
        while len(engine.queue) > 2:
            ready, execute = engine.queue.popleft()
            assert ready()
            execute()
        machine.device.settle()
        assert arrival.stall_s() == pytest.approx(machine.ops.engines_ms / 1e3)


def test_a_stream_waits_once_for_a_layer():
    """Keys and values are asked for one after the other; one wait is enough."""
    with Machine(0, ENGINES) as machine:
        arrival = machine.pool.load_layer(
            0, make_pages(1, SLOT, 6), np.array([0]), np.array([1])
        )
        arrival.order()
        queued = len(machine.device.engine.queue)
        arrival.order()
        assert len(machine.device.engine.queue) == queued
        arrival.finish()


@pytest.mark.parametrize(
    ("engines_ms", "staged_ms", "kernel_ms", "way"),
    [
        (1.0, 2.0, 0.5, KERNEL),
        (1.0, 2.0, 0.95, ENGINES),
        (1.0, 2.0, 2.0, ENGINES),
        (1.0, 0.5, 0.6, STAGED),
        (1.0, 0.5, 0.49, STAGED),
        (1.0, 0.5, 0.4, KERNEL),
        (1.0, 0.98, 2.0, ENGINES),
    ],
)
def test_the_faster_way_is_kept(engines_ms, staged_ms, kernel_ms, way):
    """A kernel has to be clearly faster, for it takes cores from the forward."""
    with Machine(4) as machine:
        machine.ops.engines_ms, machine.ops.kernel_ms = engines_ms, kernel_ms
        machine.ops.staged_ms = staged_ms
        region = make_pages(3, SLOT, 7)
        figures = machine.pool.tune(region, np.arange(3), np.array([5, 1, 8]))
        assert machine.pool.way is way
        assert machine.pool.loads_by_kernel is (way is KERNEL)
        assert figures["load_layer_by_staged_s"] == pytest.approx(staged_ms / 1e3)
        assert figures["load_layer_by_engines_s"] == pytest.approx(engines_ms / 1e3)
        assert figures["load_layer_by_kernel_s"] == pytest.approx(kernel_ms / 1e3)


@given(seed=SEEDS, at_once=st.integers(1, 5), counts=st.lists(st.integers(1, 5)))
@settings(max_examples=60)
def test_layers_that_came_with_others_are_not_copied_again(seed, at_once, counts):
    """Some layers of all pages come at once, whatever else is loaded between."""
    rng = np.random.default_rng(seed)
    counts = counts[:3] or [1]
    rows, pages = rng.permutation(NUM_PAGES), rng.permutation(NUM_PAGES)
    cuts = np.cumsum(counts)
    loads = [
        (rows[end - count : end], pages[end - count : end])
        for count, end in zip(counts, cuts, strict=True)
    ]
    region = make_pages(NUM_PAGES, SLOT, 3)
    width = at_once * LAYOUT.layer_page_bytes
    with Machine(seed, STAGED, staged_bytes=width) as machine:
        pool, ops = machine.pool, machine.ops
        arrivals = [
            pool.load_layer(layer, region, *load)
            for layer in range(LAYOUT.num_layers)
            for load in loads
        ]
        num_scattered = 0
        for first in range(0, LAYOUT.num_layers, at_once):
            layers = min(at_once, LAYOUT.num_layers - first)
            in_a_half = ops.staging_bytes // (layers * LAYOUT.layer_page_bytes)
            num_scattered += sum(-(-count // in_a_half) for count in counts)
        assert ops.kernels == ["scatter"] * num_scattered
        for arrival in arrivals:
            arrival.finish()
        for layer in range(LAYOUT.num_layers):
            for some, pages_there in loads:
                landed = ops.layers[layer, pages_there]
                assert np.array_equal(landed, layer_of(region, some, layer))
        # Who begins anew is given what the rows hold now.
        ops.layers[:] = 0
        for layer in range(LAYOUT.num_layers):
            pool.load_layer(layer, region, *loads[0]).finish()
        assert np.array_equal(
            ops.layers[0, loads[0][1]], layer_of(region, loads[0][0], 0)
        )


def test_where_layers_are_loaded_singly_nothing_comes_with_them():
    """Another layer of the same number may be another page's."""
    region = make_pages(2, SLOT, 3)
    device = FakeDevice(np.random.default_rng(0))
    ops = FakeCopyOps(device, LAYOUT, NUM_PAGES)
    ops.staged_ms = 0.1
    pool = StreamPool(ops)
    pool.tune(region, np.arange(2), np.arange(2))
    assert pool.way is not STAGED
    ops.layers[:] = 0
    pool.load_layer(1, region, np.arange(2), np.arange(2)).finish()
    assert not ops.layers[[0, 2, 3]].any()


@pytest.mark.parametrize("way", LoadWay)
def test_no_kernel_runs_for_the_first_time_in_service(way):
    """Whichever way loads go: where pages are not known yet, it is the kernel."""
    region = make_pages(8, SLOT, 9)
    with Machine(7, way, num_buffers=8) as machine:
        pool, ops = machine.pool, machine.ops
        pool.warm(np.array([5, 6]))
        wanted = {"load", "choose", "scatter", "gather 0", "gather 1"}
        assert set(ops.kernels) == wanted
        assert not np.delete(ops.layers, 5, axis=1).any()
        ran = set(ops.kernels)
        ops.kernels.clear()
        rows = np.arange(6)
        pool.load_layer(1, region, rows, rows + 2).finish()
        machine.device.going.clear()
        chosen = queued(machine, rows + 3)[np.array([0, 2])]
        mark = pool.mark()
        arrival = pool.load_layer(2, region, rows[:2], chosen, after=mark)
        machine.device.going.set()
        arrival.finish()
        pool.store_pages(np.zeros((6, SLOT), np.uint8), rows, rows, pool.mark())
        assert ops.kernels
        assert set(ops.kernels) <= ran


def test_a_kernel_is_given_no_memory_that_the_device_cannot_reach():
    """Where nothing pins, loads go by the engines and need no kernel."""
    with Machine(7, KERNEL) as machine:
        machine.ops.pins = False
        machine.pool.warm(np.array([5]))
        assert "load" not in machine.ops.kernels
        assert {"gather 0", "gather 1"} <= set(machine.ops.kernels)


@given(num_rows=st.integers(1, 2000), num_pages=st.integers(1, 2000), seed=SEEDS)
@settings(max_examples=60)
def test_a_pool_is_tuned_over_scattered_pages(num_rows, num_pages, seed):
    """Both are drawn from all that there are, each at most once; 256, or fewer."""
    rng = np.random.default_rng(seed)
    rows, pages = scattered(rng, range(3, 3 + num_rows), range(1, 1 + num_pages))
    assert len(rows) == len(pages) == min(256, num_rows, num_pages)
    for numbers, first, count in ((rows, 3, num_rows), (pages, 1, num_pages)):
        assert numbers.dtype == np.int64
        assert len(set(numbers.tolist())) == len(numbers)
        assert numbers.min() >= first
        assert numbers.max() < first + count
        if len(numbers) > 64:
            assert (np.abs(np.diff(numbers)) == 1).mean() < 0.1
            assert numbers.max() - numbers.min() > count // 2


def test_small_pieces_go_by_the_kernel_until_measured():
    """The limit is on the keys of one page in one layer."""
    for token_bytes, by_kernel in ((2048, True), (4096, False)):
        layout = PageLayout(num_layers=2, page_tokens=16, token_bytes=token_bytes)
        device = FakeDevice(np.random.default_rng(0))
        pool = StreamPool(FakeCopyOps(device, layout, 4))
        assert pool.loads_by_kernel is by_kernel


def test_the_adversary_reports_streams_that_wait_for_each_other():
    """A wait that nothing will end is a failure of the test, not a hang."""
    device = FakeDevice(np.random.default_rng(0))
    left, right = device.new_stream("left"), device.new_stream("right")
    from_left, from_right = left.record_event(), right.record_event()
    left.record_event(from_left)
    right.record_event(from_right)
    device.settle()
    late = device.new_stream("late").record_event()
    late.num_recorded += 1
    left.wait_event(late)
    with pytest.raises(AssertionError, match="wait for each other"):
        device.settle()
