"""Parts of prompts, and who is brought to the head."""

from dataclasses import replace

import pytest

from sgl_tiered.policies.admission.base import NO_TARGET, RunningFacts
from sgl_tiered.policies.admission.control import AdmissionControl, Waiter
from sgl_tiered.policies.admission.goodput import GoodputAdmission
from sgl_tiered.policies.admission.none import NoAdmission
from sgl_tiered.policies.admission.pieces import piece_tokens
from sgl_tiered.policies.admission.slo import SloAdmission
from sgl_tiered.policies.length.base import LengthPrediction

PAGE = 16


def pass_s(num_tokens):
    """A millisecond per token."""
    return num_tokens / 1_000


def control(policy=None, least=64):
    return AdmissionControl(policy or SloAdmission(), PAGE, least)


def waiter(rid="w", arrival_s=0.0, ttft_slo_s=NO_TARGET, prefill_s=0.5):
    return Waiter(rid, arrival_s, ttft_slo_s, prefill_s)


def begin(subject, slack_s, now_s=100.0, tpot_slo_s=0.05):
    """Begin a pass in which one decoder can spare ``slack_s``."""
    past_s = 0.05 * 50 - 0.02 * 40 - slack_s
    decoder = RunningFacts.at(
        now_s, "d", 11, now_s - past_s, tpot_slo_s, LengthPrediction(51, 51, 51)
    )
    subject.begin_pass([decoder], lambda num_added: 0.02, now_s)


def test_a_prompt_that_fits_is_not_cut():
    """All of it, whether or not that is a number of pages."""
    assert piece_tokens(pass_s, 333, 0.4, PAGE, 64) == 333


@pytest.mark.parametrize(
    ("allowed_s", "wanted"),
    [(0.2, 192), (0.1931, 192), (0.192, 176), (0.07, 64), (0.06, 0), (0.0, 0)],
)
def test_a_piece_is_the_most_pages_that_fit(allowed_s, wanted):
    """Whole pages strictly below the time that is left; not less than is worth it."""
    assert piece_tokens(pass_s, 333, allowed_s, PAGE, 64) == wanted


def test_a_piece_of_a_short_prompt_is_not_all_of_it():
    """One page does not fit, so nothing does: there is no empty piece."""
    assert piece_tokens(pass_s, 10, 0.005, PAGE, 1) == 0


def test_a_prompt_is_cut_to_what_decoders_can_spare():
    """0.3 s left: 288 of 500 tokens; and after them nothing more in this pass."""
    subject = control()
    begin(subject, 0.3)
    assert subject.fit(waiter(arrival_s=99.0), pass_s, 500, can_cut=True) == 288
    subject.commit(waiter().rid)
    assert subject.fit(waiter("x", 99.0), pass_s, 500, can_cut=True) == 0
    assert (subject.counts.cut, subject.counts.held) == (1, 1)


def test_a_prompt_that_cannot_be_cut_is_held():
    """Without chunked prefill it is all or nothing."""
    subject = control()
    begin(subject, 0.3)
    assert subject.fit(waiter(arrival_s=99.0), pass_s, 500, can_cut=False) == 0
    assert subject.counts.hurried == 0


def test_who_is_due_gets_all_and_is_counted():
    """The decoders' patience is over, its own too."""
    subject = control()
    begin(subject, 0.0)
    late = waiter(arrival_s=90.0, ttft_slo_s=1.0)
    assert subject.fit(late, pass_s, 500, can_cut=True) == 500
    subject.commit(late.rid)
    assert subject.counts.hurried == 1


def test_what_is_asked_for_is_spent_once_it_joins_the_pass():
    """However often; and nothing of one that is let in and does not join."""
    subject = control()
    begin(subject, 0.3)
    for rid in ("a", "a", "b"):
        asked = waiter(rid, arrival_s=99.0)
        assert subject.fit(asked, pass_s, 500, can_cut=True) == 288
    subject.commit("a")
    assert subject.counts.cut == 0, "b was let in last"
    assert subject.fit(asked, pass_s, 500, can_cut=True) == 288
    subject.commit("b")
    subject.commit("b")
    assert subject.counts.cut == 1
    assert subject.fit(asked, pass_s, 500, can_cut=True) == 0


def test_no_admission_lets_all_in_whole():
    """And need not be asked."""
    subject = control(NoAdmission())
    assert not subject.is_on
    begin(subject, 0.0)
    assert subject.fit(waiter(), pass_s, 500, can_cut=True) == 500


def test_the_most_overdue_is_found():
    """By when its prefill had to begin, not by its arrival."""
    subject = control()
    begin(subject, 0.0)
    waiting = [
        waiter("a", 90.0, 20.0),
        waiter("b", 95.0, 3.0),
        waiter("c", 96.0, 1.0),
        waiter("d", 80.0, 30.0),
    ]
    rids = [one.rid for one in waiting]
    assert subject.first_due(rids, waiting.__getitem__) == 2
    del waiting[2], rids[2]
    assert subject.first_due(rids, waiting.__getitem__) == 1


def test_nobody_is_due_yet():
    """All have time; and of two that are due alike the one ahead is first."""
    subject = control()
    begin(subject, 0.0)
    waiting = [waiter("a", 99.0, 20.0), waiter("b", 99.0, 20.0)]
    rids = ["a", "b"]
    assert subject.first_due(rids, waiting.__getitem__) is None
    begin(subject, 0.0, now_s=200.0)
    assert subject.first_due(rids, waiting.__getitem__) == 0


def test_the_queue_is_told_to_who_wants_it():
    """Times from now on; one that decoded before has no TTFT to miss any more."""
    policy = GoodputAdmission()
    told = []
    policy.see_queue = told.append
    subject = control(policy)
    begin(subject, 0.0)
    waiting = [
        waiter("a", 99.0, 20.0),
        replace(waiter("b", 90.0, 20.0, 2.0), is_resumed=True),
    ]
    subject.see_queue(["a", "b"], waiting.__getitem__)
    subject.see_queue([], waiting.__getitem__)
    assert list(told[0].rids) == ["a", "b"]
    assert told[0].due_in_s.tolist() == [18.5, 0.0]
    assert told[0].ttft_slo_s.tolist() == [20.0, NO_TARGET]
    assert told[0].prefill_s.tolist() == [0.5, 2.0]
    assert told[1].due_in_s.shape == (0,)


def test_the_queue_is_not_looked_at_for_others():
    """Algorithm 1 needs no more than one candidate."""
    subject = control()
    begin(subject, 0.0)
    subject.see_queue(["a"], pytest.fail)


def test_due_times_of_those_who_left_are_forgotten():
    """Memory is bounded by the queue, not by the server's life."""
    subject = control()
    begin(subject, 0.0)
    for number in range(1_000):
        one = waiter(f"r{number}", 99.0, 20.0)
        subject.first_due([one.rid], lambda position, one=one: one)
    assert len(subject._waiting) < 100
    subject.forget("r999")
    assert "r999" not in subject._waiting
