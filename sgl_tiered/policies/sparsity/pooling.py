"""Attention of heads and queries as one score per token."""

from __future__ import annotations

from typing import Literal

import numpy as np

from sgl_tiered.policies.sparsity.base import Floats, PrefixFacts

__all__ = ["HeadPooling", "needed", "over_heads", "over_neighbours", "per_read"]

HeadPooling = Literal["mean", "max", "normalised", "lift"]
"""``mean``, ``max``, ``normalised`` (the mean after each head's sum is 1) or ``lift``.

``lift`` is the highest of a head's mass over that of its median token: a head that
reads a few tokens is heard beside one that reads all of them a little.
"""


def needed(mass: Floats | None, name: str, policy: str) -> Floats:
    """Return the mass as float32.

    Raises:
        ValueError: there is none.
    """
    if mass is None:
        raise ValueError(f"the selection {policy} needs {name}")
    return mass.astype(np.float32)


def per_read(mass: Floats, facts: PrefixFacts, local_tokens: int) -> Floats:
    """Return the mean over the queries that could read a token.

    A sum grows with the number of its queries, so it favours early tokens whatever
    they are. A token that few have read so far is taken to be read on average a little:
    as many queries as are local are added to each count.

    Args:
        mass: [num_layers, num_heads, num_tokens].
        facts: of the prefix; its ``reads``, if they are known.
        local_tokens: queries nearer than this are not in ``mass``.
    """
    reads = facts.reads
    if reads is None:
        later = np.arange(facts.num_tokens, 0, -1) - local_tokens
        reads = np.maximum(later, 0)
    if reads.ndim == 2:
        reads = reads[:, None]
    mean: Floats = mass / (reads + max(local_tokens, 1)).astype(np.float32)
    return mean


def over_heads(mass: Floats, how: HeadPooling) -> Floats:
    """Return [num_layers, num_tokens] of [num_layers, num_heads, num_tokens]."""
    if how == "max":
        pooled: Floats = mass.max(axis=1)
    elif how == "mean":
        pooled = mass.mean(axis=1)
    elif how == "lift":
        median = np.median(mass, axis=2, keepdims=True)
        mean = mass.mean(axis=2, keepdims=True)
        pooled = (mass / np.maximum(median + 0.01 * mean, 1e-30)).max(axis=1)
    else:
        sums = np.maximum(mass.sum(axis=2, keepdims=True), 1e-30)
        pooled = (mass / sums).mean(axis=1)
    return pooled


def over_neighbours(scores: Floats, width: int) -> Floats:
    """Return the highest score of ``width`` (odd) tokens around each one."""
    if scores.shape[1] == 0:
        return scores
    half = width // 2
    padded = np.pad(scores, ((0, 0), (half, half)), constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(padded, width, axis=1)
    pooled: Floats = windows.max(axis=2)
    return pooled
