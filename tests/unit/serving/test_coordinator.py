"""The coordinator: what a waiting request may count on, whatever the tiers do."""

import numpy as np
import pytest

from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import Namespace
from sgl_tiered.core.plans import TransferResult
from sgl_tiered.testing.strategies import spell
from tests.unit.pipelines.pipeline_support import LAYOUT
from tests.unit.serving.coordinator_support import LONG_S, PATIENCE_S, Rig


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.close()


@pytest.fixture
def small():
    """A rig that can stage two pages only."""
    rig = Rig(staging_rows=2)
    yield rig
    rig.close()


def pages(num):
    return np.arange(100, 100 + num, dtype=np.int64)


def test_nothing_known(rig):
    """A prompt that nobody kept goes on at once, with nothing to load."""
    state = rig.track("r", "abc")
    assert rig.coordinator.prepare(state, 0)
    assert rig.coordinator.loadable_pages(state, 0) == 0
    assert rig.coordinator.begin(state, pages(0)) is None


def test_host_hit(rig):
    """Pages in host memory can be loaded at once, from where they lie."""
    rig.keep("abcd")
    state = rig.track("r", "abcd")
    assert rig.coordinator.prepare(state, 0)
    assert rig.coordinator.loadable_pages(state, 0) == 4
    job = rig.coordinator.begin(state, pages(4))
    assert np.array_equal(rig.landed_bytes(job), rig.expected("abcd"))
    assert rig.num_pinned() == 4
    rig.coordinator.settle(state, landed=True)
    assert rig.num_pinned() == 0
    assert rig.cache.stats.pages_loaded[TierId.HOST] == 4
    rig.cache.check()


def test_a_load_that_brings_parts_is_weighed_and_paid_by_them(rig):
    """Its predicted time is that of its bytes, and others are not touched."""
    rig.keep("abcd")
    whole = rig.coordinator.decide(rig.track("whole", "abcd"), 0).load_s
    half = rig.track("half", "abcd")
    half.load_share = 0.5
    latency_s = 1e-4
    predicted_s = rig.coordinator.decide(half, 0).load_s
    assert predicted_s - latency_s == pytest.approx((whole - latency_s) / 2)
    again = rig.coordinator.decide(rig.track("again", "abcd"), 0).load_s
    assert again == whole
    rig.coordinator.load_bytes = lambda device_pages: device_pages * 10
    assert rig.coordinator.loadable_pages(half, 0) == 4
    job = rig.coordinator.begin(half, pages(4))
    assert job.page_bytes.tolist() == [1000, 1010, 1020, 1030]
    rig.coordinator.settle(half, landed=True)


def test_a_load_of_activations_is_weighed_and_paid_by_them():
    """Page by page, also behind a front that the device has; with their kinds."""
    rig = Rig(act_page_bytes=40)
    rig.keep("abcd", np.array([0, 1, 1, 0], np.uint8))
    state = rig.track("r", "abcd")
    load_s = rig.coordinator.decide(state, 0).load_s
    assert load_s == pytest.approx(1e-4 + (2 * LAYOUT.page_bytes + 80) / 1e9)
    assert rig.coordinator.loadable_pages(state, 1) == 3
    found, first = rig.coordinator.to_load(state, 3)
    assert found.representations[first : first + 3].tolist() == [1, 1, 0]
    job = rig.coordinator.begin(state, pages(3))
    assert job.page_bytes.tolist() == [40, 40, LAYOUT.page_bytes]
    found, first = rig.coordinator.to_load(state, 2)
    assert found is state.plan
    assert found.representations[first:].tolist() == [1, 0]
    assert rig.coordinator.to_load(state, 4) is None
    rig.coordinator.settle(state, landed=True)
    assert state.report.act_by_tier == {TierId.HOST: 2}
    assert rig.coordinator.to_load(state, 1) is None
    rig.close()


def test_device_prefix_is_not_loaded(rig):
    """What the device has already is left out of the load."""
    rig.keep("abcd")
    state = rig.track("r", "abcd")
    assert rig.coordinator.prepare(state, 3)
    assert rig.coordinator.loadable_pages(state, 3) == 1
    job = rig.coordinator.begin(state, pages(1))
    assert np.array_equal(rig.landed_bytes(job), rig.expected("abcd", 3))
    rig.coordinator.settle(state, landed=True)


def test_disk_hit_is_staged_then_loadable(rig):
    """Pages on disk hold the request back until they are read; then they load."""
    rig.keep_on_disk("abcd")
    rig.disk.hold()
    state = rig.track("r", "abcd")
    assert not rig.coordinator.prepare(state, 0)
    assert rig.coordinator.num_staging == 1
    assert rig.coordinator.loadable_pages(state, 0) == 0
    rig.disk.release()
    rig.pump()
    assert rig.coordinator.num_staging == 0
    assert rig.coordinator.prepare(state, 0)
    assert rig.coordinator.loadable_pages(state, 0) == 4
    job = rig.coordinator.begin(state, pages(4))
    assert np.array_equal(rig.landed_bytes(job), rig.expected("abcd"))
    assert rig.stager.num_free_rows == 4
    rig.coordinator.landed(state)
    assert rig.stager.num_free_rows == 8
    rig.coordinator.settle(state, landed=True)
    assert rig.num_pinned() == 0
    assert rig.cache.stats.pages_loaded[TierId.DISK] == 4


def test_host_and_disk_in_one_load(rig):
    """A load may take its front from host memory and its rest from disk."""
    rig.keep_on_disk("abcd")
    plan = rig.cache.plan_offload(rig.digest, rig.track("x", "ab").tokens)
    for position, address in zip(plan.positions, plan.addresses, strict=True):
        rig.host.region[address] = rig.contents["ab"[: position + 1]]
    done = np.ones(2, np.bool_)
    rig.cache.finish_offload(plan, TransferResult(done, 0, 0.0, np.zeros(2, np.uint64)))
    state = rig.track("r", "abcd")
    assert not rig.coordinator.prepare(state, 0)
    rig.pump()
    assert rig.coordinator.prepare(state, 0)
    assert rig.coordinator.loadable_pages(state, 0) == 4
    job = rig.coordinator.begin(state, pages(4))
    assert len(job.segments) == 2
    assert np.array_equal(rig.landed_bytes(job), rig.expected("abcd"))
    rig.coordinator.settle(state, landed=True)


@pytest.mark.parametrize("prefetched", [False, True])
def test_a_late_read_is_given_up(rig, prefetched):
    """When the disk is late the request goes on by memory and recompute alone."""
    rig.keep_on_disk("abcd")
    rig.disk.hold()
    state = rig.track("r", "abcd")
    if prefetched:
        rig.coordinator.prefetch(state, 0)
        rig.clock.advance(LONG_S)
    else:
        assert not rig.coordinator.prepare(state, 0)
    assert not rig.coordinator.prepare(state, 0), "patience begins with the waiting"
    rig.clock.advance(LONG_S)
    assert rig.coordinator.prepare(state, 0)
    assert state.memory_only
    assert rig.coordinator.loadable_pages(state, 0) == 0
    assert rig.num_pinned() == 0
    rig.disk.release()
    rig.pump()
    assert rig.stager.num_free_rows == 8
    assert rig.coordinator.prepare(state, 0)
    assert rig.coordinator.loadable_pages(state, 0) == 0, "the disk stays given up"
    rig.cache.check()


def test_prefetch_reads_ahead(rig):
    """A read that began on arrival is over when the request could be admitted."""
    rig.keep_on_disk("abcd")
    state = rig.track("r", "abcd")
    rig.coordinator.prefetch(state, 0)
    rig.pump()
    assert rig.coordinator.prepare(state, 0)
    assert rig.coordinator.loadable_pages(state, 0) == 4
    job = rig.coordinator.begin(state, pages(4))
    assert np.array_equal(rig.landed_bytes(job), rig.expected("abcd"))
    rig.coordinator.settle(state, landed=True)


def test_prefetch_of_what_is_not_on_disk(rig):
    """Arrival starts nothing for pages in memory, nor for pages that nobody has."""
    rig.keep("ab")
    for rid, word in (("1", "ab"), ("2", "xy")):
        state = rig.track(rid, word)
        rig.coordinator.prefetch(state, 0)
        assert state.plan is None
    assert rig.num_pinned() == 0


@pytest.mark.parametrize("bad", [0, 2, 3])
def test_a_bad_page_shortens_the_load(rig, bad):
    """Pages before a bad one load; the bad copy is dropped and not found again."""
    rig.keep_on_disk("abcd")
    rig.spoil("abcd"[: bad + 1])
    state = rig.track("r", "abcd")
    assert not rig.coordinator.prepare(state, 0)
    rig.pump()
    assert rig.coordinator.prepare(state, 0)
    if bad:
        assert rig.coordinator.loadable_pages(state, 0) == bad
        job = rig.coordinator.begin(state, pages(bad))
        assert np.array_equal(rig.landed_bytes(job), rig.expected("abcd"[:bad]))
        rig.coordinator.settle(state, landed=True)
    else:
        assert rig.coordinator.loadable_pages(state, 0) == 0
    rig.coordinator.release("r")
    assert rig.cache.stats.pages_bad[TierId.DISK] == 1
    assert rig.stager.num_free_rows == 8
    found = rig.cache.lookup(rig.digest, state.tokens, 0)
    assert found.num_found == bad
    assert rig.num_pinned() == 0
    rig.cache.check()


def test_a_second_request_waits_for_the_first_load(rig):
    """Only one load moves a page at a time; the second request waits for its end."""
    rig.keep("abcd")
    first, second = rig.track("1", "abcd"), rig.track("2", "abcd")
    assert rig.coordinator.prepare(first, 0)
    assert rig.coordinator.loadable_pages(first, 0) == 4
    assert rig.coordinator.begin(first, pages(4)) is not None
    assert not rig.coordinator.prepare(second, 0)
    assert rig.coordinator.loadable_pages(second, 0) == 0
    rig.coordinator.landed(first)
    assert not rig.coordinator.prepare(second, 0), "not yet in the engine's tree"
    rig.coordinator.settle(first, landed=True)
    assert rig.coordinator.prepare(second, 4)
    assert rig.coordinator.loadable_pages(second, 4) == 0
    assert rig.cache.stats.pages_loaded[TierId.HOST] == 4


def test_a_second_request_does_not_wait_for_ever(rig):
    """A request that waits for another's load goes on after a while, without it."""
    rig.keep("abcd")
    first, second = rig.track("1", "abcd"), rig.track("2", "abcd")
    rig.coordinator.prepare(first, 0)
    assert rig.coordinator.begin(first, pages(4)) is not None
    assert not rig.coordinator.prepare(second, 0)
    rig.clock.advance(LONG_S)
    assert rig.coordinator.prepare(second, 0)
    assert rig.coordinator.begin(second, pages(0)) is None
    rig.coordinator.settle(first, landed=True)
    rig.cache.check()


def test_a_failed_load_can_be_tried_again(rig):
    """Pages of a load that did not land stay where they are for the next one."""
    rig.keep("abc")
    state = rig.track("r", "abc")
    rig.coordinator.prepare(state, 0)
    assert rig.coordinator.begin(state, pages(3)) is not None
    rig.coordinator.settle(state, landed=False)
    assert rig.cache.stats.pages_loaded[TierId.HOST] == 0
    assert rig.coordinator.prepare(state, 0)
    assert rig.coordinator.loadable_pages(state, 0) == 3


def test_release_while_staging_frees_the_rows(rig):
    """An aborted request's rows are free once the read into them has ended."""
    rig.keep_on_disk("abcd")
    rig.disk.hold()
    state = rig.track("r", "abcd")
    assert not rig.coordinator.prepare(state, 0)
    assert rig.disk.started.acquire(timeout=PATIENCE_S)
    rig.coordinator.release("r")
    assert rig.coordinator.state("r") is None
    assert rig.coordinator.num_staging == 0
    assert rig.num_pinned() == 0
    assert rig.stager.num_free_rows == 4
    rig.disk.release()
    rig.pump()
    assert rig.stager.num_free_rows == 8
    rig.cache.check()


def test_release_of_a_started_load_ends_its_plan(rig):
    """An aborted request whose load was handed out leaves no pin behind."""
    rig.keep("abcd")
    state = rig.track("r", "abcd")
    rig.coordinator.prepare(state, 0)
    assert rig.coordinator.begin(state, pages(4)) is not None
    rig.coordinator.release("r")
    assert rig.num_pinned() == 0
    again = rig.track("r2", "abcd")
    assert rig.coordinator.prepare(again, 0)
    assert rig.coordinator.loadable_pages(again, 0) == 4


def test_sources_are_given_back_when_the_last_load_that_reads_them_has_ended(rig):
    """The request may be gone, and come again, while loads of it still run."""
    rig.keep("abcd")
    gone = rig.track("r", "abcd")
    assert rig.coordinator.prepare(gone, 0)
    assert rig.coordinator.loadable_pages(gone, 0) == 4
    assert rig.coordinator.begin(gone, pages(4)) is not None
    for _ in range(2):
        rig.coordinator.load_begins(gone)
    rig.coordinator.release("r")
    assert rig.coordinator.state("r") is None
    assert rig.num_pinned() == 4
    rig.coordinator.load_ended(gone)
    assert rig.num_pinned() == 4
    rig.coordinator.load_ended(gone)
    assert rig.num_pinned() == 0
    again = rig.track("r", "abcd")
    assert again is not gone
    assert rig.coordinator.prepare(again, 0)
    assert rig.coordinator.loadable_pages(again, 0) == 4
    rig.cache.check()


def test_release_of_an_unknown_request(rig):
    """Forgetting a request that was never announced does nothing."""
    rig.coordinator.release("nobody")


def test_device_grew_while_staging(rig):
    """Pages that came to the device meanwhile are left out of the staged load."""
    rig.keep_on_disk("abcd")
    state = rig.track("r", "abcd")
    assert not rig.coordinator.prepare(state, 0)
    rig.pump()
    assert rig.coordinator.prepare(state, 2)
    assert rig.coordinator.loadable_pages(state, 2) == 2
    job = rig.coordinator.begin(state, pages(2))
    assert np.array_equal(rig.landed_bytes(job), rig.expected("abcd", 2))
    rig.coordinator.settle(state, landed=True)
    assert rig.stager.num_free_rows == 8


def test_device_grew_over_the_whole_load(rig):
    """A staged load of which the device has everything is given up."""
    rig.keep_on_disk("abcd")
    state = rig.track("r", "abcd")
    assert not rig.coordinator.prepare(state, 0)
    rig.pump()
    assert rig.coordinator.prepare(state, 4)
    assert rig.coordinator.loadable_pages(state, 4) == 0
    assert rig.stager.num_free_rows == 8
    assert rig.num_pinned() == 0


def test_device_shrank_while_staging(rig):
    """When the device lost the pages before the load, it starts over from there."""
    rig.keep_on_disk("abcd")
    state = rig.track("r", "abcd")
    assert not rig.coordinator.prepare(state, 2)
    rig.pump()
    assert rig.coordinator.loadable_pages(state, 1) == 0
    assert not rig.coordinator.prepare(state, 1)
    rig.pump()
    assert rig.coordinator.prepare(state, 1)
    assert rig.coordinator.loadable_pages(state, 1) == 3
    job = rig.coordinator.begin(state, pages(3))
    assert np.array_equal(rig.landed_bytes(job), rig.expected("abcd", 1))
    rig.coordinator.settle(state, landed=True)
    assert rig.stager.num_free_rows == 8
    assert rig.num_pinned() == 0


def test_a_read_larger_than_the_staging_memory_is_cut(small):
    """What fits into the staging memory is read; the rest is computed."""
    small.keep_on_disk("abcd")
    state = small.track("r", "abcd")
    assert not small.coordinator.prepare(state, 0)
    small.pump()
    assert small.coordinator.prepare(state, 0)
    assert small.coordinator.loadable_pages(state, 0) == 2
    job = small.coordinator.begin(state, pages(2))
    assert np.array_equal(small.landed_bytes(job), small.expected("ab"))
    small.coordinator.settle(state, landed=True)


def test_requests_take_turns_in_the_staging_memory(small):
    """A request waits for rows that another's read will free, then gets them."""
    small.keep_on_disk("ab")
    small.keep_on_disk("cd")
    small.disk.hold()
    first, second = small.track("1", "ab"), small.track("2", "cd")
    assert not small.coordinator.prepare(first, 0)
    assert not small.coordinator.prepare(second, 0)
    assert second.plan is None
    small.disk.release()
    small.pump()
    assert small.coordinator.prepare(first, 0)
    assert small.coordinator.begin(first, pages(2)) is not None
    small.coordinator.settle(first, landed=True)
    assert not small.coordinator.prepare(second, 0)
    small.pump()
    assert small.coordinator.prepare(second, 0)
    assert small.coordinator.loadable_pages(second, 0) == 2


def test_the_cache_may_move_on(rig):
    """A source that is gone by the time of the load means no load, not a wrong one."""
    rig.keep("abcd")
    state = rig.track("r", "abcd")
    assert rig.coordinator.prepare(state, 0)
    assert rig.coordinator.loadable_pages(state, 0) == 4
    rig.cache.reset()
    assert rig.coordinator.begin(state, pages(4)) is None
    assert rig.num_pinned() == 0


def test_release_all(rig):
    """A reset ends every request's plan."""
    rig.keep("ab")
    rig.keep_on_disk("cd")
    states = [rig.track("1", "ab"), rig.track("2", "cd")]
    for state in states:
        rig.coordinator.prepare(state, 0)
    rig.coordinator.release_all()
    rig.pump()
    assert rig.num_pinned() == 0
    assert rig.stager.num_free_rows == 8
    assert rig.coordinator.state("1") is None


def test_a_prompt_announced_again_is_decided_again(rig):
    """A longer prompt finds more, a shorter one loads no more than it may reuse."""
    rig.keep("abcd")
    state = rig.track("r", "ab")
    assert rig.coordinator.loadable_pages(state, 0) == 2
    assert rig.track("r", "abcd") is state
    assert rig.coordinator.loadable_pages(state, 0) == 4
    rig.track("r", "abc")
    assert rig.coordinator.loadable_pages(state, 0) == 3


def test_a_plan_ends_where_reuse_does(rig):
    """Under a lower limit a plan that reaches beyond it is given up, not shortened."""
    rig.keep_on_disk("abcd")
    tokens = spell("abcd", LAYOUT.page_tokens)
    state = rig.coordinator.track("r", rig.digest, tokens, 4)
    assert not rig.coordinator.prepare(state, 0)
    rig.pump()
    assert rig.coordinator.loadable_pages(state, 0) == 4
    assert rig.coordinator.track("r", rig.digest, tokens, 3) is state
    assert rig.coordinator.loadable_pages(state, 0) == 0, "it is to be read anew"
    assert rig.num_pinned() == 0
    assert rig.stager.num_free_rows == 8
    assert not rig.coordinator.prepare(state, 0)
    rig.pump()
    assert rig.coordinator.prepare(state, 0)
    assert rig.coordinator.loadable_pages(state, 0) == 3
    job = rig.coordinator.begin(state, pages(3))
    assert np.array_equal(rig.landed_bytes(job), rig.expected("abc"))
    rig.coordinator.settle(state, landed=True)


def test_nothing_is_loaded_where_nothing_may_be_reused(rig):
    """With a limit of no page a plan is given up, and none is made."""
    rig.keep("abcd")
    state = rig.track("r", "abcd")
    assert rig.coordinator.loadable_pages(state, 0) == 4
    rig.coordinator.track("r", rig.digest, state.tokens, 0)
    assert rig.coordinator.prepare(state, 0)
    assert rig.coordinator.loadable_pages(state, 0) == 0
    assert rig.coordinator.begin(state, pages(0)) is None
    assert rig.num_pinned() == 0


def test_a_load_that_has_begun_is_left_alone(rig):
    """Its pages are copied now; whoever began it ends it."""
    rig.keep("abcd")
    state = rig.track("r", "abcd")
    assert rig.coordinator.prepare(state, 0)
    assert rig.coordinator.loadable_pages(state, 0) == 4
    assert rig.coordinator.begin(state, pages(4)) is not None
    plan = state.plan
    for word, limit in (("abcd", 3), ("wxyz", 4)):
        tokens = spell(word, LAYOUT.page_tokens, tail=1)
        assert rig.coordinator.track("r", rig.digest, tokens, limit) is state
        assert state.plan is plan
        assert rig.coordinator.loadable_pages(state, 0) == 0
    rig.coordinator.settle(state, landed=True)
    assert rig.num_pinned() == 0


@pytest.mark.parametrize("word", ["wxyz", "abyz", "wxyzabcd"])
def test_other_tokens_under_one_name_are_another_prompt(rig, word):
    """Equal lengths do not make prompts equal: a plan for the former is given up."""
    rig.keep("abcd")
    state = rig.track("r", "abcd")
    assert rig.coordinator.prepare(state, 0)
    assert rig.coordinator.loadable_pages(state, 0) == 4
    assert rig.coordinator.track("s", rig.digest, state.tokens, 4) is not state
    other = rig.track("r", word)
    assert np.array_equal(other.tokens, spell(word, LAYOUT.page_tokens, tail=1))
    rig.coordinator.prepare(other, 0)
    wanted = 2 if word == "abyz" else 0
    assert rig.coordinator.loadable_pages(other, 0) == wanted


def test_another_namespace_is_another_prompt(rig):
    """The weights have changed: what was found for the former ones is not loaded."""
    rig.keep("abcd")
    state = rig.track("r", "abcd")
    assert rig.coordinator.loadable_pages(state, 0) == 4
    digest = rig.cache.open_namespace(Namespace("other weights", "bfloat16", 2))
    other = rig.coordinator.track("r", digest, state.tokens, 4)
    assert rig.coordinator.loadable_pages(other, 0) == 0


def test_a_prompt_that_grows_keeps_its_plan(rig):
    """An answer's tokens follow; what was planned for the front holds."""
    rig.keep_on_disk("abcd")
    tokens = spell("abcdef", LAYOUT.page_tokens)
    state = rig.coordinator.track("r", rig.digest, tokens[:9], 4)
    assert not rig.coordinator.prepare(state, 0)
    plan = state.plan
    assert plan is not None
    assert rig.coordinator.track("r", rig.digest, tokens, 5) is state
    assert state.plan is plan
    assert len(state.tokens) == len(tokens)
    rig.pump()
    assert rig.coordinator.loadable_pages(state, 0) == 4
