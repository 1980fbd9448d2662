"""Nobody starves under the SLO admission: the bound that its docstring states."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_tiered.policies.admission.base import (
    NO_TARGET,
    CandidateFacts,
    QueueFacts,
    RunningFacts,
)
from sgl_tiered.policies.admission.goodput import GoodputAdmission
from sgl_tiered.policies.admission.slo import SloAdmission
from sgl_tiered.policies.length.base import LengthPrediction

STEP_S = 0.03
HOLD_LIMIT_S = 10.0

Request = tuple[float, float, float]
"""Gap to the arrival before, TTFT target, seconds of prefill."""

requests = st.lists(
    st.tuples(
        st.floats(0.0, 2.0),
        st.sampled_from([0.5, 2.0, NO_TARGET]),
        st.floats(0.01, 3.0),
    ),
    min_size=1,
    max_size=25,
)


def impatient(median: int) -> RunningFacts:
    """A decoder that can spare nothing, ever, and is never given up."""
    past = 100
    past_s = 0.05 * (past + 1) - STEP_S
    prediction = LengthPrediction(101, median, 2 * median - 101)
    return RunningFacts("d", past, past_s, 0.05, prediction)


def queue_of(waiting: list[CandidateFacts], policy: SloAdmission) -> QueueFacts:
    """Return what the policy is told of them."""
    return QueueFacts(
        [one.rid for one in waiting],
        np.array([policy.due_s(one) for one in waiting]),
        np.array([one.ttft_slo_s for one in waiting]),
        np.array([one.prefill_s for one in waiting]),
    )


@pytest.mark.parametrize(
    ("kind", "median"), [(SloAdmission, 10_000), (GoodputAdmission, 101)]
)
@given(requests, st.sampled_from([0.25, 0.5, 0.8, 1.0]))
def test_waiting_is_bounded(
    kind: type[SloAdmission], median: int, drawn: list[Request], due_share: float
) -> None:
    """Each has its first token W / share + a pass and a step after it became due.

    The decoders never have time for anyone, so under ``slo`` all are let in because
    they are due, and under ``goodput`` because of that or because too many wait.
    """
    policy = kind(due_share=due_share, hold_limit_s=HOLD_LIMIT_S)
    arrivals, at_s = [], 0.0
    for gap_s, ttft_s, prefill_s in drawn:
        at_s += gap_s
        arrivals.append((at_s, ttft_s, prefill_s))
    due_at = [
        arrival_s
        + (HOLD_LIMIT_S if ttft_s == NO_TARGET else max(ttft_s - prefill_s, 0.0))
        for arrival_s, ttft_s, prefill_s in arrivals
    ]
    longest_s = max(prefill_s for _, _, prefill_s in arrivals)
    ended: dict[int, float] = {}
    now_s = 0.0
    while len(ended) < len(arrivals):
        waiting = [
            n
            for n, (arrival_s, _, _) in enumerate(arrivals)
            if arrival_s <= now_s and n not in ended
        ]

        def facts(n: int, now_s: float = now_s) -> CandidateFacts:
            arrival_s, ttft_s, prefill_s = arrivals[n]
            return CandidateFacts(str(n), now_s - arrival_s, ttft_s, prefill_s)

        policy.begin_pass([impatient(median)], lambda num_added: STEP_S, now_s)
        waiting.sort(key=lambda n: (policy.due_s(facts(n)), n))
        policy.see_queue(queue_of([facts(n) for n in waiting], policy))
        spent_s = 0.0
        for n in waiting:
            if policy.judge(facts(n)) <= facts(n).prefill_s:
                break
            was_due = policy.took(facts(n), facts(n).prefill_s)
            assert was_due or kind is GoodputAdmission
            spent_s += facts(n).prefill_s
            ended[n] = now_s + spent_s
        now_s += spent_s or STEP_S
        assert now_s < 1e5, "somebody is never let in"
    for n, end_s in ended.items():
        # W: what is due before it, and what was under way when it became due.
        before_s = sum(
            arrivals[m][2]
            for m in ended
            if due_at[m] <= due_at[n] and ended[m] > due_at[n] and m != n
        )
        work_s = before_s + arrivals[n][2] + longest_s
        assert end_s <= due_at[n] + work_s / due_share + 2 * STEP_S * len(ended) + 1e-6


@given(
    st.lists(st.tuples(st.integers(0, 50), st.floats(0.0, 3.0)), max_size=20),
    st.floats(0.001, 1.0),
)
def test_what_eq_2_admits_makes_nobody_late(
    states: list[tuple[int, float]], prefill_s: float
) -> None:
    """A decoder in time at its lower bound still is after what was not due."""
    lower = 60
    running = [
        RunningFacts(str(n), past, past_s, 0.05, LengthPrediction(lower, 80, 100))
        for n, (past, past_s) in enumerate(states)
    ]
    policy = SloAdmission()
    policy.begin_pass(running, lambda num_added: STEP_S, 0.0)
    one = CandidateFacts("c", 0.0, NO_TARGET, prefill_s)
    if policy.judge(one) <= prefill_s:
        return
    for facts in running:
        left = lower - 1 - facts.num_past_tokens
        ends_s = facts.past_s + left * STEP_S
        target_s = facts.tpot_slo_s * (lower - 1)
        if ends_s <= target_s:
            assert ends_s + prefill_s <= target_s + 1e-9
