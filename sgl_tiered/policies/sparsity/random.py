"""Random tokens: the baseline that every other selection has to beat."""

from __future__ import annotations

import numpy as np

from sgl_tiered.policies.sparsity.base import KeepSets, PrefixFacts
from sgl_tiered.policies.sparsity.keeping import even_counts, keep_best

__all__ = ["RandomSelection"]


class RandomSelection:
    """Each layer draws its own tokens, from the generator's seed and the length.

    So equal facts give equal sets, on every rank.
    """

    name = "random"
    needs_mass = False
    local_tokens = 0
    mass_power = 1
    window_tokens = 0

    def __init__(self, rng: np.random.Generator) -> None:
        self._seed = int(rng.integers(1 << 63))

    def keep(self, facts: PrefixFacts) -> KeepSets:
        """Return a random set per layer."""
        rng = np.random.default_rng((self._seed, facts.num_tokens))
        scores = rng.random((facts.num_layers, facts.num_tokens))
        return keep_best(facts, scores, even_counts(facts))
