"""The two sides that `goodput` weighs, by hand."""

import numpy as np

from sgl_tiered.policies.admission.base import (
    NO_TARGET,
    CandidateFacts,
    QueueFacts,
    RunningFacts,
)
from sgl_tiered.policies.admission.goodput import GoodputAdmission
from sgl_tiered.policies.length.base import LengthPrediction

STEP_S, TPOT_S = 0.02, 0.05
SURE = 1e-3


def decoder(past=10, past_s=0.2, lower=51, median=None, upper=None):
    """A decoder whose answer has ``lower`` tokens for sure, unless more are named."""
    median = median or lower
    prediction = LengthPrediction(lower, median, upper or median)
    return RunningFacts("d", past, past_s, TPOT_S, prediction)


def queue(*due_in_s, prefill_s=0.5, ttft_slo_s=NO_TARGET):
    num = len(due_in_s)
    return QueueFacts(
        [str(n) for n in range(num)],
        np.array(due_in_s, np.float64),
        np.full(num, ttft_slo_s),
        np.full(num, prefill_s),
    )


def left_s(running, waiting, policy=None, step=lambda num_added: STEP_S):
    """Return what a pass may take, for one that is not due."""
    policy = policy or GoodputAdmission(caution=SURE)
    policy.begin_pass(running, step, 0.0)
    policy.see_queue(waiting)
    return policy.judge(CandidateFacts("c", 0.0, NO_TARGET, 1e9))


def test_with_a_sure_length_and_nobody_pressed_it_is_equation_1():
    """0.05 * (10 + 40) - (0.2 + 0.02 * 40) = 1.5 s, by amounts a quarter apart."""
    found = left_s([decoder()], queue(*[100.0] * 8))
    assert 1.5 / 2 ** (1 / 3) <= found <= 1.5


def test_a_queue_that_harms_nobody_may_run_at_once():
    """1 s of prefill where the decoder can spare 1.5 s."""
    assert left_s([decoder()], queue(100.0, 100.0)) == NO_TARGET


def test_a_decoder_that_is_late_anyway_holds_nobody():
    """It is 10 s behind, and 40 tokens at 30 ms each cannot make that up."""
    assert left_s([decoder(past_s=10.0)], queue(100.0, 100.0)) == NO_TARGET


def test_more_waiters_than_decoders_are_not_held():
    """Each hold that could save the decoder (from 40 steps on) makes three late."""
    pressed = queue(0.5, 1.0, 1.5, prefill_s=0.5, ttft_slo_s=3.0)
    assert left_s([decoder(past_s=1.7)], pressed) == NO_TARGET


def test_fewer_waiters_than_decoders_are_held():
    """The same three, and five decoders."""
    pressed = queue(0.5, 1.0, 1.5, prefill_s=0.5, ttft_slo_s=3.0)
    assert left_s([decoder(past_s=1.7)] * 5, pressed) < 0.1


def test_waiters_that_are_late_anyway_hold_the_decoder_s_side():
    """What waits before them makes them late, so a hold takes nothing from them."""
    late = queue(0.1, 0.2, 0.3, prefill_s=5.0, ttft_slo_s=3.0)
    pressed = queue(0.1, 5.1, 10.1, prefill_s=5.0, ttft_slo_s=3.0)
    running = [decoder(past_s=1.7)] * 2
    assert left_s(running, late) < 0.1
    assert left_s(running, pressed) == NO_TARGET


def test_what_is_unlikely_to_save_anybody_is_not_held():
    """An answer of 50 to 500 tokens that needs 20 of them: a chance below the price.
    With a hundred such decoders some would be lost."""
    one = decoder(past=0, past_s=0.0, lower=51, median=301, upper=501)
    wide = queue(*[100.0] * 4, prefill_s=0.15)
    assert left_s([one], wide) == NO_TARGET
    assert left_s([one] * 100, wide) < 0.1


def test_a_batch_that_would_be_too_slow_grows_no_more():
    """A step of the grown batch takes as long as the target."""
    slow = [decoder(past_s=0.5)] * 20
    assert left_s(slow, queue(100.0), step=lambda n: 0.049 + 0.002 * n) < 0.01


def test_who_is_due_is_let_in_for_its_share():
    """As in ``slo``: with half of the time, and only once in a pass."""
    policy = GoodputAdmission(caution=SURE)
    running, late = [decoder(past_s=1.7)] * 5, CandidateFacts("c", 9.0, 2.0, 0.5)
    left_s(running, queue(100.0), policy)
    assert policy.judge(late) == NO_TARGET
    assert policy.took(late, 0.5) is True
    assert policy.judge(late) < 0.5
    for now_s, wanted in ((0.9, False), (1.1, True)):
        policy.begin_pass(running, lambda num_added: STEP_S, now_s)
        policy.see_queue(queue(100.0))
        assert (policy.judge(late) == NO_TARGET) is wanted
