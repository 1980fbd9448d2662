"""The ledger of requests under any order of notes: waits by reason are the wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.metrics import ledger as ledger_module
from sgl_tiered.metrics.ledger import RequestLedger, WaitReason

RIDS = st.sampled_from("abcde")
REASONS = st.sampled_from(WaitReason)
STEPS = st.one_of(
    st.tuples(st.just("queued"), RIDS),
    st.tuples(st.just("waits"), RIDS, REASONS),
    st.tuples(st.just("pass"), REASONS),
    st.tuples(st.just("admitted"), RIDS),
    st.tuples(st.just("first"), RIDS),
    st.tuples(st.just("finished"), RIDS),
    st.tuples(st.just("look"), RIDS),
    st.tuples(st.just("advance"), st.integers(1, 1000)),
)


class Model:
    """What a request's time in the queue must be: from being queued to leaving it."""

    def __init__(self):
        self.since_s = {}
        self.total_s = {}
        self.live = set()

    def queued(self, rid, now_s):
        if rid not in self.live:
            self.live.add(rid)
            self.total_s[rid] = 0.0
        self.since_s.setdefault(rid, now_s)

    def left(self, rid, now_s):
        if rid in self.since_s:
            self.total_s[rid] += now_s - self.since_s.pop(rid)

    def wait_s(self, rid, now_s):
        return self.total_s[rid] + now_s - self.since_s.get(rid, now_s)


@given(st.lists(STEPS, max_size=120), st.integers(2, 6))
def test_waits_by_reason_add_up_to_the_time_in_the_queue(steps, max_segments):
    """Whatever is noted in whatever order: no second is lost or counted twice, sums of
    predicted work end at nothing, and every request is told of."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger_module, "_MAX_SEGMENTS", max_segments)
        clock, model = ManualClock(), Model()
        ledger = RequestLedger(100, clock)
        for name, *values in steps:
            now_s = clock.now()
            match name:
                case "queued":
                    ledger.queued(values[0], 1, service_s=0.25)
                    model.queued(values[0], now_s)
                case "waits":
                    ledger.waits(*values)
                case "pass":
                    ledger.pass_ended(values[0])
                case "admitted":
                    ledger.admitted(values[0])
                    model.left(values[0], now_s)
                case "first":
                    ledger.first_token(values[0])
                case "finished":
                    ledger.finished(values[0])
                    model.left(values[0], now_s)
                    model.live.discard(values[0])
                case "look":
                    ledger.get(values[0])
                case _:
                    clock.advance(values[0] / 64)
        for rid in model.total_s:
            told = ledger.get(rid)
            wait_s = model.wait_s(rid, clock.now())
            assert told["wait"]["total_s"] == pytest.approx(wait_s)
            parts = sum(told["wait"]["by_reason_s"].values())
            assert parts == pytest.approx(wait_s)
        for rid in list(model.live):
            ledger.finished(rid)
        ledger.queued("last", 1, service_s=3.0)
        assert ledger.get("last")["ttft"]["predicted_s"] == pytest.approx(3.0)
