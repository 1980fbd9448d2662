"""The circuit breaker."""

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.tiers.breaker import CircuitBreaker


def breaker(clock):
    return CircuitBreaker(clock, max_failures=2, rest_s=10.0)


def test_single_failures_do_not_open_it():
    """Failures with a success between them are forgiven."""
    it = breaker(ManualClock())
    for error in ("x", "", "x", "", "x"):
        assert it.allows()
        it.record(error)
    assert it.allows()
    assert not it.is_open


def test_opens_probes_and_closes():
    """After two failures it rests; then one probe at a time decides."""
    clock = ManualClock()
    it = breaker(clock)
    it.record("first")
    it.record("second")
    assert it.is_open
    assert it.last_error == "second"
    assert not it.allows()
    clock.advance(10.0)
    assert it.allows(), "the probe"
    assert not it.allows(), "one probe only"
    it.record("still")
    clock.advance(9.0)
    assert not it.allows()
    clock.advance(1.0)
    assert it.allows()
    it.record("")
    assert it.allows()
    assert not it.is_open


def test_a_silent_probe_is_followed_by_another():
    """A probe that never reports does not keep the breaker open for ever."""
    clock = ManualClock()
    it = breaker(clock)
    it.record("x")
    it.record("x")
    clock.advance(10.0)
    assert it.allows()
    clock.advance(10.0)
    assert it.allows()


def test_resting_is_seen_without_taking_the_probe():
    """Who asks whether it rests learns when a probe is due, and leaves it to others."""
    clock = ManualClock()
    it = breaker(clock)
    assert not it.rests
    it.record("x")
    it.record("x")
    assert it.rests
    clock.advance(10.0)
    assert not it.rests
    assert not it.rests
    assert it.allows(), "the probe is still to be had"
    assert it.rests, "while it runs nobody else may"


def test_it_can_be_opened_at_once():
    """What is known to be futile opens it without further failures."""
    clock = ManualClock()
    it = breaker(clock)
    it.trip("it hangs")
    assert it.is_open
    assert it.rests
    assert it.last_error == "it hangs"
    it.record("")
    assert not it.is_open
    assert not it.rests
