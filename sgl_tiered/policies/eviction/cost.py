"""What saves the least time for the room that it takes first.

A page that is kept takes one page of room per access of others, and saves ``reload_s``
when it is used again. With ``h(a)`` the share of pages like it that are used again at
age ``a``, of those not used before, it is worth its room while

    reload_s * h(a) >= price,

the price being that at which the room asked for is the room there is. The age up to
which this pays, its *horizon*, comes with the facts (``cache/reuse.py`` learns ``h`` per
kind of page and solves for the price); this is Belady's rule with the expected next use
in place of the real one. So a run's number is the access at which its horizon ends, and
LRU is the case of equal horizons. A run that a waiting request will use needs no
estimate: it outranks all others, the first in the queue the highest, which is Belady's
rule itself.
"""

from __future__ import annotations

from sgl_tiered.policies.eviction.base import EvictionFacts

__all__ = ["CostPolicy"]

_QUEUED = 2.0**52
"""Above every access and horizon; places in the queue are taken off it exactly."""


class CostPolicy:
    """Evicts what is past its horizon for longest, and never for what comes later."""

    name = "cost"
    needs_queue = True
    needs_reuse = True

    def priority(self, facts: EvictionFacts) -> float:
        """Return the access up to which the run is worth its room."""
        if facts.queued:
            return _QUEUED - facts.next_use
        return facts.access_sequence + facts.horizon
