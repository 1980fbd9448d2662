"""A small regression that follows measurements and cannot be led far astray.

It predicts ``sum(coefficient * feature)`` and keeps the logarithms of the coefficients,
so they stay positive and small and large transfers count alike. Recursive least squares
on the logarithm of the prediction (its gradient is each term's share); old observations
fade. A single surprise is clipped, so one stalled transfer moves little; several large
ones in a row on the same side are a change, and what was learned before is let go. The
coefficients stay within bounds of their priors. Pure: no clock, no chance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

__all__ = ["GUESSED", "MEASURED", "BoundedRegression"]

GUESSED = 2.0
"""Deviation of a prior's logarithm: a guess may well be off by e^2, a factor of 7."""
MEASURED = 0.2
"""One that was measured as carefully as by a calibration: off by 20 % as a rule."""

_FORGETTING = 0.98
"""Weight of the past per observation: about 50 observations of memory."""
_MAX_FACTOR = 1000.0
"""How far a coefficient may move from its prior, either way."""
_PRIOR_VARIANCE = GUESSED**2
_NOISE_VARIANCE = 0.04
"""A measurement is off by 20 % as a rule."""
_CLIP_FLOOR, _CLIP_FACTOR = 0.25, 2.0
_SURPRISE_WEIGHT = 0.1
_RUN_OF_A_CHANGE = 4


class BoundedRegression:
    """Predicts ``sum(coefficient * feature)`` and refines the coefficients.

    Args:
        priors: first guess of each coefficient, all positive.
        deviation: of the priors' logarithms, ``GUESSED`` at most; the first
            observations move a small one little.
    """

    def __init__(self, priors: Sequence[float], deviation: float = GUESSED) -> None:
        self._priors = np.asarray(priors, dtype=np.float64)
        assert (self._priors > 0).all(), f"priors must be positive: {priors}"
        self._logs = np.zeros(len(self._priors))
        assert 0 < deviation <= GUESSED, deviation
        self._covariance = np.eye(len(self._priors)) * deviation**2
        # The typical surprise; at first the priors may be far off.
        self._typical = min(1.0, deviation)
        self._run = 0
        self._num_observations = 0

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The coefficients as refined so far."""
        return tuple((self._priors * np.exp(self._logs)).tolist())

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
        terms = np.asarray(features, dtype=np.float64) * self._priors
        terms *= np.exp(self._logs)
        predicted = float(terms.sum())
        if not (math.isfinite(value) and value > 0.0 and predicted > 0.0):
            return False
        surprise = math.log(value / predicted)
        limit = _CLIP_FLOOR + _CLIP_FACTOR * self._typical
        self._note_surprise(surprise, limit)
        shares = terms / predicted
        spread = self._covariance @ shares
        gain = spread / (_NOISE_VARIANCE + float(shares @ spread))
        bound = math.log(_MAX_FACTOR)
        step = gain * min(max(surprise, -limit), limit)
        self._logs = np.clip(self._logs + step, -bound, bound)
        covariance = (self._covariance - np.outer(gain, spread)) / _FORGETTING
        # Equal observations tell nothing about some directions: forgetting must not
        # inflate these without end.
        most = float(covariance.diagonal().max())
        self._covariance = covariance * min(1.0, _PRIOR_VARIANCE / most)
        self._num_observations += 1
        return True

    def _note_surprise(self, surprise: float, limit: float) -> None:
        if abs(surprise) <= limit:
            self._run = 0
        else:
            side = 1 if surprise > 0 else -1
            self._run = self._run + side if self._run * side > 0 else side
        if abs(self._run) >= _RUN_OF_A_CHANGE:
            self._covariance = np.eye(len(self._priors)) * _PRIOR_VARIANCE
            self._typical = 1.0
            self._run = 0
            return
        # An outlier may not stretch its own yardstick by more than a clipped step.
        size = min(abs(surprise), limit)
        self._typical += _SURPRISE_WEIGHT * (size - self._typical)
