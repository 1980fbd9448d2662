"""Reads that are met half way, left late, or fail behind a computed front."""

import numpy as np
import pytest

from sgl_tiered.cache.waiting_state import Resume
from sgl_tiered.core.ids import TierId
from tests.unit.serving.coordinator_support import PATIENCE_S, Rig

WORD = "abcdefgh"
NUM = len(WORD)


def pages(num):
    return np.arange(100, 100 + num, dtype=np.int64)


@pytest.fixture
def rig():
    """Reading a page takes as long as computing one; parts are single pages."""
    rig = Rig(load_policy="auto", page_compute_s=0.02, page_read_s=0.02, part_pages=1)
    rig.coordinator.can_split = lambda: True
    rig.keep_on_disk(WORD)
    rig.disk.is_stepped = True
    yield rig
    rig.close()


def start(rig):
    """Return a request that was split when it could be admitted."""
    state = rig.track("r", WORD)
    assert rig.coordinator.prepare(state, 0), "its front needs no read"
    assert state.is_split
    return state


def test_the_front_is_computed_while_the_back_is_read(rig):
    """Half is computed; then the other half is loaded, byte for byte."""
    state = start(rig)
    assert rig.coordinator.loadable_pages(state, 0) == 0
    end = rig.coordinator.chunk_end(state)
    assert end == pytest.approx(NUM / 2, abs=1)
    rig.step(state.staged, NUM - end)
    rig.pump()
    rig.coordinator.published(state, end)
    resume = rig.coordinator.resume(state, end)
    assert (resume.load_pages, resume.compute_pages) == (NUM - end, 0)
    assert rig.coordinator.chunk_end(state) is None
    job = rig.coordinator.begin_back(state, pages(NUM - end))
    assert np.array_equal(rig.landed_bytes(job), rig.expected(WORD, end))
    rig.coordinator.landed(state)
    assert rig.stager.num_free_rows == 8
    rig.coordinator.published(state, NUM)
    assert rig.num_pinned() == 0
    assert rig.cache.stats.pages_loaded[TierId.DISK] == NUM - end
    assert state.report.pages_read == NUM - end
    assert "front" in state.report.as_dict()["reason"]
    rig.cache.check()


def test_the_back_is_read_from_its_end(rig):
    """The page that is needed first is read last: the computing may yet reach it."""
    state = start(rig)
    addresses = state.plan.addresses[state.staged.positions].tolist()
    rig.step(state.staged, 3)
    found = [part[0] for part in rig.disk.order[:3]]
    if found[0] == addresses[0]:
        # The first part may have begun before the read was turned round.
        found = found[1:]
    assert found == addresses[::-1][: len(found)]
    rig.coordinator.release("r")


def test_computing_goes_on_until_it_meets_the_read(rig):
    """What has not come at the end of a pass is computed, page after page."""
    state = start(rig)
    done = rig.coordinator.chunk_end(state)
    first_missing = done
    while True:
        rig.clock.advance(0.02)
        resume = rig.coordinator.resume(state, done)
        if resume.load_pages:
            break
        assert resume.compute_pages > 0
        done += resume.compute_pages
        rig.coordinator.published(state, done)
        rig.step(state.staged, min(1, state.staged.num_left))
    assert done > first_missing
    assert done + resume.load_pages == NUM
    job = rig.coordinator.begin_back(state, pages(NUM - done))
    assert np.array_equal(rig.landed_bytes(job), rig.expected(WORD, done))
    rig.coordinator.published(state, NUM)
    assert rig.num_pinned() == 0
    rig.cache.check()


def test_a_read_that_hangs_is_computed_in_its_place(rig):
    """Nothing comes and the time is long over: everything is computed."""
    state = start(rig)
    done = rig.coordinator.chunk_end(state)
    rig.clock.advance(1e6)
    resume = rig.coordinator.resume(state, done)
    assert (resume.load_pages, resume.compute_pages) == (0, 0), "all that is left"
    assert state.plan is None
    assert rig.num_pinned() == 0
    assert state.report.replans
    rig.disk.close()
    rig.pump()
    assert rig.stager.num_free_rows == 8
    rig.cache.check()


def test_a_bad_page_of_the_back_is_computed(rig):
    """The computing goes on through it, and what lies behind it is loaded."""
    rig.spoil(WORD[:7])
    state = start(rig)
    end = rig.coordinator.chunk_end(state)
    assert end < 6
    for _ in range(NUM - end):
        rig.disk.steps.release()
    rig.pump()
    resume = rig.coordinator.resume(state, end)
    assert (resume.load_pages, resume.compute_pages) == (0, 7 - end)
    rig.coordinator.published(state, 7)
    resume = rig.coordinator.resume(state, 7)
    assert resume.load_pages == 1
    job = rig.coordinator.begin_back(state, pages(1))
    assert np.array_equal(rig.landed_bytes(job), rig.expected(WORD, 7))
    rig.coordinator.published(state, NUM)
    assert rig.cache.stats.pages_bad[TierId.DISK] == 1
    assert rig.num_pinned() == 0
    rig.cache.check()


def test_an_abort_between_two_passes_frees_everything(rig):
    """No row, no pin and no read is left of a split request that went away."""
    state = start(rig)
    rig.coordinator.published(state, rig.coordinator.chunk_end(state))
    rig.coordinator.release("r")
    assert rig.coordinator.state("r") is None
    rig.disk.close()
    rig.pump()
    assert rig.stager.num_free_rows == 8
    assert rig.num_pinned() == 0
    assert rig.coordinator.num_staging == 0
    rig.cache.check()


def test_an_engine_that_cannot_split_waits_or_computes(rig):
    """Without passes over parts of prompts nothing is split."""
    rig.coordinator.can_split = lambda: False
    state = rig.track("r", WORD)
    rig.coordinator.prepare(state, 0)
    assert not state.is_split
    assert rig.coordinator.chunk_end(state) is None
    rig.coordinator.release("r")


def test_pages_in_memory_go_ahead_of_the_computed_front(rig):
    """What the host has is loaded with the first pass; the plan lives on behind it."""
    plan = rig.cache.plan_offload(rig.digest, rig.track("x", WORD[:2]).tokens)
    for position, address in zip(plan.positions, plan.addresses, strict=True):
        rig.host.region[address] = rig.contents[WORD[: position + 1]]
    zeros = np.zeros(2, np.uint64)
    rig.cache.finish_offload(plan, rig.disk._result(np.ones(2, np.bool_), zeros))
    state = start(rig)
    assert rig.coordinator.loadable_pages(state, 0) == 2
    job = rig.coordinator.begin(state, pages(2))
    assert np.array_equal(rig.landed_bytes(job), rig.expected(WORD[:2]))
    end = rig.coordinator.chunk_end(state)
    assert end > 2
    rig.coordinator.landed(state)
    rig.coordinator.published(state, end)
    assert state.plan is not None
    rig.step(state.staged, NUM - end)
    rig.pump()
    assert rig.coordinator.resume(state, end).load_pages == NUM - end
    job = rig.coordinator.begin_back(state, pages(NUM - end))
    assert np.array_equal(rig.landed_bytes(job), rig.expected(WORD, end))
    rig.coordinator.published(state, NUM)
    assert rig.num_pinned() == 0
    assert rig.cache.stats.pages_loaded[TierId.HOST] == 2
    rig.cache.check()


@pytest.fixture
def waiter():
    """A rig whose reads are quick and waited for, under an engine of whole prompts."""
    rig = Rig(load_policy="auto", page_compute_s=0.02, page_read_s=0.004, part_pages=1)
    rig.keep_on_disk(WORD)
    rig.disk.is_stepped = True
    yield rig
    rig.close()


def test_a_late_read_keeps_what_has_come(waiter):
    """Six pages came in time and two never: six are loaded and two computed."""
    state = waiter.track("r", WORD)
    assert not waiter.coordinator.prepare(state, 0)
    waiter.step(state.staged, 6)
    waiter.clock.advance(0.02)
    assert not waiter.coordinator.prepare(state, 0), "it is not late yet"
    waiter.clock.advance(0.15)
    assert waiter.coordinator.prepare(state, 0)
    assert waiter.coordinator.loadable_pages(state, 0) == 6
    job = waiter.coordinator.begin(state, pages(6))
    assert np.array_equal(waiter.landed_bytes(job), waiter.expected(WORD[:6]))
    waiter.coordinator.landed(state)
    waiter.coordinator.published(state, NUM)
    assert waiter.cache.stats.pages_loaded[TierId.DISK] == 6
    assert "6 of 8" in " ".join(state.report.replans)
    waiter.disk.close()
    assert waiter.stager.drain(PATIENCE_S)
    assert waiter.num_pinned() == 0
    waiter.cache.check()


def test_a_late_read_is_turned_into_a_split(waiter):
    """Once it is late and the engine can, the front is computed and the rest met."""
    state = waiter.track("r", WORD)
    assert not waiter.coordinator.prepare(state, 0)
    waiter.step(state.staged, 2)
    waiter.coordinator.can_split = lambda: True
    waiter.clock.advance(0.14)
    assert waiter.coordinator.prepare(state, 0)
    assert state.is_split
    assert waiter.coordinator.loadable_pages(state, 0) == 2
    job = waiter.coordinator.begin(state, pages(2))
    assert np.array_equal(waiter.landed_bytes(job), waiter.expected(WORD[:2]))
    assert 2 < waiter.coordinator.chunk_end(state) < NUM
    assert "computed while the rest is read" in " ".join(state.report.replans)
    waiter.coordinator.release("r")
    waiter.disk.close()
    assert waiter.stager.drain(PATIENCE_S)
    assert waiter.num_pinned() == 0


def test_the_report_tells_what_was_weighed(waiter):
    """Spans, predictions of both ways, and what came of it."""
    state = waiter.track("r", WORD)
    waiter.coordinator.prepare(state, 0)
    told = state.report.as_dict()
    assert told["reason"] == "loading is cheaper"
    (span,) = told["spans"]
    assert (span["pages"], span["action"], span["source"]) == (NUM, "load", "disk")
    predicted = told["predicted"]
    assert predicted["load_s"] == pytest.approx(NUM * 0.004, rel=0.01)
    assert predicted["recompute_s"] == pytest.approx(NUM * 0.02, rel=0.01)
    assert predicted["total_s"] < predicted["total_without_load_s"]
    assert told["actual"]["pages_loaded"] == 0
    waiter.coordinator.release("r")


def test_reads_that_wait_for_each_other_count_as_wait(waiter):
    """A second request sees the first one's bytes ahead of its own."""
    waiter.coordinator.prepare(waiter.track("r", WORD), 0)
    facts = waiter.coordinator._facts(False)
    assert facts.wait_s[TierId.DISK] == pytest.approx(NUM * 0.004, rel=0.01)
    waiter.coordinator.release("r")


def test_a_lower_limit_ends_a_split(rig):
    """Its back reaches further than may be reused, so the rest is computed."""
    state = start(rig)
    end = rig.coordinator.chunk_end(state)
    rig.coordinator.track("r", rig.digest, state.tokens, NUM - 1)
    assert rig.coordinator.chunk_end(state) is None
    assert rig.coordinator.resume(state, end) == Resume()
    assert rig.num_pinned() == 0
