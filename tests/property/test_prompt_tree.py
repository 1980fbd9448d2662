"""The prompt tree against a model without any structure: sets of pages per holder.

A page is the tuple of all tokens up to its end. The model keeps, per holder, a dict
from page to the set of tiers and a dict from page to the end of its assumption.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from sgl_tiered.core.ids import TierId
from sgl_tiered.policies.routing.base import ASSUMED, NUM_PLACES
from sgl_tiered.router.tree import Holder, Match, PromptTree, keys_of, root_key

PAGE = 2
MAX_PAGES = 5
NUM_HOLDERS = 3
TTL_S = 10.0
prompts = st.lists(st.integers(0, 1), min_size=0, max_size=PAGE * MAX_PAGES)
tiers = st.sampled_from([TierId.DEVICE, TierId.HOST, TierId.DISK])
holders = st.integers(0, NUM_HOLDERS - 1)


def pages_of(tokens: list[int]) -> Iterator[tuple[int, ...]]:
    """Give the whole pages of a prompt as the rows of tokens up to their ends."""
    for end in range(PAGE, len(tokens) + 1, PAGE):
        yield tuple(tokens[:end])


def block_hash(holder: int, page: tuple[int, ...]) -> int:
    """Return a holder's own name of a page; it means nothing to the tree."""
    return hash((holder, page))


@dataclass
class Model:
    """What one holder has."""

    known: dict[tuple[int, ...], set[TierId]] = field(default_factory=dict)
    assumed: dict[tuple[int, ...], float] = field(default_factory=dict)

    def place(self, page: tuple[int, ...]) -> int | None:
        """Return the fastest place of a page."""
        if page in self.known:
            return int(min(self.known[page]))
        return ASSUMED if page in self.assumed else None

    def match(self, tokens: list[int]) -> Match | None:
        """Return what a lookup must find."""
        counts = [0] * NUM_PLACES
        confirmed = 0
        for number, page in enumerate(pages_of(tokens)):
            place = self.place(page)
            if place is None:
                break
            counts[place] += 1
            if page in self.known and confirmed == number:
                confirmed += 1
        return Match(tuple(counts), confirmed) if sum(counts) else None


class PromptTreeMachine(RuleBasedStateMachine):
    """Any row of events, assumptions and losses, in any order."""

    @initialize()
    def begin(self) -> None:
        self.tree = PromptTree()
        self.holders: list[Holder] = [
            self.tree.add_holder(f"i{n}", PAGE) for n in range(NUM_HOLDERS)
        ]
        self.models = [Model() for _ in range(NUM_HOLDERS)]
        self.now_s = 0.0

    def keys(self, tokens: list[int]) -> list[bytes]:
        return keys_of(root_key("tokens", PAGE), tokens, PAGE)

    @rule(number=holders, tokens=prompts, first=st.integers(0, 4), tier=tiers)
    def store(self, number: int, tokens: list[int], first: int, tier: TierId) -> None:
        """A chain is stored behind its parent; without one it is an orphan."""
        pages = list(pages_of(tokens))
        if len(pages) <= first:
            return
        model, parent = self.models[number], pages[first - 1] if first else None
        chain = pages[first:]
        orphans = self.tree.store(
            self.holders[number],
            [block_hash(number, page) for page in chain],
            None if parent is None else block_hash(number, parent),
            tokens[first * PAGE : len(pages) * PAGE],
            PAGE,
            tier,
        )
        if parent is not None and parent not in model.known:
            assert orphans == len(chain)
            return
        assert orphans == 0
        for page in chain:
            model.known.setdefault(page, set()).add(tier)

    @rule(number=holders, tokens=prompts, first=st.integers(0, 4), tier=tiers)
    def remove(self, number: int, tokens: list[int], first: int, tier: TierId) -> None:
        """The last tier takes the assumption with it."""
        chain = list(pages_of(tokens))[first:]
        self.tree.remove(
            self.holders[number], [block_hash(number, page) for page in chain], tier
        )
        model = self.models[number]
        for page in chain:
            if page in model.known:
                model.known[page].discard(tier)
                if not model.known[page]:
                    del model.known[page]
                    model.assumed.pop(page, None)

    @rule(number=holders, tokens=prompts)
    def assume(self, number: int, tokens: list[int]) -> None:
        self.tree.assume(self.holders[number], self.keys(tokens), self.now_s + TTL_S)
        for page in pages_of(tokens):
            self.models[number].assumed[page] = self.now_s + TTL_S

    @rule(number=holders, tokens=prompts)
    def doubt(self, number: int, tokens: list[int]) -> None:
        self.tree.doubt(self.holders[number], self.keys(tokens))
        for page in pages_of(tokens):
            self.models[number].assumed.pop(page, None)

    @rule(delta_s=st.sampled_from([1.0, 4.0, 11.0]))
    def pass_time(self, delta_s: float) -> None:
        self.now_s += delta_s
        num_ended = self.tree.expire(self.now_s)
        expected = 0
        for model in self.models:
            kept = {p: end for p, end in model.assumed.items() if end > self.now_s}
            expected += len(model.assumed) - len(kept)
            model.assumed = kept
        assert num_ended == expected

    @rule(number=holders)
    def clear(self, number: int) -> None:
        self.tree.clear(self.holders[number])
        self.models[number] = Model()

    @rule(number=holders)
    def replace(self, number: int) -> None:
        """An instance leaves and another one comes; nothing of the old one stays."""
        self.tree.remove_holder(self.holders[number])
        self.holders[number] = self.tree.add_holder("new", PAGE)
        self.models[number] = Model()

    @rule(tokens=prompts)
    def match(self, tokens: list[int]) -> None:
        found = self.tree.match(self.keys(tokens))
        expected = {
            holder.number: model.match(tokens)
            for holder, model in zip(self.holders, self.models, strict=True)
        }
        assert found == {n: match for n, match in expected.items() if match}

    @precondition(lambda self: hasattr(self, "tree"))
    @invariant()
    def counts_agree(self) -> None:
        """Nodes are the pages that somebody has, and none is left behind."""
        held = [{*model.known, *model.assumed} for model in self.models]
        assert len(self.tree) == len(set().union(*held))
        for holder, model in zip(self.holders, self.models, strict=True):
            counts = [0] * NUM_PLACES
            for page in {*model.known, *model.assumed}:
                place = model.place(page)
                assert place is not None
                counts[place] += 1
            assert self.tree.count(holder) == tuple(counts)


TestPromptTree = PromptTreeMachine.TestCase
