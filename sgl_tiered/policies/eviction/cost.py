"""What saves the least time for the room that it takes first.

A page that was last used ``a`` accesses ago and is kept for ``b`` more takes that much
room, less if it is used before, and saves ``reload_s`` if it is:

    worth = reload_s * max over b of P(used within b | a) / E[accesses kept | a, b].

That is reload cost times expected reuse per size and time, all pages being of one size:
the index that Gittins (1979) proved best for one page at a time, and what LHD
(Beckmann, Chen, Cidon, NSDI 2018) calls hit density. ``cache/reuse.py`` learns it by
kind of page and age. A run that a waiting request will use needs no estimate: it
outranks all others, the first in the queue the highest, which is Belady's rule with the
part of the future that is known. Where nothing is learned every worth is 0, and the
least recently used run goes first.
"""

from __future__ import annotations

from sgl_tiered.policies.eviction.base import EvictionFacts

__all__ = ["CostPolicy"]

_QUEUED = 2.0**52
"""Above every worth; places in the queue are taken off it exactly."""


class CostPolicy:
    """Evicts the lowest worth, and what the queue needs last of all."""

    name = "cost"
    needs_queue = True
    needs_reuse = True

    def priority(self, facts: EvictionFacts) -> float:
        """Return seconds saved per access and page, or the place in the queue."""
        if facts.queued:
            return _QUEUED - facts.next_use
        return facts.worth
