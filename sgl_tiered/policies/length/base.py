"""Interface of a length predictor: how many tokens will an answer have?

Two decisions need it. Admission asks what a request that decodes will need at least
(LayerKV Eq. 1, N_future): the lower bound. The forecast of free room asks when it will
end (LayerKV Eq. 5, Released): the median. A prediction is of the whole answer; what is
out already is a condition, so that it can be asked again while the answer grows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

__all__ = ["LengthFacts", "LengthPrediction", "LengthPredictor", "bounded"]


@dataclass(frozen=True, slots=True)
class LengthFacts:
    """What a predictor may know of a request before its first token.

    Attributes:
        num_prompt_tokens: length of the prompt.
        max_new_tokens: the most that the request allows its answer; bounds every
            prediction.
        group: anything that alike requests share, such as a route, a tenant or a
            conversation; may be empty.
        said_tokens: a length that somebody outside has named: the true one in an
            experiment, or the served model's own estimate; 0 where nobody has.
    """

    num_prompt_tokens: int
    max_new_tokens: int
    group: str = ""
    said_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LengthPrediction:
    """Tokens of the whole answer, those that are out already included.

    Attributes:
        lower: the answer is rarely shorter; N_future of Eq. 1 is this less what is out.
        median: as often shorter as longer; when Eq. 5 expects the release.
        upper: the answer is rarely longer.
    """

    lower: int
    median: int
    upper: int


@runtime_checkable
class LengthPredictor(Protocol):
    """Predicts answers, and learns from those that ended.

    It draws nothing and reads no clock: predictors that observed the same answers in
    the same order predict alike, so all ranks of a model agree.
    """

    @property
    def name(self) -> str:
        """The word used in flags and reports."""
        ...

    def predict(self, facts: LengthFacts, num_done: int = 0) -> LengthPrediction:
        """Predict an answer of which ``num_done`` tokens are out, and more to come.

        ``lower <= median <= upper``; none is below ``num_done + 1``, nor above the
        request's ``max_new_tokens`` (or ``num_done + 1``, should that be more).
        """
        ...

    def observe(self, facts: LengthFacts, num_output_tokens: int) -> None:
        """Learn from an answer that has ended by itself or at its allowance.

        Not for one that was aborted: how long it would have been is not known.
        """
        ...


def bounded(
    facts: LengthFacts, num_done: int, lower: int, median: int, upper: int
) -> LengthPrediction:
    """Return the prediction nearest to three lengths that keeps the promises."""
    least = num_done + 1
    most = max(facts.max_new_tokens, least)
    lower = min(max(lower, least), most)
    median = min(max(median, lower), most)
    return LengthPrediction(lower, median, min(max(upper, median), most))
