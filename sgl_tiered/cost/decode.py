"""Time of a decode step, learned from the steps of a running server.

    T = step + request * batch + context_token * (sum of the contexts)

as `calibration.DecodeFit` measures it and `sim.times` models it. A guess starts from
the prefill's coefficients: a request of a step is one token, and its attention sees its
whole context.
"""

from __future__ import annotations

from sgl_tiered.cost.calibration import DecodeFit
from sgl_tiered.cost.prefill import PrefillSnapshot
from sgl_tiered.cost.regression import GUESSED, MEASURED, BoundedRegression

__all__ = ["DecodeCost"]

_LEAST_S = 1e-9
"""A coefficient of 0 could not be corrected: the fit refines logarithms."""


class DecodeCost:
    """Predicts and learns the time of a step. Used on one thread.

    Args:
        step_s, request_s, context_token_s: first values; 0 becomes a tiny number.
        deviation: how far off they may be, as of ``BoundedRegression``.
    """

    def __init__(
        self,
        step_s: float,
        request_s: float,
        context_token_s: float,
        deviation: float = GUESSED,
    ) -> None:
        firsts = (step_s, request_s, context_token_s)
        self._fit = BoundedRegression([max(s, _LEAST_S) for s in firsts], deviation)
        self._coefficients = self._fit.coefficients

    @classmethod
    def guessed(cls, prefill: PrefillSnapshot) -> DecodeCost:
        """Return a cost that starts from what prefill costs."""
        return cls(prefill.overhead_s, prefill.token_s, prefill.pair_s)

    @classmethod
    def measured(cls, fit: DecodeFit) -> DecodeCost:
        """Return a cost that starts from a calibration."""
        return cls(fit.step_s, fit.request_s, fit.context_token_s, MEASURED)

    @property
    def num_observations(self) -> int:
        """Steps learned from."""
        return self._fit.num_observations

    def seconds(self, batch: float, context_tokens: float) -> float:
        """Return the predicted time of one step; contexts are summed."""
        step_s, request_s, context_token_s = self._coefficients
        return step_s + request_s * batch + context_token_s * context_tokens

    def observe(self, batch: int, context_tokens: int, seconds: float) -> None:
        """Learn from one step."""
        if batch > 0 and context_tokens >= 0:
            features = (1.0, float(batch), float(context_tokens))
            if self._fit.observe(features, seconds):
                self._coefficients = self._fit.coefficients
