"""Holds prefill only while that harms fewer requests than prefill would.

Source: ours, on top of LayerKV's rule (``slo.py``, whose Eq. 1 this keeps per decoder).
Eq. 2 takes the least patient of all decoders: among hundreds there is always one, and
for its sake a whole queue misses its TTFT. Here both sides are counted.

A decoder that is x seconds behind its target (x < 0: ahead) and loses d seconds more
still meets it if R tokens are left in which to make that up,

    x + d + T_step * R <= T_tpot * R,      R >= need(d) = (x + d) / (T_tpot - T_step),

which is Eq. 1 solved for the length. The predicted length has a distribution F, drawn
through its three percentiles, so the decoder misses with the chance F(need(d)). If p
seconds of prefill wait until n more steps are done, it is those answers that end within
them that are spared. Holding for n steps therefore saves

    B(p, n) = sum_i max(0, F_i(min(need_i(p), n + 1)) - F_i(need_i(0)))

answers: none of a decoder that is late anyway, none of one that has time enough. It
costs those that wait. One that must begin in s seconds to meet its TTFT target, what
waits before it counted, is late with a chance taken as

    G(s) = 1 - s / (caution * T_ttft), between 0 and 1
    C(n) = sum_k G(s_k - n * T_step) - G(s_k)

so one that is late anyway costs nothing either, and one that has just come little. A
pass takes as much prefill p as leaves

    max_n B(p, n) - C(n) <= price                           n = 1, 2, 4 ... 128

``price`` stands for what is not seen: smaller batches, and requests yet to come. The
rest is as in ``slo.py``: who is due is let in for ``due_share`` of the time, with the
bound on waiting that is proven there.
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

__all__ = ["CAUTION", "PRICE", "GoodputAdmission"]

CAUTION = 0.5
"""Of a TTFT target: one that has this much left waits without risk."""
PRICE = 0.1
"""Answers that a hold must save more than it costs: as Eq. 2 with one decoder, whose
lower bound is the tenth percentile."""

_STEPS: Float64s = np.exp2(np.arange(8, dtype=np.float64))
_PARTS: Float64s = np.exp2(np.linspace(-8.0, 0.0, 25))
"""Of all that waits, the amounts of prefill that are looked at."""
_LEAST_S = 1.0
_TINY = 1e-9


class GoodputAdmission(SloAdmission):
    """Weighs decoders against waiting requests.

    Args:
        caution: share of a TTFT target; above 0.
        price: answers; 0 or more.
        due_share, hold_limit_s: of ``SloAdmission``.
    """

    name = "goodput"
    needs_queue = True

    def __init__(
        self,
        caution: float = CAUTION,
        price: float = PRICE,
        due_share: float = DUE_SHARE,
        hold_limit_s: float = HOLD_LIMIT_S,
    ) -> None:
        super().__init__(due_share, hold_limit_s)
        assert caution > 0.0, caution
        self._caution, self._price = caution, price
        # Rows: seconds behind, target, tokens left by the three percentiles.
        self._decoders: Float64s = np.zeros((5, 0))
        # Rows: seconds until each must begin, seconds over which it becomes pressed.
        self._waiters: Float64s = np.zeros((2, 0))
        self._queue_s = 0.0
        self._allowed_s = NO_TARGET
        self._allowed_for = 0

    def begin_pass(
        self, running: Sequence[RunningFacts], step_s: StepTime, now_s: float
    ) -> None:
        """Take in the decoders' states; O(running)."""
        self._now_s, self._spent_s, self._num_added = now_s, 0.0, 0
        self._step_s = step_s
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
        self._waiters, self._queue_s = np.zeros((2, 0)), 0.0
        self._allowed_s, self._allowed_for = NO_TARGET, 0

    def see_queue(self, queue: QueueFacts) -> None:
        """Take in who waits; O(waiting)."""
        before_s = np.cumsum(queue.prefill_s) - queue.prefill_s
        self._waiters = np.stack(
            [queue.due_in_s - before_s, self._caution * queue.ttft_slo_s]
        )
        self._queue_s = float(queue.prefill_s.sum())
        self._allowed_s, self._allowed_for = NO_TARGET, 0

    def _left_s(self) -> float:
        """Return what the pass may still take, for one more request."""
        if not self._decoders.shape[1]:
            return NO_TARGET
        # Steps grow slowly with the batch, so it is enough to look again now and then.
        if self._num_added >= 2 * self._allowed_for or not self._allowed_for:
            self._allowed_for = self._num_added + 1
            self._allowed_s = min(self._allowed_s, self._allowed())
        return self._allowed_s - self._spent_s

    def _allowed(self) -> float:
        """Return how much prefill in all harms no more than it helps."""
        decoders, step_s = self._decoders, self._step_s(0)
        steps_s = _STEPS * step_s
        due_in_s, ramp_s = self._waiters[:, self._num_added :]
        costs = _pressed(due_in_s[:, None] - steps_s, ramp_s[:, None]).sum(0)
        costs -= _pressed(due_in_s, ramp_s).sum()
        amounts = _PARTS * max(self._queue_s, 2.0 * self._spent_s, _LEAST_S)
        grown_s = self._step_s(self._num_added + 1)
        late = _chance(decoders, _need(decoders, np.zeros(1), step_s))
        then = _chance(decoders, _need(decoders, amounts, grown_s))
        ended = _chance(
            decoders, np.broadcast_to(_STEPS + 1.0, (len(late), len(_STEPS)))
        )
        # F rises, so F(min(a, b)) is the lesser of F(a) and F(b).
        saved = np.minimum(then[:, :, None], ended[:, None, :]) - late[:, :, None]
        worth = np.maximum(saved, 0.0).sum(0) - costs
        is_held = worth.max(1) > self._price
        if not is_held.any():
            return NO_TARGET
        first = int(is_held.argmax())
        return float(amounts[first - 1]) if first else 0.0


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


def _pressed(left_s: Float64s, ramp_s: Float64s) -> Float64s:
    """Return how likely one with so many seconds left is late."""
    chance: Float64s = np.clip(1.0 - left_s / ramp_s, 0.0, 1.0)
    return chance
