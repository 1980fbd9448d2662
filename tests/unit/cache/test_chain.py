"""A chain of tiers: what goes down, what comes up, what is refused and tried again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sgl_tiered.cache.tiered_cache import CacheConfig, TierConfig, TieredCache
from sgl_tiered.core.clock import ManualClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import Namespace
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import DemotePlan, Int32s, TransferResult
from sgl_tiered.testing.strategies import spell

PAGE_TOKENS = 4
MakeCache = Callable[..., TieredCache]
HOST, CXL, DISK = TierId.HOST, TierId.CXL, TierId.DISK


def prompt(word: str) -> Int32s:
    return spell(word, PAGE_TOKENS)


def arrived(num_pages: int, *, ok: bool = True) -> TransferResult:
    sums = np.arange(1, num_pages + 1, dtype=np.uint64)
    return TransferResult(np.full(num_pages, ok), 0, 1e-3, sums)


class Story:
    """One cache and one namespace; words are prompts."""

    def __init__(self, cache: TieredCache) -> None:
        self.cache = cache
        self.digest = cache.open_namespace(Namespace("m", "bfloat16", PAGE_TOKENS))

    def store(self, word: str, seen_pages: int = 0) -> int:
        plan = self.cache.plan_offload(self.digest, prompt(word), seen_pages=seen_pages)
        if plan is None:
            return 0
        self.cache.finish_offload(plan, arrived(len(plan.pages)))
        return len(plan.pages)

    def plan(self, most: int = 100) -> DemotePlan:
        plan = self.cache.plan_demote(most)
        assert plan is not None
        return plan

    def demote_all(self) -> list[tuple[str, int]]:
        """Demote until nothing is left; return the edges and pages of each batch."""
        done = []
        while (plan := self.cache.plan_demote(100)) is not None:
            done.append((f"{plan.source.label}>{plan.target.label}", len(plan.pages)))
            self.cache.finish_demote(plan, arrived(len(plan.pages)))
        self.cache.check()
        return done

    def sources(self, word: str) -> str:
        decision = self.cache.lookup(self.digest, prompt(word), 0)
        return "".join(TierId(int(t)).label[0] for t in decision.tiers)

    def load(self, word: str) -> None:
        decision = self.cache.lookup(self.digest, prompt(word), 0)
        plan = self.cache.commit_load(decision)
        assert plan is not None
        self.cache.finish_load(plan, landed=True)

    def dropped(self, tier: TierId) -> dict[str, int]:
        return dict(self.cache.stats.pages_dropped[tier])


def test_pages_go_down_the_whole_chain(make_cache: MakeCache) -> None:
    """Written through from host to CXL, and from there to disk, one edge at a time."""
    story = Story(make_cache(host=4, cxl=6, disk=9))
    story.store("abc")
    assert story.demote_all() == [("host>cxl", 3), ("cxl>disk", 3)]
    story.store("wxyz")
    story.demote_all()
    assert story.sources("abc") == "ccd"


def test_each_edge_has_one_batch_under_way(make_cache: MakeCache) -> None:
    """A second plan comes for the other edge only; a third not before an end."""
    story = Story(make_cache(host=8, cxl=8, disk=8))
    story.store("ab")
    story.demote_all()
    story.cache.drop_tier(DISK)
    story.store("xy")
    first = story.plan()
    assert (first.source, first.target) == (HOST, CXL)
    assert story.cache.plan_demote(9) is None
    story.cache.finish_demote(first, arrived(2))
    story.store("kl")
    plans = [story.plan(), story.plan()]
    assert {plan.target for plan in plans} == {CXL, DISK}
    assert story.cache.plan_demote(9) is None
    for plan in plans:
        story.cache.finish_demote(plan, arrived(len(plan.pages)))
    story.cache.check()


def test_a_page_used_again_comes_back_to_the_first_tier(make_cache: MakeCache) -> None:
    """Loaded from CXL or disk it lacks a host copy, so the next offload makes one."""
    story = Story(make_cache(host=3, cxl=4, disk=9))
    for word in ("abc", "xyz", "klm"):
        story.store(word)
        story.demote_all()
    assert story.sources("abc") == "ddd"
    assert story.sources("xyz") == "cdd"
    story.load("abc")
    assert story.store("abc") == 3
    assert story.sources("abc") == "hhh"
    # Its copy in CXL goes with it: what the host loses next is found there.
    assert story.demote_all() == [("host>cxl", 3)]


@pytest.mark.parametrize("tiers", [(CXL, DISK), (HOST, CXL), (HOST, DISK), (CXL,)])
def test_any_tiers_in_order_make_a_chain(
    make_cache: MakeCache, tiers: tuple[TierId, ...]
) -> None:
    """The first takes the offloads, each next one what comes from above."""
    sizes = {tier.label: 8 if tier in tiers else 0 for tier in (HOST, CXL, DISK)}
    story = Story(make_cache(**sizes))
    story.store("ab")
    wanted = [(f"{tiers[0].label}>{tiers[1].label}", 2)] if len(tiers) > 1 else []
    assert story.demote_all() == wanted
    assert story.sources("ab") == 2 * tiers[0].label[0]


def test_on_evict_takes_the_coldest_of_each_tier(make_cache: MakeCache) -> None:
    """Each edge starts when its own source is above the watermark."""
    story = Story(
        make_cache(
            host=4, cxl=4, disk=9, demote_policy="on-evict", demote_watermark=0.5
        )
    )
    story.store("ab")
    assert story.demote_all() == []
    story.store("xy")
    assert story.demote_all() == [("host>cxl", 2)]
    story.store("kl")
    assert story.demote_all() == [("host>cxl", 2), ("cxl>disk", 2)]
    assert story.sources("ab") == "cc"


def test_an_edge_that_failed_rests_and_tries_again(make_cache: MakeCache) -> None:
    """The batch comes again after the rest; the other edge goes on meanwhile."""
    clock = ManualClock()
    story = Story(make_cache(cxl=8, disk=8, clock=clock, demote_rest_s=5.0))
    story.store("ab")
    story.cache.finish_demote(story.plan(), arrived(2))
    story.cache.finish_demote(story.plan(), arrived(2, ok=False))
    assert story.cache.plan_demote(9) is None
    story.store("xy")
    assert story.plan().target == CXL
    clock.advance(5.0)
    again = story.plan()
    assert (again.target, len(again.pages)) == (DISK, 2)


def test_a_tier_can_be_spared(make_cache: MakeCache) -> None:
    """Nothing goes to a disk that is shut off; the edges above it work on."""
    story = Story(make_cache(cxl=8, disk=8))
    story.store("ab")
    plan = story.cache.plan_demote(9, not_to=(DISK,))
    assert plan is not None
    assert plan.target == CXL
    story.cache.finish_demote(plan, arrived(2))
    assert story.cache.plan_demote(9, not_to=(DISK,)) is None
    assert story.plan().target == DISK


def test_pages_that_fail_again_and_again_are_given_up(make_cache: MakeCache) -> None:
    """Three times; then they are counted, and the edge is tried with the next ones."""
    story = Story(make_cache(disk=8, demote_rest_s=0.0))
    story.store("abc")
    for _ in range(3):
        story.cache.finish_demote(story.plan(), arrived(3, ok=False))
    assert story.cache.plan_demote(9) is None
    assert story.dropped(DISK) == {"failed": 3}
    story.store("x")
    story.cache.finish_demote(story.plan(), arrived(1))
    assert story.sources("x") == "h"


def test_a_refusal_is_tried_again_once_something_changed(make_cache: MakeCache) -> None:
    """Pages find no room while a load pins the disk's copies, and find it later."""
    story = Story(make_cache(host=3, disk=3))
    story.store("abc")
    story.demote_all()
    story.cache.drop_tier(HOST)
    decision = story.cache.lookup(story.digest, prompt("abc"), 0)
    load = story.cache.commit_load(decision)
    assert load is not None
    story.store("xyz")
    assert story.cache.plan_demote(9) is None
    assert story.cache.plan_demote(9) is None
    story.cache.finish_load(load, landed=True)
    assert story.demote_all() == [("host>disk", 3)]
    assert story.dropped(DISK) == {}


def test_a_page_that_is_worth_less_is_given_up(make_cache: MakeCache) -> None:
    """After three refusals it is counted; it does not stay in the queue for ever."""
    story = Story(make_cache(host=8, disk=3))
    story.store("abc")
    story.demote_all()
    story.store("xyz")
    for num_dropped in (0, 0, 3):
        # Used now, so worth more than xyz; and the table changes.
        story.load("abc")
        assert story.demote_all() == []
        assert sum(story.dropped(DISK).values()) == num_dropped
    assert story.dropped(DISK) == {"no room": 3}
    assert story.cache.stats.lost_writes() == {
        "offload_no_room_pages": 0,
        "offload_seen_once_pages": 0,
        "evict_host_uncopied_pages": 0,
        "demote_disk_no_room_pages": 3,
    }


def test_what_leaves_a_tier_before_it_was_written_is_counted(
    make_cache: MakeCache,
) -> None:
    """Pages evicted while they waited for their turn; not those that were written."""
    story = Story(make_cache(host=3, disk=9))
    story.store("abc")
    story.demote_all()
    story.store("xyz")
    story.store("pqr")
    story.demote_all()
    stats = story.cache.stats
    assert dict(stats.pages_evicted) == {HOST: 6, DISK: 0}
    assert dict(stats.pages_uncopied) == {HOST: 3}
    assert stats.lost_writes()["evict_host_uncopied_pages"] == 3


def test_bad_settings_of_the_chain_are_named() -> None:
    """The rest and the admission are checked; so is the order of the tiers."""
    layout = PageLayout(1, 4, 8)
    tiers = (TierConfig(HOST, 4), TierConfig(DISK, 4))
    with pytest.raises(ValueError, match="demote_rest_s"):
        CacheConfig(layout, tiers, demote_rest_s=-1.0)
    with pytest.raises(ValueError, match="disk_admission"):
        CacheConfig(layout, tiers, disk_admission="some")
    with pytest.raises(ValueError, match="fastest first"):
        CacheConfig(layout, (TierConfig(CXL, 4), TierConfig(HOST, 4)))


def test_second_hit_writes_what_two_requests_had(make_cache: MakeCache) -> None:
    """The first sighting stays in the host; the second goes to disk, also for pages
    that left the host in between and came back."""
    story = Story(make_cache(host=4, disk=16, disk_admission="second-hit"))
    story.store("abc")
    assert story.demote_all() == []
    story.store("abx")
    assert story.demote_all() == [("host>disk", 2)]
    story.store("wxyz")
    assert story.demote_all() == []
    assert story.sources("abc") == "dd"
    story.store("abc")
    assert story.demote_all() == [("host>disk", 1)]


def test_auto_stops_writing_what_nobody_reads(make_cache: MakeCache) -> None:
    """After four memories of new pages none is written; those that come again are, and
    once many do all are."""
    story = Story(make_cache(host=4, disk=64, disk_admission="auto"))
    written = []
    for word in ("abcd", "efgh", "ijkl", "mnop", "qrst", "uvwx"):
        story.store(word)
        written.append(sum(pages for _, pages in story.demote_all()))
    assert written == [4, 4, 4, 0, 0, 0]
    story.store("uvwx")
    assert story.demote_all() == [("host>disk", 4)]
    story.store("yzAB")
    assert story.demote_all() == [("host>disk", 4)]


def test_a_request_counts_once(make_cache: MakeCache) -> None:
    """Pages of an earlier chunk of the same prompt are not seen a second time."""
    story = Story(make_cache(disk=16, disk_admission="second-hit"))
    story.store("ab")
    story.store("abcd", seen_pages=2)
    assert story.demote_all() == []
    story.store("abcd")
    assert story.demote_all() == [("host>disk", 4)]


def test_admission_is_for_the_disk_only(make_cache: MakeCache) -> None:
    """CXL takes everything."""
    story = Story(make_cache(cxl=8, disk=16, disk_admission="second-hit"))
    story.store("abc")
    assert story.demote_all() == [("host>cxl", 3)]
    story.store("abc")
    assert story.demote_all() == [("cxl>disk", 3)]


def test_an_offload_put_off_is_as_old_as_its_request(make_cache: MakeCache) -> None:
    """What was sighted first is evicted first, although it was copied last."""
    story = Story(make_cache(host=4))
    cold = story.cache.sight(story.digest, prompt("ab"))
    story.store("xy")
    plan = story.cache.plan_offload(story.digest, prompt("ab"), sighted=cold)
    assert plan is not None
    story.cache.finish_offload(plan, arrived(2))
    story.store("k")
    assert (story.sources("ab"), story.sources("xy")) == ("h", "hh")


def test_pages_in_no_tier_are_counted(make_cache: MakeCache) -> None:
    """For the report of what the device dropped before a copy was made."""
    story = Story(make_cache())
    story.store("ab")
    assert story.cache.num_without_copy(story.digest, prompt("abcd"), 0) == 2
    assert story.cache.num_without_copy(story.digest, prompt("abcd"), 3) == 1
    assert story.cache.num_without_copy(story.digest, prompt("ab"), 1) == 0
