"""Always the same length: the plainest predictor, for experiments."""

from __future__ import annotations

from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.length.base import LengthFacts, LengthPrediction, bounded

__all__ = ["ConstantLength"]


class ConstantLength:
    """Predicts one length for every request, and learns nothing.

    An answer that has outgrown it is expected to end with its next token.

    Args:
        num_tokens: at least 1.

    Raises:
        ConfigError: it is less.
    """

    name = "constant"

    def __init__(self, num_tokens: int) -> None:
        if num_tokens < 1:
            raise ConfigError(
                "length_predictor",
                f"{num_tokens} tokens are no answer",
                "give 1 or more",
            )
        self._num_tokens = num_tokens

    def predict(self, facts: LengthFacts, num_done: int = 0) -> LengthPrediction:
        """Return the constant, within the request's bounds."""
        tokens = self._num_tokens
        return bounded(facts, num_done, tokens, tokens, tokens)

    def observe(self, facts: LengthFacts, num_output_tokens: int) -> None:
        """Change nothing."""
