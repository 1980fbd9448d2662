"""An interpolated 5-gram model (Kneser-Ney), to hold the network's perplexity against.

Each order's counts are lowered by one absolute discount, estimated from how many
n-grams occur once and twice, and what that frees goes to the next shorter context;
orders below the longest count in how many contexts a token occurs, not how often
(Kneser and Ney, 1995; interpolated as in Chen and Goodman, 1999). N-grams are integers,
tables are sorted arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["NgramModel"]

_Keys = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class _Order:
    """Tables of one order: its n-grams, and what is known of their contexts."""

    keys: _Keys
    counts: NDArray[np.int64]
    contexts: _Keys
    context_counts: NDArray[np.int64]
    followers: NDArray[np.int64]
    discount: float


class NgramModel:
    """Probabilities of a token after up to ``order - 1`` others.

    Args:
        tokens: int [num_tokens], the training text in one run.
        vocab_tokens: tokens that share what is left below the shortest context.
        order: tokens of the longest n-gram.

    Raises:
        ValueError: n-grams of so large a vocabulary do not fit into 64 bits, or the
        text
            is shorter than an n-gram.
    """

    def __init__(
        self, tokens: NDArray[np.int32], vocab_tokens: int, order: int = 5
    ) -> None:
        self._bits = max(1, int(vocab_tokens - 1).bit_length())
        if order * self._bits > 64:
            raise ValueError(f"{order}-grams of {vocab_tokens} tokens exceed 64 bits")
        if len(tokens) < order:
            raise ValueError(f"{len(tokens)} tokens have no {order}-gram")
        self._vocab_tokens = vocab_tokens
        self._order = order
        keys, counts = np.unique(self._keys(tokens, order), return_counts=True)
        self._orders = [self._tables(keys, counts)]
        for shorter in range(order - 1, 0, -1):
            mask = np.uint64((1 << (shorter * self._bits)) - 1)
            keys, counts = np.unique(keys & mask, return_counts=True)
            self._orders.insert(0, self._tables(keys, counts))

    def log_probabilities(self, tokens: NDArray[np.int32]) -> NDArray[np.float64]:
        """Return the natural logarithm of each token's probability after those before.

        Shape [num_tokens]. The first tokens, whose context is short, use what they
        have.
        """
        found = np.full(len(tokens), 1.0 / self._vocab_tokens)
        for length, tables in enumerate(self._orders, start=1):
            if len(tokens) < length:
                break
            keys = self._keys(tokens, length)
            counts = _look_up(tables.keys, tables.counts, keys)
            contexts = keys >> np.uint64(self._bits)
            totals = _look_up(tables.contexts, tables.context_counts, contexts)
            followers = _look_up(tables.contexts, tables.followers, contexts)
            known = totals > 0
            shorter = found[length - 1 :]
            freed = tables.discount * followers
            mixed = np.maximum(counts - tables.discount, 0.0) + freed * shorter
            shorter[known] = mixed[known] / totals[known]
        logs: NDArray[np.float64] = np.log(found)
        return logs

    def _keys(self, tokens: NDArray[np.int32], length: int) -> _Keys:
        """Return every n-gram as an integer, the last token in the lowest bits."""
        wide = tokens.astype(np.uint64)
        keys = np.zeros(len(tokens) - length + 1, dtype=np.uint64)
        for place in range(length):
            keys = (keys << np.uint64(self._bits)) | wide[place : place + len(keys)]
        return keys

    def _tables(self, keys: _Keys, counts: NDArray[np.int64]) -> _Order:
        contexts, starts = np.unique(keys >> np.uint64(self._bits), return_index=True)
        once, twice = int((counts == 1).sum()), int((counts == 2).sum())
        # Without any n-gram that occurs once the estimate would be zero or undefined.
        discount = once / (once + 2 * twice) if once else 0.5
        return _Order(
            keys,
            counts,
            contexts,
            np.add.reduceat(counts, starts),
            np.diff(np.append(starts, len(keys))),
            min(discount, 0.95),
        )


def _look_up(
    keys: _Keys, values: NDArray[np.int64], wanted: _Keys
) -> NDArray[np.int64]:
    """Return the value of each wanted key, 0 where there is none."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)
