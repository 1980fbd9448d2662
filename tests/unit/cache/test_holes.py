"""Offloads of prompts of which the device lacks parts, and rows that come and go."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import Namespace
from sgl_tiered.core.plans import Int32s, TransferResult
from sgl_tiered.testing.strategies import spell

PAGE_TOKENS = 4
MakeCache = Callable[..., TieredCache]


def prompt(word: str) -> Int32s:
    return spell(word, PAGE_TOKENS)


class Story:
    """A cache and one namespace, with words for prompts."""

    def __init__(self, cache: TieredCache) -> None:
        self.cache = cache
        self.digest = cache.open_namespace(Namespace("model", "bfloat16", PAGE_TOKENS))

    def store(self, word: str, leave: str = "") -> list[int]:
        """Offload a prompt; ``leave`` marks pages that are not whole by ``-``."""
        mask = np.array([mark == "-" for mark in leave]) if leave else None
        plan = self.cache.plan_offload(self.digest, prompt(word), leave=mask)
        if plan is None:
            return []
        ok = np.ones(len(plan.pages), np.bool_)
        sums = np.arange(1, len(ok) + 1, dtype=np.uint64)
        self.cache.finish_offload(plan, TransferResult(ok, 0, 1e-3, sums))
        self.cache.check()
        positions: list[int] = plan.positions.tolist()
        return positions

    def found(self, word: str) -> int:
        return self.cache.lookup(self.digest, prompt(word), 0).num_found


@pytest.mark.parametrize(
    ("known", "word", "leave", "stored"),
    [
        ("", "abcd", "++++", [0, 1, 2, 3]),
        ("", "abcd", "++-+", [0, 1]),
        ("", "abcd", "-+++", []),
        ("ab", "abcd", "--++", [2, 3]),
        ("ab", "abcd", "-+-+", []),
        ("abcd", "abcd", "-+-+", []),
        ("ab", "abcdef", "++++-+", [2, 3]),
    ],
)
def test_pages_that_are_not_whole_are_left(
    make_cache: MakeCache, known: str, word: str, leave: str, stored: list[int]
) -> None:
    """And what lies behind one that is in no tier, as nobody could find it."""
    story = Story(make_cache())
    if known:
        story.store(known)
    assert story.store(word, leave) == stored
    assert story.found(word) == len(known) + len(stored)


def test_a_page_below_keeps_the_way_open(make_cache: MakeCache) -> None:
    """One that only the disk has is not stored again, and what follows it is."""
    story = Story(make_cache(disk=8))
    story.store("abc")
    plan = story.cache.plan_demote(100)
    assert plan is not None
    sums = np.arange(1, 4, dtype=np.uint64)
    result = TransferResult(np.ones(3, np.bool_), 0, 1e-3, sums)
    story.cache.finish_demote(plan, result)
    story.cache.drop_tier(TierId.HOST)
    assert story.store("abcde", "+-+++") == [0, 2, 3, 4]
    assert story.found("abcde") == 5
    assert story.store("abcde") == [1]


def test_rows_are_told_when_they_go(make_cache: MakeCache) -> None:
    """Whoever keeps something beside them can let it go: once, and before reuse."""
    story = Story(make_cache(host=4))
    gone: list[int] = []
    story.cache.watch_rows(lambda rows: gone.extend(rows.tolist()))
    story.store("abcd")
    rows = story.cache.known_pages(story.digest, prompt("abcdef")).tolist()
    assert len(rows) == 4
    story.store("wxyz")
    assert sorted(gone) == sorted(rows)
    gone.clear()
    rows = story.cache.known_pages(story.digest, prompt("wxyz")).tolist()
    story.cache.reset()
    assert sorted(gone) == sorted(rows)
    assert len(story.cache.known_pages(story.digest, prompt("wxyz"))) == 0
