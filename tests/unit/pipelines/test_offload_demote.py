"""Copies downwards: device to host, host to disk."""

import threading

import numpy as np
import pytest

from sgl_tiered.core.clock import ManualClock, SystemClock
from sgl_tiered.core.plans import TransferResult
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.pipelines.completions import (
    CompletionQueue,
    DemoteFinished,
    OffloadFinished,
)
from sgl_tiered.pipelines.demote import CHUNK_PAGES, DemoteWorker
from sgl_tiered.pipelines.offload import CHUNK_PAGES as OFFLOAD_CHUNK_PAGES
from sgl_tiered.pipelines.offload import OffloadWorker
from sgl_tiered.pipelines.shares import BandwidthShares, Share
from sgl_tiered.testing.fakes import FakeDevicePool, FakeTier
from sgl_tiered.testing.tier_kit import make_pages
from sgl_tiered.tiers.base import TierIO
from sgl_tiered.tiers.host import HostTier
from tests.unit.pipelines.pipeline_support import (
    LAYOUT,
    PATIENCE_S,
    SLOT,
    demote_plan,
    offload_plan,
)

NUM_SLOTS = 128


@pytest.fixture
def pool():
    pool = FakeDevicePool(LAYOUT, num_pages=32)
    pool.fill(np.random.default_rng(0))
    yield pool
    pool.open_gates()


@pytest.fixture
def host():
    tier = HostTier(SLOT, NUM_SLOTS)
    yield tier
    tier.close()


@pytest.fixture
def disk():
    tier = FakeTier(SLOT, NUM_SLOTS)
    yield tier
    tier.close()


@pytest.fixture
def completions():
    return CompletionQueue()


@pytest.fixture
def metrics():
    return MetricsRegistry()


@pytest.fixture
def offload(pool, host, completions, metrics):
    worker = OffloadWorker(
        pool, host, completions, SystemClock(), metrics, max_queued=2
    )
    yield worker
    pool.open_gates()
    worker.close(PATIENCE_S)


def make_demote(host, disk, completions, metrics, **settings):
    return DemoteWorker(host, disk, completions, SystemClock(), metrics, **settings)


def test_offload_copies_whole_pages(offload, pool, host, completions, metrics):
    """Pages of the device lie in their slots, after the work that writes them."""
    mark = pool.mark()
    offload.submit(offload_plan([5, 2]), np.array([30, 7]), mark)
    assert offload.drain(PATIENCE_S)
    assert np.array_equal(host.region[5, : LAYOUT.page_bytes], pool.page(30))
    assert np.array_equal(host.region[2, : LAYOUT.page_bytes], pool.page(7))
    assert pool.marks == [mark]
    (finished,) = completions.drain()
    assert isinstance(finished, OffloadFinished)
    assert finished.result.ok.all()
    assert finished.result.num_bytes == 2 * LAYOUT.page_bytes
    assert metrics.snapshot()["edges"]["device->host"]["pages"] == 2


def test_full_offload_queue_pushes_back(offload, pool, completions):
    """A full queue refuses at once: ``try_submit`` silently, ``submit`` as failed."""
    pool.close_gates()
    plans = [offload_plan([i], plan_id=i) for i in range(6)]
    page = np.array([0])
    offload.submit(plans[0], page, 0)
    assert pool.store_started.acquire(timeout=PATIENCE_S)
    taken = [offload.try_submit(plan, page, 0) for plan in plans[1:5]]
    assert taken == [True, True, False, False]
    assert completions.drain() == []
    offload.submit(plans[5], page, 0)
    (refused,) = completions.drain()
    assert refused.plan is plans[5]
    assert "full" in refused.result.error
    pool.open_gates()
    assert offload.drain(PATIENCE_S)
    assert [c.plan.plan_id for c in completions.drain()] == [0, 1, 2]


def test_failed_offload_is_a_result(offload, pool, completions):
    """A copy that raises is reported as failed, and the next one runs."""
    pool.fail_store = True
    offload.submit(offload_plan([0, 1]), np.array([0, 1]), 0)
    assert offload.drain(PATIENCE_S)
    pool.fail_store = False
    offload.submit(offload_plan([0]), np.array([0]), 0)
    assert offload.drain(PATIENCE_S)
    bad, good = completions.drain()
    assert bad.result.ok.tolist() == [False, False]
    assert "told to fail" in bad.result.error
    assert good.result.ok.all()


def test_offloads_that_are_given_up_show_nothing(pool, host, completions, metrics):
    """Neither what runs nor what waits; what was copied before, and after, is there."""
    clock = ManualClock()
    worker = OffloadWorker(pool, host, completions, clock, metrics)
    num_pages = OFFLOAD_CHUNK_PAGES + 1
    assert worker.stuck_s() == 0.0
    pool.close_gates()
    pages = np.arange(num_pages) % 32
    worker.submit(offload_plan(np.arange(num_pages), plan_id=1), pages, 0)
    worker.submit(offload_plan([100], plan_id=2), np.array([0]), 0)
    assert pool.store_started.acquire(timeout=PATIENCE_S)
    clock.advance(3.0)
    assert worker.stuck_s() == 3.0
    worker.give_up()
    worker.submit(offload_plan([101], plan_id=3), np.array([1]), 0)
    pool.open_gates()
    assert worker.drain(PATIENCE_S)
    assert worker.stuck_s() == 0.0
    ends = {end.plan.plan_id: end.result for end in completions.drain()}
    assert {n: int(end.ok.sum()) for n, end in ends.items()} == {1: 0, 2: 0, 3: 1}
    assert "given up" in ends[1].error
    assert "given up" in ends[2].error
    # Of the first its first chunk, of the second nothing, the third.
    assert len(pool.marks) == 2
    worker.close(PATIENCE_S)


def test_each_chunk_of_an_offload_is_progress(pool, host, completions, metrics):
    """A plan of many chunks is not stuck while they end, and keeps what was copied."""
    clock = ManualClock()
    worker = OffloadWorker(pool, host, completions, clock, metrics)
    num_pages = OFFLOAD_CHUNK_PAGES + 1
    store = pool.store_pages
    stuck = []

    def store_pages(*args):
        store(*args)
        clock.advance(2.0)
        stuck.append(worker.stuck_s())
        if len(stuck) == 2:
            worker.give_up()

    pool.store_pages = store_pages
    pages = np.arange(num_pages) % 32
    worker.submit(offload_plan(np.arange(num_pages)), pages, 0)
    assert worker.drain(PATIENCE_S)
    assert stuck == [2.0, 2.0]
    (end,) = completions.drain()
    assert end.result.ok.tolist() == [True] * OFFLOAD_CHUNK_PAGES + [False]
    worker.close(PATIENCE_S)


def test_demote_stores_pages_with_checksums(host, disk, completions, metrics):
    """Pages of the host are in the slower tier, also when they take several chunks."""
    num_pages = 2 * CHUNK_PAGES + 3
    host.region[:] = make_pages(NUM_SLOTS, SLOT, seed=1)
    worker = make_demote(host, disk, completions, metrics)
    sources = np.random.default_rng(1).permutation(NUM_SLOTS)[:num_pages]
    targets = np.random.default_rng(2).permutation(NUM_SLOTS)[:num_pages]
    worker.submit(demote_plan(sources, targets))
    assert worker.drain(PATIENCE_S)
    (finished,) = completions.drain()
    assert isinstance(finished, DemoteFinished)
    assert finished.result.ok.all()
    assert len(finished.result.checksums) == num_pages
    rows = np.arange(num_pages)
    buffer = make_pages(num_pages, SLOT, seed=2)
    assert disk.load(TierIO(targets, buffer, rows)).ok.all()
    assert np.array_equal(buffer, host.region[sources])
    assert metrics.snapshot()["edges"]["host->disk"]["pages"] == num_pages
    worker.close(PATIENCE_S)


def shares_held(is_active, max_pause_s):
    """Return shares of which a demotion has used its part for a long time."""
    shares = BandwidthShares(SystemClock(), max_pause_s=max_pause_s)
    shares.watch(Share.LOAD, is_active)
    shares.used(Share.DEMOTE, 600.0)
    return shares


def test_demote_lets_reads_go_first_but_not_for_ever(host, disk, completions, metrics):
    """The worker asks before each chunk, waits while reads run, and then goes on."""
    asked = []

    def reads_active():
        asked.append(len(asked))
        return len(asked) < 4

    shares = shares_held(reads_active, max_pause_s=PATIENCE_S)
    worker = make_demote(host, disk, completions, metrics, shares=shares)
    worker.submit(demote_plan([0], [1]))
    assert worker.drain(PATIENCE_S)
    assert len(asked) == 4
    worker.close(PATIENCE_S)
    shares = shares_held(lambda: True, max_pause_s=0.01)
    endless = make_demote(host, disk, completions, metrics, shares=shares)
    endless.submit(demote_plan([0], [2]))
    assert endless.drain(PATIENCE_S)
    assert all(c.result.ok.all() for c in completions.drain())
    endless.close(PATIENCE_S)


def test_offload_waits_for_its_turn_chunk_by_chunk(pool, host, completions, metrics):
    """Before each chunk it asks; at close the rest is reported as failed."""
    asked, closing = [], threading.Event()

    def loads_active():
        asked.append(len(asked))
        if len(asked) > 1:
            closing.set()
        return len(asked) > 1

    shares = BandwidthShares(SystemClock(), max_pause_s=600.0)
    shares.watch(Share.LOAD, loads_active)
    worker = OffloadWorker(
        pool, host, completions, SystemClock(), metrics, shares=shares
    )
    # A first chunk that takes long, as far as the shares are told.
    real_used = shares.used
    shares.used = lambda share, seconds: real_used(share, 600.0)
    num_pages = OFFLOAD_CHUNK_PAGES + 3
    pages = np.arange(num_pages) % 32
    worker.submit(offload_plan(np.arange(num_pages)), pages, 0)
    assert closing.wait(PATIENCE_S)
    worker.close(PATIENCE_S)
    (finished,) = completions.drain()
    wanted = np.arange(num_pages) < OFFLOAD_CHUNK_PAGES
    assert np.array_equal(finished.result.ok, wanted)
    assert finished.result.num_bytes == OFFLOAD_CHUNK_PAGES * LAYOUT.page_bytes
    assert finished.result.error == "closed"


def test_close_ends_a_pause_and_fails_the_rest(host, disk, completions, metrics):
    """A demotion that waits for reads at close is reported as failed."""
    waiting = threading.Event()

    def reads_active():
        waiting.set()
        return True

    shares = shares_held(reads_active, max_pause_s=600.0)
    worker = make_demote(host, disk, completions, metrics, shares=shares)
    worker.submit(demote_plan([0, 1], [1, 2]))
    assert waiting.wait(PATIENCE_S)
    worker.close(PATIENCE_S)
    (finished,) = completions.drain()
    assert finished.result.ok.tolist() == [False, False]
    assert finished.result.error == "closed"
    assert not worker.try_submit(demote_plan([0], [1]))


def test_partly_failed_demote(host, disk, completions, metrics):
    """Pages of a chunk that failed are not ok; the other chunks' are."""
    real, calls = disk.store, []

    def store(io):
        calls.append(len(io.addresses))
        if len(calls) == 2:
            return TransferResult.failed(len(io.addresses), 0.0, "no space")
        return real(io)

    disk.store = store
    worker = make_demote(host, disk, completions, metrics)
    num_pages = 2 * CHUNK_PAGES + 1
    worker.submit(demote_plan(np.arange(num_pages), np.arange(num_pages)))
    assert worker.drain(PATIENCE_S)
    (finished,) = completions.drain()
    wanted = np.ones(num_pages, bool)
    wanted[CHUNK_PAGES : 2 * CHUNK_PAGES] = False
    assert np.array_equal(finished.result.ok, wanted)
    assert finished.result.error == "no space"
    worker.close(PATIENCE_S)
