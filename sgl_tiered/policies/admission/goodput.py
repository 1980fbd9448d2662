"""LayerKV's rule (``slo.py``), only where it harms fewer requests than it spares.

Source: ours. Eq. 2 takes the least patient of all decoders: among hundreds there is
always one, and for its sake a whole queue misses its TTFT. So before each pass both
sides are counted, and Eq. 2 holds nobody where holding does not pay.

A decoder that is x seconds behind its target (x < 0: ahead) and loses d seconds more
still meets it if R tokens are left in which to make that up,

    x + d + T_step * R <= T_tpot * R,      R >= need(d) = (x + d) / (T_tpot - T_step),

which is Eq. 1 solved for the length. R has a distribution F, drawn through the three
percentiles of the predicted length: the decoder misses with the chance F(need(d)). Let
P be the prefill of all that waits. If it waits until n more steps are done, the answers
that end within them are spared, so of all decoders i that makes

    B(n) = sum_i max(0, F_i(min(need_i(P), n + 1)) - F_i(need_i(0)))

- nothing of a decoder that is late anyway, nothing of one that has time enough. Those
that wait lose n steps of the time s_k that they have left until they must begin, what
waits before them counted, as a share of their target:

    C(n) = weight * sum_k G(s_k - n * T_step) - G(s_k)
    G(s) = 1 - s / T_ttft, from 0 to 1 + late

- nothing of a request that is hopelessly late. Eq. 2 holds where for some n of 1, 2, 4
... 128

    B(n) - C(n) > price.

All that is admitted at once is looked at, not the next prompt alone: each prompt by
itself may harm hardly anybody, and all together everybody.

Who is due is let in as in ``slo.py``, so the bound on waiting stated there holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sgl_tiered.policies.admission.base import (
    NO_TARGET,
    Float64s,
    QueueFacts,
    RunningFacts,
    StepTime,
)
from sgl_tiered.policies.admission.slo import DUE_SHARE, HOLD_LIMIT_S, SloAdmission

__all__ = ["LATE", "PRICE", "WEIGHT", "GoodputAdmission"]

WEIGHT = 3.0
"""Requests that a delay reaches for each that waits: those yet to come queue behind."""
LATE = 1.0
"""In targets: a request later than this is lost. One that is a little late still has
others behind it who need not be; without them a queue once late would stay so."""
PRICE = 0.1
"""Answers that a hold must spare at least, as Eq. 2 wants of one decoder: its lower
bound is the tenth percentile."""

_STEPS: Float64s = np.exp2(np.arange(8, dtype=np.float64))
_TINY = 1e-9


class GoodputAdmission(SloAdmission):
    """Weighs decoders against waiting requests, then asks ``SloAdmission``.

    Args:
        weight: of a waiting request against a decoder; 0 or more.
        late: TTFT targets; 0 or more.
        price: answers; 0 or more.
        due_share, hold_limit_s: of ``SloAdmission``.
    """

    name = "goodput"
    needs_queue = True

    def __init__(
        self,
        weight: float = WEIGHT,
        late: float = LATE,
        price: float = PRICE,
        due_share: float = DUE_SHARE,
        hold_limit_s: float = HOLD_LIMIT_S,
    ) -> None:
        super().__init__(due_share, hold_limit_s)
        assert min(weight, late, price) >= 0.0, (weight, late, price)
        self._weight, self._late, self._price = weight, late, price
        # Rows: seconds behind, target, tokens left by the three percentiles.
        self._decoders: Float64s = np.zeros((5, 0))
        self._is_worth_it = True

    def begin_pass(
        self, running: Sequence[RunningFacts], step_s: StepTime, now_s: float
    ) -> None:
        """Take in the decoders' states; O(running)."""
        super().begin_pass(running, step_s, now_s)
        rows = [
            (
                facts.past_s - facts.tpot_slo_s * facts.num_past_tokens,
                facts.tpot_slo_s,
                facts.prediction.lower - 1 - facts.num_past_tokens,
                facts.prediction.median - 1 - facts.num_past_tokens,
                facts.prediction.upper - 1 - facts.num_past_tokens,
            )
            for facts in running
            if facts.tpot_slo_s < NO_TARGET
        ]
        self._decoders = np.array(rows, np.float64).reshape(-1, 5).T
        self._decoders[2:] = np.maximum(self._decoders[2:], 1.0)
        self._is_worth_it = True

    def see_queue(self, queue: QueueFacts) -> None:
        """Take in who waits; O(waiting)."""
        prefill_s = queue.prefill_s
        wait_s = np.cumsum(prefill_s) - prefill_s
        left = (queue.due_in_s - wait_s) / queue.ttft_slo_s
        self._is_worth_it = self._weigh(left, queue.ttft_slo_s, float(prefill_s.sum()))

    def _left_s(self) -> float:
        """Return what Eq. 2 leaves where a hold is worth it, else infinity."""
        return super()._left_s() if self._is_worth_it else NO_TARGET

    def _weigh(self, left: Float64s, ttft_slo_s: Float64s, queue_s: float) -> bool:
        """Return whether some hold spares more answers than it makes late."""
        decoders, step_s = self._decoders, self._step_s(0)
        if not decoders.shape[1]:
            return True
        lost = _STEPS * step_s / ttft_slo_s[:, None]
        costs = self._pressed(left[:, None] - lost) - self._pressed(left[:, None])
        need = _need(decoders, np.array([0.0, queue_s]), step_s)
        late, then = _chance(decoders, need).T
        steps = np.broadcast_to(_STEPS + 1.0, (len(late), len(_STEPS)))
        # F rises, so F(min(a, b)) is the lesser of F(a) and F(b).
        spared = np.minimum(then[:, None], _chance(decoders, steps)) - late[:, None]
        worth = np.maximum(spared, 0.0).sum(0) - costs.sum(0)
        return bool(worth.max() > self._price)

    def _pressed(self, left: Float64s) -> Float64s:
        """Return G for the time that is left, as a share of the target."""
        return self._weight * np.clip(1.0 - left, 0.0, 1.0 + self._late)


def _need(decoders: Float64s, lost_s: Float64s, step_s: float) -> Float64s:
    """Return the tokens that each must have left to make up for losses.

    Args:
        decoders: float64 [5, n].
        lost_s: float64 [m].
        step_s: what a step takes.

    Returns:
        float64 [n, m].
    """
    behind_s, tpot_s = decoders[:2, :, None]
    need: Float64s = (behind_s + lost_s) / np.maximum(tpot_s - step_s, _TINY)
    return need


def _chance(decoders: Float64s, tokens: Float64s) -> Float64s:
    """Return how likely fewer tokens than these are left.

    Args:
        decoders: float64 [5, n].
        tokens: float64 [n, m].

    Returns:
        float64 [n, m].
    """
    lower, median, upper = decoders[2:, :, None]
    # Between equal percentiles there is no doubt, so none below them either.
    tail = 0.1 * (upper > lower)
    found: Float64s = (
        tail * _share(tokens, 1.0, lower)
        + (0.5 - tail) * _share(tokens, lower, median)
        + 0.4 * _share(tokens, median, upper)
        + 0.1 * _share(tokens, upper, upper + (upper - median))
    )
    return found


def _share(x: Float64s, begin: Float64s | float, end: Float64s) -> Float64s:
    """Return how much of the way from ``begin`` to ``end`` is done at ``x``."""
    share: Float64s = np.clip((x - begin) / np.maximum(end - begin, _TINY), 0.0, 1.0)
    return share
