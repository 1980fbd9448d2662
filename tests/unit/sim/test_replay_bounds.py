"""Stack distances and Belady's bound, against replay and exhaustive search."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from sgl_tiered.core.ids import TierId
from sgl_tiered.policies.eviction.lru import LRUPolicy
from sgl_tiered.sim.exclusive import ExclusiveTier
from sgl_tiered.sim.opt import OptBound
from sgl_tiered.sim.replay import replay_exclusive
from sgl_tiered.sim.stack import LRUCurve
from tests.unit.sim.replay_support import prefixes, spell_trace, word_lists


def most_hits(words: list[str], num_pages: int) -> int:
    """The best over every choice of what to keep after every request."""
    best: dict[frozenset[str], int] = {frozenset(): 0}
    for word in words:
        after: dict[frozenset[str], int] = {}
        pages = prefixes(word)
        for kept, hits in best.items():
            num_hits = 0
            while num_hits < len(pages) and pages[num_hits] in kept:
                num_hits += 1
            there = sorted(kept | set(pages))
            for n in range(min(num_pages, len(there)) + 1):
                for choice in combinations(there, n):
                    chosen = frozenset(choice)
                    after[chosen] = max(after.get(chosen, 0), hits + num_hits)
        best = after
    return max(best.values(), default=0)


def test_known_places() -> None:
    """``ab`` again after ``c``: three pages were used since the first ``a``."""
    curve = LRUCurve(spell_trace(["ab", "c", "ab"]))
    assert [curve.hit_pages(n) for n in range(5)] == [0, 0, 1, 2, 2]
    assert [curve.hit_tokens(n) for n in range(5)] == [0, 0, 4, 8, 8]
    assert curve.num_unique == 3


def test_opt_looks_ahead() -> None:
    """LRU of one page misses both uses of ``a``; who knows the future keeps it."""
    trace = spell_trace(["a", "b", "a", "c", "a"])
    assert LRUCurve(trace).hit_pages(1) == 0
    assert OptBound(trace).hits(1) == [0, 0, 1, 0, 1]


def test_opt_keeps_the_beginning_of_a_prompt() -> None:
    """With one page for ``abc`` it keeps ``a``, the only one that can be hit."""
    assert OptBound(spell_trace(["abc", "abc"])).hits(1) == [0, 1]


@given(words=word_lists(), num_pages=st.integers(1, 30))
def test_distances_are_lru(words: list[str], num_pages: int) -> None:
    """Pages hit, tokens hit and pages lost equal those of a direct replay."""
    trace = spell_trace(words)
    curve = LRUCurve(trace)
    tier = TierId.DEVICE
    replayed = replay_exclusive(trace, [ExclusiveTier(tier, num_pages, LRUPolicy())])
    assert curve.hit_pages(num_pages) == replayed.hit_pages[tier]
    assert curve.hit_tokens(num_pages) == replayed.hit_tokens[tier]
    assert curve.pushed_pages(num_pages) == replayed.lost_pages[tier]


@given(words=word_lists())
def test_more_room_never_hits_less(words: list[str]) -> None:
    """LRU and OPT alike, up to the ideal, which both reach with room for all."""
    trace = spell_trace(words)
    curve, bound = LRUCurve(trace), OptBound(trace)
    sizes = range(curve.num_unique + 2)
    lru = [curve.hit_tokens(n) for n in sizes]
    opt = [bound.hit_tokens(n) for n in sizes]
    assert lru == sorted(lru)
    assert opt == sorted(opt)
    assert all(a <= b for a, b in zip(lru, opt, strict=True))
    assert lru[-1] == opt[-1]
    assert lru[0] == opt[0] == 0


@given(
    words=word_lists(max_words=6, max_pages=3, letters="ab"),
    num_pages=st.integers(0, 3),
)
def test_opt_is_the_best_there_is(words: list[str], num_pages: int) -> None:
    """No choice of pages to keep, however made, hits more."""
    found = sum(OptBound(spell_trace(words)).hits(num_pages))
    assert found == most_hits(words, num_pages)
