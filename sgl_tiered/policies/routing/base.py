"""Interface of a routing policy: which instance is to serve a request?

MemServe (papers: "MemServe", section 6, Table 6) compares three: least load, session
and prompt tree. A policy here is a pure function of frozen facts and ranks all the
instances that it is given, best first: the first one serves, the next ones are where
the request goes if that one fails. Replicas of the router share nothing, so nothing may
be remembered either; what is to take turns does so by ``RequestFacts.turn``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from sgl_tiered.core.ids import TierId

__all__ = [
    "ASSUMED",
    "NUM_PLACES",
    "PLACES",
    "InstanceFacts",
    "RequestFacts",
    "RoutingPolicy",
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


def turned(turn: int, num_instances: int) -> tuple[int, ...]:
    """Return per position its place in this turn's round: 0 for the one to begin with.

    Among equals the smallest place wins, so that a tie is a round robin.
    """
    return tuple((position - turn) % num_instances for position in range(num_instances))
