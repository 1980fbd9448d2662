"""Route a session to where it went before, without remembering where that was.

Rendezvous hashing: each pair of session and instance has a weight that all replicas
compute alike, and the heaviest instance wins. When an instance leaves, only its own
sessions move; when one joins, it takes its share from all the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from sgl_tiered.policies.routing.base import (
    FleetFacts,
    InstanceFacts,
    RequestFacts,
)
from sgl_tiered.policies.routing.least_load import LeastLoadRouting

__all__ = ["SessionRouting"]


class SessionRouting:
    """The session's heaviest instance; requests without a session by least load."""

    name = "session"

    def __init__(self, running_cost_tokens: float = 64.0) -> None:
        self._otherwise = LeastLoadRouting(running_cost_tokens)

    def rank(
        self, request: RequestFacts, instances: Sequence[InstanceFacts]
    ) -> tuple[int, ...]:
        """Return the positions by falling weight; the load plays no part."""
        if not request.session:
            return self._otherwise.rank(request, instances)
        weights = _weights(request.session, [each.name for each in instances])
        return tuple(sorted(range(len(instances)), key=lambda i: (-weights[i], i)))

    def best(self, request: RequestFacts, fleet: FleetFacts) -> int:
        """Return the position of the greatest weight."""
        if not request.session:
            return self._otherwise.best(request, fleet)
        weights = _weights(request.session, fleet.names)
        return weights.index(max(weights))


def _weights(session: str, names: Sequence[str]) -> list[int]:
    # Of one length, so that ("ab", "c") and ("a", "bc") differ.
    prefix = xxhash.xxh3_64_digest(session.encode())
    digest = xxhash.xxh3_64_intdigest
    return [digest(prefix + name.encode()) for name in names]
