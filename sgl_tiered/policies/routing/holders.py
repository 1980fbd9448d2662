"""Who holds more of a prompt than the instance that was chosen for it.

MemServe's scheduler names them with the request, so that the chosen instance can pull
what it lacks (papers: "MemServe", section 6). Whether a pull pays is decided there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sgl_tiered.policies.routing.base import ASSUMED, PLACES, InstanceFacts

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
    instances: Sequence[InstanceFacts], chosen: int, limit: int = 4
) -> tuple[Holder, ...]:
    """Return who holds more than ``instances[chosen]``, the most first.

    Only what events confirmed counts: nobody should be asked for bytes that are merely
    assumed to be there. What the chosen one has in front counts in whatever way.

    Args:
        instances: facts of all candidates.
        chosen: position of the one that serves.
        limit: how many to name at most.
    """
    own = instances[chosen].num_cached
    found = [
        Holder(position, each.confirmed_tokens, _slowest(each))
        for position, each in enumerate(instances)
        if position != chosen and each.confirmed_tokens > own
    ]
    found.sort(key=lambda holder: (-holder.num_tokens, holder.position))
    return tuple(found[:limit])


def _slowest(instance: InstanceFacts) -> str:
    return PLACES[max(i for i, n in enumerate(instance.cached_tokens[:ASSUMED]) if n)]
