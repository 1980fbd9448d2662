"""The true length, told from outside: what the best predictor could do."""

from __future__ import annotations

from sgl_tiered.policies.length.base import LengthFacts, LengthPrediction, bounded

__all__ = ["OracleLength"]


class OracleLength:
    """Predicts what ``said_tokens`` says; for experiments whose answers are known.

    A request of which nobody has said the length is expected to use its allowance.
    """

    name = "oracle"

    def predict(self, facts: LengthFacts, num_done: int = 0) -> LengthPrediction:
        """Return the length that was told, within the request's bounds."""
        tokens = facts.said_tokens or facts.max_new_tokens
        return bounded(facts, num_done, tokens, tokens, tokens)

    def observe(self, facts: LengthFacts, num_output_tokens: int) -> None:
        """Change nothing: there is nothing to learn."""
