"""CaR's importance with one ratio for all layers: what per-layer ratios are worth."""

from __future__ import annotations

from sgl_tiered.policies.sparsity.base import KeepSets, PrefixFacts
from sgl_tiered.policies.sparsity.car import LOCAL_TOKENS, long_range_importance
from sgl_tiered.policies.sparsity.keeping import even_counts, keep_best
from sgl_tiered.policies.sparsity.pooling import HeadPooling

__all__ = ["CarUniformSelection"]


class CarUniformSelection:
    """As ``car``, but every layer keeps equally many tokens."""

    name = "car-uniform"
    needs_mass = True
    local_tokens = LOCAL_TOKENS
    window_tokens = 0

    def __init__(self, pooling: HeadPooling = "max", neighbours: int = 1) -> None:
        self._pooling = pooling
        self._neighbours = neighbours

    def keep(self, facts: PrefixFacts) -> KeepSets:
        """Return the most important tokens of each layer."""
        scores = long_range_importance(
            facts, self.name, self._pooling, self._neighbours
        )
        return keep_best(facts, scores, even_counts(facts))
