"""The prompt tree, case by case; its laws are in ``tests/property``."""

from __future__ import annotations

import pytest

from sgl_tiered.core.ids import TierId
from sgl_tiered.policies.routing.base import ASSUMED, NUM_PLACES
from sgl_tiered.router.tree import Holder, Match, PromptTree, keys_of, root_key

PAGE = 4
TOKENS = list(range(16))


@pytest.fixture
def tree() -> PromptTree:
    return PromptTree(max_assumed=4)


@pytest.fixture
def holder(tree: PromptTree) -> Holder:
    return tree.add_holder("a", PAGE)


def keys(tokens: list[int], page: int = PAGE, **fields: str) -> list[bytes]:
    return keys_of(root_key("tokens", page, **fields), tokens, page)


def pages(**counts: int) -> tuple[int, ...]:
    row = [0] * NUM_PLACES
    for tier, count in counts.items():
        row[ASSUMED if tier == "assumed" else TierId[tier.upper()]] = count
    return tuple(row)


def test_a_page_counts_at_its_fastest_tier(tree: PromptTree, holder: Holder) -> None:
    """Copies on several tiers are one page; the last to go ends it."""
    tree.store(holder, [1, 2], None, TOKENS[:8], PAGE, TierId.DEVICE)
    tree.store(holder, [1, 2], None, TOKENS[:8], PAGE, TierId.HOST)
    assert tree.match(keys(TOKENS)) == {holder.number: Match(pages(device=2), 2)}
    tree.remove(holder, [2], TierId.DEVICE)
    assert tree.match(keys(TOKENS)) == {
        holder.number: Match(pages(device=1, host=1), 2)
    }
    tree.remove(holder, [2], TierId.HOST)
    assert tree.match(keys(TOKENS)) == {holder.number: Match(pages(device=1), 1)}


def test_a_chain_grows_behind_its_parent(tree: PromptTree, holder: Holder) -> None:
    """Blocks are placed by the parent's hash; without one known they are orphans."""
    tree.store(holder, [1], None, TOKENS[:4], PAGE, TierId.DEVICE)
    assert tree.store(holder, [2, 3], 1, TOKENS[4:12], PAGE, TierId.DEVICE) == 0
    assert tree.store(holder, [9], 8, TOKENS[12:], PAGE, TierId.DEVICE) == 1
    assert holder.num_orphans == 1
    assert tree.match(keys(TOKENS))[holder.number].num_pages == 3


def test_a_hole_ends_the_prefix(tree: PromptTree, holder: Holder) -> None:
    """What lies behind a page that is gone cannot be used."""
    tree.store(holder, [1, 2, 3], None, TOKENS[:12], PAGE, TierId.DEVICE)
    tree.remove(holder, [2], TierId.DEVICE)
    assert tree.match(keys(TOKENS))[holder.number].num_pages == 1


def test_namespaces_never_match_each_other(tree: PromptTree, holder: Holder) -> None:
    """Adapters, salts, other keys, page sizes and alphabets keep prefixes apart."""
    tree.store(holder, [1], None, TOKENS[:4], PAGE, TierId.DEVICE, cache_salt="s")
    assert tree.match(keys(TOKENS, cache_salt="s"))
    for other in (
        keys(TOKENS),
        keys(TOKENS, lora="s"),
        keys(TOKENS, cache_salt="s", extra_key="x"),
        keys(TOKENS, 2, cache_salt="s"),
        keys_of(root_key("characters", PAGE, cache_salt="s"), TOKENS, PAGE),
    ):
        assert tree.match(other) == {}


def test_pages_before_and_after_an_assumed_one(
    tree: PromptTree, holder: Holder
) -> None:
    """The confirmed prefix ends at the first page that is only assumed."""
    tree.store(holder, [1, 2, 3], None, TOKENS[:12], PAGE, TierId.HOST)
    tree.assume(holder, keys(TOKENS), 5.0)
    assert tree.match(keys(TOKENS)) == {
        holder.number: Match(pages(host=3, assumed=1), 3)
    }
    tree.expire(5.0)
    assert tree.match(keys(TOKENS)) == {holder.number: Match(pages(host=3), 3)}


def test_assumptions_are_bounded(tree: PromptTree, holder: Holder) -> None:
    """The next to end makes room for new ones."""
    tree.assume(holder, keys([7] * 8), 1.0)
    tree.assume(holder, keys(TOKENS), 2.0)
    assert len(tree) == 4
    assert tree.match(keys(TOKENS))[holder.number].num_pages == 4
    assert tree.match(keys([7] * 8)) == {}


def test_several_holders_of_one_prefix(tree: PromptTree, holder: Holder) -> None:
    """Each is told with what it has, and none with nothing."""
    other = tree.add_holder("b", PAGE)
    third = tree.add_holder("c", PAGE)
    tree.store(holder, [1, 2, 3, 4], None, TOKENS, PAGE, TierId.DEVICE)
    tree.store(other, [7, 8], None, TOKENS[:8], PAGE, TierId.DISK)
    assert tree.match(keys(TOKENS)) == {
        holder.number: Match(pages(device=4), 4),
        other.number: Match(pages(disk=2), 2),
    }
    tree.remove_holder(holder)
    assert tree.match(keys(TOKENS)) == {other.number: Match(pages(disk=2), 2)}
    assert third.number not in tree.match(keys(TOKENS))


def test_an_empty_prompt_matches_nobody(tree: PromptTree, holder: Holder) -> None:
    """Less than a page is no prefix."""
    tree.store(holder, [1], None, TOKENS[:4], PAGE, TierId.DEVICE)
    assert tree.match(keys(TOKENS[:3])) == {}
