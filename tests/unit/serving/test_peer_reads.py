"""A disk that is read for peers by the pipeline of the server's own promotions."""

import numpy as np
import pytest

from sgl_tiered.core.addresses import slots_of
from sgl_tiered.core.clock import SystemClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import TransferResult
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.pipelines.promote import PromoteWorker
from sgl_tiered.pool.cache_store import CacheStore
from sgl_tiered.pool.disk_reads import DiskReads
from sgl_tiered.testing.strategies import spell
from tests.unit.serving.coordinator_support import (
    LAYOUT,
    NUM_SLOTS,
    PATIENCE_S,
    Rig,
)


class PeerRig(Rig):
    """A rig whose disk is read for peers."""

    def __init__(self):
        super().__init__()
        self.worker = PromoteWorker(
            self.disk,
            self.host,
            self.completions,
            SystemClock(),
            MetricsRegistry(),
            part_pages=2,
        )
        self.store = CacheStore(self.cache, 0, {TierId.HOST: self.host})
        self.reads = DiskReads(
            self.cache,
            self.store,
            self.worker,
            self.clock,
            lambda: bool(self.coordinator.num_staging),
            lambda: self.coordinator.waiting_prompts(16),
        )

    def begin(self, word):
        """Read a prompt for a peer."""
        tokens = spell(word, LAYOUT.page_tokens)
        return self.reads.begin(self.digest, tokens, 0, len(word))

    def end(self):
        """Wait for the reads and take their ends."""
        assert self.worker.drain(PATIENCE_S)
        for event in self.completions.drain():
            assert self.reads.finished(event.plan, event.positions, event.result)
        self.cache.check()

    def sent(self, word):
        """Return what a peer would be sent, uint8 [n, slot_bytes]."""
        tokens = spell(word, LAYOUT.page_tokens)
        blocks = self.reads.match(self.digest, tokens, 0, len(word))
        return self.host.region[slots_of(blocks)]

    def close(self):
        """End the threads."""
        self.worker.close(PATIENCE_S)
        super().close()


@pytest.fixture
def rig():
    rig = PeerRig()
    yield rig
    rig.close()


def test_pages_of_the_disk_can_be_sent(rig):
    """Byte for byte; nothing stays pinned."""
    rig.keep_on_disk("abcd")
    assert not len(rig.sent("abcd"))
    read = rig.begin("abcd")
    rig.end()
    assert (read.done, read.num_read, read.num_pages) == (True, 4, 4)
    assert (rig.sent("abcd") == rig.expected("abcd")).all()
    assert rig.num_pinned() == 0
    assert rig.begin("abcd") is None, "there is nothing more to read"


def test_a_spoiled_page_is_not_sent(rig):
    """Its checksum tells; what was before it is sent."""
    rig.keep_on_disk("abcd")
    rig.spoil("abc")
    read = rig.begin("abcd")
    rig.end()
    assert read.num_read == 3
    assert (rig.sent("abcd") == rig.expected("abcd")[:2]).all()


def test_own_reads_come_first(rig):
    """While the disk is read for a request here, nothing is read for peers."""
    rig.keep_on_disk("abcd")
    state = rig.track("r", "abcd")
    rig.disk.hold()
    assert not rig.coordinator.prepare(state, 0)
    assert rig.begin("abcd") is None
    rig.disk.release()
    rig.pump()
    rig.coordinator.release("r")


def test_prompts_that_wait_here_keep_their_copies(rig):
    """Room for a peer is not made of what a request is about to load."""
    rig.keep_on_disk("bc")
    word = "a" * NUM_SLOTS
    plan = rig.cache.plan_offload(rig.digest, spell(word, LAYOUT.page_tokens))
    done = np.ones(NUM_SLOTS, np.bool_)
    rig.cache.finish_offload(plan, TransferResult(done, 0, 0.0))
    state = rig.track("r", word)
    assert len(rig.coordinator.waiting_prompts(16)) == 1
    assert rig.begin("bc") is None
    assert len(rig.sent(word)) == NUM_SLOTS
    # Once its load has begun it needs no more than what that has pinned.
    state.started = True
    assert rig.coordinator.waiting_prompts(16) == []
    assert rig.begin("bc") is not None
    rig.end()
    assert (rig.sent("bc") == rig.expected("bc")).all()
    state.started = False


def test_a_cache_without_a_reader_tells_what_memory_has(rig):
    """Pages of the disk are not held out to peers."""
    rig.keep("ab")
    reads = DiskReads(rig.cache, rig.store, None, rig.clock, lambda: False)
    tokens = spell("ab", LAYOUT.page_tokens)
    assert reads.held(rig.digest, tokens, 0).media == {TierId.HOST: 2}
    rig.cache.drop_tier(TierId.HOST)
    assert reads.held(rig.digest, tokens, 0).num_pages == 0
    assert reads.begin(rig.digest, tokens, 0, 2) is None
    assert rig.reads.held(rig.digest, tokens, 0).media == {TierId.DISK: 2}
    assert np.array_equal(rig.store.tiers_of(rig.digest, tokens, 1), [TierId.DISK])
