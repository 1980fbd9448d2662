"""Which prompt is copied next when the device gets full; letters stand for pages."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from sgl_tiered.cache.deferred import Deferred, DeferredOffloads
from sgl_tiered.cache.lookahead import QueueLookahead
from sgl_tiered.core.plans import Int32s
from sgl_tiered.policies.eviction.registry import make_eviction_policy
from sgl_tiered.testing.strategies import spell

PAGE_TOKENS = 4
DIGEST = bytes(16)


def prompt(word: str) -> Int32s:
    return spell(word, PAGE_TOKENS)


class Device:
    """Notes prompts at ever later times; the handle is the prompt's word."""

    def __init__(self, policy: str = "lru", threshold: float = 0.5) -> None:
        rng = np.random.default_rng(0)
        self.queue = QueueLookahead(PAGE_TOKENS)
        self.deferred = DeferredOffloads(
            make_eviction_policy(policy, rng), PAGE_TOKENS, 20, threshold, self.queue
        )
        self._time = 0

    def note(self, *words: str) -> None:
        for word in words:
            self._time += 1
            recency = (self._time, float(self._time))
            self.deferred.note(DIGEST, prompt(word), recency, word)

    def next(self, free_pages: int = 0) -> str | None:
        found = self.deferred.next(free_pages)
        return None if found is None else str(found.handle)

    def copy(self, free_pages: int = 0) -> str:
        """Copy the next prompt as a whole; return its word."""
        found = self.deferred.next(free_pages)
        assert found is not None
        self.deferred.settle(found, len(found.tokens) // PAGE_TOKENS)
        return str(found.handle)

    def sweep(self, resident: Mapping[str, int]) -> list[tuple[str, int]]:
        """Tell how many pages of each word are left; all of those not named."""

        def num_resident(found: Deferred) -> int:
            return resident.get(str(found.handle), len(found.tokens) // PAGE_TOKENS)

        return [(str(d.handle), left) for d, left in self.deferred.sweep(num_resident)]


def test_nothing_is_copied_while_there_is_room() -> None:
    """With a threshold of one half of 20 pages, ten free ones are enough."""
    device = Device()
    device.note("abc")
    assert device.next(free_pages=10) is None
    assert device.next(free_pages=9) == "abc"
    assert device.next(free_pages=9) == "abc"


def test_the_coldest_goes_first_until_enough_could_be_dropped() -> None:
    """Copied pages count as room; the rest stays uncopied."""
    device = Device()
    device.note("abcd", "klmn", "wxyz")
    assert device.copy(free_pages=3) == "abcd"
    assert device.copy(free_pages=3) == "klmn"
    assert device.deferred.clean_pages == 8
    assert device.next(free_pages=3) is None


@pytest.mark.parametrize("policy", ["score", "cost"])
def test_what_the_queue_uses_is_copied_last(policy: str) -> None:
    """Of two that are waited for, the one whose turn comes later goes first."""
    device = Device(policy)
    device.note("abcd", "klmn", "wxyz")
    device.queue.entered(1, DIGEST, prompt("abcde"))
    device.queue.entered(2, DIGEST, prompt("klmn"))
    assert device.next() == "wxyz"
    device.queue.entered(3, DIGEST, prompt("wxyz"))
    assert device.next() == "wxyz"
    device.queue.left(2)
    assert device.next() == "klmn"
    device.queue.clear()
    assert device.next() == "abcd"


def test_lru_does_not_look_at_the_queue() -> None:
    """What was not used for longest is copied, whoever waits for it."""
    device = Device("lru")
    device.note("abcd", "klmn")
    device.queue.entered(1, DIGEST, prompt("abcd"))
    assert device.next() == "abcd"


def test_use_makes_a_prompt_the_last() -> None:
    """Also one that was copied: its pages are no room any more."""
    device = Device()
    device.note("abc", "xyz")
    device.copy()
    device.note("abc")
    assert device.deferred.clean_pages == 0
    assert device.next() == "xyz"
    assert len(device.deferred) == 2


def test_the_next_turn_replaces_the_one_before() -> None:
    """The beginning of a prompt is not noted twice."""
    device = Device()
    device.note("ab", "x", "abcd")
    assert len(device.deferred) == 2
    assert device.next() == "x"


@pytest.mark.parametrize(("policy", "wanted"), [("lru", "xyz"), ("fifo", "abc")])
def test_the_policy_says_what_is_cold(policy: str, wanted: str) -> None:
    """Under fifo a use does not protect."""
    device = Device(policy)
    device.note("abc", "xyz", "abc")
    assert device.next() == wanted


def test_what_was_evicted_before_a_copy_is_told_once() -> None:
    """Its beginning remains noted, as old as before."""
    device = Device()
    device.note("abcd", "wxyz")
    assert device.sweep({"abcd": 1}) == [("abcd", 1)]
    assert device.sweep({"abcd": 1}) == []
    found = device.deferred.next(0)
    assert found is not None
    assert (found.tokens == prompt("a")).all()
    assert device.sweep({"abcd": 0, "wxyz": 0}) == [("abcd", 0), ("wxyz", 0)]
    assert len(device.deferred) == 0


def test_evicted_copies_are_no_loss() -> None:
    """They are forgotten, and no longer count as room."""
    device = Device()
    device.note("abcd", "wxyz")
    device.copy()
    assert device.sweep({"abcd": 0}) == []
    assert device.deferred.clean_pages == 0
    assert device.next() == "wxyz"


def test_copies_that_were_dropped_are_made_again() -> None:
    """In the old order."""
    device = Device()
    device.note("abcd", "klmn", "wxyz")
    device.copy()
    device.copy()
    device.deferred.forget_copies()
    assert device.deferred.clean_pages == 0
    assert [device.copy() for _ in range(2)] == ["abcd", "klmn"]


def test_a_prompt_that_cannot_be_copied_is_given_up() -> None:
    """Settled with no page it does not come again, unless it is used again."""
    device = Device()
    device.note("abcd", "wxyz")
    found = device.deferred.next(0)
    assert found is not None
    device.deferred.settle(found, 0)
    assert device.next() == "wxyz"
    device.note("abcd")
    assert device.next() == "wxyz"


def test_a_prompt_used_while_it_is_copied_comes_again() -> None:
    """The end of the copy is that of the old note."""
    device = Device()
    device.note("abcd")
    found = device.deferred.next(0)
    assert found is not None
    device.note("abcd")
    device.deferred.settle(found, 4)
    assert device.deferred.clean_pages == 0
    assert device.next() == "abcd"


def test_prompts_without_a_whole_page_are_left_out() -> None:
    """There is nothing to copy."""
    device = Device()
    device.note("")
    assert len(device.deferred) == 0


def test_the_number_of_prompts_is_bounded() -> None:
    """The coldest go, and replaced notes do not pile up."""
    device = Device()
    rng = np.random.default_rng(0)
    for number in range(5000):
        tokens = rng.integers(99, size=PAGE_TOKENS, dtype=np.int32)
        device.deferred.note(DIGEST, tokens, (number, float(number)), number)
        device.note("abc")
    assert len(device.deferred) == 4096
    found = device.deferred.next(0)
    assert found is not None
    assert found.handle == 5000 - 4095
    assert len(device.deferred._heap) <= 2 * 4096
    device.deferred.clear()
    assert device.next() is None
