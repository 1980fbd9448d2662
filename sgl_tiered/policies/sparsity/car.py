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
from sgl_tiered.policies.sparsity.solver import ratios_for_tokens

__all__ = ["LOCAL_TOKENS", "CarSelection", "LongRangeImportance"]

LOCAL_TOKENS = 64
"""Nearer queries are left out: as many as recent tokens stay anyway."""


class LongRangeImportance:
    """What a selection asks for, and how it ranks tokens, without a budget.

    Args:
        pooling: over heads.
        neighbours: a token counts as much as the best of so many around it (odd).
        mass_power: 1 adds up attention. 2 adds up its squares: leaving token j out
            moves what query i gets by p_ij times a difference of values, so this is
            the squared error over all queries, up to values; of two tokens with equal
            sums the one that few queries read strongly counts more.
    """

    name = "car"
    needs_mass = True
    local_tokens = LOCAL_TOKENS
    window_tokens = 0

    def __init__(
        self, pooling: HeadPooling = "max", neighbours: int = 1, mass_power: int = 1
    ) -> None:
        self._pooling = pooling
        self._neighbours = neighbours
        self.mass_power = mass_power

    def importance(self, facts: PrefixFacts) -> Floats:
        """Return the importance of each token per layer; [num_layers, num_tokens].

        Raises:
            ValueError: the facts have no mass.
        """
        mass = per_read(needed(facts.mass, "mass", self.name), facts, self.local_tokens)
        scores = over_heads(mass, self._pooling)
        if self._neighbours > 1:
            scores = over_neighbours(scores, self._neighbours)
        return scores


class CarSelection(LongRangeImportance):
    """Ratios from the profile, or from the prefix itself where there is none."""

    def keep(self, facts: PrefixFacts) -> KeepSets:
        """Return the most important tokens, of each layer as many as it needs."""
        scores = self.importance(facts)
        return keep_best(facts, scores, _counts(facts, scores))


def _counts(facts: PrefixFacts, scores: Floats) -> Counts:
    always = always_kept(facts)
    if facts.curves is None:
        # The same water filling on the prefix itself: the best of all layers' tokens.
        free = np.where(np.isnan(scores), np.inf, scores)[:, ~always]
        num_free = facts.budget_tokens - facts.num_layers * int(always.sum())
        best = np.argsort(-free, axis=None, kind="stable")[: max(num_free, 0)]
        layers = best // max(free.shape[1], 1)
        wanted = always.sum() + np.bincount(layers, minlength=facts.num_layers)
        return whole_counts(wanted.astype(np.float64), facts)
    num_tokens = max(facts.num_tokens, 1)
    share = facts.budget_tokens / (facts.num_layers * num_tokens)
    floor = float(always.sum() / num_tokens)
    ratios = ratios_for_tokens(facts.curves, min(share, 1.0), floor)
    return whole_counts(ratios * num_tokens, facts)
