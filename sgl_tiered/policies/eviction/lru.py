"""Least recently used first."""

from __future__ import annotations

from sgl_tiered.policies.eviction.base import EvictionFacts

__all__ = ["LRUPolicy"]


class LRUPolicy:
    """Evicts what was not used for longest."""

    name = "lru"
    needs_queue = False
    needs_reuse = False

    def priority(self, facts: EvictionFacts) -> float:
        """Return the number of the last access: as its time, but without ties."""
        return float(facts.access_sequence)
