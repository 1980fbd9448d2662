"""Requests whose pages were read ahead: they wait, load them, or go without."""

import numpy as np
import pytest

from sgl_tiered.cache.prefetcher import Prefetcher
from sgl_tiered.core.clock import SystemClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.pipelines.completions import PromoteFinished
from sgl_tiered.pipelines.promote import PromoteWorker
from sgl_tiered.policies.prefetch.registry import make_prefetch_policy
from tests.unit.serving.coordinator_support import LONG_S, PATIENCE_S, Rig


class PromotingRig(Rig):
    """A rig whose coordinator looks ahead, into the host tier."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.worker = PromoteWorker(
            self.disk,
            self.host,
            self.completions,
            SystemClock(),
            MetricsRegistry(),
            part_pages=2,
        )
        policy = make_prefetch_policy("car")
        self.prefetcher = Prefetcher(self.cache, policy, self.worker, self.clock)
        self.coordinator.prefetcher = self.prefetcher

    def look(self, *states):
        """Look ahead for these, while a long pass will run."""
        self.prefetcher.advance([(state, 0) for state in states], busy_s=LONG_S)

    def end(self):
        """Wait for the reads ahead to end and take their ends."""
        assert self.worker.drain(PATIENCE_S)
        for event in self.completions.drain():
            assert isinstance(event, PromoteFinished)
            self.prefetcher.finished(event.plan, event.positions, event.result)
        self.cache.check()

    def close(self):
        """End the threads."""
        super().close()
        self.worker.close(PATIENCE_S)


@pytest.fixture
def rig():
    rig = PromotingRig()
    yield rig
    rig.close()


def test_promoted_pages_are_loaded_from_the_host(rig):
    """Byte for byte; no read of the request's own is needed."""
    rig.keep_on_disk("abcd")
    state = rig.track("r", "abcd")
    rig.look(state)
    rig.end()
    assert rig.coordinator.prepare(state, 0)
    assert rig.coordinator.loadable_pages(state, 0) == 4
    job = rig.coordinator.begin(state, np.arange(4))
    assert set(job.plan.tiers.tolist()) == {TierId.HOST}
    assert (rig.landed_bytes(job) == rig.expected("abcd")).all()
    rig.coordinator.settle(state, landed=True)
    assert rig.num_pinned() == 0


def test_a_request_waits_for_pages_on_their_way(rig):
    """It starts no second read of them, and goes on when they have come."""
    rig.keep_on_disk("abcd")
    state = rig.track("r", "abcd")
    rig.disk.hold()
    rig.look(state)
    assert not rig.coordinator.prepare(state, 0)
    assert not rig.coordinator.prepare(state, 0)
    assert rig.coordinator.num_staging == 0
    rig.disk.release()
    rig.end()
    assert rig.coordinator.prepare(state, 0)
    assert rig.coordinator.loadable_pages(state, 0) == 4


def test_two_that_wait_share_the_read(rig):
    """Another request for the same pages, not in the window, waits for it too."""
    rig.keep_on_disk("abcd")
    first, second = rig.track("r", "abcd"), rig.track("s", "abcx")
    rig.disk.hold()
    rig.look(first)
    assert not rig.coordinator.prepare(second, 0)
    rig.disk.release()
    rig.end()
    assert rig.coordinator.prepare(second, 0)
    assert rig.coordinator.loadable_pages(second, 0) == 3
    assert rig.disk.started.acquire(timeout=PATIENCE_S)
    assert rig.disk.started.acquire(timeout=PATIENCE_S)
    assert not rig.disk.started.acquire(blocking=False), "read in two parts, once"


def test_a_late_read_is_given_up(rig):
    """The request goes without; pages that were in memory are still loaded."""
    rig.keep_on_disk("abcd")
    rig.disk.hold()
    state = rig.track("r", "abcd")
    rig.look(state)
    assert not rig.coordinator.prepare(state, 0)
    rig.clock.advance(LONG_S)
    assert rig.coordinator.prepare(state, 0)
    assert state.memory_only
    assert rig.coordinator.loadable_pages(state, 0) == 0
    assert state.report.replans
    # Nobody waits for it any more, so what is unread stays unread.
    rig.prefetcher.advance([(state, 0)])
    rig.disk.release()
    rig.end()
    rig.coordinator.release("r")
    assert rig.num_pinned() == 0


def test_where_computing_is_faster_nobody_waits():
    """By prediction: a page takes a second to come and next to nothing to compute."""
    rig = PromotingRig(load_policy="auto", page_compute_s=1e-3, page_read_s=1.0)
    rig.keep_on_disk("abcd")
    rig.disk.hold()
    state = rig.track("r", "abcd")
    rig.look(state)
    assert rig.prefetcher.is_busy, "it costs nothing while the long pass runs"
    assert rig.coordinator.prepare(state, 0)
    assert state.memory_only
    rig.disk.release()
    rig.end()
    rig.close()


def test_a_bad_page_is_computed(rig):
    """What came before it is loaded, and the bad copy is gone."""
    rig.keep_on_disk("abcd")
    rig.spoil("abc")
    state = rig.track("r", "abcd")
    rig.look(state)
    rig.end()
    assert rig.coordinator.prepare(state, 0)
    assert rig.coordinator.loadable_pages(state, 0) == 2
