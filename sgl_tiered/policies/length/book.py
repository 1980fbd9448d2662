"""The answers under way, and what was predicted for each.

A prediction is asked for on every scheduling pass and changes only slowly, so it is
kept and made anew when the answer has outgrown its lower bound or has become a quarter
longer: a few times per request, not once per token. Engine and simulator share it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from sgl_tiered.policies.length.base import (
    LengthFacts,
    LengthPrediction,
    LengthPredictor,
)

__all__ = ["LengthBook", "LengthScore"]

_GROWTH = 1.25
_MIN_GROWTH_TOKENS = 16


@dataclass(frozen=True, slots=True)
class LengthScore:
    """How good the first predictions of the answers that ended were.

    Attributes:
        num_answers: that ended.
        coverage: share of them at least as long as the lower bound.
        mean_lower_tokens: mean of the lower bounds; a low one covers easily.
        mean_error_tokens: mean distance from the median.
        mean_output_tokens: mean length.
    """

    num_answers: int
    coverage: float
    mean_lower_tokens: float
    mean_error_tokens: float
    mean_output_tokens: float


@dataclass(slots=True)
class _Page:
    facts: LengthFacts
    first: LengthPrediction
    current: LengthPrediction
    renew_at: int


class LengthBook:
    """Predictions of the requests that wait or run; nothing is kept of others.

    Args:
        predictor: asked, and told how answers ended.
    """

    def __init__(self, predictor: LengthPredictor) -> None:
        self.predictor = predictor
        self._pages: dict[Hashable, _Page] = {}
        self._num_answers = 0
        self._num_covered = 0
        self._sum_lower = 0
        self._sum_error = 0
        self._sum_output = 0

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, rid: Hashable) -> bool:
        return rid in self._pages

    def entered(self, rid: Hashable, facts: LengthFacts) -> LengthPrediction:
        """Note a request and return what is predicted for it."""
        first = self.predictor.predict(facts)
        self._pages[rid] = _Page(facts, first, first, self._next_look(first, 0))
        return first

    def prediction(self, rid: Hashable, num_done: int = 0) -> LengthPrediction | None:
        """Return what is predicted of a request with ``num_done`` tokens out.

        Its bounds hold for ``num_done`` although they may have been made earlier: none
        is below ``num_done + 1``. None for a request that never entered.
        """
        page = self._pages.get(rid)
        if page is None:
            return None
        if num_done >= page.renew_at:
            page.current = self.predictor.predict(page.facts, num_done)
            page.renew_at = self._next_look(page.current, num_done)
        return page.current

    def said(self, rid: Hashable, num_tokens: int) -> None:
        """Note a length that was named for a request; it is predicted anew with it."""
        page = self._pages.get(rid)
        if page is not None:
            page.facts = replace(page.facts, said_tokens=num_tokens)
            page.renew_at = 0

    def finished(self, rid: Hashable, num_output_tokens: int) -> None:
        """Learn from an answer that ended by itself or at its allowance."""
        page = self._pages.pop(rid, None)
        if page is None:
            return
        self.predictor.observe(page.facts, num_output_tokens)
        self._num_answers += 1
        self._num_covered += num_output_tokens >= page.first.lower
        self._sum_lower += page.first.lower
        self._sum_error += abs(num_output_tokens - page.first.median)
        self._sum_output += num_output_tokens

    def left(self, rid: Hashable) -> None:
        """Forget a request that was aborted: its answer tells no length."""
        self._pages.pop(rid, None)

    def clear(self) -> None:
        """Forget all requests under way; what was learned stays."""
        self._pages.clear()

    def score(self) -> LengthScore:
        """Return how good the predictions were; zeros before the first answer."""
        num = max(self._num_answers, 1)
        return LengthScore(
            num_answers=self._num_answers,
            coverage=self._num_covered / num,
            mean_lower_tokens=self._sum_lower / num,
            mean_error_tokens=self._sum_error / num,
            mean_output_tokens=self._sum_output / num,
        )

    @staticmethod
    def _next_look(prediction: LengthPrediction, num_done: int) -> int:
        grown = max(int(num_done * _GROWTH), num_done + _MIN_GROWTH_TOKENS)
        return min(prediction.lower, grown)
