"""What no request in the window or on the device uses first: CaR's Score.

CaR, section III-B-3 "Cache Replacement Policy": "our policy targets the KV cache node
with the smallest Score". A request that enters the Shuffled Window adds 1 to the score
of its nodes, one that is sent to the GPU another 1, and one that has ended takes 2
away. The paper does not say what goes first among equal scores, which most nodes have:
the least recently used one does here.
"""

from __future__ import annotations

from sgl_tiered.policies.eviction.base import EvictionFacts

__all__ = ["ScorePolicy"]

_SPAN = 2.0**44
"""Accesses that fit between two scores; priorities stay exact up to a score of 256."""


class ScorePolicy:
    """Evicts the smallest score, least recently used first."""

    name = "score"
    needs_queue = True
    needs_reuse = False

    def priority(self, facts: EvictionFacts) -> float:
        """Return the score, and the number of the last access below it."""
        return facts.score * _SPAN + facts.access_sequence
