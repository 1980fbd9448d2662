"""Reads into the staging region: rows, results, release."""

import threading

import numpy as np
import pytest

from sgl_tiered.core.clock import ManualClock, SystemClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.pipelines.completions import CompletionQueue, StageFinished
from sgl_tiered.pipelines.staging import StagingReader, part_pages
from sgl_tiered.testing.fakes import FakeTier
from sgl_tiered.testing.tier_kit import make_pages
from sgl_tiered.tiers.base import TierIO
from tests.unit.pipelines.pipeline_support import PATIENCE_S, SLOT, load_plan

NUM_PAGES = 16


@pytest.fixture
def disk():
    tier = FakeTier(SLOT, NUM_PAGES)
    rows = np.arange(NUM_PAGES, dtype=np.int64)
    tier.pages = make_pages(NUM_PAGES, SLOT, seed=1)
    tier.sums = tier.store(TierIO(rows, tier.pages, rows)).checksums
    tier.started.acquire()
    yield tier
    tier.close()


@pytest.fixture
def completions():
    return CompletionQueue()


@pytest.fixture
def metrics():
    return MetricsRegistry()


@pytest.fixture
def reader(disk, completions, metrics):
    reader = StagingReader(disk, 6, completions, SystemClock(), metrics)
    yield reader
    disk.release()
    reader.close(PATIENCE_S)


def plan_for(disk, addresses):
    slots = np.asarray(addresses)
    return load_plan(slots, tier=TierId.DISK, checksums=disk.sums[slots])


def positions(*numbers):
    return np.array(numbers, np.int32)


def test_pages_are_staged(reader, disk, completions, metrics):
    """The chosen positions of a plan are read into rows of the region."""
    plan = plan_for(disk, [3, 9, 1, 4])
    staged = reader.try_submit(plan, positions(0, 2, 3))
    assert reader.drain(PATIENCE_S)
    assert staged.done
    assert staged.result.ok.all()
    assert np.array_equal(staged.region[staged.rows], disk.pages[[3, 1, 4]])
    assert staged.region is reader.region
    (finished,) = completions.drain()
    assert isinstance(finished, StageFinished)
    assert finished.plan is plan
    assert finished.staged is staged
    assert finished.positions.tolist() == [0, 2, 3]
    assert metrics.snapshot()["edges"]["disk->host"]["pages"] == 3
    reader.release(staged)


def test_all_rows_or_none(reader, disk):
    """A read that does not fit is not begun; after a release it is."""
    plan = plan_for(disk, range(8))
    assert reader.largest_read_pages == 6
    assert reader.try_submit(plan, positions(*range(7))) is None
    first = reader.try_submit(plan, positions(0, 1, 2, 3))
    assert reader.num_free_rows == 2
    assert reader.try_submit(plan, positions(4, 5, 6)) is None
    assert reader.num_free_rows == 2
    second = reader.try_submit(plan, positions(4, 5))
    assert not set(first.rows) & set(second.rows)
    assert reader.drain(PATIENCE_S)
    reader.release(first)
    assert reader.try_submit(plan, positions(4, 5, 6)) is not None
    assert reader.drain(PATIENCE_S)


def test_release_before_the_read_has_ended(reader, disk, completions):
    """Rows of a released read stay taken until nothing writes to them any more."""
    disk.hold()
    staged = reader.try_submit(plan_for(disk, range(6)), positions(*range(6)))
    assert disk.started.acquire(timeout=PATIENCE_S)
    reader.release(staged)
    reader.release(staged)
    assert reader.num_free_rows == 0
    assert reader.try_submit(plan_for(disk, [0]), positions(0)) is None
    disk.release()
    assert reader.drain(PATIENCE_S)
    assert reader.num_free_rows == 6
    assert len(completions.drain()) == 1, "a released read still reports its end"


def test_release_twice_frees_once(reader, disk):
    """Releasing again does not free the rows of somebody else."""
    plan = plan_for(disk, range(6))
    first = reader.try_submit(plan, positions(0, 1, 2))
    assert reader.drain(PATIENCE_S)
    reader.release(first)
    second = reader.try_submit(plan, positions(0, 1, 2))
    reader.release(first)
    assert reader.num_free_rows == 3
    assert reader.drain(PATIENCE_S)
    reader.release(second)
    assert reader.num_free_rows == 6


def test_a_wrong_page_is_not_ok(reader, disk, completions):
    """A page that is not what the plan expects is not ok, alone."""
    plan = plan_for(disk, [0, 1, 2])
    plan.checksums[1] ^= np.uint64(7)
    staged = reader.try_submit(plan, positions(0, 1, 2))
    assert reader.drain(PATIENCE_S)
    assert staged.result.ok.tolist() == [True, False, True]
    assert completions.drain()[0].result.error


def test_a_raising_tier_is_a_failed_read(reader, disk, completions):
    """An exception becomes a failed result; rows come back by release."""
    plan = load_plan([NUM_PAGES + 5], tier=TierId.DISK)
    staged = reader.try_submit(plan, positions(0))
    assert reader.drain(PATIENCE_S)
    assert staged.done
    assert not staged.result.ok.any()
    assert "outside" in staged.result.error
    reader.release(staged)
    assert reader.num_free_rows == 6


def test_it_tells_how_long_no_thread_was_free(disk, completions, metrics):
    """Reads that do not end are noticed once every thread has one, from then on."""
    clock = ManualClock()
    reader = StagingReader(disk, 6, completions, clock, metrics, num_threads=2)
    assert reader.stuck_s() == 0.0
    disk.gate.clear()
    for address in (1, 2):
        assert reader.stuck_s() == 0.0, "a thread is free"
        reader.try_submit(plan_for(disk, [address]), positions(0))
        assert disk.started.acquire(timeout=PATIENCE_S)
        clock.advance(3.0)
    assert reader.stuck_s() == 3.0
    disk.gate.set()
    assert reader.drain(PATIENCE_S)
    assert reader.stuck_s() == 0.0
    reader.close(PATIENCE_S)


def test_closed_reader_takes_nothing(disk, completions, metrics):
    """After close nothing is read; a waiting read is reported as failed."""
    reader = StagingReader(disk, 6, completions, SystemClock(), metrics, num_threads=1)
    disk.hold()
    plan = plan_for(disk, [0, 1])
    reader.try_submit(plan, positions(0))
    assert disk.started.acquire(timeout=PATIENCE_S)
    waiting = reader.try_submit(plan, positions(1))
    reader.close(0.0)
    assert waiting.done
    assert "closed" in waiting.result.error
    assert reader.try_submit(plan, positions(0)) is None
    disk.release()
    assert reader.drain(PATIENCE_S)


def test_region_is_registered(disk, completions, metrics):
    """The staging region is pinned like the host tier's, and unpinned at close."""
    calls = []

    def register(address, num_bytes):
        calls.append((address, num_bytes))
        return lambda: calls.append("undone")

    reader = StagingReader(
        disk, 3, completions, SystemClock(), metrics, register=register
    )
    assert calls == [(reader.region.ctypes.data, 3 * SLOT)]
    reader.close(PATIENCE_S)
    assert calls[1:] == ["undone"]


class Stepped(FakeTier):
    """A tier that notes which addresses each call reads, and lets one at a time."""

    def __init__(self, slot_bytes, num_slots):
        super().__init__(slot_bytes, num_slots)
        self.calls = []
        self.steps = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)

    def load(self, io):
        """Read, once a step is taken."""
        self.calls.append(io.addresses.tolist())
        self.begun.release()
        self.steps.acquire()
        return super().load(io)


@pytest.fixture
def stepped(completions, metrics):
    """A reader of parts of two pages on one thread, and its tier."""
    tier = Stepped(SLOT, NUM_PAGES)
    rows = np.arange(NUM_PAGES, dtype=np.int64)
    tier.pages = make_pages(NUM_PAGES, SLOT, seed=1)
    tier.sums = tier.store(TierIO(rows, tier.pages, rows)).checksums
    reader = StagingReader(
        tier,
        NUM_PAGES,
        completions,
        SystemClock(),
        metrics,
        num_threads=1,
        part_pages=2,
    )
    yield reader, tier
    for _ in range(NUM_PAGES):
        tier.steps.release()
    reader.close(PATIENCE_S)


def let(tier, num):
    """Let parts end, and wait until the one after them has begun."""
    for _ in range(num):
        tier.steps.release()
        assert tier.begun.acquire(timeout=PATIENCE_S)


def test_a_read_is_done_in_parts(stepped, completions):
    """What has arrived is known before the end; the end is one for all parts."""
    reader, tier = stepped
    staged = reader.try_submit(plan_for(tier, range(7)), positions(*range(7)))
    assert tier.begun.acquire(timeout=PATIENCE_S)
    assert (len(staged.arrived), staged.num_left, staged.num_unbegun) == (0, 7, 5)
    let(tier, 2)
    assert staged.arrived.tolist() == [0, 1, 2, 3]
    assert (staged.num_left, staged.num_unbegun) == (3, 1)
    assert not completions.drain()
    let(tier, 1)
    tier.steps.release()
    assert reader.drain(PATIENCE_S)
    assert [len(call) for call in tier.calls] == [2, 2, 2, 1]
    (finished,) = completions.drain()
    assert finished.positions.tolist() == list(range(7))
    assert finished.result.ok.all()
    assert finished.result.num_bytes == 7 * SLOT
    assert np.array_equal(staged.region[staged.rows], tier.pages[:7])


def test_a_read_can_be_turned_round(stepped):
    """What was not begun comes last pages first, and all of it comes."""
    reader, tier = stepped
    staged = reader.try_submit(plan_for(tier, range(8)), positions(*range(8)))
    assert tier.begun.acquire(timeout=PATIENCE_S)
    staged.turn_round()
    let(tier, 3)
    tier.steps.release()
    assert reader.drain(PATIENCE_S)
    assert tier.calls == [[0, 1], [6, 7], [4, 5], [2, 3]]
    assert np.array_equal(staged.region[staged.rows], tier.pages[:8])


def test_a_cancelled_read_ends_with_what_was_begun(stepped, completions):
    """Pages that were never asked for are neither good nor bad."""
    reader, tier = stepped
    staged = reader.try_submit(plan_for(tier, range(8)), positions(*range(8)))
    assert tier.begun.acquire(timeout=PATIENCE_S)
    staged.cancel()
    tier.steps.release()
    assert reader.drain(PATIENCE_S)
    (finished,) = completions.drain()
    assert finished.positions.tolist() == [0, 1]
    assert finished.result.ok.tolist() == [True, True]
    assert staged.done
    assert staged.num_left == 0
    reader.release(staged)
    assert reader.num_free_rows == NUM_PAGES


def test_reads_that_share_the_link_say_so(disk, completions, metrics):
    """The time of a read tells the link's speed only where no other one ran."""
    reader = StagingReader(disk, 6, completions, SystemClock(), metrics)
    alone = reader.try_submit(plan_for(disk, [0]), positions(0))
    assert reader.drain(PATIENCE_S)
    assert alone.is_alone
    while disk.started.acquire(blocking=False):
        pass
    disk.hold()
    two = [reader.try_submit(plan_for(disk, [n]), positions(0)) for n in (1, 2)]
    for _ in two:
        assert disk.started.acquire(timeout=PATIENCE_S)
    disk.release()
    assert reader.drain(PATIENCE_S)
    assert not any(staged.is_alone for staged in two)
    reader.close(PATIENCE_S)


@pytest.mark.parametrize(
    ("latency_s", "bytes_per_s", "pages"),
    [(1e-4, 30e6, 10), (1e-4, 200e6, 40), (1e-4, 7e9, 84), (0.15, 60e6, 720)],
)
def test_the_size_of_a_part_follows_from_the_link(latency_s, bytes_per_s, pages):
    """1 MiB where slow, 20 ms up to 8 MiB where fast, eight latencies at least."""
    assert part_pages(latency_s, bytes_per_s, 100_000) == pages
