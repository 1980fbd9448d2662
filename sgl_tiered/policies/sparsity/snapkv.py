"""What the prefix's last queries read, and its neighbours.

SnapKV (Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation",
2024) takes the attention of an observation window at the end of the prompt, pools it
over neighbouring tokens so that what is kept hangs together, and keeps the highest.
Where the question stands in that window it knows what will be read; here the prefix
ends before any question is seen. Heads choose together (see README.md).
"""

from __future__ import annotations

from sgl_tiered.policies.sparsity.base import Floats, KeepSets, PrefixFacts
from sgl_tiered.policies.sparsity.keeping import even_counts, keep_best
from sgl_tiered.policies.sparsity.pooling import needed, over_heads, over_neighbours

__all__ = ["SnapKVSelection", "window_scores"]

_WINDOW_TOKENS = 64
_NEIGHBOURS = 7
"""The paper's kernel size for its long-context runs."""


def window_scores(facts: PrefixFacts, policy: str) -> Floats:
    """Return the pooled attention of the last queries; [num_layers, num_tokens].

    Raises:
        ValueError: the facts have no ``recent_mass``.
    """
    mass = needed(facts.recent_mass, "recent_mass", policy)
    return over_neighbours(over_heads(mass, "mean"), _NEIGHBOURS)


class SnapKVSelection:
    """Attention of the last window, the same number of tokens in every layer."""

    name = "snapkv"
    needs_mass = False
    local_tokens = 0
    mass_power = 1
    window_tokens = _WINDOW_TOKENS

    def keep(self, facts: PrefixFacts) -> KeepSets:
        """Return what the window reads most."""
        return keep_best(facts, window_scores(facts, self.name), even_counts(facts))
