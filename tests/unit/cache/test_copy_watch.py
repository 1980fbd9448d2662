"""What is told of copies that come and go, applied to a picture of the tiers."""

from __future__ import annotations

import hashlib
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from sgl_tiered.cache.copy_watch import CopyWatch, Gained, Lost
from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import Namespace
from sgl_tiered.core.plans import TransferResult
from sgl_tiered.testing.strategies import spell

PAGE_TOKENS = 4
PAGE_BYTES = 4 * PAGE_TOKENS
MakeCache = Callable[..., TieredCache]


class Sums:
    """Names by SHA-256 of a page and all before it; some namespaces are nobody's."""

    def __init__(self) -> None:
        self.unknown: set[bytes] = set()

    def chain(self, digest: bytes, before: bytes | None, raw: bytes) -> bytes | None:
        if digest in self.unknown:
            return None
        states, last = b"", before or digest
        for start in range(0, len(raw), PAGE_BYTES):
            last = hashlib.sha256(last + raw[start : start + PAGE_BYTES]).digest()
            states += last
        return states

    def names(self, digest: bytes, states: bytes) -> list[int]:
        del digest
        return np.frombuffer(states, ">i8").reshape(-1, 4)[:, 0].tolist()


class Story:
    """A cache, what is told of it, and the picture that a listener has."""

    def __init__(self, cache: TieredCache) -> None:
        self.cache, self.sums = cache, Sums()
        self.digest = cache.open_namespace(Namespace("model", "bfloat16", PAGE_TOKENS))
        self.watch: CopyWatch = cache.watch_copies(self.sums)
        self.picture: dict[TierId, set[int]] = {
            t.tier: set() for t in cache.config.tiers
        }
        self.heard: set[int] = set()

    def store(self, word: str) -> None:
        plan = self.cache.plan_offload(self.digest, spell(word, PAGE_TOKENS))
        if plan is not None:
            self.cache.finish_offload(plan, landed(len(plan.pages)))

    def demote(self) -> None:
        while (plan := self.cache.plan_demote(16)) is not None:
            self.cache.finish_demote(plan, landed(len(plan.pages)))

    def listen(self, max_pages: int = 10**6) -> list[Gained | Lost]:
        """Apply one portion to the picture; parents must have been heard of before."""
        told = self.watch.take(max_pages)
        for change in told:
            names, held = set(change.names), self.picture[change.tier]
            if isinstance(change, Lost):
                assert names <= held, "lost and never told"
                held -= names
                continue
            assert not names & held, "told twice"
            assert len(change.raw) == PAGE_BYTES * len(change.names)
            assert change.parent is None or change.parent in self.heard
            held |= names
            self.heard |= names
        return told

    def name(self, word: str) -> int:
        """Return the name of a word's last page."""
        raw = spell(word, PAGE_TOKENS).tobytes()
        states = self.sums.chain(self.digest, None, raw) or b""
        return self.sums.names(self.digest, states)[-1]

    def truth(self, words: list[str]) -> dict[TierId, set[int]]:
        """Return what is held, by the rows of all prefixes of some words."""
        table = self.cache._table
        held: dict[TierId, set[int]] = {tier: set() for tier in table.tiers}
        fronts = {each[: n + 1] for each in words for n in range(len(each))}
        for word in sorted(fronts):
            rows = self.cache._index.rows_of(
                self.digest, spell(word, PAGE_TOKENS).tobytes()
            )
            if len(rows) == len(word):
                for number, tier in enumerate(table.tiers):
                    if int(table.flags[rows[-1]]) >> number & 1:
                        held[tier].add(self.name(word))
        return held


def landed(num: int) -> TransferResult:
    sums = np.arange(1, num + 1, dtype=np.uint64)
    return TransferResult(np.ones(num, np.bool_), 0, 1e-3, sums)


@pytest.mark.parametrize("max_pages", [1, 3, 100])
@pytest.mark.parametrize("seed", range(6))
def test_the_picture_is_the_truth_once_all_was_told(
    make_cache: MakeCache, seed: int, max_pages: int
) -> None:
    """Stores, evictions, demotions and drops, told in portions of any size."""
    rng = np.random.default_rng(seed)
    story = Story(make_cache(host=6, disk=70, demote_policy="write-through"))
    words: list[str] = []
    for _ in range(60):
        word = "".join(rng.choice(list("abc"), size=int(rng.integers(1, 6))))
        words.append(word)
        step = int(rng.integers(5))
        if step < 3:
            story.store(word)
        elif step == 3:
            story.demote()
        elif rng.integers(4) == 0:
            story.cache.drop_tier(TierId.HOST)
        if rng.integers(2):
            told = story.listen(max_pages)
            gained = [len(c.names) for c in told if isinstance(c, Gained)]
            assert sum(gained) <= 2 * max_pages, "a page, in two tiers at most"
        story.cache.check()
    while story.listen(max_pages):
        pass
    assert story.picture == story.truth(words)
    assert any(story.picture.values())
    assert story.listen() == []


def test_what_came_and_went_between_is_not_told(make_cache: MakeCache) -> None:
    """Nobody hears of a page that is gone before it was told."""
    story = Story(make_cache())
    story.store("ab")
    story.cache.drop_tier(TierId.HOST)
    assert story.listen() == []


def test_a_run_is_one_change_with_its_parent(make_cache: MakeCache) -> None:
    """Tokens and names in order, hung up at the page in front of them."""
    story = Story(make_cache())
    story.store("ab")
    (first,) = story.listen()
    assert isinstance(first, Gained)
    assert (first.tier, first.parent) == (TierId.HOST, None)
    assert first.names == (story.name("a"), story.name("ab"))
    assert first.raw == spell("ab", PAGE_TOKENS).tobytes()
    story.store("abcd")
    (second,) = story.listen()
    assert isinstance(second, Gained)
    assert second.parent == story.name("ab")
    assert second.names == (story.name("abc"), story.name("abcd"))


def test_a_namespace_of_nobody_is_told_once_it_is_known(make_cache: MakeCache) -> None:
    """As with pages on disk that belong to an adapter no request asked for yet."""
    story = Story(make_cache())
    story.sums.unknown.add(story.digest)
    story.store("ab")
    assert story.listen() == []
    story.sums.unknown.clear()
    assert story.listen() == []
    story.watch.retell(story.digest)
    assert [len(change.names) for change in story.listen()] == [2]


def test_after_a_reset_all_begins_anew(make_cache: MakeCache) -> None:
    """The listener knows already that nothing is left."""
    story = Story(make_cache())
    story.store("ab")
    story.listen()
    story.cache.reset()
    story.watch.clear()
    story.picture[TierId.HOST].clear()
    story.cache.open_namespace(Namespace("model", "bfloat16", PAGE_TOKENS))
    assert story.listen() == []
    story.store("b")
    assert [change.names for change in story.listen()] == [(story.name("b"),)]


def test_pages_that_were_there_before_are_told(make_cache: MakeCache) -> None:
    """A disk kept over a restart is adopted before anybody listens."""
    cache = make_cache()
    before = Story(cache)
    before.store("abc")
    after = Story(cache)
    assert [len(change.names) for change in after.listen()] == [3]


def test_a_portion_costs_no_more_where_more_is_left(make_cache: MakeCache) -> None:
    """What one call touches is bounded, however many pages wait to be told."""
    peaks = []
    for num_pages in (2_000, 20_000):
        story = Story(make_cache(host=num_pages, disk=num_pages))
        for number in range(0, num_pages, 50):
            story.store(chr(40 + number) + "x" * 49)
        story.listen(8)
        tracemalloc.start()
        story.listen(8)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # What is told is the same; only a look at all that waits would take more.
    assert peaks[1] < 1.5 * peaks[0]


def test_stale_rows_do_not_pile_up(make_cache: MakeCache) -> None:
    """Rows that came and went while nobody listened are remembered once, not each
    time."""
    story = Story(make_cache(host=6, disk=8))
    for _ in range(200):
        story.store("abcd")
        story.cache.drop_tier(TierId.HOST)
    assert story.watch._num_queued <= 2 * len(story.watch._is_news)
    assert story.watch._num_queued == sum(map(len, story.watch._queue))
    assert story.listen() == []
