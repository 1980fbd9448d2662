"""From scores and budgets to keep sets: the part that all selections share."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sgl_tiered.policies.sparsity.base import Counts, Floats, KeepSets, PrefixFacts

__all__ = ["always_kept", "even_counts", "keep_best", "whole_counts"]


def always_kept(facts: PrefixFacts) -> npt.NDArray[np.bool_]:
    """Return which positions every layer keeps; bool [num_tokens]."""
    positions = np.arange(facts.num_tokens)
    first_recent = facts.num_tokens - facts.num_recent
    kept: npt.NDArray[np.bool_] = (positions < facts.num_sinks) | (
        positions >= first_recent
    )
    return kept


def whole_counts(wanted: Floats, facts: PrefixFacts) -> Counts:
    """Return how many tokens each layer keeps: whole numbers that use up the budget.

    Args:
        wanted: tokens of each layer; any scale near the budget; [num_layers].
        facts: give the budget and the bounds, from what is always kept to all tokens.

    Returns:
        As near to ``wanted``, shifted by one number for all layers, as bounds allow.
    """
    low = int(always_kept(facts).sum())
    high = facts.num_tokens
    total = min(max(facts.budget_tokens, low * len(wanted)), high * len(wanted))
    # The clipped sum grows with the shift, so halving finds it.
    span = float(np.abs(wanted).max()) + high
    below, above = -span, span
    for _ in range(60):
        shift = 0.5 * (below + above)
        if np.clip(wanted + shift, low, high).sum() < total:
            below = shift
        else:
            above = shift
    exact = np.clip(wanted + above, low, high)
    counts = np.floor(exact + 1e-9).astype(np.int64)
    # The largest remainders round up; of equal ones the first layers'.
    order = np.argsort(counts - exact, kind="stable")
    order = order[counts[order] < high]
    counts[order[: total - int(counts.sum())]] += 1
    return counts


def even_counts(facts: PrefixFacts) -> Counts:
    """Return equal counts for all layers; the first ones take what is left over."""
    share = facts.budget_tokens / facts.num_layers
    return whole_counts(np.full(facts.num_layers, share), facts)


def keep_best(facts: PrefixFacts, scores: Floats, counts: Counts) -> KeepSets:
    """Return per layer what is always kept and the best of the rest.

    Args:
        facts: of the prefix.
        scores: higher is kept; not a number counts as highest, since nothing is dropped
            of which nothing is known; of equal ones the earlier token is kept.
            [num_layers, num_tokens].
        counts: tokens to keep per layer, as ``whole_counts`` gives them.
    """
    always = always_kept(facts)
    wanted = np.where(np.isnan(scores), np.inf, scores)
    kept = []
    for row, count in zip(wanted, counts, strict=True):
        # Sorted as a pair, so that even an infinite score comes behind the always kept.
        order = np.lexsort((-row, ~always))
        kept.append(np.sort(order[:count]).astype(np.int64))
    return kept
