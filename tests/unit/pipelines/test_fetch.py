"""Loads that nobody waits for: a layer at a time, behind all others, cancelled soon."""

import threading

import numpy as np
import pytest

from sgl_tiered.core.clock import SystemClock
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.pipelines.completions import CompletionQueue
from sgl_tiered.pipelines.fetch import FetchTicket
from sgl_tiered.pipelines.layerwise_load import LayerwiseLoader, LoadJob, Segment
from sgl_tiered.testing.fakes import FakeDevicePool
from sgl_tiered.testing.tier_kit import make_pages
from tests.unit.pipelines.pipeline_support import LAYOUT, PATIENCE_S, SLOT, load_plan

HOST = make_pages(8, SLOT, seed=1)


@pytest.fixture
def pool():
    pool = FakeDevicePool(LAYOUT, num_pages=32)
    yield pool
    pool.open_gates()


@pytest.fixture
def loader(pool):
    loader = LayerwiseLoader(pool, CompletionQueue(), SystemClock(), MetricsRegistry())
    yield loader
    pool.open_gates()
    loader.close(PATIENCE_S)


def job(rows, device_pages, charge=None):
    plan = load_plan(rows)
    segment = Segment(HOST, plan.addresses, np.arange(len(rows)), charge)
    return LoadJob(plan, (segment,), np.asarray(device_pages, np.int64))


def ticket(pool, rows, device_pages, charge=None):
    return FetchTicket(job(rows, device_pages, charge), pool, SystemClock())


def test_all_layers_land(loader, pool):
    """Byte for byte, and the source is charged for each of them."""
    charged = []
    fetch = ticket(pool, [6, 3], [10, 11], charged.append)
    assert loader.submit_steps(fetch)
    assert loader.drain(PATIENCE_S)
    assert fetch.ended
    assert fetch.landed
    assert sum(charged) == 2 * LAYOUT.page_bytes
    for device_page, row in ((10, 6), (11, 3)):
        page = HOST[row, : LAYOUT.page_bytes]
        np.testing.assert_array_equal(pool.page(device_page), page)


def test_a_load_waits_for_one_layer_of_it_at_most(loader, pool):
    """It goes first once the layer under way has been copied."""
    pool.close_gates()
    fetch = ticket(pool, [6, 3], [10, 11])
    assert loader.submit_steps(fetch)
    load = loader.submit([job([5], [20])])
    pool.open_gates()
    assert load.wait(PATIENCE_S)
    assert loader.drain(PATIENCE_S)
    num_pages = [pages for _, pages in pool.copies]
    assert num_pages == [2, 1, 1, 1, 1, 2, 2, 2]
    assert fetch.landed


def test_cancelled_it_ends_with_the_layer_under_way(loader, pool):
    """``cancel`` returns when nothing writes to the slots any more, and not before."""
    pool.close_gates()
    pool.gates[0].set()
    fetch = ticket(pool, [6], [10])
    assert loader.submit_steps(fetch)
    while len(pool.by_waiter) < 2:
        threading.Event().wait(0.001)
    cancelling = threading.Thread(target=fetch.cancel)
    cancelling.start()
    cancelling.join(0.05)
    assert cancelling.is_alive(), "it returned while a layer was being copied"
    pool.gates[1].set()
    cancelling.join(PATIENCE_S)
    assert not cancelling.is_alive()
    assert fetch.ended
    assert not fetch.landed
    pool.open_gates()
    assert loader.drain(PATIENCE_S)
    assert [layer for layer, _ in pool.copies] == [0, 1]


def test_cancelled_before_its_turn_it_copies_nothing(pool):
    """And again does no harm."""
    fetch = ticket(pool, [6], [10])
    fetch.cancel()
    fetch.cancel()
    assert fetch.ended
    assert not fetch.step()
    assert pool.copies == []


def test_a_layer_that_fails_ends_it(loader, pool):
    """With an error, and no further layer."""
    pool.fail_layer = 2
    fetch = ticket(pool, [6], [10])
    assert loader.submit_steps(fetch)
    assert loader.drain(PATIENCE_S)
    assert fetch.ended
    assert not fetch.landed
    assert "layer 2" in fetch.failed
    assert fetch.failed_source is fetch.job.segments[0].source


def test_closed_in_between_it_has_failed(loader, pool):
    """Nobody is left to copy the rest."""
    pool.close_gates()
    fetch = ticket(pool, [6], [10])
    assert loader.submit_steps(fetch)
    while not pool.by_waiter:
        threading.Event().wait(0.001)
    closing = threading.Thread(target=loader.close, args=(PATIENCE_S,))
    closing.start()
    while not loader._worker.closed:
        threading.Event().wait(0.001)
    pool.open_gates()
    closing.join(PATIENCE_S)
    assert fetch.ended
    assert not fetch.landed
    assert not loader.submit_steps(ticket(pool, [6], [10]))
