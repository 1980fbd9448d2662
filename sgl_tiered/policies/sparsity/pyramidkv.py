"""SnapKV's choice with budgets that fall linearly over the layers.

PyramidKV (Cai et al., "PyramidKV: Dynamic KV Cache Compression based on Pyramidal
Information Funneling", 2024): low layers read broadly and high ones a few tokens, so
the last layer keeps ``1 / 20`` of the mean beyond what is always kept, the first one as
much more, and those between lie on the line.
"""

from __future__ import annotations

import numpy as np

from sgl_tiered.policies.sparsity.base import Counts, KeepSets, PrefixFacts
from sgl_tiered.policies.sparsity.keeping import always_kept, keep_best, whole_counts
from sgl_tiered.policies.sparsity.snapkv import SnapKVSelection, window_scores

__all__ = ["PyramidKVSelection", "pyramid_counts"]

_STEEPNESS = 20.0
"""The paper's beta: the mean budget over the last layer's."""


def pyramid_counts(facts: PrefixFacts) -> Counts:
    """Return the line's counts; a flatter one where the first layer had too many."""
    always = float(always_kept(facts).sum())
    room = facts.num_tokens - always
    mean = facts.budget_tokens / facts.num_layers - always
    mean = min(max(mean, 0.0), room)
    last = max(mean / _STEEPNESS, 2.0 * mean - room)
    line = np.linspace(2.0 * mean - last, last, facts.num_layers)
    if facts.num_layers == 1:
        line = np.array([mean])
    return whole_counts(always + line, facts)


class PyramidKVSelection:
    """Attention of the last window; low layers keep more."""

    name = "pyramidkv"
    needs_mass = False
    local_tokens = 0
    mass_power = 1
    window_tokens = SnapKVSelection.window_tokens

    def keep(self, facts: PrefixFacts) -> KeepSets:
        """Return what the window reads most, of each layer its part of the pyramid."""
        scores = window_scores(facts, self.name)
        return keep_best(facts, scores, pyramid_counts(facts))
