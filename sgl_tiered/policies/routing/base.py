"""Interface of a routing policy: which instance is to serve a request?

MemServe (papers: "MemServe", section 6, Table 6) compares three: least load, session
and prompt tree. A policy here is a pure function of frozen facts and ranks all the
instances that it is given, best first: the first one serves, the next ones are where
the request goes if that one fails. Replicas of the router share nothing, so nothing may
be remembered either; what is to take turns does so by ``RequestFacts.turn``.

``rank`` is the definition, in plain Python and for all. Behind a router there may be a
thousand instances, so that it asks ``best`` instead: the first of ``rank``, computed on
columns. The kit in ``sgl_tiered.testing`` holds the two together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import Int64s

__all__ = [
    "ASSUMED",
    "NUM_PLACES",
    "PLACES",
    "FleetFacts",
    "InstanceFacts",
    "RequestFacts",
    "RoutingPolicy",
    "least",
    "turned",
]

PLACES: tuple[str, ...] = (*(tier.label for tier in TierId), "assumed")
"""Where a cached token can be: a tier, or assumed to be there (sent, not confirmed)."""
NUM_PLACES = len(PLACES)
ASSUMED = NUM_PLACES - 1


@dataclass(frozen=True, slots=True)
class InstanceFacts:
    """What is known of an instance that could serve the request.

    Attributes:
        name: of the instance; the same on all replicas of the router.
        cached_tokens: of this request's prompt, per place of ``PLACES``; a token counts
            once, at the fastest place that holds it.
        confirmed_tokens: length of the prefix that events confirmed, without a hole;
            at most the sum of the tiers' tokens.
        waiting_tokens: prompt tokens sent there that are still to be computed.
        num_running: requests that it has and has not answered in full.
    """

    name: str
    cached_tokens: tuple[int, ...] = (0,) * NUM_PLACES
    confirmed_tokens: int = 0
    waiting_tokens: int = 0
    num_running: int = 0

    @property
    def num_cached(self) -> int:
        """Tokens of the prompt that it holds, wherever."""
        return sum(self.cached_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class FleetFacts:
    """The same of many instances, by columns; most hold nothing of a prompt.

    Attributes:
        names: of the instances, shape [num_instances].
        waiting_tokens: shape [num_instances].
        num_running: shape [num_instances].
        holders: positions of those that hold some of the prompt, rising, each once.
        cached_tokens: of the holders, shape [num_holders, NUM_PLACES].
        confirmed_tokens: of the holders, shape [num_holders].
    """

    names: Sequence[str]
    waiting_tokens: Int64s
    num_running: Int64s
    holders: Int64s
    cached_tokens: Int64s
    confirmed_tokens: Int64s

    def __len__(self) -> int:
        return len(self.names)

    @classmethod
    def of(cls, instances: Sequence[InstanceFacts]) -> FleetFacts:
        """Return the columns of a list."""
        holders = [i for i, each in enumerate(instances) if each.num_cached]
        held = [instances[i] for i in holders]
        cached = np.array([each.cached_tokens for each in held], np.int64)
        return cls(
            [each.name for each in instances],
            np.array([each.waiting_tokens for each in instances], np.int64),
            np.array([each.num_running for each in instances], np.int64),
            np.array(holders, np.int64),
            cached.reshape(len(held), NUM_PLACES),
            np.array([each.confirmed_tokens for each in held], np.int64),
        )

    def instance(self, position: int) -> InstanceFacts:
        """Return what is known of one instance."""
        cached, confirmed = (0,) * NUM_PLACES, 0
        at = int(np.searchsorted(self.holders, position))
        if at < len(self.holders) and self.holders[at] == position:
            cached = tuple(self.cached_tokens[at].tolist())
            confirmed = int(self.confirmed_tokens[at])
        return InstanceFacts(
            self.names[position],
            cached,
            confirmed,
            int(self.waiting_tokens[position]),
            int(self.num_running[position]),
        )

    def take(self, positions: Int64s) -> FleetFacts:
        """Return the facts of some instances only, in this (rising) order."""
        stays = np.isin(self.holders, positions)
        return FleetFacts(
            [self.names[position] for position in positions.tolist()],
            self.waiting_tokens[positions],
            self.num_running[positions],
            np.searchsorted(positions, self.holders[stays]),
            self.cached_tokens[stays],
            self.confirmed_tokens[stays],
        )


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What is known of the request.

    Attributes:
        num_tokens: of its prompt; an estimate where characters stand for tokens.
        session: what its client calls its session, or the connection; empty for none.
        turn: grows by one per request; among equals, it says whose turn it is.
    """

    num_tokens: int
    session: str = ""
    turn: int = 0


@runtime_checkable
class RoutingPolicy(Protocol):
    """Ranks instances; keeps nothing."""

    @property
    def name(self) -> str:
        """The word used in flags and reports."""
        ...

    def rank(
        self, request: RequestFacts, instances: Sequence[InstanceFacts]
    ) -> tuple[int, ...]:
        """Return the positions of all instances, the best first."""
        ...

    def best(self, request: RequestFacts, fleet: FleetFacts) -> int:
        """Return what ``rank`` puts first; there is one instance at least."""
        ...


def turned(turn: int, num_instances: int) -> tuple[int, ...]:
    """Return per position its place in this turn's round: 0 for the one to begin with.

    Among equals the smallest place wins, so that a tie is a round robin.
    """
    return tuple((position - turn) % num_instances for position in range(num_instances))


def least(turn: int, *keys: npt.NDArray[Any]) -> int:
    """Return the position with the least keys, the first key first; else in turn.

    Args:
        turn: of the request.
        keys: each of shape [num_instances], one instance at least.
    """
    left = np.arange(len(keys[0]))
    for key in keys:
        values = key[left]
        left = left[values == values.min()]
        if len(left) == 1:
            return int(left[0])
    return int(left[((left - turn) % len(keys[0])).argmin()])
