"""Eq. 1 and 2 by hand, and what was added to them."""

import pytest

from sgl_tiered.policies.admission.base import (
    NO_TARGET,
    CandidateFacts,
    RunningFacts,
)
from sgl_tiered.policies.admission.slo import SloAdmission
from sgl_tiered.policies.length.base import LengthPrediction

STEP_S = 0.02


def decoder(past=10, past_s=0.2, tpot_slo_s=0.05, lower=51, median=61):
    prediction = LengthPrediction(lower, median, median + 10)
    return RunningFacts("d", past, past_s, tpot_slo_s, prediction)


def candidate(prefill_s=0.5, waited_s=0.0, ttft_slo_s=NO_TARGET, *, resumed=False):
    return CandidateFacts("c", waited_s, ttft_slo_s, prefill_s, is_resumed=resumed)


def begun(*running, now_s=0.0, step=lambda num_added: STEP_S, policy=None):
    policy = policy or SloAdmission()
    policy.begin_pass(running, step, now_s)
    return policy


def test_what_prefill_may_take_is_equation_1():
    """0.05 * (10 + 40) - (0.2 + 0.02 * 40) = 1.5 s; the first token counts for TTFT."""
    assert begun(decoder()).judge(candidate()) == pytest.approx(1.5)


def test_the_tightest_decoder_decides():
    """Equation 2 takes the least of all: here of one that has lost 1 s already."""
    policy = begun(decoder(), decoder(past_s=1.2), decoder(tpot_slo_s=NO_TARGET))
    assert policy.judge(candidate()) == pytest.approx(0.5)


def test_prefill_adds_up_in_a_pass():
    """Three of 0.5 s: two stay below 1.5 s, the third would reach it."""
    policy = begun(decoder())
    for wanted in (True, True, False):
        left_s = policy.judge(candidate())
        assert (candidate().prefill_s < left_s) is wanted
        if wanted:
            assert policy.took(candidate(), 0.5) is False


def test_a_new_pass_begins_with_nothing_spent():
    """What the last pass took is in the decoders' past by now."""
    policy = begun(decoder())
    policy.took(candidate(), 1.4)
    begun(decoder(), policy=policy)
    assert policy.judge(candidate()) == pytest.approx(1.5)


def test_an_answer_beyond_its_prediction_has_one_token_to_come():
    """N_future is a positive number: 0.05 * 101 - (2 + 0.02) = 3.03 s."""
    policy = begun(decoder(past=100, past_s=2.0))
    assert policy.judge(candidate()) == pytest.approx(3.03)


def test_an_admitted_request_makes_the_steps_longer():
    """A step of 20 ms and 1 ms more per request: 40 tokens cost 40 ms more each."""
    policy = begun(decoder(), step=lambda n: STEP_S + 0.001 * n)
    assert policy.judge(candidate()) == pytest.approx(1.46)
    policy.took(candidate(), 0.1)
    assert policy.judge(candidate()) == pytest.approx(1.42 - 0.1)


def test_a_batch_that_would_be_too_slow_grows_no_more():
    """With 20 decoders a step takes as long as the target: the next one is held."""
    slow = decoder(past_s=0.5)
    policy = begun(*[slow] * 20, step=lambda n: 0.0025 * (20 + n))
    assert policy.judge(candidate(prefill_s=0.01)) <= 0.0


def test_nobody_is_held_for_a_decoder_that_is_late_anyway():
    """It misses its target at the median too; another one's patience counts."""
    hopeless = decoder(past_s=10.0)
    assert begun(hopeless).judge(candidate()) == NO_TARGET
    assert begun(hopeless, decoder()).judge(candidate()) == pytest.approx(1.5)


def test_a_decoder_a_little_late_is_not_given_up():
    """0.2 s of the 2.5 s that its target allows are within what predictions err by."""
    assert begun(decoder(past_s=1.9, median=51)).judge(candidate()) < 0
    assert begun(decoder(past_s=2.0, median=51)).judge(candidate()) == NO_TARGET


def test_others_are_held_while_a_decoder_can_recover():
    """Late at its lower bound, in time if its answer is as long as the median."""
    behind = decoder(past_s=1.9, median=101)
    assert begun(behind).judge(candidate()) == pytest.approx(-0.2)


def test_who_would_miss_its_ttft_is_let_in():
    """0.5 s of prefill, a target of 2 s: it must not begin later than after 1.5 s."""
    tight = decoder(past_s=1.6)
    for waited_s, wanted in ((1.4, 0.1), (1.5, NO_TARGET), (9.0, NO_TARGET)):
        found = begun(tight).judge(candidate(waited_s=waited_s, ttft_slo_s=2.0))
        assert found == pytest.approx(wanted)


def test_who_cannot_meet_its_ttft_is_let_in_at_once():
    """5 s of prefill for a target of 2 s: waiting would only make it worse."""
    policy = begun(decoder(past_s=1.6))
    assert policy.judge(candidate(prefill_s=5.0, ttft_slo_s=2.0)) == NO_TARGET


def test_who_has_no_target_waits_within_bounds():
    """Ten seconds, then it is let in."""
    tight = decoder(past_s=1.6)
    assert begun(tight).judge(candidate(waited_s=9.9)) == pytest.approx(0.1)
    assert begun(tight).judge(candidate(waited_s=10.0)) == NO_TARGET


def test_who_lost_its_pages_is_not_held():
    """Its own TPOT is running."""
    assert begun(decoder(past_s=1.6)).judge(candidate(resumed=True)) == NO_TARGET


def test_due_prefill_takes_its_share_of_the_time():
    """After half a second of it decoders have half a second to themselves."""
    policy = begun(decoder(past_s=1.6))
    late = candidate(waited_s=9.0, ttft_slo_s=2.0)
    assert policy.judge(late) == NO_TARGET
    assert policy.took(late, 0.5) is True
    assert policy.judge(late) < 0.5, "only one in a pass"
    for now_s, wanted in ((0.5, False), (0.9, False), (1.1, True)):
        begun(decoder(past_s=1.6), now_s=now_s, policy=policy)
        assert (policy.judge(late) == NO_TARGET) is wanted


def test_who_is_due_and_fits_costs_the_next_one_nothing():
    """The rest is for those whom decoders had no patience for."""
    policy = begun(decoder())
    late = candidate(waited_s=9.0, ttft_slo_s=2.0)
    assert policy.took(late, 0.5) is False
    begun(decoder(past_s=1.6), now_s=0.5, policy=policy)
    assert policy.judge(late) == NO_TARGET
