"""Who holds more of a prompt than the instance that was chosen for it.

MemServe's scheduler names them with the request, so that the chosen instance can pull
what it lacks (papers: "MemServe", section 6). Whether a pull pays is decided there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sgl_tiered.policies.routing.base import ASSUMED, PLACES, FleetFacts

__all__ = ["Holder", "holders_of_more"]


@dataclass(frozen=True, slots=True)
class Holder:
    """An instance that holds a longer prefix than the chosen one.

    Attributes:
        position: of the instance.
        num_tokens: length of the prefix that it holds, confirmed by events.
        slowest: the slowest tier in which a part of it is, a word of ``PLACES``.
    """

    position: int
    num_tokens: int
    slowest: str


def holders_of_more(
    fleet: FleetFacts, chosen: int, limit: int = 4
) -> tuple[Holder, ...]:
    """Return who holds more than the chosen instance, the most first.

    Only what events confirmed counts: nobody should be asked for bytes that are merely
    assumed to be there. What the chosen one has in front counts in whatever way.

    Args:
        fleet: facts of all candidates.
        chosen: position of the one that serves.
        limit: how many to name at most.
    """
    own = fleet.instance(chosen).num_cached
    confirmed, positions = fleet.confirmed_tokens, fleet.holders
    more = np.flatnonzero((confirmed > own) & (positions != chosen))
    order = np.lexsort((positions[more], -confirmed[more]))[:limit]
    return tuple(
        Holder(int(positions[at]), int(confirmed[at]), _slowest(fleet, int(at)))
        for at in more[order]
    )


def _slowest(fleet: FleetFacts, at: int) -> str:
    return PLACES[int(np.flatnonzero(fleet.cached_tokens[at, :ASSUMED])[-1])]
