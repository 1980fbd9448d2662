"""CaR's importance with one ratio for all layers: what per-layer ratios are worth."""

from __future__ import annotations

from sgl_tiered.policies.sparsity.base import KeepSets, PrefixFacts
from sgl_tiered.policies.sparsity.car import LongRangeImportance
from sgl_tiered.policies.sparsity.keeping import even_counts, keep_best

__all__ = ["CarUniformSelection"]


class CarUniformSelection(LongRangeImportance):
    """As ``car``, but every layer keeps equally many tokens."""

    name = "car-uniform"

    def keep(self, facts: PrefixFacts) -> KeepSets:
        """Return the most important tokens of each layer."""
        return keep_best(facts, self.importance(facts), even_counts(facts))
