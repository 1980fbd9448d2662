"""First in, first out."""

from __future__ import annotations

from sgl_tiered.policies.eviction.base import EvictionFacts

__all__ = ["FIFOPolicy"]


class FIFOPolicy:
    """Evicts what came first, used or not."""

    name = "fifo"
    needs_queue = False
    needs_reuse = False

    def priority(self, facts: EvictionFacts) -> float:
        """Return the number of the access that inserted the run."""
        return float(facts.insert_sequence)
