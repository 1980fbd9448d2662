"""Reads from disk into the slots of a memory tier, in parts, cancelled or broken."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from sgl_tiered.core.clock import ManualClock, SystemClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import PageRecords, PromotePlan, namespace_rows
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.pipelines.completions import CompletionQueue, PromoteFinished
from sgl_tiered.pipelines.promote import PromoteWorker
from sgl_tiered.pipelines.shares import BandwidthShares, Share
from sgl_tiered.testing.fakes import FakeTier
from sgl_tiered.testing.tier_kit import make_pages
from sgl_tiered.tiers.base import TierIO
from sgl_tiered.tiers.host import HostTier

SLOT = 4_096
NUM_SLOTS = 16
PATIENCE_S = 20.0
PAGES = make_pages(NUM_SLOTS, SLOT, seed=3)


class Rig:
    """A disk with pages, an empty host, and a worker that reads two pages at a time."""

    def __init__(self, **settings: object) -> None:
        self.disk = FakeTier(SLOT, NUM_SLOTS)
        self.host = HostTier(SLOT, NUM_SLOTS)
        addresses = np.arange(NUM_SLOTS, dtype=np.int64)
        records = PageRecords(
            namespace_rows(b"m" * 16, NUM_SLOTS),
            np.zeros((NUM_SLOTS, 16), np.uint8),
            np.zeros((NUM_SLOTS, 16), np.uint8),
            np.zeros((NUM_SLOTS, 2), np.int32),
            np.zeros(NUM_SLOTS, np.uint64),
            addresses,
        )
        self.sums = self.disk.store(
            TierIO(addresses, PAGES.copy(), addresses, records)
        ).checksums
        assert self.disk.started.acquire(timeout=PATIENCE_S)
        self.completions = CompletionQueue()
        self.metrics = MetricsRegistry()
        self.worker = PromoteWorker(
            self.disk,
            self.host,
            self.completions,
            SystemClock(),
            self.metrics,
            part_pages=2,
            **settings,  # type: ignore[arg-type]
        )

    def plan(self, sources: list[int], first_target: int = 0) -> PromotePlan:
        num_pages = len(sources)
        addresses = np.array(sources, np.int64)
        return PromotePlan(
            1,
            TierId.DISK,
            TierId.HOST,
            np.arange(num_pages, dtype=np.int32),
            addresses,
            first_target + np.arange(num_pages, dtype=np.int64),
            self.sums[addresses],
        )

    def end(self) -> PromoteFinished:
        """Wait for the end of the only read."""
        assert self.worker.drain(PATIENCE_S)
        (event,) = self.completions.drain()
        assert isinstance(event, PromoteFinished)
        return event

    def close(self) -> None:
        self.disk.close()
        self.worker.close(PATIENCE_S)
        self.host.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def test_pages_arrive_in_their_slots(rig: Rig) -> None:
    """Byte for byte, whatever the order of the slots on disk, and on the edge's count.

    The part at the end is shorter than the others.
    """
    sources = [9, 2, 14, 0, 5]
    read = rig.worker.submit(rig.plan(sources, first_target=3))
    assert read is not None
    event = rig.end()
    assert event.positions.tolist() == [0, 1, 2, 3, 4]
    assert event.result.ok.all()
    assert event.is_alone
    assert (rig.host.region[3:8, :SLOT] == PAGES[sources]).all()
    assert read.num_left == 0
    assert rig.metrics.snapshot()["edges"]["disk->host"]["pages"] == 5


def test_a_cancelled_read_ends_with_the_part_under_way(rig: Rig) -> None:
    """What was not begun is not among the positions that were read."""
    rig.disk.hold()
    read = rig.worker.submit(rig.plan([0, 1, 2, 3, 4, 5]))
    assert read is not None
    assert rig.disk.started.acquire(timeout=PATIENCE_S)
    read.cancel()
    rig.disk.release()
    event = rig.end()
    assert event.positions.tolist() == [0, 1]
    assert event.result.ok.all()


def test_a_wrong_page_is_not_ok(rig: Rig) -> None:
    """A page whose checksum differs is told apart from those around it."""
    plan = rig.plan([0, 1, 2])
    plan.checksums[1] ^= np.uint64(1)
    rig.worker.submit(plan)
    event = rig.end()
    assert event.positions.tolist() == [0, 1, 2]
    assert event.result.ok.tolist() == [True, False, True]
    assert event.result.error


def test_a_tier_that_raises_breaks_one_read_only(rig: Rig) -> None:
    """The thread lives on, and says what happened."""
    load = rig.disk.load

    def fail(io: TierIO) -> None:
        raise RuntimeError("the cable is out")

    rig.disk.load = fail  # type: ignore[assignment]
    rig.worker.submit(rig.plan([0, 1]))
    event = rig.end()
    assert not event.result.ok.any()
    assert "the cable is out" in event.result.error
    rig.disk.load = load  # type: ignore[method-assign]
    rig.worker.submit(rig.plan([0, 1]))
    assert rig.end().result.ok.all()


def test_a_host_that_fails_says_nothing_of_the_disk(rig: Rig) -> None:
    """Pages that could not be put into memory were not read: their source is good."""

    def refuse(num_bytes: int, *, is_store: bool = False) -> None:
        raise OSError("no memory")

    rig.host.charge = refuse  # type: ignore[method-assign]
    rig.worker.submit(rig.plan([0, 1, 2]))
    event = rig.end()
    assert event.positions.tolist() == []
    assert "no memory" in event.result.error


def test_the_queue_is_bounded_and_closes() -> None:
    """A full or closed worker takes nothing; those that wait end unread."""
    rig = Rig(max_queued=1)
    rig.disk.hold()
    assert rig.worker.submit(rig.plan([0])) is not None
    assert rig.disk.started.acquire(timeout=PATIENCE_S)
    assert rig.worker.submit(rig.plan([1])) is not None
    assert rig.worker.submit(rig.plan([2])) is None
    rig.disk.close()
    rig.worker.close(PATIENCE_S)
    events = rig.completions.drain()
    assert sorted(len(event.result.ok) for event in events) == [0, 1]  # type: ignore[union-attr]
    assert rig.worker.submit(rig.plan([3])) is None
    rig.close()


def test_loads_go_first_unless_a_request_is_held_up() -> None:
    """While a load runs the second part waits for its turn; urgency ends that."""
    clock = ManualClock()
    shares = BandwidthShares(clock)
    shares.watch(Share.LOAD, lambda: True)
    rig = Rig(shares=shares)
    shares.used(Share.PROMOTE, 1.0)
    read = rig.worker.submit(rig.plan([0, 1, 2]))
    assert read is not None
    assert not rig.disk.started.acquire(timeout=0.05)
    read.hurry()
    assert rig.end().result.ok.all()
    rig.close()


def test_a_read_that_hangs_is_seen() -> None:
    """So that the disk can be left out of lookups."""
    rig = Rig()
    assert rig.worker.stuck_s() == 0.0
    rig.disk.hold()
    rig.worker.submit(rig.plan([0]))
    assert rig.disk.started.acquire(timeout=PATIENCE_S)
    assert rig.worker.stuck_s() > 0.0
    rig.close()
