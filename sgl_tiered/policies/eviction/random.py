"""A random victim: the baseline that every other policy has to beat."""

from __future__ import annotations

import numpy as np

from sgl_tiered.policies.eviction.base import EvictionFacts

__all__ = ["RandomPolicy"]

_MASK = (1 << 64) - 1


class RandomPolicy:
    """Gives each insertion one number, drawn from the generator's seed.

    The number is a hash (SplitMix64) of the seed and of the insertion's number: one
    draw per insertion, without a table of draws, and equal facts get equal numbers.
    """

    name = "random"
    needs_queue = False
    needs_reuse = False

    def __init__(self, rng: np.random.Generator) -> None:
        self._seed = int(rng.integers(1 << 63))

    def priority(self, facts: EvictionFacts) -> float:
        """Return the insertion's number, uniform in [0, 1)."""
        x = (self._seed + facts.insert_sequence * 0x9E3779B97F4A7C15) & _MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        return float((x ^ (x >> 31)) >> 11) * 2.0**-53
