"""The first tokens and the last ones: StreamingLLM.

Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023: the first
tokens take the attention that has nowhere else to go, and the last ones are read most.
"""

from __future__ import annotations

import numpy as np

from sgl_tiered.policies.sparsity.base import KeepSets, PrefixFacts
from sgl_tiered.policies.sparsity.keeping import even_counts, keep_best

__all__ = ["RecentSelection"]


class RecentSelection:
    """Everything but sinks and the last tokens goes."""

    name = "recent"
    needs_mass = False
    local_tokens = 0
    mass_power = 1
    window_tokens = 0

    def keep(self, facts: PrefixFacts) -> KeepSets:
        """Return the first and the last tokens."""
        positions = np.arange(facts.num_tokens, dtype=np.float64)
        scores = np.broadcast_to(positions, (facts.num_layers, facts.num_tokens))
        return keep_best(facts, scores, even_counts(facts))
