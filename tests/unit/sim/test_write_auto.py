"""What write policy ``auto`` costs and saves on played traffic, against copying all.

A device of 40 pages over a host of 100, served as it is shipped: reuse within 140 pages
is what these could have served, so that is what must have been seen without any.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_tiered.cache.sightings import WORTH
from sgl_tiered.cache.tiered_cache import TierConfig
from sgl_tiered.core.ids import TierId
from sgl_tiered.sim.page_trace import PageTrace
from sgl_tiered.sim.replay import ReplayResult, ServedPolicies, replay_served
from tests.unit.sim.replay_support import spell_trace, word_lists

DEVICE, HOST = 40, 100
TRUST = DEVICE + HOST
Prompts = list[list[int]]


class Pages:
    """Names pages that nobody else has."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, num_pages: int) -> list[int]:
        start, self._next = self._next, self._next + num_pages
        return list(range(start, self._next))


def unique(pages: Pages, num_prompts: int, length: int = 10) -> Prompts:
    return [pages.take(length) for _ in range(num_prompts)]


def chats(pages: Pages, num_chats: int, num_turns: int = 4) -> Prompts:
    """Conversations that take turns; each turn repeats the one before and adds four."""
    prompts: Prompts = []
    talks: Prompts = [[] for _ in range(num_chats)]
    for _ in range(num_turns):
        for talk in talks:
            talk += pages.take(4)
            prompts.append(list(talk))
    return prompts


def documents(pages: Pages, num_documents: int, num_rounds: int = 3) -> Prompts:
    """Documents, asked one after the other, and again; each question is a new page."""
    bodies = unique(pages, num_documents)
    return [body + pages.take(1) for _ in range(num_rounds) for body in bodies]


def play(
    prompts: Prompts, policy: str, disk: int = 0, host: int = HOST
) -> ReplayResult:
    trace = PageTrace(
        [np.array(prompt, np.int64) for prompt in prompts],
        [4 * len(prompt) for prompt in prompts],
        4,
    )
    sizes = {TierId.HOST: host, TierId.DISK: disk}
    lower = [TierConfig(tier, num) for tier, num in sizes.items() if num]
    policies = ServedPolicies(write_policy=policy, disk_admission="auto")
    return replay_served(trace, DEVICE, lower, policies)


def stored(result: ReplayResult) -> int:
    return result.stored_pages[TierId.HOST]


def hits(result: ReplayResult) -> int:
    return sum(result.hit_pages.values())


@pytest.mark.parametrize("disk", [0, 20, 10_000])
def test_prompts_that_never_come_again_stop_being_copied(disk: int) -> None:
    """As soon as all that the tiers could serve went by, or four times the memory where
    a disk is larger; a small disk and a large one alike."""
    prompts = unique(Pages(), 100)
    trust = min(TRUST + disk, 4 * TRUST)
    assert stored(play(prompts, "write-through", disk)) == 1_000
    assert trust - 10 <= stored(play(prompts, "auto", disk)) <= trust


@pytest.mark.parametrize("disk", [20, 100, 2_000])
def test_prompts_that_never_come_again_stop_being_written_to_disk(disk: int) -> None:
    """The admission follows the same law, where all is copied to the host."""
    result = play(unique(Pages(), 300), "write-through", disk)
    assert result.stored_pages[TierId.DISK] <= min(TRUST + disk, 4 * TRUST)


def test_a_beginning_that_all_share_says_nothing_of_the_rest() -> None:
    """Its copy is made, and it is hit as ever; of the rest no copy is."""
    pages = Pages()
    system = pages.take(5)
    prompts = [system + rest for rest in unique(pages, 150)]
    through, auto = play(prompts, "write-through"), play(prompts, "auto")
    assert hits(auto) == hits(through)
    # Five pages that came again, at the second prompt.
    assert stored(auto) <= TRUST + 5 * WORTH + 5


@pytest.mark.parametrize("traffic", [chats, documents])
@pytest.mark.parametrize("number", [3, 8])
def test_what_comes_again_is_copied_as_if_all_was(traffic, number) -> None:
    """Chats and documents that the host can hold: no hit and no copy is missing."""
    prompts = [p for _ in range(5) for p in traffic(Pages(), number)]
    through, auto = play(prompts, "write-through"), play(prompts, "auto")
    assert (hits(auto), stored(auto)) == (hits(through), stored(through))


@pytest.mark.parametrize("disk", [0, 20, 10_000])
@pytest.mark.parametrize("traffic", [chats, documents])
def test_copies_come_back_with_the_first_prompt_that_comes_again(traffic, disk) -> None:
    """After much without reuse each page is missed once at most for lack of a copy:
    those that came before the first that came again."""
    pages = Pages()
    before = unique(pages, 200)
    after = traffic(pages, 8)
    through = play(before + after, "write-through", disk)
    auto = play(before + after, "auto", disk)
    seen: set[int] = set()
    for prompt in after:
        if prompt[0] in seen:
            break
        seen.update(prompt)
    assert 0 <= hits(through) - hits(auto) <= len(seen)
    late = play(before + after + after, "auto", disk)
    # Once they were copied nothing is missed any more.
    assert hits(late) - hits(auto) == (
        hits(play(before + after + after, "write-through", disk)) - hits(through)
    )


def test_a_prompt_sent_twice_is_hit_the_third_time() -> None:
    """Although it and all others around it were new when copies had stopped."""
    pages = Pages()
    prompt = pages.take(10)
    middle = [unique(pages, 8) for _ in range(2)]
    prompts = [*unique(pages, 100), prompt, *middle[0], prompt, *middle[1], prompt]
    assert hits(play(prompts, "auto")) == 10


def test_copies_stop_again_after_the_last_that_came_again() -> None:
    """Chats, then nothing that comes again: the last prompt earned most at once."""
    pages = Pages()
    before = chats(pages, 8)
    # The other pages of the turn before last were seen for a third time.
    num_again = 4
    most = max(TRUST, WORTH * num_again)
    alone = stored(play(before, "auto"))
    assert stored(play(before + unique(pages, 150), "auto")) <= alone + most


def work(result: ReplayResult) -> float:
    """Return pages computed, and copies at what they cost at most in such pages."""
    return result.prompt_tokens / 4 - hits(result) + 0.04 * stored(result)


def repeating(share: float) -> Prompts:
    """Prompts of which a share is the one nine before."""
    rng, pages = np.random.default_rng(1), Pages()
    prompts: Prompts = []
    for _ in range(500):
        is_again = rng.random() < share and len(prompts) > 9
        prompts += [prompts[-9]] if is_again else unique(pages, 1)
    return prompts


def test_one_prompt_in_twenty_that_comes_again_is_enough() -> None:
    """As one page pays for fifty, most of what copying all would find is found."""
    prompts = repeating(0.05)
    assert hits(play(prompts, "auto")) >= 0.8 * hits(play(prompts, "write-through"))


@pytest.mark.parametrize("share", [0.0, 0.01, 0.05, 0.3])
def test_the_regret_is_bounded_whatever_share_comes_again(share: float) -> None:
    """Near the work of the better of copying all and copying what comes again."""
    prompts = repeating(share)
    auto = play(prompts, "auto")
    others = [play(prompts, policy) for policy in ("write-through", "selective")]
    assert work(auto) <= 1.02 * min(work(other) for other in others)


@given(words=word_lists(max_words=40), device=st.integers(1, 6), host=st.integers(1, 9))
def test_no_hit_is_won_and_no_copy_added(
    words: list[str], device: int, host: int
) -> None:
    """Where the tiers hold everything: auto copies some of what copying all would."""
    lower = [TierConfig(TierId.HOST, 999)]
    through, auto = (
        replay_served(
            spell_trace(words), device, lower, ServedPolicies(write_policy=policy)
        )
        for policy in ("write-through", "auto")
    )
    assert stored(auto) <= stored(through)
    assert hits(auto) <= hits(through)
    small = [TierConfig(TierId.HOST, host)]
    replay_served(
        spell_trace(words), device, small, ServedPolicies(write_policy="auto")
    )
