"""Looking ahead over the queue: what is read, once, in what order, and what is not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from sgl_tiered.cache.device_prefetcher import DevicePrefetcher, Waiting
from sgl_tiered.cache.prefetcher import Prefetcher, measured_tpot_s
from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.cache.waiting_state import WaitingLoad
from sgl_tiered.core.clock import ManualClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import Namespace
from sgl_tiered.core.plans import LoadPlan, PromotePlan, TransferResult
from sgl_tiered.policies.prefetch.base import Decoding, QueueFacts
from sgl_tiered.policies.prefetch.car import CarPrefetch
from sgl_tiered.policies.prefetch.registry import make_prefetch_policy
from sgl_tiered.testing.strategies import spell
from tests.unit.cache.conftest import PAGE_TOKENS


class Eager(CarPrefetch):
    """Everything is due at once, so that what is read does not depend on when."""

    name = "eager"

    def starts_s(self, facts: QueueFacts) -> tuple[float, ...]:
        return (0.0,) * len(facts.services_s)


class FakeRead:
    """A promotion that ends when the test says so."""

    def __init__(self, plan: PromotePlan) -> None:
        self.plan = plan
        self.num_left = plan.num_pages
        self.is_urgent = self.is_cancelled = False

    def hurry(self) -> None:
        self.is_urgent = True

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeReader:
    """Keeps what was submitted."""

    def __init__(self) -> None:
        self.reads: list[FakeRead] = []
        self.is_full = False

    def submit(self, plan: PromotePlan) -> FakeRead | None:
        if self.is_full:
            return None
        self.reads.append(FakeRead(plan))
        return self.reads[-1]


class Rig:
    """A cache, a prefetcher on it and prompts on disk."""

    def __init__(self, make_cache, policy: str = "", window: int = 16, **cache):
        self.clock = ManualClock()
        cache.setdefault("disk", 64)
        self.cache: TieredCache = make_cache(clock=self.clock, **cache)
        self.digest = self.cache.open_namespace(Namespace("m", "bfloat16", PAGE_TOKENS))
        self.reader = FakeReader()
        self.prefetcher = Prefetcher(
            self.cache,
            make_prefetch_policy(policy) if policy else Eager(),
            self.reader,
            self.clock,
            window,
        )

    def keep(self, word: str, *, on_host: bool = False) -> None:
        """Put a prompt's pages on disk, and leave them on the host or not."""
        tokens = spell(word, PAGE_TOKENS)
        plan = self.cache.plan_offload(self.digest, tokens)
        assert plan is not None
        self.cache.finish_offload(plan, done(len(plan.pages)))
        while (demote := self.cache.plan_demote(64)) is not None:
            self.cache.finish_demote(demote, done(len(demote.pages)))
        if not on_host:
            self.cache.drop_tier(TierId.HOST)

    def wait(self, word: str) -> WaitingLoad:
        """Return a request that waits for a prompt."""
        tokens = spell(word, PAGE_TOKENS, tail=1)
        return WaitingLoad(self.digest, tokens, len(word))

    def look(self, *states: WaitingLoad, **facts: object) -> float:
        """Look over a queue of which nothing is on the device."""
        return self.prefetcher.advance([(state, 0) for state in states], **facts)

    def end(self, read: FakeRead, num_read: int | None = None, bad: int = 0) -> None:
        """End a read after some of its pages; the last ones of them are bad."""
        plan = read.plan
        num_read = plan.num_pages if num_read is None else num_read
        ok = np.ones(num_read, np.bool_)
        ok[num_read - bad :] = False
        read.num_left = 0
        positions = np.arange(num_read, dtype=np.int32)
        self.prefetcher.finished(plan, positions, TransferResult(ok, 0, 0.0))
        self.cache.check()

    def tiers(self, word: str) -> list[int]:
        """Return from where each page of a prompt would be loaded."""
        tokens = spell(word, PAGE_TOKENS, tail=1)
        return [int(tier) for tier in self.cache.lookup(self.digest, tokens, 0).tiers]

    def num_pinned(self) -> int:
        tiers = (TierId.HOST, TierId.DISK)
        return sum(self.cache.occupancy(tier).pinned_slots for tier in tiers)


class Room:
    """A device that takes every fetch, and lets none end."""

    def __init__(self, rig: Rig) -> None:
        self.device = DevicePrefetcher(rig.cache, Eager())
        self.device.room = self
        self.num_cancelled = 0
        self._plans: dict[int, LoadPlan] = {}

    def room_pages(self) -> int:
        return 64

    def submit(self, plan: LoadPlan, state: Waiting, keep: Sequence[Waiting]) -> bool:
        self._plans[plan.plan_id] = plan
        return True

    def cancel(self, plan_id: int) -> None:
        self.num_cancelled += 1
        self.device.ended(self._plans.pop(plan_id), landed=False)


def done(num_pages: int) -> TransferResult:
    return TransferResult(
        np.ones(num_pages, np.bool_), 0, 0.0, np.zeros(num_pages, np.uint64)
    )


@pytest.fixture
def make_rig(make_cache):
    return lambda *args, **settings: Rig(make_cache, *args, **settings)


def test_pages_on_disk_become_host_hits(make_rig):
    """A promoted page is a copy in the first tier that any request can load."""
    rig = make_rig()
    rig.keep("abc")
    rig.look(rig.wait("abc"))
    (read,) = rig.reader.reads
    assert read.plan.num_pages == 3
    assert rig.tiers("abc") == [TierId.DISK] * 3
    rig.end(read)
    assert rig.tiers("abc") == [TierId.HOST] * 3
    assert rig.num_pinned() == 0


def test_one_read_for_all_that_wait_for_a_prefix(make_rig):
    """Requests that share pages, at once or one look after the other: one transfer."""
    rig = make_rig()
    rig.keep("abcd")
    queue = [rig.wait(word) for word in ("abcx", "abcy", "abcd")]
    rig.look(*queue)
    rig.look(*queue)
    assert [read.plan.num_pages for read in rig.reader.reads] == [3, 1]


def test_the_queue_is_read_in_its_order(make_rig):
    """Not in that of arrival or of length; and no further than the window."""
    rig = make_rig(window=2)
    for word in ("aaa", "bb", "c"):
        rig.keep(word)
    rig.look(rig.wait("bb"), rig.wait("c"), rig.wait("aaa"))
    assert [read.plan.num_pages for read in rig.reader.reads] == [2, 1]


def test_pages_on_the_device_or_the_host_are_not_read(make_rig):
    """Nor is anything of a request whose own load is committed."""
    rig = make_rig()
    rig.keep("abc", on_host=True)
    rig.look(rig.wait("abc"))
    assert rig.reader.reads == []
    rig.cache.drop_tier(TierId.HOST)
    rig.prefetcher.advance([(rig.wait("abc"), 3)])
    assert rig.reader.reads == []
    loading = rig.wait("abc")
    decision = rig.cache.lookup(rig.digest, loading.tokens, 0)
    loading.plan = rig.cache.commit_load(decision)
    rig.look(loading)
    assert rig.reader.reads == []


def test_what_is_not_due_waits(make_rig):
    """CaR's rule: with a long answer ahead nothing is read, and the time is told."""
    rig = make_rig("car")
    rig.keep("abc")
    facts = {"is_blocked": True, "tpot_s": 0.1}
    due_s = rig.look(rig.wait("abc"), decoding=[Decoding(100, 0.0)], **facts)
    assert rig.reader.reads == []
    load_s = rig.cache.planner.load_s(TierId.DISK, 3)
    # A step takes 0.1 s, and before its end nobody asks again.
    assert due_s == pytest.approx(10.0 - load_s - 0.1)
    rig.look(rig.wait("abc"), decoding=[Decoding(100, 9.8)], **facts)
    assert rig.reader.reads == []
    rig.look(rig.wait("abc"), decoding=[Decoding(100, 9.95)], **facts)
    assert len(rig.reader.reads) == 1


def test_what_gets_due_during_a_pass_is_read_at_once(make_rig):
    """The engine cannot be asked again before the pass has ended."""
    rig = make_rig("car")
    rig.keep("abc")
    rig.look(rig.wait("abc"), busy_s=5.0)
    assert len(rig.reader.reads) == 1


def test_what_is_needed_is_not_evicted_for_it(make_rig):
    """With host pages that the window needs, nothing is read; without, they go."""
    rig = make_rig(host=3)
    rig.keep("xyz")
    rig.keep("abc", on_host=True)
    rig.look(rig.wait("abc"), rig.wait("xyz"))
    assert rig.reader.reads == []
    rig.look(rig.wait("xyz"))
    assert len(rig.reader.reads) == 1
    assert rig.tiers("abc") == [TierId.DISK] * 3


def test_an_abort_cancels_and_leaves_nothing(make_rig):
    """Nobody waits any more: unread pages stay on disk, those that came are kept."""
    rig = make_rig()
    rig.keep("abcd")
    rig.look(rig.wait("abcd"))
    (read,) = rig.reader.reads
    rig.look()
    assert read.is_cancelled
    rig.end(read, num_read=1)
    assert rig.tiers("abcd") == [TierId.HOST] + [TierId.DISK] * 3
    assert rig.num_pinned() == 0
    assert not rig.prefetcher.is_busy


def test_another_waiter_keeps_a_read_alive(make_rig):
    """The one who asked first has gone; the other is behind the window."""
    rig = make_rig(window=1)
    rig.keep("abcd")
    first, second = rig.wait("abcx"), rig.wait("abcy")
    rig.look(first)
    rig.look(second)
    (read,) = rig.reader.reads
    rig.look(rig.wait("zz"), others=[second])
    assert not read.is_cancelled
    rig.look(rig.wait("zz"))
    assert read.is_cancelled
    rig.end(read, num_read=0)


def test_a_bad_page_is_dropped_and_the_good_ones_stay(make_rig):
    """A page whose bytes were wrong is a hit in no tier afterwards."""
    rig = make_rig()
    rig.keep("abc")
    rig.look(rig.wait("abc"))
    rig.end(rig.reader.reads[0], bad=1)
    assert rig.tiers("abc") == [TierId.HOST] * 2


def test_a_full_reader_leaves_all_as_it_was(make_rig):
    """No pin and no slot is lost when a read cannot be queued."""
    rig = make_rig()
    rig.keep("abc")
    rig.reader.is_full = True
    rig.look(rig.wait("abc"))
    rig.cache.check()
    assert rig.num_pinned() == 0
    assert not rig.prefetcher.is_busy
    assert rig.tiers("abc") == [TierId.DISK] * 3


def test_a_request_whose_turn_comes_waits_and_the_read_hurries(make_rig):
    """It waits for the predicted time; for other prompts nothing is on its way."""
    rig = make_rig()
    rig.keep("abc")
    state = rig.wait("abc")
    rig.look(state)
    left_s = rig.prefetcher.hold_s(state, 0, 0.0)
    assert left_s == pytest.approx(rig.cache.planner.load_s(TierId.DISK, 3))
    assert rig.reader.reads[0].is_urgent
    assert rig.prefetcher.hold_s(rig.wait("xyz"), 0, 0.0) is None
    rig.end(rig.reader.reads[0])
    assert rig.prefetcher.hold_s(state, 0, 0.0) is None


def test_a_read_that_never_ends_holds_nobody(make_rig):
    """After several times the predicted time requests go without it."""
    rig = make_rig()
    rig.keep("abc")
    state = rig.wait("abc")
    rig.look(state)
    rig.clock.advance(100.0)
    assert rig.prefetcher.hold_s(state, 0, 0.0) == 0.0


def test_a_disk_that_rests_is_not_read(make_rig):
    """What was begun is cancelled, and nothing new starts until it is back."""
    rig = make_rig()
    rig.keep("abc")
    rig.keep("xyz")
    rig.look(rig.wait("abc"))
    rig.cache.rest([TierId.DISK])
    rig.look(rig.wait("abc"), rig.wait("xyz"))
    assert [read.is_cancelled for read in rig.reader.reads] == [True]
    rig.end(rig.reader.reads[0], num_read=0)
    rig.cache.rest([])
    rig.look(rig.wait("xyz"))
    assert len(rig.reader.reads) == 2


def test_a_reset_while_pages_are_on_their_way(make_rig):
    """They end into nothing; no slot and no pin is left behind."""
    rig = make_rig()
    rig.keep("abc")
    rig.look(rig.wait("abc"))
    rig.prefetcher.cancel_all()
    rig.cache.reset()
    rig.cache.check()
    rig.end(rig.reader.reads[0])
    assert rig.tiers("abc") == []
    assert rig.num_pinned() == 0
    assert rig.cache.occupancy(TierId.HOST).used_slots == 0
    assert rig.cache.occupancy(TierId.DISK).used_slots == 0


@pytest.mark.parametrize("policy", ["none", "arrival"])
def test_other_policies_do_not_look_ahead(make_rig, policy):
    """Their reads are the requests' own."""
    rig = make_rig(policy)
    rig.keep("abc")
    assert rig.look(rig.wait("abc")) == float("inf")
    assert rig.reader.reads == []


def test_tpot_is_measured_over_gaps():
    """A first token is no gap; nothing known gives 0."""
    assert measured_tpot_s([]) == 0.0
    assert measured_tpot_s([(1, 0.7)]) == 0.0
    assert measured_tpot_s([(11, 1.0), (1, 0.7), (6, 0.5)]) == pytest.approx(0.1)


@pytest.mark.parametrize("to_device", [False, True])
def test_a_new_request_is_not_taken_for_one_that_left(make_rig, to_device):
    """Though Python may give it the number (``id``) that the other one had: nobody
    waits for that one's pages any more."""
    rig = make_rig()
    rig.keep("abc", on_host=to_device)
    room = Room(rig)
    if to_device:
        rig.prefetcher.device = room.device
    gone = rig.wait("abc")
    number = id(gone)
    rig.look(gone)
    assert rig.prefetcher.is_busy
    del gone
    others = []
    while len(others) < 100 and (not others or id(others[-1]) != number):
        others.append(rig.wait("xyz"))
    rig.look(others[-1])
    if to_device:
        assert room.num_cancelled == 1
    else:
        (read,) = rig.reader.reads
        assert read.is_cancelled
