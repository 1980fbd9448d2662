"""Interface of an eviction policy: what is the next copy to lose.

A policy only ranks. The cache decides what may go at all (never a pinned copy, never
one in flight, the last pages of a run first), keeps the heap and frees the slots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from sgl_tiered.core.ids import TierId

__all__ = ["EvictionFacts", "EvictionPolicy"]


@dataclass(frozen=True, slots=True)
class EvictionFacts:
    """What a policy may know of a run of pages.

    Attributes:
        tier: the tier that needs room.
        num_pages: pages of the run with a copy in that tier.
        last_access_s: clock value of the last access, seconds.
        inserted_s: clock value of the insertion, seconds.
        access_sequence: number of the last access; grows with every access, so it
            orders them as the clock does, without ties and alike on every rank.
        insert_sequence: number of the access that inserted the run.
        num_hits: loads that the run has served.
        score: importance that waiting and running requests give it (CaR); 0 where
            nobody keeps one.
        queued: waiting requests that will use the run's last page.
        next_use: place in the queue, counted from the server's start, of the first of
            these; infinite without one.
        worth: seconds saved per access for which a page of the run is kept, as
            learned from pages like it; 0 where nobody learns.
    """

    tier: TierId
    num_pages: int
    last_access_s: float
    inserted_s: float
    access_sequence: int
    insert_sequence: int
    num_hits: int
    score: float
    queued: int = 0
    next_use: float = math.inf
    worth: float = 0.0


@runtime_checkable
class EvictionPolicy(Protocol):
    """Ranks runs of pages; one object per tier."""

    @property
    def name(self) -> str:
        """The word used in flags and reports."""
        ...

    @property
    def needs_queue(self) -> bool:
        """Whether it looks at ``score``, ``queued`` or ``next_use``."""
        ...

    @property
    def needs_reuse(self) -> bool:
        """Whether it looks at ``worth``."""
        ...

    def priority(self, facts: EvictionFacts) -> float:
        """Return a finite number; the run with the lowest is evicted first.

        Equal facts give equal numbers, and a later access, a further hit, a higher
        score, a higher worth or one more request that waits for the run never lowers
        the number: the cache re-ranks a run when its turn comes, so it would see a fall
        too late. Where a score or the queue falls it re-ranks at once, and where a
        worth takes a step with age, at that step. Of equal numbers the least recently
        used run goes first.
        """
        ...
