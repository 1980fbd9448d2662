"""CaR's quality-aware sparsification: per-layer ratios, long-range importance.

CaR (papers: "CaR", section D) measures how sparse each layer's attention is, gives each
layer a compression ratio of its own, and drops the tokens with the lower scores. Ours:

- Ratios come from the solver (solver.py): all layers keep tokens down to the same
  marginal loss of long-range attention.
- A token's importance is the attention that it received from queries ``LOCAL_TOKENS``
  away or further, per query that could read it. Near queries read nearly everything
  once; what later turns read is what distant queries have read.
"""

from __future__ import annotations

import numpy as np

from sgl_tiered.policies.sparsity.base import Counts, Floats, KeepSets, PrefixFacts
from sgl_tiered.policies.sparsity.keeping import always_kept, keep_best, whole_counts
from sgl_tiered.policies.sparsity.pooling import (
    HeadPooling,
    needed,
    over_heads,
    over_neighbours,
    per_read,
)
from sgl_tiered.policies.sparsity.solver import HeldCurves, ratios_for_tokens

__all__ = ["LOCAL_TOKENS", "CarSelection", "long_range_importance"]

LOCAL_TOKENS = 64
"""Nearer queries are left out: as many as recent tokens stay anyway."""


def long_range_importance(
    facts: PrefixFacts, policy: str, pooling: HeadPooling, neighbours: int
) -> Floats:
    """Return the importance of each token per layer; [num_layers, num_tokens].

    Raises:
        ValueError: the facts have no mass.
    """
    mass = per_read(needed(facts.mass, "mass", policy), facts, LOCAL_TOKENS)
    scores = over_heads(mass, pooling)
    return over_neighbours(scores, neighbours) if neighbours > 1 else scores


class CarSelection:
    """Ratios from the profile, or from the prefix itself where there is none.

    Args:
        pooling: over heads.
        neighbours: a token counts as much as the best of so many around it (odd).
    """

    name = "car"
    needs_mass = True
    local_tokens = LOCAL_TOKENS
    window_tokens = 0

    def __init__(self, pooling: HeadPooling = "max", neighbours: int = 1) -> None:
        self._pooling = pooling
        self._neighbours = neighbours

    def keep(self, facts: PrefixFacts) -> KeepSets:
        """Return the most important tokens, of each layer as many as it needs."""
        scores = long_range_importance(
            facts, self.name, self._pooling, self._neighbours
        )
        return keep_best(facts, scores, self._counts(facts, scores))

    def _counts(self, facts: PrefixFacts, scores: Floats) -> Counts:
        if facts.num_tokens == 0:
            return np.zeros(facts.num_layers, dtype=np.int64)
        curves = facts.curves or HeldCurves.of_importance(np.nan_to_num(scores))
        share = facts.budget_tokens / (facts.num_layers * facts.num_tokens)
        floor = float(always_kept(facts).mean())
        ratios = ratios_for_tokens(curves, min(share, 1.0), floor)
        return whole_counts(ratios * facts.num_tokens, facts)
