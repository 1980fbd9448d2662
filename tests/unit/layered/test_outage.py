"""Copies that fail are told once, tried ever less often, and counted."""

from __future__ import annotations

import logging

import pytest

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.layered.outage import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    QUIET_S,
    Outage,
)

ERROR = OSError("no")


def given_up(outage: Outage) -> None:
    """Let a copy fail for good."""
    outage.failed(ERROR, is_last=False)
    outage.failed(ERROR, is_last=True)


def test_pauses_double_up_to_a_bound() -> None:
    """By the clock, from the last copy that was given up."""
    clock = ManualClock()
    outage = Outage("to the host", clock)
    for number in range(10):
        given_up(outage)
        pause_s = min(FIRST_PAUSE_S * 2**number, LONGEST_PAUSE_S)
        clock.advance(0.99 * pause_s)
        assert outage.holds_back
        clock.advance(0.02 * pause_s)
        assert not outage.holds_back
    assert (outage.num_failed, outage.num_outages) == (20, 1)


def test_what_was_queued_before_does_not_lengthen_the_pause() -> None:
    """A burst of failures is one."""
    clock = ManualClock()
    outage = Outage("to the host", clock)
    for _ in range(100):
        given_up(outage)
    clock.advance(FIRST_PAUSE_S)
    assert not outage.holds_back
    assert outage.lasts


def test_a_success_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    """The next outage begins with the first pause; each is told once, if at all."""
    clock = ManualClock()
    outage = Outage("to the host", clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            given_up(outage)
            clock.advance(1.0)
        outage.succeeded()
        outage.succeeded()
        assert not outage.lasts
        assert not outage.holds_back
        # It comes and goes: once told is enough.
        given_up(outage)
        clock.advance(FIRST_PAUSE_S)
        assert not outage.holds_back
        outage.succeeded()
    assert [record.message for record in caplog.records] == [
        "copies of layers to the host fail, and are tried again from time to time: "
        "OSError('no')",
        "copies of layers to the host work again after 3.0 s",
    ]
    assert outage.num_outages == 2
    clock.advance(QUIET_S)
    given_up(outage)
    assert len(caplog.records) == 3


def test_one_failure_is_no_outage(caplog: pytest.LogCaptureFixture) -> None:
    """The second attempt may work: nothing is told, nothing held back."""
    outage = Outage("to the host", ManualClock())
    with caplog.at_level(logging.WARNING):
        outage.failed(ERROR, is_last=False)
        outage.succeeded()
    assert not outage.lasts
    assert outage.num_failed == 1
    assert not caplog.records
