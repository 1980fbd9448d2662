"""From a prompt to an instance: look up the tree, gather the facts, ask the policy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sgl_tiered.core.clock import Clock
from sgl_tiered.core.plans import Int64s
from sgl_tiered.policies.routing.base import (
    NUM_PLACES,
    FleetFacts,
    InstanceFacts,
    RequestFacts,
    RoutingPolicy,
)
from sgl_tiered.policies.routing.holders import holders_of_more
from sgl_tiered.router.board import Columns, LoadBoard
from sgl_tiered.router.instances import Instance
from sgl_tiered.router.prompts import Prompt, PromptKeys
from sgl_tiered.router.tree import PromptTree

__all__ = ["Boards", "Choice", "PromptKeys", "Scheduler"]

_PAGES_PER_TURN = 4096
"""Assumed before other requests get the loop: a few milliseconds."""
_MAX_SIZES = 8
"""Of pages, for which a prompt's names are derived."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request is to go.

    Attributes:
        instance: that is to serve it.
        facts: of that instance at the time.
        holders: who holds more of the prompt, for the header (see ``Scheduler``).
    """

    instance: Instance
    facts: InstanceFacts
    holders: str = ""


class Boards(Protocol):
    """What a scheduler sees of a fleet: a tree and a board per kind of instance."""

    @property
    def trees(self) -> Mapping[str, PromptTree]:
        """Who holds which prefix."""
        ...

    @property
    def boards(self) -> Mapping[str, LoadBoard]:
        """Who can serve, and how much each has to do."""
        ...


class Scheduler:
    """Decides; sends nothing.

    ``Choice.holders`` names who holds more than the chosen instance, the most first:
    ``NAME=URL;tokens=N;tier=WORD`` joined by ``, ``. N is the length of the prefix that
    the holder's own events confirmed, the word its slowest tier in it.
    """

    def __init__(
        self, fleet: Boards, policy: RoutingPolicy, page_characters: int, clock: Clock
    ) -> None:
        self._fleet = fleet
        self._policy = policy
        self._page_characters = page_characters
        self._clock = clock
        self._turn = 0

    def keys(self, prompt: Prompt) -> PromptKeys:
        """Return the prompt's keys, to be handed to the other methods."""
        return PromptKeys(prompt, self._page_characters)

    def choose(
        self,
        prompt: Prompt,
        keys: PromptKeys,
        kind: str,
        *,
        session: str = "",
        tried: Collection[str] = (),
    ) -> Choice | None:
        """Return where a request is to go; None where nobody can take it.

        Args:
            prompt: of the request.
            keys: of the prompt.
            kind: of instance.
            session: of the client; empty for none.
            tried: names of the instances that failed on this request.
        """
        columns = self._fleet.boards[kind].columns(self._clock.now())
        instances = columns.instances
        facts = self._facts(columns, keys, kind)
        if tried:
            left = [at for at, name in enumerate(columns.names) if name not in tried]
            instances = [instances[at] for at in left]
            facts = facts.take(np.array(left, np.int64))
        if not instances:
            return None
        request = RequestFacts(prompt.num_tokens, session, self._turn)
        self._turn += 1
        best = self._policy.best(request, facts)
        named = ", ".join(
            f"{instances[holder.position].name}="
            f"{instances[holder.position].config.url};tokens={holder.num_tokens}"
            f";tier={holder.slowest}"
            for holder in holders_of_more(facts, best)
        )
        return Choice(instances[best], facts.instance(best), named)

    @property
    def page_sizes(self) -> tuple[int, ...]:
        """Tokens in a page of those to whom a request could go now, a few sizes."""
        now_s = self._clock.now()
        boards = self._fleet.boards.values()
        sizes = {size for board in boards for size in board.columns(now_s).positions}
        return tuple(sorted(sizes)[:_MAX_SIZES])

    def assume(self, instance: Instance, keys: PromptKeys, ttl_s: float) -> None:
        """Assume from now on that an instance has this prompt."""
        for _ in self.assuming(instance, keys, ttl_s):
            pass

    def assuming(
        self, instance: Instance, keys: PromptKeys, ttl_s: float
    ) -> Iterator[None]:
        """Do what ``assume`` does in turns of a few milliseconds."""
        if not instance.holders or ttl_s <= 0:
            return
        tree, pages = self._pages(instance, keys)
        for at in range(0, len(pages), _PAGES_PER_TURN):
            if at:
                yield
            if not instance.holders:  # it was removed meanwhile
                return
            until_s = self._clock.now() + ttl_s
            tree.assume(instance.holders[0], pages[at : at + _PAGES_PER_TURN], until_s)

    def expect(
        self, instance: Instance, keys: PromptKeys, ttl_s: float
    ) -> Callable[[], None]:
        """Assume that an instance will have this prompt, which is sent there now.

        Who comes next with this prefix should follow it. Returns what takes it back,
        where the instance does not answer, or refuses.
        """
        if not instance.holders or ttl_s <= 0:
            return lambda: None
        tree, pages = self._pages(instance, keys)
        holder = instance.holders[0]
        until_s = self._clock.now() + ttl_s
        added = tree.expect(holder, pages[:_PAGES_PER_TURN], until_s)
        return lambda: tree.take_back(holder, added, until_s)

    def doubt(self, instance: Instance, keys: PromptKeys) -> None:
        """Assume no longer that an instance has this prompt: it failed on it."""
        tree = self._fleet.trees[instance.config.kind]
        for holder in instance.holders[:1]:
            tree.doubt(holder, keys.at(keys.page(holder.page_tokens)))

    def _pages(
        self, instance: Instance, keys: PromptKeys
    ) -> tuple[PromptTree, list[bytes]]:
        # With several ranks nobody knows which one took it; the first stands for all.
        page_tokens = instance.holders[0].page_tokens
        tree = self._fleet.trees[instance.config.kind]
        return tree, keys.at(keys.page(page_tokens))

    def _facts(self, columns: Columns, keys: PromptKeys, kind: str) -> FleetFacts:
        """Gather the facts; an instance of several ranks has what its best one has."""
        tree = self._fleet.trees[kind]
        found: list[tuple[Int64s, Int64s, Int64s]] = []
        for page_tokens, positions in columns.positions.items():
            page = keys.page(page_tokens)
            matches = tree.find(keys.at(page))
            at = positions[matches.numbers]
            there = at >= 0
            found.append(
                (
                    at[there],
                    keys.num_tokens(matches.pages[there], page),
                    keys.num_tokens(matches.confirmed[there], page),
                )
            )
        at, cached, confirmed = (
            (np.concatenate(parts) for parts in zip(*found, strict=True))
            if found
            else (np.zeros(0, np.int64), np.zeros((0, NUM_PLACES), np.int64), _NONE)
        )
        holders, cached, confirmed = _best_ranks(at, cached, confirmed)
        return FleetFacts(
            columns.names,
            columns.waiting_tokens,
            columns.num_running,
            holders,
            cached,
            confirmed,
        )


_NONE = np.zeros(0, np.int64)


def _best_ranks(
    at: Int64s, cached: Int64s, confirmed: Int64s
) -> tuple[Int64s, Int64s, Int64s]:
    """Return positions, each once and rising, with what one rank has: that of the most.

    Tokens and what is confirmed of them are of the same rank; among equals of the one
    of which more is confirmed.

    Args:
        at: positions, shape [num_holders]; ranks of one instance have the same.
        cached: tokens per place, shape [num_holders, NUM_PLACES].
        confirmed: tokens, shape [num_holders].
    """
    order = np.lexsort((-confirmed, -cached.sum(axis=1), at))
    at, cached, confirmed = at[order], cached[order], confirmed[order]
    firsts = np.flatnonzero(np.diff(at, prepend=-1))
    return at[firsts], cached[firsts], confirmed[firsts]
