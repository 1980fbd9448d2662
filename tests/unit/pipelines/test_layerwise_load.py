"""Layer-wise loads: order, overlap, failure, accounting."""

import threading

import numpy as np
import pytest

from sgl_tiered.core.clock import ManualClock, SystemClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.pipelines.completions import CompletionQueue, LoadFinished
from sgl_tiered.pipelines.layerwise_load import (
    LayerwiseLoader,
    LoadJob,
    LoadTicket,
    Segment,
    group_layers,
)
from sgl_tiered.serving.emulation import Fault
from sgl_tiered.testing.fakes import FakeDevicePool
from sgl_tiered.testing.faulty import FaultyTier
from sgl_tiered.testing.tier_kit import make_pages
from sgl_tiered.tiers.host import HostTier
from tests.unit.pipelines.pipeline_support import LAYOUT, PATIENCE_S, SLOT, load_plan


@pytest.fixture
def pool():
    pool = FakeDevicePool(LAYOUT, num_pages=32)
    yield pool
    pool.open_gates()


@pytest.fixture
def completions():
    return CompletionQueue()


@pytest.fixture
def metrics():
    return MetricsRegistry()


@pytest.fixture
def loader(pool, completions, metrics):
    loader = LayerwiseLoader(pool, completions, SystemClock(), metrics)
    yield loader
    pool.open_gates()
    loader.close(PATIENCE_S)


def job(region, rows, device_pages, *, charge=None, plan_id=1):
    plan = load_plan(rows, plan_id=plan_id)
    segment = Segment(region, plan.addresses, np.arange(len(rows)), charge)
    return LoadJob(plan, (segment,), np.asarray(device_pages, np.int64))


def test_pages_land_where_they_belong(loader, pool, completions):
    """Jobs of a batch, each from several regions, land byte for byte."""
    host, staging = make_pages(8, SLOT, seed=1), make_pages(4, SLOT, seed=2)
    plan = load_plan([6, 0, 3, 1])
    mixed = LoadJob(
        plan,
        (
            Segment(host, np.array([6, 3]), np.array([0, 2])),
            Segment(staging, np.array([2, 1]), np.array([1, 3]), None, TierId.HOST),
        ),
        np.array([10, 11, 12, 13]),
    )
    ticket = loader.submit([mixed, job(host, [5], [20], plan_id=2)])
    assert ticket.wait(PATIENCE_S)
    wanted = {10: host[6], 11: staging[2], 12: host[3], 13: staging[1], 20: host[5]}
    for device_page, row in wanted.items():
        assert np.array_equal(pool.page(device_page), row[: LAYOUT.page_bytes])
    assert loader.drain(PATIENCE_S)
    (finished,) = completions.drain()
    assert isinstance(finished, LoadFinished)
    assert finished.landed
    assert finished.ticket is ticket
    assert [p.plan_id for p in finished.plans] == [1, 2]
    assert finished.num_bytes == 5 * LAYOUT.page_bytes


def test_layers_arrive_in_order_under_the_computation(loader, pool):
    """The waiter of layer 0 goes on while layer 1 is still on its way."""
    pool.close_gates()
    ticket = loader.submit([job(make_pages(2, SLOT, 3), [0, 1], [4, 5])])
    passed = [threading.Event() for _ in range(LAYOUT.num_layers)]

    def model():
        for layer in range(LAYOUT.num_layers):
            ticket.wait_layer(layer)
            passed[layer].set()

    thread = threading.Thread(target=model)
    thread.start()
    for layer in range(LAYOUT.num_layers):
        assert not passed[layer].is_set()
        assert not ticket.done
        pool.gates[layer].set()
        assert passed[layer].wait(PATIENCE_S)
    thread.join()
    assert ticket.wait(PATIENCE_S)
    assert ticket.stall_s > 0


def test_all_jobs_of_a_layer_come_before_the_next_layer(loader, pool):
    """A batch is copied layer by layer, not job by job, and jobs by one copy each."""
    region = make_pages(6, SLOT, 4)
    jobs = [job(region, [0], [1]), job(region, [1, 2], [2, 3])]
    assert loader.submit(jobs).wait(PATIENCE_S)
    wanted = [(layer, 3) for layer in range(LAYOUT.num_layers)]
    assert pool.copies == wanted


def test_a_failed_copy_releases_all_waiters(loader, pool, completions, metrics):
    """After a failure nobody waits any more, and the load has not landed."""
    pool.close_gates()
    pool.fail_layer = 1
    ticket = loader.submit([job(make_pages(1, SLOT, 5), [0], [0])])
    waiters = [
        threading.Thread(target=ticket.wait_layer, args=(layer,)) for layer in (1, 2, 3)
    ]
    for waiter in waiters:
        waiter.start()
    pool.open_gates()
    for waiter in waiters:
        waiter.join(PATIENCE_S)
        assert not waiter.is_alive()
    assert not ticket.wait(PATIENCE_S)
    assert ticket.done
    assert "told to fail" in ticket.failed
    assert loader.drain(PATIENCE_S)
    (finished,) = completions.drain()
    assert (finished.landed, finished.num_bytes) == (False, 0)
    edge = metrics.snapshot()["edges"]["host->device"]
    assert (edge["failures"], edge["failed_pages"], edge["bytes"]) == (1, 1, 0)
    pool.fail_layer = -1
    assert loader.submit([job(make_pages(1, SLOT, 5), [0], [0])]).wait(PATIENCE_S)


def test_every_layer_is_charged_its_bytes(loader, pool):
    """A throttled source is charged layer by layer, so that layers still overlap."""
    charged = []
    pages = job(make_pages(3, SLOT, 6), [0, 1, 2], [0, 1, 2], charge=charged.append)
    assert loader.submit([pages]).wait(PATIENCE_S)
    assert charged == [3 * LAYOUT.layer_page_bytes] * LAYOUT.num_layers


def test_bytes_are_counted_by_source(loader, metrics):
    """Metrics tell copies from host memory and from CXL memory apart."""
    region = make_pages(4, SLOT, 7)
    plan = load_plan([0, 1, 2])
    both = LoadJob(
        plan,
        (
            Segment(region, np.array([0]), np.array([0])),
            Segment(region, np.array([1, 2]), np.array([1, 2]), None, TierId.CXL),
        ),
        np.array([0, 1, 2]),
    )
    assert loader.submit([both]).wait(PATIENCE_S)
    assert loader.drain(PATIENCE_S)
    edges = metrics.snapshot()["edges"]
    assert edges["host->device"]["bytes"] == LAYOUT.page_bytes
    assert edges["cxl->device"]["pages"] == 2


def test_empty_and_closed(pool, completions, metrics):
    """Nothing to load has landed; after close every load has failed at once."""
    loader = LayerwiseLoader(pool, completions, SystemClock(), metrics)
    assert loader.submit([]).wait(PATIENCE_S)
    loader.close(PATIENCE_S)
    ticket = loader.submit([job(make_pages(1, SLOT, 8), [0], [0])])
    ticket.wait_layer(3)
    assert not ticket.wait(PATIENCE_S)
    assert "closed" in ticket.failed


def test_close_releases_waiting_loads(pool, completions, metrics):
    """A load that never began is failed at close, and its waiters go on."""
    pool.close_gates()
    loader = LayerwiseLoader(pool, completions, SystemClock(), metrics)
    region = make_pages(1, SLOT, 9)
    loader.submit([job(region, [0], [0])])
    second = loader.submit([job(region, [0], [1])])
    loader.close(0.0)
    second.wait_layer(0)
    assert not second.wait(PATIENCE_S)
    pool.open_gates()
    assert loader.drain(PATIENCE_S)


def test_wait_can_time_out(loader, pool):
    """A wait with a timeout says False, and the load goes on."""
    pool.close_gates()
    ticket = loader.submit([job(make_pages(1, SLOT, 10), [0], [0])])
    assert not ticket.wait(0.0)
    assert not ticket.done
    pool.open_gates()
    assert ticket.wait(PATIENCE_S)


def test_negative_control_reaches_the_device(loader, pool):
    """A page that a faulty host shows as zeros is zeros on the device."""
    host = HostTier(SLOT, 4)
    host.region[:] = make_pages(4, SLOT, 11)
    faulty = FaultyTier(host, [Fault("zero", times=1)])
    plan = load_plan([0, 1, 2])
    segment = Segment.of_tier(faulty, plan.addresses, np.arange(3))
    pages = LoadJob(plan, (segment,), np.array([7, 8, 9]))
    assert loader.submit([pages]).wait(PATIENCE_S)
    zero = [not pool.page(device_page).any() for device_page in (7, 8, 9)]
    assert zero.count(True) == 1
    host.close()


def test_a_waiter_that_copies_brings_every_layer_itself(loader, pool, completions):
    """Where copies and computation share the cores, the loader leaves them to it."""
    pool.waiter_copies = True
    region = make_pages(3, SLOT, 9)
    ticket = loader.submit([job(region, [0, 2], [4, 5])])
    for layer in range(LAYOUT.num_layers):
        ticket.wait_layer(layer)
        begin = LAYOUT.key_offset(layer)
        wanted = region[[0, 2], begin : begin + LAYOUT.layer_page_bytes]
        assert np.array_equal(pool.layers[layer, [4, 5]], wanted)
    assert ticket.wait(PATIENCE_S)
    assert pool.by_waiter == [True] * LAYOUT.num_layers
    assert loader.drain(PATIENCE_S)
    (finished,) = completions.drain()
    assert finished.landed
    assert finished.num_bytes == 2 * LAYOUT.page_bytes


def test_the_loader_steps_in_where_the_waiter_does_not_come_back(loader, pool):
    """A forward that breaks off leaves no load behind that never ends."""
    pool.waiter_copies = True
    ticket = loader.submit([job(make_pages(1, SLOT, 9), [0], [4])])
    ticket.wait_layer(0)
    assert loader.drain(PATIENCE_S)
    assert ticket.done
    assert pool.by_waiter == [True] + [False] * (LAYOUT.num_layers - 1)


def test_who_waits_for_the_whole_wakes_the_loader(loader, pool):
    """Nobody else would copy then."""
    pool.waiter_copies = True
    ticket = loader.submit([job(make_pages(1, SLOT, 9), [0], [4])])
    assert ticket.wait(PATIENCE_S)
    assert not any(pool.by_waiter)


def test_a_waiter_whose_copy_fails_is_released(loader, pool, completions):
    """The failure reaches ``wait`` and the completion, and never the model."""
    pool.waiter_copies = True
    pool.fail_layer = 1
    ticket = loader.submit([job(make_pages(1, SLOT, 9), [0], [4])])
    for layer in range(LAYOUT.num_layers):
        ticket.wait_layer(layer)
    assert not ticket.wait(PATIENCE_S)
    assert "layer 1" in ticket.failed
    assert loader.drain(PATIENCE_S)
    (finished,) = completions.drain()
    assert not finished.landed


def test_what_the_model_computes_between_two_layers_is_no_time_of_the_load(
    pool, completions, metrics
):
    """The planner learns from these seconds what a load costs."""
    clock = ManualClock()
    pool.waiter_copies = True
    loader = LayerwiseLoader(pool, completions, clock, metrics)
    ticket = loader.submit([job(make_pages(1, SLOT, 9), [0], [4])])
    for layer in range(LAYOUT.num_layers):
        ticket.wait_layer(layer)
        clock.advance(0.04)
    assert ticket.wait(PATIENCE_S)
    assert loader.drain(PATIENCE_S)
    (finished,) = completions.drain()
    assert finished.seconds == 0.0
    loader.close(PATIENCE_S)


def test_a_load_that_was_given_up_under_a_copy_stays_failed(pool):
    """The copy that ends later must not turn missing layers into landed ones."""
    pool.waiter_copies = True
    pool.close_gates()
    ticket = LoadTicket([job(make_pages(1, SLOT, 9), [0], [4])], pool, SystemClock())
    waiter = threading.Thread(target=ticket.wait_layer, args=(0,))
    waiter.start()
    while not pool.by_waiter:
        waiter.join(0.001)
    ticket._finish("the loader is closed")
    pool.open_gates()
    waiter.join(PATIENCE_S)
    assert not ticket.wait(PATIENCE_S)
    assert ticket.failed == "the loader is closed"


def test_a_ticket_tells_which_tier_failed(loader, pool):
    """The tier whose copy broke is named; staging memory is no tier."""
    host = HostTier(SLOT, 4)
    faulty = FaultyTier(host, [Fault("error", times=1)])
    plan = load_plan([0, 1, 2])
    staged = Segment(make_pages(1, SLOT, 12), np.array([0]), np.array([2]))
    segments = (Segment.of_tier(faulty, plan.addresses[:2], np.arange(2)), staged)
    pages = LoadJob(plan, segments, np.array([7, 8, 9]))
    broken = loader.submit([pages])
    assert not broken.wait(PATIENCE_S)
    assert broken.failed_source is TierId.HOST
    assert broken.sources == {TierId.HOST}
    whole = loader.submit([pages])
    assert whole.wait(PATIENCE_S)
    assert whole.failed_source is None
    host.close()


def test_parts_of_pages_are_paid_for_as_parts(pool, completions, metrics):
    """Link, metrics and costs see the bytes that a load brings, layers together."""
    charges = []
    region, plan = make_pages(3, SLOT, 4), load_plan([0, 1, 2])
    segment = Segment(region, plan.addresses, np.arange(3), charges.append)
    loader = LayerwiseLoader(pool, completions, SystemClock(), metrics)
    num_bytes = np.array([5, 0, 1002])
    pages = LoadJob(plan, (segment,), np.array([3, 4, 5], np.int64), num_bytes)
    assert loader.submit([pages]).wait(PATIENCE_S)
    assert loader.drain(PATIENCE_S)
    assert len(charges) == LAYOUT.num_layers
    assert sum(charges) == 1007
    (finished,) = completions.drain()
    assert finished.num_bytes == 1007
    assert finished.figures.moved[TierId.HOST][0] == 1007
    edge = metrics.snapshot()["edges"]["host->device"]
    assert (edge["bytes"], edge["pages"]) == (1007, 3)
    loader.close(PATIENCE_S)


def test_a_paced_copy_is_the_loader_s(pool, completions, metrics):
    """A copy that sleeps for its pace is not done by the thread that computes."""
    pool.waiter_copies = True
    region = make_pages(2, SLOT, 4)
    plan = load_plan([0, 1])
    paced = Segment(region, plan.addresses, np.arange(2), None, is_paced=True)
    loader = LayerwiseLoader(pool, completions, SystemClock(), metrics)
    ticket = loader.submit([LoadJob(plan, (paced,), np.array([3, 4], np.int64))])
    for layer in range(LAYOUT.num_layers):
        ticket.wait_layer(layer)
    assert ticket.wait(PATIENCE_S)
    assert not any(pool.by_waiter)
    loader.close(PATIENCE_S)


def test_layers_come_in_groups_where_a_copy_has_a_fixed_cost(
    pool, completions, metrics
):
    """Two layers arrive together, and their bytes are paid for together."""
    charges = []
    num_bytes = 3 * LAYOUT.page_bytes
    # sqrt(bytes / bandwidth / latency) = 2 groups of the four layers.
    loader = LayerwiseLoader(
        pool, completions, SystemClock(), metrics, link=lambda: (num_bytes / 4, 1.0)
    )
    region = make_pages(3, SLOT, 4)
    pool.close_gates()
    ticket = loader.submit([job(region, [0, 1, 2], [1, 2, 3], charge=charges.append)])
    pool.gates[0].set()
    pool.gates[1].set()
    ticket.wait_layer(0)
    ticket.wait_layer(1)
    assert charges == [2 * 3 * LAYOUT.layer_page_bytes]
    pool.open_gates()
    assert ticket.wait(PATIENCE_S)
    assert charges == [2 * 3 * LAYOUT.layer_page_bytes] * 2
    loader.close(PATIENCE_S)


@pytest.mark.parametrize(
    ("num_bytes", "link", "layers"),
    [
        (10**8, None, 1),
        (10**8, (0.0, 1e9), 1),
        (10**8, (1e-5, 1e10), 1),
        (10**6, (1e-4, 1e9), 10),
        (10**3, (1e-3, 1e9), 32),
    ],
)
def test_the_size_of_a_group_follows_from_the_link(num_bytes, link, layers):
    """Many layers where their copy is short beside its fixed cost, else one."""
    assert group_layers(32, num_bytes, link) == layers
