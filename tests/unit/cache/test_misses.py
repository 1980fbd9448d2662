"""Why pages are no hit: what is remembered of them, and what is told to whom."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_tiered.cache.tombstones import CELL_BYTES, Cause, Tombstones, cells_for
from sgl_tiered.core.clock import ManualClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import Namespace, page_keys
from sgl_tiered.core.plans import QUEUE_FULL, TransferResult
from sgl_tiered.testing.strategies import spell

PAGE = 4
CELLS = 1 << 12


class Story:
    """A small cache whose pages are letters, and what it says of them."""

    def __init__(self, make_cache, **settings):
        self.clock = ManualClock(50.0)
        self.cache = make_cache(clock=self.clock, tombstones=CELLS, **settings)
        self.digest = self.namespace("")

    def namespace(self, salt):
        return self.cache.open_namespace(Namespace("m", "bf16", PAGE, cache_salt=salt))

    def keep(self, word, digest=None, result=None):
        digest = self.digest if digest is None else digest
        plan = self.cache.plan_offload(digest, spell(word, PAGE))
        if plan is not None:
            num = len(plan.pages)
            landed = TransferResult(np.ones(num, np.bool_), 0, 1e-3)
            self.cache.finish_offload(plan, result or landed)
        while (demote := self.cache.plan_demote(64)) is not None:
            num = len(demote.pages)
            ok = np.ones(num, np.bool_)
            self.cache.finish_demote(demote, TransferResult(ok, 0, 1e-3))
        self.clock.advance(1.0)

    def why(self, word, digest=None, **kwargs):
        digest = self.digest if digest is None else digest
        spans = self.cache.misses.explain(
            digest, spell(word, PAGE), 0, len(word), **kwargs
        )
        assert sum(span.num_pages for span in spans) == len(word)
        return [(span.cause, span.tier, span.num_pages) for span in spans]


@pytest.fixture
def make_story(make_cache):
    return lambda **settings: Story(make_cache, **settings)


def test_a_new_prompt_was_never_seen(make_story):
    """Of what nobody sent there is nothing to say."""
    assert make_story().why("abc") == [("never seen", None, 3)]


def test_an_evicted_page_is_told_with_tier_policy_and_age(make_story):
    """The end of the oldest prompt went for a new one: from where, by what, when."""
    story = make_story(host=6)
    story.keep("abcd")
    story.keep("vwxyz")
    assert story.why("abcd") == [("not taken", None, 1), ("evicted", "host", 3)]
    spans = story.cache.misses.explain(story.digest, spell("abcd", PAGE), 1, 4)
    assert "evicted from host by lru 1.0 s ago" in spans[0].text
    assert spans[0].as_dict(PAGE)["first_token"] == PAGE
    assert spans[0].as_dict(PAGE)["age_s"] == pytest.approx(1.0, abs=1e-3)


def test_what_the_last_tier_evicts_counts(make_story):
    """A page that went from the host while the disk had it is told of the disk."""
    story = make_story(host=4, disk=64)
    story.keep("abcd")
    story.keep("vwxy")
    assert story.why("abcd") == [("not taken", None, 4)]
    story.cache.drop_tier(TierId.DISK)
    assert story.why("abcd") == [("dropped", "disk", 4)]


def test_an_eviction_without_a_copy_below_says_so(make_story):
    """With a disk that admits at the second sighting, the host's loss is the end."""
    story = make_story(host=4, disk=64, disk_admission="second-hit")
    story.keep("abcd")
    story.keep("vwxy")
    spans = story.cache.misses.explain(story.digest, spell("abcd", PAGE), 0, 4)
    assert [span.cause for span in spans] == ["evicted"]
    assert "disk had no copy by then (admission second-hit)" in spans[0].text


def test_a_failed_check_is_told(make_story):
    """A page whose bytes were wrong is gone for that reason, and those after it are
    still there."""
    story = make_story()
    story.keep("abc")
    decision = story.cache.lookup(story.digest, spell("abc", PAGE), 0)
    plan = story.cache.commit_load(decision)
    story.cache.finish_load(plan, landed=False, bad_pages=np.array([1], np.int32))
    assert story.why("abc") == [
        ("not taken", None, 1),
        ("failed check", "host", 1),
        ("not taken", None, 1),
    ]


@pytest.mark.parametrize(
    ("error", "cause"), [(QUEUE_FULL, "back pressure"), ("it broke", "not written")]
)
def test_a_copy_that_did_not_come_is_told(make_story, error, cause):
    """A copy that was left out under pressure is told apart from one that broke."""
    story = make_story()
    story.keep("abc", result=TransferResult.failed(3, 0.0, error))
    assert story.why("abc") == [(cause, "host", 3)]


def test_pages_without_room_are_told(make_story):
    """A prompt longer than the tier: what found no room is told."""
    story = make_story(host=3)
    story.keep("abcde")
    assert story.why("abcde") == [("not taken", None, 3), ("no room", "host", 2)]


def test_a_page_seen_once_is_told_under_selective_writes(make_story):
    """It was seen, and a second sighting would have kept it."""
    story = make_story(write_policy="selective")
    story.keep("abc")
    assert story.why("abcd") == [("not admitted", None, 3), ("never seen", None, 1)]


def test_a_page_seen_while_copies_had_stopped_is_told(make_story):
    """Not that a policy refused it for good."""
    story = make_story(host=8, write_policy="auto")
    for word in ("abcd", "efgh", "ijkl"):
        story.keep(word)
    assert story.why("ijkl") == [("not admitted", None, 4)]
    spans = story.cache.misses.explain(story.digest, spell("ijkl", PAGE), 0, 4)
    assert "while nothing comes again" in spans[0].text


def test_the_digest_tells_credits_apart(make_story):
    """Ranks of one credit copy the same; of another they will not."""
    story = make_story(host=8, write_policy="auto")
    before = story.cache.state_digest()
    story.cache.sight(story.digest, spell("a", PAGE))
    assert story.cache.state_digest() != before


def test_what_the_device_lost_is_told(make_story):
    """Pages that were evicted from the device before their copy was due."""
    story = make_story(write_policy="on-evict")
    story.cache.misses.lost(story.digest, spell("abcd", PAGE), 2)
    assert story.why("abcd") == [
        ("never seen", None, 2),
        ("never copied", "device", 2),
    ]


def test_another_tenants_pages_are_not_told(make_story):
    """Neither what another salt holds nor what it lost changes what is told to others;
    only a namespace that is handed in as a sibling is looked at."""
    story = make_story(host=6)
    salted = story.namespace("secret")
    story.keep("abcd", salted)
    assert story.why("abcd") == [("never seen", None, 4)]
    story.keep("uvwxyz")
    assert story.why("abcd") == [("never seen", None, 4)]
    assert story.why("abcd", salted) == [("evicted", "host", 4)]
    told = story.why("uvwxyz", salted, siblings={"without a salt": story.digest})
    assert told == [("other namespace", None, 6)]


def test_asking_changes_nothing(make_story):
    """A question cuts no run and touches no page: the cache's state stays the same."""
    story = make_story(host=8)
    story.keep("abcdef")
    before = story.cache.state_digest()
    assert story.why("abcxyz") == [("not taken", None, 3), ("never seen", None, 3)]
    assert story.cache.state_digest() == before
    story.cache.check()


def test_a_reset_forgets_what_was_remembered(make_story):
    """After the cache was emptied nothing is remembered of its pages."""
    story = make_story(host=4)
    story.keep("abcd")
    story.keep("vwxy")
    story.cache.reset()
    assert story.why("abcd") == [("never seen", None, 4)]


def test_many_reasons_are_told_as_one(make_story):
    """A prompt of many short stories is told in eight spans, which cover it."""
    story = make_story(host=64)
    word = "abcdefghijklmnopqrst"
    for length in range(1, len(word), 2):
        story.cache.misses.lost(story.digest, spell(word[:length], PAGE), length - 1)
    told = story.why(word)
    assert len(told) == 8
    assert told[-1][0] == "various"


def test_without_tombstones_nothing_is_told(make_cache):
    """A cache that does not remember has no answer and no table."""
    cache = make_cache()
    digest = cache.open_namespace(Namespace("m", "bf16", PAGE))
    assert cache.misses.explain(digest, spell("abc", PAGE), 0, 3) == []


def test_the_table_is_of_fixed_size_and_the_newest_wins():
    """Ten times as many keys as cells: no byte more, and the last ones are known."""
    table = Tombstones(1 << 8, now_s=10.0)
    num_bytes = table.num_bytes
    assert num_bytes == CELL_BYTES * (1 << 8)
    tokens = np.arange(2560 * PAGE, dtype=np.int32)
    keys = page_keys(b"n" * 16, tokens, PAGE)
    for number in range(len(keys)):
        table.add(keys[number : number + 1], Cause.EVICTED, TierId.DISK, 10.0 + number)
    assert table.num_bytes == num_bytes
    causes, tiers, times = table.find(keys[-1:])
    assert (causes[0], tiers[0], times[0]) == (Cause.EVICTED, TierId.DISK, 2569.0)
    known = table.find(keys)[0] > 0
    assert 0 < known.sum() <= 1 << 8


def test_the_number_of_cells_follows_the_tiers():
    """A power of two above twice the slots, between a least and a most."""
    assert cells_for(10) == 1 << 12
    assert cells_for(5000) == 1 << 14
    assert cells_for(10**9) == 1 << 21
