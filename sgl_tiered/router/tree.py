"""The prompt tree of one kind of instance: who holds which prefix, and in which tier.

A node is a page of a prompt *and* all that is in front of it, named by the chained key
of ``core/keys.py``; a node's name is its path, so that edges need not be stored and a
lookup walks the keys of the prompt. A node's *claims* say who holds it. A claim is
known, with its tiers, from the holder's own events; or assumed, because the prompt was
sent there, until a time (the paper's TTL) is over. When the last tier of a node is
given up, so is the assumption.

A *holder* is one publisher of events: an instance, or one data-parallel rank of it. Its
events name blocks by hashes of its own, which mean nothing here but as names: ``names``
leads from them to nodes. A block whose parent has no name cannot be placed (its prefix
was stored before we listened) and is counted as an orphan.

Not thread-safe: the router's loop owns it. To store or remove a chain of pages costs
O(pages), plus O(holders) wherever the holders change along it; a lookup O(pages), plus
vector work on the holders. What a claim takes: ``benchmarks/micro/routing.py``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import Namespace, as_tokens, page_keys
from sgl_tiered.core.plans import Int64s
from sgl_tiered.policies.routing.base import NUM_PLACES
from sgl_tiered.router.claims import (
    ASSUMED_BIT,
    FASTEST,
    KNOWN_BITS,
    NOBODY,
    PLACE_MASK,
    Claims,
    ClaimSets,
)

__all__ = ["Holder", "Match", "Matches", "PromptTree", "keys_of", "root_key"]


def root_key(
    alphabet: str,
    page_tokens: int,
    *,
    lora: str = "",
    cache_salt: str = "",
    extra_key: str = "",
) -> bytes:
    """Return the name in front of a prompt's first page, 16 bytes.

    Args:
        alphabet: what a prompt consists of, ``tokens`` or ``characters``.
        page_tokens: units of it in one page.
        lora: name of the adapter.
        cache_salt: the tenant's salt.
        extra_key: what else keeps prefixes apart; events do not tell it.
    """
    return Namespace(
        f"{alphabet}/{extra_key}", "", page_tokens, lora=lora, cache_salt=cache_salt
    ).digest()


def keys_of(root: bytes, units: Sequence[int], page_tokens: int) -> list[bytes]:
    """Return the names of the whole pages of a prompt, shape [num_pages]."""
    keys = page_keys(root, as_tokens(units), page_tokens)
    return [row.tobytes() for row in keys]


@dataclass(slots=True, eq=False)
class Holder:
    """One publisher of events, as the tree knows it.

    Attributes:
        number: its number in claims; never used again.
        instance: name of the instance that it belongs to.
        page_tokens: tokens in one of its pages; what its events say wins.
        names: of its blocks: hash in events -> node.
        assumed: node -> time at which the assumption ends, seconds; the next to end
            comes first.
        num_orphans: blocks that could not be placed.
        is_complete: whether every block that it holds was announced to us.
    """

    number: int
    instance: str
    page_tokens: int
    names: dict[int, bytes] = field(default_factory=dict)
    assumed: OrderedDict[bytes, float] = field(default_factory=OrderedDict)
    num_orphans: int = 0
    is_complete: bool = False


@dataclass(frozen=True, slots=True)
class Match:
    """What a holder has of a prompt.

    Attributes:
        pages: per place of ``policies.routing.base.PLACES``, at the fastest that holds
            each; the sum is the length of the prefix.
        num_confirmed: leading pages that events confirmed.
    """

    pages: tuple[int, ...]
    num_confirmed: int

    @property
    def num_pages(self) -> int:
        """Length of the prefix."""
        return sum(self.pages)


@dataclass(frozen=True, slots=True, eq=False)
class Matches:
    """What each holder has of a prompt; only those that have its first page.

    Attributes:
        numbers: of the holders, rising, shape [num_holders].
        pages: as ``Match.pages``, shape [num_holders, NUM_PLACES].
        confirmed: as ``Match.num_confirmed``, shape [num_holders].
    """

    numbers: Int64s
    pages: Int64s
    confirmed: Int64s


class PromptTree:
    """Nodes with their claims; see the module.

    Args:
        max_assumed: assumptions per holder; beyond, the next to end goes first.

    Attributes:
        version: grows when holders come, go or change the size of their pages.
    """

    def __init__(self, max_assumed: int = 1_000_000) -> None:
        self.version = 0
        self._max_assumed = max_assumed
        self._nodes: dict[bytes, Claims] = {}
        self._sets = ClaimSets()
        self._holders: dict[int, Holder] = {}
        self._next_number = 0

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def num_claim_sets(self) -> int:
        """Different sets of claims that are in use."""
        return len(self._sets)

    @property
    def holders(self) -> Iterable[Holder]:
        """All holders."""
        return self._holders.values()

    def add_holder(self, instance: str, page_tokens: int) -> Holder:
        """Return a new holder of nothing."""
        holder = Holder(self._next_number, instance, page_tokens)
        self._next_number += 1
        self._holders[holder.number] = holder
        self.version += 1
        return holder

    def remove_holder(self, holder: Holder) -> None:
        """Forget a holder and its claims."""
        self.clear(holder)
        del self._holders[holder.number]
        self.version += 1

    def clear(self, holder: Holder) -> None:
        """Forget what a holder holds; O(what it holds)."""
        for key in holder.names.values():
            self._update(key, holder.number, keep=0)
        for key in holder.assumed:
            self._update(key, holder.number, keep=0)
        holder.names.clear()
        holder.assumed.clear()

    def store(
        self,
        holder: Holder,
        block_hashes: Sequence[int],
        parent_hash: int | None,
        tokens: Sequence[int],
        block_tokens: int,
        tier: TierId,
        *,
        lora: str = "",
        cache_salt: str = "",
    ) -> int:
        """Note a chain of blocks that a holder stored.

        Args:
            holder: who stored it.
            block_hashes: its names for them, shape [num_blocks].
            parent_hash: its name of the block in front; None for the start.
            tokens: of all blocks, shape [num_blocks * block_tokens].
            block_tokens: tokens in one block.
            tier: where they are.
            lora: adapter of a chain that has no parent.
            cache_salt: of a chain that has no parent.

        Returns:
            The number of orphans among them: all, or none.
        """
        if parent_hash is None:
            parent = root_key("tokens", block_tokens, lora=lora, cache_salt=cache_salt)
        else:
            found = holder.names.get(parent_hash)
            if found is None:
                holder.num_orphans += len(block_hashes)
                return len(block_hashes)
            parent = found
        if holder.page_tokens != block_tokens:
            holder.page_tokens = block_tokens
            self.version += 1
        bit = 1 << tier
        keys = keys_of(parent, tokens, block_tokens)
        for block_hash, key in zip(block_hashes, keys, strict=True):
            known = holder.names.setdefault(block_hash, key)
            self._update(known, holder.number, add=bit)
        return 0

    def remove(self, holder: Holder, block_hashes: Sequence[int], tier: TierId) -> None:
        """Note that a holder gave up blocks in one tier; unknown ones are no news."""
        keep = ~(1 << tier)
        for block_hash in block_hashes:
            key = holder.names.get(block_hash)
            if key is None:
                continue
            places = self._update(key, holder.number, keep=keep)
            if not places & KNOWN_BITS:
                del holder.names[block_hash]
                if holder.assumed.pop(key, None) is not None:
                    self._update(key, holder.number, keep=0)

    def assume(self, holder: Holder, keys: Sequence[bytes], until_s: float) -> None:
        """Assume that a holder has the prompt of these keys until a time.

        Times never fall from call to call, so the next to end stays in front.
        """
        for key in keys:
            holder.assumed[key] = until_s
            holder.assumed.move_to_end(key)
            self._update(key, holder.number, add=ASSUMED_BIT)
        while len(holder.assumed) > self._max_assumed:
            key, _ = holder.assumed.popitem(last=False)
            self._update(key, holder.number, keep=KNOWN_BITS)

    def expect(
        self, holder: Holder, keys: Sequence[bytes], until_s: float
    ) -> list[bytes]:
        """Assume what nobody assumes yet of a prompt that is on its way to a holder.

        Nothing goes for it: where there is no room it is left out. Returns the keys
        that were added, for ``take_back``.
        """
        room = max(self._max_assumed - len(holder.assumed), 0)
        added = [key for key in keys if key not in holder.assumed][:room]
        self.assume(holder, added, until_s)
        return added

    def take_back(self, holder: Holder, keys: Sequence[bytes], until_s: float) -> None:
        """End what ``expect`` added; what was assumed anew since then stays."""
        for key in keys:
            if holder.assumed.get(key) == until_s:
                del holder.assumed[key]
                self._update(key, holder.number, keep=KNOWN_BITS)

    def doubt(self, holder: Holder, keys: Sequence[bytes]) -> None:
        """End the assumptions about a prompt: the holder failed on it."""
        for key in keys:
            if holder.assumed.pop(key, None) is not None:
                self._update(key, holder.number, keep=KNOWN_BITS)

    def expire(self, now_s: float) -> int:
        """End the assumptions whose time is over; returns how many."""
        num_ended = 0
        for holder in self._holders.values():
            while holder.assumed:
                key, until_s = next(iter(holder.assumed.items()))
                if until_s > now_s:
                    break
                del holder.assumed[key]
                self._update(key, holder.number, keep=KNOWN_BITS)
                num_ended += 1
        return num_ended

    def find(self, keys: Sequence[bytes]) -> Matches:
        """Return what each holder has of a prompt.

        Args:
            keys: names of the prompt's pages, shape [num_pages].
        """
        runs = self._runs(keys)
        if not runs:
            return Matches(
                np.zeros(0, np.int64),
                np.zeros((0, NUM_PLACES), np.int64),
                np.zeros(0, np.int64),
            )
        first, end = runs[0]
        numbers, fastest, known = first.columns
        pages = np.zeros((len(numbers), NUM_PLACES), np.int64)
        alive = np.arange(len(numbers))
        pages[alive, fastest] = end
        confirmed = known * end
        for claims, stop in runs[1:]:
            here, fastest, known = claims.columns
            wanted = numbers[alive]
            at = np.minimum(np.searchsorted(here, wanted), len(here) - 1)
            stays = here[at] == wanted
            alive, at = alive[stays], at[stays]
            if not len(alive):
                break
            pages[alive, fastest[at]] += stop - end
            # Confirmed goes on only where it had no hole so far.
            on = (known[at] == 1) & (confirmed[alive] == end)
            confirmed[alive[on]] = stop
            end = stop
        return Matches(numbers, pages, confirmed)

    def match(self, keys: Sequence[bytes]) -> dict[int, Match]:
        """Return what ``find`` does, by the holders' numbers; for a few of them."""
        found = self.find(keys)
        rows = zip(
            found.numbers.tolist(),
            found.pages.tolist(),
            found.confirmed.tolist(),
            strict=True,
        )
        return {
            number: Match(tuple(pages), confirmed) for number, pages, confirmed in rows
        }

    def _runs(self, keys: Sequence[bytes]) -> list[tuple[Claims, int]]:
        """Return the runs of pages with equal claims, each with its end."""
        runs: list[tuple[Claims, int]] = []
        get = self._nodes.get
        last: Claims | None = None
        for place, key in enumerate(keys):
            claims = get(key)
            if claims is not None and claims is last:
                continue
            if last is not None:
                runs.append((last, place))
            if claims is None:
                return runs
            last = claims
        if last is not None:
            runs.append((last, len(keys)))
        return runs

    def count(self, holder: Holder) -> tuple[int, ...]:
        """Return the pages that a holder has per place, each at its fastest one.

        O(what it holds): for reports.
        """
        counts = np.zeros(NUM_PLACES, dtype=np.int64)
        for key in {*holder.names.values(), *holder.assumed}:
            places = self._nodes.get(key, NOBODY).places(holder.number)
            if places:
                counts[FASTEST[places]] += 1
        return tuple(int(count) for count in counts)

    def _update(
        self, key: bytes, number: int, *, keep: int = PLACE_MASK, add: int = 0
    ) -> int:
        """Change the places of one claim; returns them, 0 where no claim is left."""
        old = self._nodes.get(key, NOBODY)
        new, places = self._sets.changed(old, number, keep, add)
        if new is not old:
            self._sets.moved(old, new)
            if new is NOBODY:
                del self._nodes[key]
            else:
                self._nodes[key] = new
        return places
