"""The two sides that `goodput` weighs, by hand."""

import numpy as np
import pytest

from sgl_tiered.policies.admission.base import (
    NO_TARGET,
    CandidateFacts,
    QueueFacts,
    RunningFacts,
)
from sgl_tiered.policies.admission.goodput import GoodputAdmission
from sgl_tiered.policies.length.base import LengthPrediction

STEP_S, TPOT_S = 0.02, 0.05


def decoder(past=10, past_s=0.2, lower=51, median=None, upper=None):
    """A decoder whose answer has ``lower`` tokens for sure, unless more are named."""
    median = median or lower
    prediction = LengthPrediction(lower, median, upper or median)
    return RunningFacts("d", past, past_s, TPOT_S, prediction)


def queue(*due_in_s, prefill_s=4.0, ttft_slo_s=3.0):
    num = len(due_in_s)
    return QueueFacts(
        [str(n) for n in range(num)],
        np.array(due_in_s, np.float64),
        np.full(num, ttft_slo_s),
        np.full(num, prefill_s),
    )


def left_s(running, waiting, policy=None, now_s=0.0):
    """Return what a pass may take, for one that is not due."""
    policy = policy or GoodputAdmission()
    policy.begin_pass(running, lambda num_added: STEP_S, now_s)
    policy.see_queue(waiting)
    return policy.judge(CandidateFacts("c", 0.0, NO_TARGET, 1e9))


PATIENT = queue(100.0, ttft_slo_s=NO_TARGET)


def test_where_a_hold_pays_it_is_equation_2():
    """0.05 * (10 + 40) - (0.2 + 0.02 * 40) = 1.5 s, and 4 s wait with no hurry."""
    assert left_s([decoder()], PATIENT) == pytest.approx(1.5)


def test_a_queue_that_harms_nobody_is_not_held():
    """1 s of prefill where the decoder can spare 1.5 s."""
    assert left_s([decoder()], queue(100.0, prefill_s=1.0)) == NO_TARGET


def test_all_that_waits_counts_together():
    """Five prompts of 1 s each: any of them could go, and all would make it late."""
    several = queue(*[100.0] * 5, prefill_s=1.0, ttft_slo_s=NO_TARGET)
    assert left_s([decoder()], several) == pytest.approx(1.5)


def test_a_decoder_that_is_late_anyway_holds_nobody():
    """It is 9.5 s behind, and 40 tokens at 30 ms each cannot make that up."""
    assert left_s([decoder(past_s=10.0)], PATIENT) == NO_TARGET


@pytest.mark.parametrize(("num", "is_held"), [(1, False), (2, True)])
def test_decoders_are_counted_against_those_who_wait(num, is_held):
    """64 steps of 20 ms spare each decoder, and cost a waiting one 3 * 1.28 / 3."""
    found = left_s([decoder()] * num, queue(0.0))
    assert (found != NO_TARGET) is is_held


@pytest.mark.parametrize(("num", "is_held"), [(1, True), (2, False)])
def test_those_who_wait_are_counted_against_decoders(num, is_held):
    """Two decoders; the second request is late by less than its target."""
    found = left_s([decoder()] * 2, queue(*[1.5] * num, prefill_s=3.0))
    assert (found != NO_TARGET) is is_held


def test_who_is_hopelessly_late_is_not_spared():
    """More than its target too late, by itself or by what waits before it."""
    assert left_s([decoder()], queue(-3.1)) == pytest.approx(1.5)
    behind = queue(-3.1, *[0.0] * 5, prefill_s=3.1)
    assert left_s([decoder()], behind) == pytest.approx(1.5)


def test_an_unlikely_loss_is_not_held_against_anybody():
    """It needs 20 tokens to make 0.6 s up; a chance of 4 % that it has fewer. Of ten
    such decoders one may be lost."""
    one = decoder(past=0, past_s=0.0, lower=51, median=301, upper=501)
    waiting = queue(100.0, prefill_s=0.6, ttft_slo_s=NO_TARGET)
    assert left_s([one], waiting) == NO_TARGET
    assert left_s([one] * 10, waiting) == pytest.approx(1.5)


def test_who_is_due_is_let_in_for_its_share():
    """As in ``slo``: with half of the time, and only once in a pass."""
    policy = GoodputAdmission()
    running, late = [decoder(past_s=1.7)] * 5, CandidateFacts("c", 9.0, 2.0, 0.5)
    assert left_s(running, PATIENT, policy) < 0.1
    assert policy.judge(late) == NO_TARGET
    assert policy.took(late, 0.5) is True
    assert policy.judge(late) < 0.5
    for now_s, wanted in ((0.9, False), (1.1, True)):
        left_s(running, PATIENT, policy, now_s)
        assert (policy.judge(late) == NO_TARGET) is wanted
