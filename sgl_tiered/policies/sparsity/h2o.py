"""Heavy hitters: half of the budget for the most read tokens, half for the last ones.

H2O (Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large
Language Models", 2023) keeps the tokens with the highest sum of attention over all
queries so far, and recent ones. Sums are not divided by the number of readers, so early
tokens are favoured; that is the method. Its heads choose on their own; here a layer
keeps tokens for all its heads, so their sum chooses.
"""

from __future__ import annotations

import numpy as np

from sgl_tiered.policies.sparsity.base import KeepSets, PrefixFacts
from sgl_tiered.policies.sparsity.keeping import even_counts, keep_best
from sgl_tiered.policies.sparsity.pooling import needed, over_heads

__all__ = ["H2OSelection"]


class H2OSelection:
    """Accumulated attention of all queries, and as many recent tokens."""

    name = "h2o"
    needs_mass = True
    local_tokens = 0
    mass_power = 1
    window_tokens = 0

    def keep(self, facts: PrefixFacts) -> KeepSets:
        """Return heavy hitters and recent tokens, half and half, in each layer."""
        counts = even_counts(facts)
        scores = over_heads(needed(facts.mass, "mass", self.name), "mean")
        distance = np.arange(facts.num_tokens, 0, -1)
        is_recent = distance[None, :] <= counts[:, None] // 2
        return keep_best(facts, np.where(is_recent, np.inf, scores), counts)
