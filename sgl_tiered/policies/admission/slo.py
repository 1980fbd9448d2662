"""Prefill as far as no decoder misses its TPOT: LayerKV's SLO-aware scheduler.

Source: LayerKV (papers: layerkv), section 3.1, Equations 1 and 2, Algorithm 1. For a
request i that decodes, with the TPOT target T_tpot, N_past tokens in T_past seconds
so far, N_future tokens still to come at least, and T_future = (time of a step) *
N_future, prefill may take

    T_allow_i = T_tpot * (N_past + N_future) - (T_past + T_future)              (1)

and requests q_1 ... q_n of the queue are admitted while

    T_prefill_1 + ... + T_prefill_n < min_i T_allow_i                           (2)

N_future is the lower bound of the predicted length less N_past, and at least 1.

Three things are added:

- The step of Eq. 1 is that of the batch as it will be: an admitted request decodes
  too, and makes every step longer.
- A decoder that will probably miss its target even if nothing is admitted does not
  count: holding others for it would cost them their targets and save nothing. That is
  so where Eq. 1 is negative at the *median* of the predicted length too, by more than
  ``HOPE`` of what the target allows in all.
- Nobody starves. A request whose prefill must begin now to meet its TTFT target, or
  that cannot meet it any more, is due: it goes to the head of the queue and is
  admitted whatever Eq. 2 says. Prefill admitted so takes ``due_share`` of the time at
  most: after s seconds of it the next one waits for s * (1 / due_share - 1).

With layer-wise memory some requests are paused (``layers/turns.py``). Prefill delays
none of them, so they do not count, and of the others only the time in which they took
part: a pause is charged to the turns, which give those it made late their room. To
hold prompts gives them none, and would hold all for whoever waited longest.

Bound: with W seconds of prefill due before a request (its own included), it has its
first token at most W / due_share + (one pass and one step) after it became due, if the
pool has room for it; a later arrival never becomes due before it. A request without a
TTFT target is due after ``hold_limit_s``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sgl_tiered.policies.admission.base import (
    NO_TARGET,
    CandidateFacts,
    Float64s,
    QueueFacts,
    RunningFacts,
    StepTime,
)

__all__ = [
    "DUE_SHARE",
    "HOLD_LIMIT_S",
    "HOPE",
    "SloAdmission",
    "allowance_s",
    "is_hopeless",
]

DUE_SHARE = 0.5
"""Of the time, for prefill of requests that are due: decoders keep half their pace."""
HOLD_LIMIT_S = 10.0
"""A person who waits longer for a first word goes away."""
HOPE = 0.1
"""Steps and lengths are predicted with errors of this size; without it a decoder with
little to spare would be given up by the first slow step, and lost by what follows."""

_NONE: Float64s = np.zeros(0)


class SloAdmission:
    """LayerKV's Algorithm 1; keeps nothing but the pass and when the next may be due.

    Args:
        due_share: of the time, for prefill that Eq. 2 would hold; above 0, 1 at most.
        hold_limit_s: how long a request without a TTFT target may be held.
    """

    name = "slo"
    needs_facts = True
    needs_queue = False

    def __init__(
        self, due_share: float = DUE_SHARE, hold_limit_s: float = HOLD_LIMIT_S
    ) -> None:
        assert 0.0 < due_share <= 1.0, due_share
        self._due_share = due_share
        self._hold_limit_s = hold_limit_s
        self._rest_until_s = -NO_TARGET
        self._now_s = 0.0
        self._spent_s = 0.0
        self._num_added = 0
        self._step_s: StepTime = lambda num_added: 0.0
        self._slack_s = self._num_future = _NONE

    def begin_pass(
        self, running: Sequence[RunningFacts], step_s: StepTime, now_s: float
    ) -> None:
        """Take in the decoders' states; O(running)."""
        self._now_s, self._spent_s, self._num_added = now_s, 0.0, 0
        self._step_s = step_s
        slack, future = [], []
        step_now_s = step_s(0)
        for facts in running:
            if facts.tpot_slo_s == NO_TARGET:
                continue
            num_future = _num_future(facts, facts.prediction.lower)
            slack_s = _slack_s(facts, num_future)
            if slack_s < step_now_s * num_future and is_hopeless(facts, step_now_s):
                continue
            slack.append(slack_s)
            future.append(num_future)
        self._slack_s = np.array(slack, np.float64) if slack else _NONE
        self._num_future = np.array(future, np.float64) if future else _NONE

    def see_queue(self, queue: QueueFacts) -> None:
        """Do nothing: Algorithm 1 looks at one request after the other."""

    def judge(self, candidate: CandidateFacts) -> float:
        """Return what Eq. 2 leaves for it; infinity for one that is due."""
        left_s = self._left_s()
        if candidate.prefill_s < left_s:
            return left_s
        is_due = candidate.is_resumed or self.due_s(candidate) <= 0.0
        if is_due and self._now_s + self._spent_s >= self._rest_until_s:
            return NO_TARGET
        return left_s

    def took(self, candidate: CandidateFacts, seconds: float) -> bool:
        """Count it, and let the next due one wait if this one was taken out of turn."""
        del candidate
        out_of_turn = seconds >= self._left_s()
        self._spent_s += seconds
        self._num_added += 1
        if out_of_turn:
            rest_s = seconds * (1.0 / self._due_share - 1.0)
            self._rest_until_s = self._now_s + self._spent_s + rest_s
        return out_of_turn

    def due_s(self, candidate: CandidateFacts) -> float:
        """Return how long its prefill may still begin later."""
        if candidate.is_resumed:
            return 0.0
        if candidate.ttft_slo_s == NO_TARGET:
            return self._hold_limit_s - candidate.waited_s
        # Due on arrival at the earliest: else one with a long prefill would be due
        # before requests that have waited.
        latest_s = max(candidate.ttft_slo_s - candidate.prefill_s, 0.0)
        return latest_s - candidate.waited_s

    def _left_s(self) -> float:
        """Return Eq. 2's right side less its left side, for one more request."""
        if not len(self._slack_s):
            return NO_TARGET
        step_s = self._step_s(self._num_added + 1)
        allowed_s = self._slack_s - step_s * self._num_future
        return float(allowed_s.min()) - self._spent_s


def allowance_s(facts: RunningFacts, step_s: float) -> float:
    """Return Eq. 1: how long one may wait and still meet its target.

    Negative where it is late at the lower bound of its length already; ``NO_TARGET``
    where it has none.

    Args:
        facts: of a request that decodes.
        step_s: of each step to come.
    """
    num_future = _num_future(facts, facts.prediction.lower)
    return _slack_s(facts, num_future) - step_s * num_future


def is_hopeless(facts: RunningFacts, step_s: float) -> bool:
    """Return whether one will miss its target even if nothing delays it any more.

    At the median of its length, by more than ``HOPE`` of what the target allows.
    """
    likely = _num_future(facts, facts.prediction.median)
    hope_s = HOPE * facts.tpot_slo_s * (facts.num_past_tokens + likely)
    return _slack_s(facts, likely) + hope_s < step_s * likely


def _num_future(facts: RunningFacts, num_tokens: int) -> int:
    """Return the tokens still to come of an answer of ``num_tokens`` in all."""
    return max(num_tokens - 1 - facts.num_past_tokens, 1)


def _slack_s(facts: RunningFacts, num_future: int) -> float:
    """Return Eq. 1 without T_future."""
    total = facts.num_past_tokens + num_future
    return facts.tpot_slo_s * total - facts.past_s
