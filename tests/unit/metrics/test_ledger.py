"""The ledger of requests: each second of waiting has one reason; memory is bounded."""

from __future__ import annotations

import pytest

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.metrics import ledger as ledger_module
from sgl_tiered.metrics.ledger import RequestLedger, WaitReason


@pytest.fixture
def clock():
    return ManualClock(100.0)


@pytest.fixture
def ledger(clock):
    return RequestLedger(4, clock)


def waits(ledger, rid):
    return ledger.get(rid)["wait"]["by_reason_s"]


def test_a_request_that_nobody_looked_at_waits_for_the_pass(ledger, clock):
    """Until the first pass after it came has ended, it waits for the one that runs."""
    ledger.pass_ended(WaitReason.BUDGET)
    ledger.queued("a", 10)
    clock.advance(2.0)
    ledger.admitted("a")
    assert waits(ledger, "a") == {"pass": 2.0}


def test_the_end_of_a_search_is_the_reason_of_all_that_wait(ledger, clock):
    """One note per pass is for all who were not looked at, from their own time on."""
    ledger.queued("a", 10)
    ledger.pass_ended(WaitReason.BUDGET)
    clock.advance(1.0)
    ledger.queued("b", 10)
    clock.advance(1.0)
    ledger.pass_ended(WaitReason.BUDGET)
    clock.advance(1.0)
    ledger.pass_ended(WaitReason.SLOT)
    clock.advance(0.5)
    for rid in "ab":
        ledger.admitted(rid)
    assert waits(ledger, "a") == {"budget": 3.0, "slot": 0.5}
    assert waits(ledger, "b") == {"budget": 1.0, "pass": 1.0, "slot": 0.5}


def test_a_note_of_its_own_lasts_until_the_next_pass_ends(ledger, clock):
    """A request that is passed over for its loads waits for them, and only as long as
    every pass says so again."""
    ledger.queued("a", 10)
    ledger.queued("b", 10)
    ledger.waits("a", WaitReason.LOAD)
    ledger.pass_ended(WaitReason.BUDGET)
    clock.advance(1.0)
    ledger.waits("a", WaitReason.LOAD)
    ledger.pass_ended(WaitReason.BUDGET)
    clock.advance(1.0)
    ledger.pass_ended(WaitReason.BUDGET)
    clock.advance(1.0)
    assert waits(ledger, "a") == {"budget": 1.0, "load": 2.0}
    assert waits(ledger, "b") == {"budget": 3.0}


def test_a_new_reason_ends_the_old_one_at_once(ledger, clock):
    """Each note is about the time after it."""
    ledger.queued("a", 10)
    ledger.waits("a", WaitReason.SLO)
    clock.advance(1.0)
    ledger.waits("a", WaitReason.LOAD)
    clock.advance(2.0)
    ledger.admitted("a")
    assert waits(ledger, "a") == {"slo": 1.0, "load": 2.0}


def test_who_is_overtaken_waits_for_the_order(ledger, clock):
    """The time of a pass with one that came later belongs to the order of the queue."""
    for rid in "abc":
        ledger.queued(rid, 10)
    ledger.pass_ended(WaitReason.PASS)
    ledger.admitted("b")
    ledger.pass_ended(WaitReason.PASS)
    clock.advance(1.0)
    ledger.pass_ended(WaitReason.BUDGET)
    clock.advance(1.0)
    assert waits(ledger, "a") == {"order": 1.0, "budget": 1.0}
    assert waits(ledger, "c") == {"pass": 1.0, "budget": 1.0}


def test_a_retracted_request_waits_again(ledger, clock):
    """Its second wait adds to the first; its first token stays the first."""
    ledger.queued("a", 10)
    clock.advance(1.0)
    ledger.admitted("a")
    clock.advance(1.0)
    ledger.first_token("a")
    clock.advance(5.0)
    ledger.queued("a", 10)
    ledger.pass_ended(WaitReason.BUDGET)
    clock.advance(3.0)
    ledger.admitted("a")
    ledger.first_token("a")
    ledger.finished("a")
    told = ledger.get("a")
    assert told["wait"] == {"total_s": 4.0, "by_reason_s": {"pass": 1.0, "budget": 3.0}}
    assert told["ttft"]["real_s"] == 2.0
    # Whoever reads the prediction is told that it knows nothing of room.
    assert "room in the pool" in told["ttft"]["predicted_without"]
    assert told["total_s"] == 10.0
    assert told["retractions"] == 1


def test_the_prediction_adds_up_the_work_before(ledger, clock):
    """What waits counts whole, what is being computed counts what is left of it."""
    ledger.queued("a", 10, service_s=2.0)
    ledger.queued("b", 10, service_s=3.0)
    ledger.admitted("a")
    clock.advance(0.5)
    ledger.queued("c", 10, service_s=1.0)
    ledger.first_token("a")
    ledger.finished("b", is_aborted=True)
    ledger.queued("d", 10, service_s=4.0)
    predicted = {rid: ledger.get(rid)["ttft"]["predicted_s"] for rid in "abcd"}
    assert predicted == {"a": 2.0, "b": 5.0, "c": 5.5, "d": 5.0}


def test_states_and_details_are_told(ledger, clock):
    """A request is waiting, running, then finished or aborted, with what was noted."""
    ledger.queued("a", 7)
    assert ledger.get("a")["state"] == "waiting"
    ledger.admitted("a")
    ledger.note("a", missing=[])
    assert ledger.get("a")["state"] == "running"
    ledger.finished("a", {"tokens": {"computed": 7}})
    ledger.note("a", edges={})
    told = ledger.get("a")
    assert told["state"] == "finished"
    assert told["prompt_tokens"] == 7
    assert (told["missing"], told["tokens"], told["edges"]) == ([], {"computed": 7}, {})
    ledger.queued("b", 7)
    ledger.finished("b", is_aborted=True)
    assert ledger.get("b")["state"] == "aborted"
    assert ledger.get("b")["ttft"]["real_s"] is None
    assert ledger.get("nobody") is None


def test_only_the_last_are_kept(ledger, clock):
    """Of six that ended four are known, the latest first, or the slowest first."""
    for number, rid in enumerate("abcdef"):
        ledger.queued(rid, 1)
        ledger.admitted(rid)
        clock.advance(1.0 + (number * 7) % 5)
        ledger.first_token(rid)
        ledger.finished(rid)
    assert [told["rid"] for told in ledger.recent(9)] == ["f", "e", "d", "c"]
    assert [told["rid"] for told in ledger.recent(1)] == ["f"]
    assert ledger.recent(0) == []
    assert ledger.get("a") is None
    assert [told["rid"] for told in ledger.slowest(2)] == ["c", "e"]


def test_nothing_is_kept_where_nothing_is_to_be_kept(clock):
    """With zero to keep every call is without effect."""
    ledger = RequestLedger(0, clock)
    ledger.queued("a", 1)
    ledger.waits("a", WaitReason.LOAD)
    ledger.pass_ended(WaitReason.BUDGET)
    ledger.admitted("a")
    ledger.first_token("a")
    ledger.finished("a")
    assert not ledger.is_on
    assert ledger.get("a") is None
    assert ledger.recent(5) == []


def test_many_passes_are_added_up_in_bounded_memory(ledger, clock, monkeypatch):
    """When more passes are remembered than may be, what they say is kept as sums."""
    monkeypatch.setattr(ledger_module, "_MAX_SEGMENTS", 8)
    ledger.queued("a", 1)
    reasons = (WaitReason.BUDGET, WaitReason.SLOT)
    for number in range(101):
        ledger.pass_ended(reasons[number % 2])
        clock.advance(1.0)
    assert len(ledger._segments) <= 8
    assert waits(ledger, "a") == {"budget": 51.0, "slot": 50.0}


def test_requests_without_an_end_are_left_behind(ledger, monkeypatch):
    """However many requests never end, only so many are followed."""
    monkeypatch.setattr(ledger_module, "_MAX_LIVE", 10)
    for number in range(50):
        ledger.queued(str(number), 1, service_s=1.0)
    assert ledger.get("39") is None
    assert ledger.get("49")["ttft"]["predicted_s"] == pytest.approx(11.0)
