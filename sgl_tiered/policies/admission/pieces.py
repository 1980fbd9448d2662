"""How much of a long prompt fits into the time that an admission leaves."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["LEAST_PIECE_SHARE", "piece_tokens"]

LEAST_PIECE_SHARE = 0.125
"""Of a chunk: a smaller piece is mostly the overhead of a pass."""


def piece_tokens(
    pass_s: Callable[[int], float],
    num_tokens: int,
    allowed_s: float,
    page_tokens: int,
    least_tokens: int,
) -> int:
    """Return how many of the next tokens of a prompt to compute now.

    Args:
        pass_s: predicted seconds of a pass over so many of them; it grows.
        num_tokens: tokens that the pass would have; all of them if they fit.
        allowed_s: seconds that the pass must stay below.
        page_tokens: a smaller number is a multiple of this.
        least_tokens: fewer are not worth a pass.

    Returns:
        ``num_tokens``, a multiple of ``page_tokens`` below it, or 0 for none.
    """
    if pass_s(num_tokens) < allowed_s:
        return num_tokens
    low, high = 0, (num_tokens - 1) // page_tokens
    while low < high:
        middle = (low + high + 1) // 2
        if pass_s(middle * page_tokens) < allowed_s:
            low = middle
        else:
            high = middle - 1
    piece = low * page_tokens
    return piece if piece and piece >= least_tokens else 0
