"""From a prompt to an instance: look up the tree, gather the facts, ask the policy."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sgl_tiered.core.clock import Clock
from sgl_tiered.policies.routing.base import (
    NUM_PLACES,
    InstanceFacts,
    RequestFacts,
    RoutingPolicy,
)
from sgl_tiered.policies.routing.holders import holders_of_more
from sgl_tiered.router.fleet import Fleet
from sgl_tiered.router.instances import Instance
from sgl_tiered.router.prompts import CHARACTERS_PER_TOKEN, TOKENS, Prompt
from sgl_tiered.router.tree import Match, keys_of, root_key

__all__ = ["Choice", "PromptKeys", "Scheduler"]


class PromptKeys:
    """The names of a prompt's pages, per page size, derived once.

    Args:
        prompt: whose.
        page_characters: in one page, where its units are characters.
    """

    def __init__(self, prompt: Prompt, page_characters: int) -> None:
        self._prompt = prompt
        self._page_characters = page_characters
        self._keys: dict[int, list[bytes]] = {}

    def page(self, page_tokens: int) -> int:
        """Return the units in a page on an instance with pages of so many tokens."""
        is_tokens = self._prompt.alphabet == TOKENS
        return page_tokens if is_tokens else self._page_characters

    def at(self, page: int) -> list[bytes]:
        """Return the names of the whole pages of so many units."""
        keys = self._keys.get(page)
        if keys is None:
            prompt = self._prompt
            root = root_key(
                prompt.alphabet,
                page,
                lora=prompt.lora,
                cache_salt=prompt.cache_salt,
                extra_key=prompt.extra_key,
            )
            keys = self._keys[page] = keys_of(root, prompt.units, page)
        return keys

    def num_tokens(self, num_pages: int, page: int) -> int:
        """Return the tokens in so many pages; an estimate for characters."""
        num_units = num_pages * page
        if self._prompt.alphabet == TOKENS:
            return num_units
        return num_units // CHARACTERS_PER_TOKEN


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


class Scheduler:
    """Decides; sends nothing.

    ``Choice.holders`` names who holds more than the chosen instance, the most first:
    ``NAME=URL;tokens=N;tier=WORD`` joined by ``, ``. N is the length of the prefix that
    the holder's own events confirmed, the word its slowest tier in it.
    """

    def __init__(
        self, fleet: Fleet, policy: RoutingPolicy, page_characters: int, clock: Clock
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
        instances = [
            each for each in self._fleet.available(kind) if each.name not in tried
        ]
        if not instances:
            return None
        facts = self._facts(instances, keys, kind)
        request = RequestFacts(prompt.num_tokens, session, self._turn)
        self._turn += 1
        best = self._policy.rank(request, facts)[0]
        named = ", ".join(
            f"{instances[holder.position].name}="
            f"{instances[holder.position].config.url};tokens={holder.num_tokens}"
            f";tier={holder.slowest}"
            for holder in holders_of_more(facts, best)
        )
        return Choice(instances[best], facts[best], named)

    def assume(self, instance: Instance, keys: PromptKeys, ttl_s: float) -> None:
        """Assume from now on that an instance has this prompt."""
        if not instance.holders or ttl_s <= 0:
            return
        # With several ranks nobody knows which one took it; the first stands for all.
        holder = instance.holders[0]
        tree = self._fleet.trees[instance.config.kind]
        pages = keys.at(keys.page(holder.page_tokens))
        tree.assume(holder, pages, self._clock.now() + ttl_s)

    def doubt(self, instance: Instance, keys: PromptKeys) -> None:
        """Assume no longer that an instance has this prompt: it failed on it."""
        tree = self._fleet.trees[instance.config.kind]
        for holder in instance.holders[:1]:
            tree.doubt(holder, keys.at(keys.page(holder.page_tokens)))

    def _facts(
        self, instances: Sequence[Instance], keys: PromptKeys, kind: str
    ) -> list[InstanceFacts]:
        tree = self._fleet.trees[kind]
        sizes = {h.page_tokens for each in instances for h in each.holders}
        matches = {page: tree.match(keys.at(page)) for page in map(keys.page, sizes)}
        facts = []
        for instance in instances:
            cached, confirmed = (0,) * NUM_PLACES, 0
            for holder in instance.holders:
                page = keys.page(holder.page_tokens)
                match = matches[page].get(holder.number)
                if match is not None:
                    here = _tokens(keys, match, page)
                    cached = max(cached, here, key=sum)
                    confirmed = max(
                        confirmed, keys.num_tokens(match.num_confirmed, page)
                    )
            waiting, running = self._fleet.load(instance)
            facts.append(
                InstanceFacts(instance.name, cached, confirmed, waiting, running)
            )
        return facts


def _tokens(keys: PromptKeys, match: Match, page: int) -> tuple[int, ...]:
    return tuple(keys.num_tokens(pages, page) for pages in match.pages)
