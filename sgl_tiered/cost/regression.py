"""A small regression that follows measurements and cannot be led far astray.

Recursive least squares over multipliers of prior coefficients. Every observation is
divided by its prediction, so that small and large transfers count alike; its surprise
is clipped on a logarithmic scale (one stalled transfer moves little, a lasting change
is followed); old observations fade; the multipliers stay within bounds. Pure: no
clock, no chance. Three numbers, about 10 us per observation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

__all__ = ["BoundedRegression"]

_FORGETTING = 0.98
"""Weight of the past per observation: about 50 observations of memory."""
_MAX_FACTOR = 1000.0
"""How far a coefficient may move from its prior, either way."""
_SURPRISE_FLOOR = 0.25
_SURPRISE_WEIGHT = 0.1
_MAX_SURPRISE = 2.0
_MAX_TRACE = 3.0
"""Bound of the covariance: equal observations would otherwise inflate it."""


class BoundedRegression:
    """Predicts ``sum(coefficient * feature)`` and refines the coefficients.

    Args:
        priors: first guess of each coefficient, all positive.
    """

    def __init__(self, priors: Sequence[float]) -> None:
        self._priors = np.asarray(priors, dtype=np.float64)
        assert (self._priors > 0).all(), f"priors must be positive: {priors}"
        n = len(self._priors)
        self._multipliers = np.ones(n)
        self._covariance = np.eye(n)
        # The typical surprise; at first the priors may be far off.
        self._surprise = 1.0
        self._num_observations = 0

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The coefficients as refined so far."""
        return tuple((self._priors * self._multipliers).tolist())

    @property
    def num_observations(self) -> int:
        """Observations used."""
        return self._num_observations

    def observe(self, features: Sequence[float], value: float) -> bool:
        """Learn from one measurement; return False where it makes no sense.

        Args:
            features: one number per coefficient, not negative, not all zero.
            value: what was measured, positive and finite.
        """
        x = np.asarray(features, dtype=np.float64) * self._priors
        predicted = float(x @ self._multipliers)
        if not (math.isfinite(value) and value > 0.0 and predicted > 0.0):
            return False
        x /= predicted
        surprise = math.log(value / predicted)
        limit = _SURPRISE_FLOOR + 2.0 * self._surprise
        residual = math.expm1(min(max(surprise, -limit), limit))
        self._surprise += _SURPRISE_WEIGHT * (
            min(abs(surprise), _MAX_SURPRISE) - self._surprise
        )
        px = self._covariance @ x
        gain = px / (_FORGETTING + float(x @ px))
        self._multipliers = np.clip(
            self._multipliers + gain * residual, 1.0 / _MAX_FACTOR, _MAX_FACTOR
        )
        covariance = (self._covariance - np.outer(gain, px)) / _FORGETTING
        trace = float(np.trace(covariance))
        limit_trace = _MAX_TRACE * len(x) * max(1.0, float(self._multipliers.max()))
        self._covariance = covariance * min(1.0, limit_trace / max(trace, 1e-300))
        self._num_observations += 1
        return True
