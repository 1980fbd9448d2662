"""TieredCache, told as stories of requests; letters stand for pages of tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sgl_tiered.cache.tiered_cache import CacheConfig, TierConfig, TieredCache
from sgl_tiered.core.clock import ManualClock
from sgl_tiered.core.ids import Lookup, TierId
from sgl_tiered.core.keys import Namespace, page_keys
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import (
    DemotePlan,
    Int32s,
    LoadPlan,
    OffloadPlan,
    PageRecords,
    TransferResult,
    namespace_rows,
)
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost
from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.eviction.lru import LRUPolicy
from sgl_tiered.testing.strategies import spell

PAGE_TOKENS = 4
SPACE = Namespace("model", "bfloat16", PAGE_TOKENS)
MakeCache = Callable[..., TieredCache]


def prompt(word: str, tail: int = 0) -> Int32s:
    return spell(word, PAGE_TOKENS, tail)


def result(plan: OffloadPlan | DemotePlan, ok: str = "") -> TransferResult:
    """Return a result; ``ok`` marks pages that arrived by ``+`` (default all)."""
    marks = ok or "+" * len(plan.pages)
    sums = np.arange(1, len(marks) + 1, dtype=np.uint64)
    return TransferResult(np.array([m == "+" for m in marks]), 0, 1e-3, sums)


class Story:
    """A cache and one namespace, with words for prompts."""

    def __init__(self, cache: TieredCache, space: Namespace = SPACE) -> None:
        self.cache = cache
        self.digest = cache.open_namespace(space)

    def store(self, word: str, ok: str = "") -> int:
        """Offload a prompt to the end; return the pages that were planned."""
        plan = self.plan(word)
        if plan is None:
            return 0
        self.cache.finish_offload(plan, result(plan, ok))
        return len(plan.pages)

    def plan(self, word: str) -> OffloadPlan | None:
        return self.cache.plan_offload(self.digest, prompt(word))

    def demote(self, most: int = 100) -> int:
        plan = self.cache.plan_demote(most)
        if plan is None:
            return 0
        self.cache.finish_demote(plan, result(plan))
        return len(plan.pages)

    def found(self, word: str) -> int:
        return self.cache.lookup(self.digest, prompt(word), 0).num_found

    def sources(self, word: str) -> str:
        decision = self.cache.lookup(self.digest, prompt(word), 0)
        return "".join(TierId(int(t)).label[0] for t in decision.tiers)

    def load(self, word: str, first_page: int = 0) -> LoadPlan:
        plan = self.cache.commit_load(
            self.cache.lookup(self.digest, prompt(word), first_page)
        )
        assert plan is not None
        return plan


def test_a_page_is_a_hit_once_it_has_landed(make_cache: MakeCache) -> None:
    """Not before: a copy in flight is not found."""
    story = Story(make_cache())
    plan = story.plan("abc")
    assert plan is not None
    assert plan.positions.tolist() == [0, 1, 2]
    assert story.found("abc") == 0
    story.cache.finish_offload(plan, result(plan))
    assert story.found("abc") == 3
    assert story.sources("abcd") == "hhh"


def test_only_whole_pages_count(make_cache: MakeCache) -> None:
    """The partial page at the end is neither stored nor found."""
    story = Story(make_cache())
    plan = story.cache.plan_offload(story.digest, prompt("ab", tail=3))
    assert plan is not None
    assert len(plan.pages) == 2
    assert story.cache.plan_offload(story.digest, prompt("", tail=3)) is None


def test_only_missing_pages_are_offloaded(make_cache: MakeCache) -> None:
    """The second turn of a chat stores its own pages; a repeat stores nothing."""
    story = Story(make_cache())
    story.store("ab")
    plan = story.plan("abcd")
    assert plan is not None
    assert plan.positions.tolist() == [2, 3]
    assert story.plan("abcd") is None


def test_tokens_decide_not_positions(make_cache: MakeCache) -> None:
    """A prompt that differs in the last token of a page does not hit that page."""
    story = Story(make_cache())
    story.store("abc")
    assert story.found("axc") == 1
    other = prompt("abc")
    other[PAGE_TOKENS] += 1
    assert story.cache.lookup(story.digest, other, 0).num_found == 1


def test_namespaces_do_not_mix(make_cache: MakeCache) -> None:
    """Another tenant's equal prompt is a miss."""
    cache = make_cache()
    story = Story(cache)
    other = Story(cache, Namespace("model", "bfloat16", PAGE_TOKENS, cache_salt="s"))
    story.store("abc")
    assert other.found("abc") == 0
    assert cache.open_namespace(SPACE) == story.digest


def test_lookup_starts_after_the_device_s_pages(make_cache: MakeCache) -> None:
    """Pages that the device has are neither counted nor loaded."""
    story = Story(make_cache())
    story.store("abcde")
    decision = story.cache.lookup(story.digest, prompt("abcde"), 2)
    assert (decision.first_page, decision.num_pages) == (2, 3)
    limited = story.cache.lookup(story.digest, prompt("abcde"), 2, max_pages=1)
    assert limited.num_found == 1
    assert story.cache.lookup(story.digest, prompt("abcde"), 5).lookup == Lookup.MISS


def test_a_second_request_waits_for_the_same_load(make_cache: MakeCache) -> None:
    """PENDING while its first page is being loaded, then a hit."""
    story = Story(make_cache())
    story.store("abcd")
    plan = story.load("abcd")
    waiting = story.cache.lookup(story.digest, prompt("abx"), 0)
    assert waiting.lookup == Lookup.PENDING
    assert waiting.num_pages == 0
    story.cache.finish_load(plan, landed=True)
    assert story.cache.lookup(story.digest, prompt("abx"), 0).num_pages == 2


def test_a_run_ends_before_pages_that_are_being_loaded(make_cache: MakeCache) -> None:
    """One transfer per page at a time, without waiting for later pages."""
    story = Story(make_cache())
    story.store("abcd")
    story.load("abcd", first_page=2)
    decision = story.cache.lookup(story.digest, prompt("abcd"), 0)
    assert (decision.lookup, decision.num_pages) == (Lookup.HIT, 2)


def test_pinned_pages_outlive_pressure(make_cache: MakeCache) -> None:
    """A full tier refuses rather than evict what a load is reading."""
    story = Story(make_cache(host=4))
    story.store("abcd")
    plan = story.load("abcd")
    assert story.plan("wxyz") is None
    assert story.cache.stats.num_refused_offload_pages == 4
    story.cache.finish_load(plan, landed=True)
    assert story.store("wxyz") == 4
    assert story.found("abcd") == 0


def test_as_many_leading_pages_as_fit(make_cache: MakeCache) -> None:
    """A prompt longer than the tier keeps its beginning."""
    story = Story(make_cache(host=4))
    assert story.store("abcdef") == 4
    assert story.found("abcdef") == 4


def test_a_prompt_does_not_evict_itself(make_cache: MakeCache) -> None:
    """Later pages never cost the prompt its earlier ones."""
    story = Story(make_cache(host=3))
    story.store("ab")
    story.store("abcde")
    assert story.found("abcde") == 3


def test_lru_takes_the_end_of_the_coldest_prompt(make_cache: MakeCache) -> None:
    """The last page first, then the one before it."""
    story = Story(make_cache(host=6))
    story.store("abc")
    story.store("xyz")
    assert story.found("abc") == 3
    story.store("k")
    assert (story.found("xyz"), story.found("abc")) == (2, 3)


def test_fifo_takes_the_oldest_whatever_its_use(make_cache: MakeCache) -> None:
    """Use does not protect under fifo."""
    story = Story(make_cache(host=6, eviction="fifo"))
    story.store("abc")
    story.store("xyz")
    assert story.found("abc") == 3
    story.store("k")
    assert (story.found("xyz"), story.found("abc")) == (3, 2)


def test_a_shared_prefix_goes_last(make_cache: MakeCache) -> None:
    """Pages that others continue are evicted after these others."""
    story = Story(make_cache(host=4))
    story.store("abx")
    story.store("aby")
    story.store("k")
    assert (story.found("abx"), story.found("aby")) == (2, 3)


def test_failed_offloads_leave_nothing(make_cache: MakeCache) -> None:
    """Pages that did not arrive are no hit and hold no slot."""
    story = Story(make_cache())
    story.store("abcd", ok="+-+-")
    assert story.found("abcd") == 1
    assert story.cache.occupancy(TierId.HOST).used_slots == 2
    # The holes are filled the next time; page c has been kept.
    plan = story.plan("abcd")
    assert plan is not None
    assert plan.positions.tolist() == [1, 3]
    story.cache.check()


def test_demoted_pages_are_found_on_disk(make_cache: MakeCache) -> None:
    """Write-through: what the host loses, the disk still has, with checksums."""
    story = Story(make_cache(host=3, disk=9))
    story.store("abc")
    assert story.demote() == 3
    story.store("xyz")
    assert story.sources("abc") == "ddd"
    plan = story.load("abc")
    assert plan.checksums.tolist() == [1, 2, 3]
    assert plan.tiers.tolist() == [TierId.DISK] * 3


def test_the_faster_copy_is_read(make_cache: MakeCache) -> None:
    """Host before disk, page by page; a tier that may not be read is left out."""
    story = Story(make_cache(host=4, disk=9))
    story.store("abcd")
    story.demote()
    story.store("xy")
    assert story.sources("abcd") == "hhdd"
    decision = story.cache.lookup(
        story.digest, prompt("abcd"), 0, tiers_allowed={TierId.HOST}
    )
    assert decision.num_found == 2
    assert decision.num_from(TierId.HOST) == 2


def test_records_let_a_restart_verify(make_cache: MakeCache) -> None:
    """Keys chain from the namespace's digest over all tokens."""
    story = Story(make_cache(disk=9))
    story.store("ab")
    story.store("abcd")
    plan = story.cache.plan_demote(100)
    assert plan is not None
    keys = page_keys(story.digest, prompt("abcd"), PAGE_TOKENS)
    assert (plan.records.keys == keys).all()
    assert (plan.records.parents[1:] == keys[:-1]).all()
    assert plan.records.parents[0].tobytes() == story.digest
    assert (plan.records.tokens.reshape(-1) == prompt("abcd")).all()
    assert (plan.records.addresses == plan.target_addresses).all()


def test_a_batch_takes_all_namespaces_in_turn(make_cache: MakeCache) -> None:
    """A long prompt takes several calls, parents first; what was offered later comes
    after it, in the same batch where there is room."""
    cache = make_cache(disk=9)
    story = Story(cache)
    other = Story(cache, Namespace("model", "bfloat16", PAGE_TOKENS, lora="l"))
    story.store("abcde")
    other.store("ab")
    sizes, spaces = [], []
    while (plan := cache.plan_demote(3)) is not None:
        sizes.append(len(plan.pages))
        spaces += [row.tobytes() for row in plan.records.namespaces]
        cache.finish_demote(plan, result(plan))
    assert sizes == [3, 3, 1]
    assert spaces == [story.digest] * 5 + [other.digest] * 2


def test_on_evict_demotes_the_coldest_ahead_of_need(make_cache: MakeCache) -> None:
    """Nothing below the watermark; above it, what would be evicted next."""
    cache = make_cache(host=8, disk=9, demote_policy="on-evict", demote_watermark=0.5)
    story = Story(cache)
    story.store("abc")
    assert story.demote() == 0
    story.store("xyz")
    assert story.demote(3) == 3
    story.store("klmno")
    assert story.sources("abc") == "ddd"
    assert story.found("xyz") == 3


def test_the_disk_keeps_what_is_worth_more(make_cache: MakeCache) -> None:
    """A page is not written over one that its policy would keep longer."""
    story = Story(make_cache(host=8, disk=3))
    story.store("abc")
    story.demote()
    story.store("xyz")
    assert story.found("abc") == 3
    assert story.demote() == 0
    story.store("klm")
    assert story.demote() == 3


def test_selective_stores_on_the_second_sighting(make_cache: MakeCache) -> None:
    """One-time prompts never take a slot; shared beginnings do."""
    story = Story(make_cache(write_policy="selective"))
    assert story.store("abc") == 0
    assert story.store("abx") == 2
    assert story.store("abc") == 1
    assert story.found("abcd") == 3


def test_auto_stops_copying_and_begins_again(make_cache: MakeCache) -> None:
    """After as many new pages as the device and the tiers have; what is seen twice is
    copied, and then new pages are again."""
    cache = make_cache(write_policy="auto", device_pages=4)
    story = Story(cache)
    assert [story.store(word) for word in ("abcd", "efgh", "ijkl")] == [4, 4, 0]
    assert not cache.copies_at_once
    assert [story.store(word) for word in ("mnop", "qrst")] == [0, 0]
    assert cache.stats.num_seen_once_pages == 12
    assert story.store("mnopu") == 5
    assert cache.copies_at_once
    assert story.store("vwx") == 3


def test_auto_sees_a_request_once_however_it_is_computed(
    make_cache: MakeCache,
) -> None:
    """The chunks of a prompt are no reuse of those before."""
    cache = make_cache(write_policy="auto", device_pages=4)
    story = Story(cache)
    for word in ("abcd", "efgh", "ijkl"):
        story.store(word)
    assert story.store("mn") == 0
    num_before = cache.stats.num_seen_once_pages
    plan = cache.plan_offload(story.digest, prompt("mnop"), seen_pages=2)
    assert plan is None
    assert cache.stats.num_seen_once_pages == num_before + 2
    assert not cache.copies_at_once


def test_auto_knows_what_a_tier_has(make_cache: MakeCache) -> None:
    """What a former process left on disk comes again at its first sight here."""
    before = Story(make_cache(host=8, disk=8))
    before.store("abcd")
    plan = before.cache.plan_demote(9)
    assert plan is not None
    cache = make_cache(host=8, disk=8, write_policy="auto")
    story = Story(cache)
    assert cache.adopt(TierId.DISK, plan.records)[0] == 4
    for word in ("efgh", "ijkl", "mnop", "qrst"):
        story.store(word)
    assert not cache.copies_at_once
    assert story.store("abcd") == 4
    assert cache.copies_at_once


def test_a_reset_trusts_anew(make_cache: MakeCache) -> None:
    """After a flush nothing is known of what comes."""
    cache = make_cache(write_policy="auto")
    story = Story(cache)
    for word in ("abcd", "efgh"):
        story.store(word)
    assert not cache.copies_at_once
    cache.reset()
    assert cache.copies_at_once


def test_bad_pages_become_misses(make_cache: MakeCache) -> None:
    """The wrong copy goes; another tier's copy of the page stays."""
    story = Story(make_cache(host=3, disk=6))
    story.store("abc")
    story.demote()
    story.cache.finish_load(
        story.load("abc"), landed=False, bad_pages=np.array([1], np.int32)
    )
    assert story.sources("abc") == "hdh"
    story.cache.finish_load(
        story.load("abc"), landed=False, bad_pages=np.array([1], np.int32)
    )
    assert story.sources("abc") == "h"
    assert dict(story.cache.stats.pages_bad) == {TierId.HOST: 1, TierId.DISK: 1}


def test_finishing_twice_is_a_broken_invariant(make_cache: MakeCache) -> None:
    """Each plan ends once."""
    story = Story(make_cache(disk=4))
    plan = story.plan("a")
    assert plan is not None
    story.cache.finish_offload(plan, result(plan))
    with pytest.raises(AssertionError, match="not under way"):
        story.cache.finish_offload(plan, result(plan))
    load = story.load("a")
    story.cache.finish_load(load, landed=True)
    with pytest.raises(AssertionError, match="not under way"):
        story.cache.finish_load(load, landed=True)
    demote = story.cache.plan_demote(1)
    assert demote is not None
    story.cache.finish_demote(demote, result(demote))
    with pytest.raises(AssertionError, match="not under way"):
        story.cache.finish_demote(demote, result(demote))


def test_a_stale_decision_is_refused(make_cache: MakeCache) -> None:
    """None once a source is gone, even where its row is another page's now."""
    story = Story(make_cache(host=3))
    story.store("abc")
    old = story.cache.lookup(story.digest, prompt("abc"), 0)
    story.store("xyz")
    assert story.cache.commit_load(old) is None
    assert story.cache.stats.num_refused_loads == 1


def test_an_old_decision_that_still_holds_is_carried_out(make_cache: MakeCache) -> None:
    """Changes elsewhere in the table do not matter."""
    story = Story(make_cache(host=8))
    story.store("abc")
    old = story.cache.lookup(story.digest, prompt("abc"), 0)
    story.store("xyz")
    assert story.cache.commit_load(old) is not None
    assert story.cache.commit_load(old) is None


def test_reset_with_transfers_under_way(make_cache: MakeCache) -> None:
    """Nothing is found; slots in use come back when their plans end."""
    story = Story(make_cache(host=8, disk=8))
    story.store("abc")
    load, demote = story.load("abc"), story.cache.plan_demote(9)
    offload = story.plan("xy")
    assert demote is not None
    assert offload is not None
    story.cache.reset()
    assert story.found("abc") == 0
    assert story.cache.occupancy(TierId.HOST).used_slots == 5
    assert story.store("abcdef") == 3
    story.cache.finish_offload(offload, result(offload))
    story.cache.finish_demote(demote, result(demote))
    story.cache.finish_load(load, landed=True)
    assert story.found("xy") == 0
    assert story.cache.occupancy(TierId.HOST).used_slots == 3
    assert story.cache.occupancy(TierId.DISK).used_slots == 0
    story.cache.check()


def test_drop_tier_spares_what_is_being_read(make_cache: MakeCache) -> None:
    """Slots in use are told later; the other tier's copies remain."""
    story = Story(make_cache(host=8, disk=8))
    story.store("abcd")
    story.demote()
    story.cache.drop_tier(TierId.HOST)
    plan = story.load("abcd", first_page=2)
    story.cache.drop_tier(TierId.DISK)
    dropped = story.cache.take_forgotten(TierId.DISK)
    assert sorted([*dropped.tolist(), *plan.addresses.tolist()]) == [0, 1, 2, 3]
    assert story.found("abcd") == 0
    story.cache.finish_load(plan, landed=True)
    forgotten = story.cache.take_forgotten(TierId.DISK)
    assert forgotten.tolist() == sorted(plan.addresses.tolist())
    story.cache.check()


def test_forgotten_addresses_are_told_once(make_cache: MakeCache) -> None:
    """Evicted ones, unless a new copy has taken the slot."""
    story = Story(make_cache(host=8, disk=3))
    story.store("abc")
    story.demote()
    story.store("x")
    plan = story.cache.plan_demote(9)
    assert plan is not None
    assert story.cache.take_forgotten(TierId.DISK).tolist() == []
    story.cache.finish_demote(plan, result(plan, ok="-"))
    assert (
        story.cache.take_forgotten(TierId.DISK).tolist()
        == plan.target_addresses.tolist()
    )
    assert story.cache.take_forgotten(TierId.DISK).tolist() == []


def make_records(word: str, addresses: list[int]) -> PageRecords:
    """Return the records of a prompt's pages."""
    digest, tokens = SPACE.digest(), prompt(word)
    keys = page_keys(digest, tokens, PAGE_TOKENS)
    before = np.frombuffer(digest, np.uint8)[None, :]
    return PageRecords(
        namespaces=namespace_rows(digest, len(keys)),
        keys=keys,
        parents=np.concatenate([before, keys[:-1]]),
        tokens=tokens.reshape(-1, PAGE_TOKENS),
        checksums=np.arange(50, 50 + len(word), dtype=np.uint64),
        addresses=np.array(addresses, np.int64),
    )


def take(records: PageRecords, numbers: list[int]) -> PageRecords:
    return PageRecords(
        records.namespaces[numbers],
        records.keys[numbers],
        records.parents[numbers],
        records.tokens[numbers],
        records.checksums[numbers],
        records.addresses[numbers],
    )


def test_adopt_takes_over_what_hangs_together(make_cache: MakeCache) -> None:
    """In any order, with checksums, at the same addresses; then new slots differ."""
    story = Story(make_cache(host=8, disk=8))
    records = take(make_records("abcd", [5, 1, 7, 2]), [2, 0, 3, 1])
    assert story.cache.adopt(TierId.DISK, records)[0] == 4
    plan = story.load("abcd")
    assert plan.addresses.tolist() == [5, 1, 7, 2]
    assert plan.checksums.tolist() == [50, 51, 52, 53]
    story.store("xyz")
    demote = story.cache.plan_demote(9)
    assert demote is not None
    assert not set(demote.target_addresses.tolist()) & {5, 1, 7, 2}
    story.cache.check()


def test_adopt_refuses_orphans_and_forgeries(make_cache: MakeCache) -> None:
    """A flipped token costs its page and those after it; addresses are told."""
    story = Story(make_cache(disk=8))
    records = make_records("abcd", [0, 1, 2, 3])
    records.tokens[1, 0] += 1
    num_adopted, refused = story.cache.adopt(TierId.DISK, records)
    assert (num_adopted, sorted(refused.tolist())) == (1, [1, 2, 3])
    assert story.found("abcd") == 1


def test_adopt_refuses_strangers_and_bad_slots(make_cache: MakeCache) -> None:
    """An unknown namespace, a slot outside or in use, a page that is there."""
    story = Story(make_cache(disk=4))
    stranger = make_records("ab", [0, 1])
    other = PageRecords(
        namespace_rows(bytes(16), 2),
        stranger.keys,
        stranger.parents,
        stranger.tokens,
        stranger.checksums,
        stranger.addresses,
    )
    assert story.cache.adopt(TierId.DISK, other)[0] == 0
    assert story.cache.adopt(TierId.DISK, make_records("ab", [0, 9]))[0] == 1
    assert story.cache.adopt(TierId.DISK, make_records("ax", [3, 0]))[0] == 0
    assert story.cache.adopt(TierId.DISK, make_records("ay", [3, 2]))[0] == 1
    assert story.cache.occupancy(TierId.DISK).used_slots == 2
    story.cache.check()


def test_adopt_for_a_namespace_that_nobody_named_yet(make_cache: MakeCache) -> None:
    """Pages adopted under a bare digest are found once the namespace is named."""
    cache = make_cache(disk=4)
    records = make_records("ab", [0, 1])
    assert cache.adopt(TierId.DISK, records)[0] == 2
    story = Story(cache)
    assert story.digest == records.namespaces[0].tobytes()
    assert story.found("ab") == 2
    cache.check()


def test_adopt_joins_branches_and_later_parts(make_cache: MakeCache) -> None:
    """Prompts that part, in two calls, the second of which starts in the middle."""
    story = Story(make_cache(disk=16))
    assert story.cache.adopt(TierId.DISK, make_records("abc", [0, 1, 2]))[0] == 3
    branch = make_records("abxy", [9, 9, 3, 4])
    assert story.cache.adopt(TierId.DISK, take(branch, [3, 2]))[0] == 2
    assert (story.found("abc"), story.found("abxy")) == (3, 4)
    story.cache.check()


def test_occupancy_looks_at_no_page(make_cache: MakeCache) -> None:
    """It is asked for between batches: a scan takes 12 ms with 2.6 million pages."""

    class NoScan:
        def __getitem__(self, index: object) -> object:
            raise AssertionError("occupancy scans the table")

    story = Story(make_cache())
    story.store("abc")
    table = story.cache._table
    kept, table.entry_of = table.entry_of, NoScan()  # type: ignore[assignment]
    occupancy = story.cache.occupancy(TierId.HOST)
    table.entry_of = kept
    assert (occupancy.used_slots, occupancy.pinned_slots) == (3, 0)


def test_occupancy_counts_pins(make_cache: MakeCache) -> None:
    """Free, used and pinned slots, flights included."""
    story = Story(make_cache(host=8))
    story.store("abc")
    story.load("ab")
    story.plan("xy")
    occupancy = story.cache.occupancy(TierId.HOST)
    assert (occupancy.used_slots, occupancy.free_slots) == (5, 3)
    assert occupancy.pinned_slots == 4
    assert occupancy.slot_bytes == 4096


def test_growth_keeps_everything(make_cache: MakeCache) -> None:
    """Past the table's first capacity all pages are still found."""
    story = Story(make_cache(host=5000))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(99, size=400, dtype=np.int32) for _ in range(40)]
    for tokens in prompts:
        plan = story.cache.plan_offload(story.digest, tokens)
        assert plan is not None
        story.cache.finish_offload(plan, result(plan))
    story.cache.check()
    found = [story.cache.lookup(story.digest, t, 0).num_found for t in prompts]
    assert found == [100] * 40


def test_stats_count_pages(make_cache: MakeCache) -> None:
    """Stored, loaded by tier, evicted."""
    story = Story(make_cache(host=3, disk=9))
    story.store("abc")
    story.demote()
    story.store("x")
    story.cache.finish_load(story.load("abc"), landed=True)
    stats = story.cache.stats
    assert dict(stats.pages_stored) == {TierId.HOST: 4, TierId.DISK: 3}
    assert dict(stats.pages_loaded) == {TierId.HOST: 2, TierId.DISK: 1}
    assert dict(stats.pages_evicted) == {TierId.HOST: 1, TierId.DISK: 0}


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("load_policy", "sometimes"),
        ("write_policy", "back"),
        ("demote_policy", "never"),
        ("demote_watermark", 1.5),
    ],
)
def test_bad_settings_are_named(
    make_cache: MakeCache, setting: str, value: object
) -> None:
    """The error says which setting is wrong."""
    with pytest.raises(ConfigError, match=setting):
        make_cache(**{setting: value})


def test_bad_tiers_are_refused() -> None:
    """Fastest first, each once, with room, never the device, with costs for all."""
    layout = PageLayout(1, 4, 8)
    host, disk = TierConfig(TierId.HOST, 4), TierConfig(TierId.DISK, 4)
    for tiers in [(), (disk, host), (host, host)]:
        with pytest.raises(ConfigError, match="tiers"):
            CacheConfig(layout, tiers)
    with pytest.raises(ConfigError, match="num_slots"):
        TierConfig(TierId.HOST, 0)
    with pytest.raises(ConfigError, match="device"):
        TierConfig(TierId.DEVICE, 4)
    cost = CostModel(PrefillCost(1, 1, 1, 1.0), {TierId.HOST: LinkCost(1e-3, 1e9)})
    with pytest.raises(ConfigError, match="disk"):
        TieredCache(
            CacheConfig(layout, (host, disk)),
            cost=cost,
            eviction={t: LRUPolicy() for t in (TierId.HOST, TierId.DISK)},
            clock=ManualClock(),
        )


def test_a_full_disk_keeps_a_reserve_and_a_host_none(make_cache: MakeCache) -> None:
    """One slot in 64 stays free on disk, so that long runs are to be had there."""
    cache = make_cache(host=256, disk=256)
    digest = cache.open_namespace(SPACE)
    rng = np.random.default_rng(3)
    for _ in range(60):
        tokens = rng.integers(0, 1000, 10 * PAGE_TOKENS, dtype=np.int32)
        plan = cache.plan_offload(digest, tokens)
        cache.finish_offload(plan, result(plan))
        while (demote := cache.plan_demote(64)) is not None:
            cache.finish_demote(demote, result(demote))
    cache.check()
    assert cache.occupancy(TierId.DISK).free_slots == 256 // 64
    assert cache.occupancy(TierId.HOST).free_slots == 0


def test_a_resting_tier_is_not_looked_at(make_cache: MakeCache) -> None:
    """Its pages are not found while it rests, and are found again afterwards."""
    story = Story(make_cache(host=8, disk=8))
    story.store("abc")
    story.demote()
    story.cache.rest([TierId.HOST])
    assert story.sources("abc") == "ddd"
    story.cache.rest([TierId.HOST, TierId.DISK])
    assert story.found("abc") == 0
    story.cache.rest([TierId.DISK])
    assert story.sources("abc") == "hhh"
    story.cache.drop_tier(TierId.HOST)
    assert story.found("abc") == 0
    story.cache.rest([])
    assert story.sources("abc") == "ddd"
