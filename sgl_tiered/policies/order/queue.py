"""A queue and its order: what is known of each request, kept and refreshed.

Looking a request up in the device's tree and in the tiers takes tens of microseconds,
and what it says stays true for many passes. So each request is looked up once when it
joins, and a bounded number again in every pass: first those that share their beginning
with one that was just served, as its pages are on the device now; then the head of the
queue; then one after the other in a circle. Until its first look a request counts as
computed whole. Nor are many taken in at once: of a burst the first go to the order in
this pass, and the others stand behind them by arrival until a later pass takes them in.
The engine and the simulator share this object.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, Protocol, TypeVar

from sgl_tiered.policies.order.base import Location, RequestOrder, WaitingFacts

__all__ = ["NUM_JOINS", "NUM_LOOKS", "FactsSource", "Outlook", "QueueOrder"]

K_contra = TypeVar("K_contra", bound=Hashable, contravariant=True)
K = TypeVar("K", bound=Hashable)

NUM_LOOKS = 8
"""Lookups per pass, see ``benchmarks/micro/ordering.py`` for what they cost."""
NUM_JOINS = 64
"""Requests taken in per pass, more than one serves; what a pass adds stays bounded."""
_NUM_HEAD = 2
"""Looks at those who would be next, of whom most of ``_HEAD`` are served by then."""
_HEAD = 32
_MAX_STALE = 64
"""Requests that are marked for a look because one of their kind was served."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a look at the caches says of a request; see ``WaitingFacts``."""

    location: Location
    num_uncached_tokens: int
    service_s: float
    has_history: bool
    num_device_tokens: int = 0


_UNKNOWN = Outlook(Location.NOWHERE, 0, 0.0, has_history=False)


class FactsSource(Protocol[K_contra]):
    """Looks requests up, by the keys that ``QueueOrder.arrange`` is given."""

    def num_prompt_tokens(self, key: K_contra) -> int:
        """Return the tokens of the prompt."""
        ...

    def kin(self, key: K_contra) -> Hashable:
        """Return something that requests with the same beginning have in common."""
        ...

    def guess(self, key: K_contra) -> Outlook:
        """Return what is known without a look: everything is computed."""
        ...

    def look(self, key: K_contra) -> Outlook:
        """Look the request up; changes nothing."""
        ...


@dataclass(slots=True)
class _Entry(Generic[K]):
    key: K
    kin: Hashable
    facts: WaitingFacts


class QueueOrder(Generic[K]):
    """Arranges one queue, pass after pass.

    Args:
        order: decides.
        source: says what is known of a request.
        num_looks: lookups per pass at most, more than those at the head.
        num_joins: requests at most that a pass takes in, 1 or more.
    """

    def __init__(
        self,
        order: RequestOrder,
        source: FactsSource[K],
        num_looks: int = NUM_LOOKS,
        num_joins: int = NUM_JOINS,
    ) -> None:
        assert num_looks > _NUM_HEAD, f"{num_looks} lookups per pass"
        assert num_joins >= 1, f"{num_joins} requests taken in per pass"
        self._order = order
        self._source = source
        self._num_looks = num_looks
        self._num_joins = num_joins
        # By arrival: every new entry is the last.
        self._entries: dict[K, _Entry[K]] = {}
        # When those came that are not taken in yet, by arrival.
        self._late: dict[K, float] = {}
        self._families: dict[Hashable, dict[K, None]] = {}
        # Keys to look up first, in this order; dicts stand for ordered sets.
        self._fresh: dict[K, None] = {}
        self._stale: dict[K, None] = {}
        self._head: list[K] = []
        self._circle: list[K] = []
        self._next_index = 0
        self._pass_number = 0

    @property
    def name(self) -> str:
        """The order's."""
        return self._order.name

    def facts(self, key: K) -> WaitingFacts | None:
        """Return what is known of a request; None of one that is not taken in."""
        entry = self._entries.get(key)
        return None if entry is None else entry.facts

    def arrange(self, keys: Sequence[K], now_s: float) -> list[int]:
        """Return positions in ``keys`` in the order in which to serve them.

        Args:
            keys: of all requests that wait, in any order. Those that were not there at
                the last call have joined since, in the order in which they stand here;
                those that are gone have left for good.
            now_s: clock value.
        """
        self._pass_number += 1
        self._forget(keys)
        self._enter(keys, now_s)
        if self._order.needs_facts:
            self._refresh()
        place = {key: position for position, key in enumerate(keys)}
        by_arrival = [place[key] for key in self._entries]
        facts = [entry.facts for entry in self._entries.values()]
        arranged = self._order.arrange(facts, now_s, self._pass_number)
        positions = [by_arrival[i] for i in arranged]
        positions += [place[key] for key in self._late]
        self._head = [keys[i] for i in positions[:_HEAD]]
        return positions

    def _forget(self, keys: Sequence[K]) -> None:
        """Drop who has left."""
        here = set(keys)
        # In order of arrival: that of a set differs from rank to rank.
        for entry in [e for e in self._entries.values() if e.key not in here]:
            self._leave(entry)
        for key in [key for key in self._late if key not in here]:
            del self._late[key]

    def _enter(self, keys: Sequence[K], now_s: float) -> None:
        """Note who has joined, and take in the oldest of them."""
        for key in keys:
            if key not in self._entries:
                self._late.setdefault(key, now_s)
        for key in list(islice(self._late, self._num_joins)):
            self._join(key, self._late.pop(key))

    def _join(self, key: K, arrival_s: float) -> None:
        kin: Hashable = None
        if self._order.needs_facts:
            kin = self._source.kin(key)
            self._families.setdefault(kin, {})[key] = None
            self._fresh[key] = None
        outlook = self._source.guess(key) if self._order.needs_facts else _UNKNOWN
        num_tokens = self._source.num_prompt_tokens(key)
        facts = _facts(self._next_index, arrival_s, num_tokens, outlook)
        self._entries[key] = _Entry(key, kin, facts)
        self._next_index += 1

    def _leave(self, entry: _Entry[K]) -> None:
        key = entry.key
        del self._entries[key]
        self._fresh.pop(key, None)
        self._stale.pop(key, None)
        family = self._families.get(entry.kin)
        if family is None:
            return
        family.pop(key, None)
        if not family:
            del self._families[entry.kin]
            return
        for other in family:
            if len(self._stale) >= _MAX_STALE:
                break
            self._stale[other] = None

    def _refresh(self) -> None:
        """Look up those whose facts are missing or likely to be wrong."""
        left = self._num_looks
        seen: set[K] = set()
        for key in [key for key in self._head if key in self._entries][:_NUM_HEAD]:
            left -= self._look(key, seen)
        for waiting in (self._fresh, self._stale):
            # One look is kept for the circle, or the oldest facts would never change.
            while waiting and left > 1:
                key = next(iter(waiting))
                del waiting[key]
                left -= self._look(key, seen)
        for _ in range(min(left, len(self._entries))):
            if not self._circle:
                self._circle = list(reversed(self._entries))
            key = self._circle.pop()
            if key in self._entries:
                self._look(key, seen)

    def _look(self, key: K, seen: set[K]) -> int:
        """Look a request up, unless it was in this pass; return the looks taken."""
        if key in seen:
            return 0
        seen.add(key)
        self._fresh.pop(key, None)
        self._stale.pop(key, None)
        entry = self._entries[key]
        old = entry.facts
        entry.facts = _facts(
            old.index, old.arrival_s, old.num_prompt_tokens, self._source.look(key)
        )
        return 1


def _facts(
    index: int, arrival_s: float, num_prompt_tokens: int, outlook: Outlook
) -> WaitingFacts:
    return WaitingFacts(
        index,
        arrival_s,
        outlook.location,
        num_prompt_tokens,
        outlook.num_uncached_tokens,
        outlook.service_s,
        outlook.has_history,
        outlook.num_device_tokens,
    )
