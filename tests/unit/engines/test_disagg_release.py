"""When a decode instance may use the memory of a failed transfer again."""

from __future__ import annotations

import socket

import pytest

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.engines.sglang.disagg.release import Reach, ReleaseWatch, knock

ROOM = 5
PREFILL = ("10.0.0.1", 1000)
OTHER = ("10.0.0.2", 1000)
LONG_S = 10_000.0


class Rig:
    """A watch without a thread, and ports that say what a test wants."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.said = {PREFILL: Reach.THERE, OTHER: Reach.THERE}
        self.watch = ReleaseWatch(self.clock, self.said.__getitem__, threaded=False)

    def is_safe(self, *, has_word: bool = False) -> bool:
        return self.watch.is_safe(ROOM, has_word=has_word)


@pytest.fixture
def rig() -> Rig:
    rig = Rig()
    rig.watch.hold(ROOM, [PREFILL])
    return rig


def test_a_prefill_that_is_there_is_waited_for(rig: Rig) -> None:
    """However long it takes: it may be stopped, and go on."""
    for _ in range(3):
        rig.watch.look()
        rig.clock.advance(LONG_S)
        assert not rig.is_safe()
    assert rig.watch.num_held == 1


def test_its_word_ends_a_hold_after_a_moment(rig: Rig) -> None:
    """Bytes in this machine's own buffers get the moment."""
    assert not rig.is_safe(has_word=True)
    rig.clock.advance(0.9)
    assert not rig.is_safe(has_word=True)
    rig.clock.advance(0.2)
    assert rig.is_safe(has_word=True)


def test_its_death_ends_a_hold_after_a_while(rig: Rig) -> None:
    """Its port refuses, and what its system still sends has had time to arrive."""
    rig.said[PREFILL] = Reach.OVER
    rig.watch.look()
    rig.clock.advance(9.9)
    rig.watch.look()
    assert not rig.is_safe()
    rig.clock.advance(0.2)
    assert rig.is_safe()


def test_a_port_that_answers_again_begins_anew(rig: Rig) -> None:
    """Whoever it is: it counts as the prefill instance."""
    rig.said[PREFILL] = Reach.OVER
    rig.watch.look()
    rig.clock.advance(9.0)
    rig.said[PREFILL] = Reach.THERE
    rig.watch.look()
    rig.clock.advance(LONG_S)
    assert not rig.is_safe()
    rig.said[PREFILL] = Reach.OVER
    rig.watch.look()
    assert not rig.is_safe()


def test_silence_ends_a_hold_much_later(rig: Rig) -> None:
    """A machine that is off, or cut off: its system repeats what it sent."""
    rig.said[PREFILL] = Reach.SILENT
    rig.watch.look()
    rig.clock.advance(900.0)
    assert not rig.is_safe()
    rig.clock.advance(301.0)
    assert rig.is_safe()


def test_all_ranks_count(rig: Rig) -> None:
    """One that is there keeps the hold; all have to be over."""
    rig.watch.hold(ROOM, [PREFILL, OTHER])
    rig.said[PREFILL] = Reach.OVER
    rig.watch.look()
    rig.clock.advance(LONG_S)
    assert not rig.is_safe()
    rig.said[OTHER] = Reach.OVER
    rig.watch.look()
    rig.clock.advance(11.0)
    assert rig.is_safe()


def test_what_is_not_held_goes_by_the_word() -> None:
    """A transfer whose receiver never asked for KV needs no watch."""
    rig = Rig()
    assert rig.is_safe(has_word=True)
    assert not rig.is_safe()


def test_a_room_can_be_used_again(rig: Rig) -> None:
    """What was known of a former hold is forgotten with it."""
    rig.is_safe(has_word=True)
    rig.clock.advance(5.0)
    rig.watch.forget(ROOM)
    rig.watch.forget(ROOM)
    assert rig.watch.num_held == 0
    rig.watch.hold(ROOM, [PREFILL])
    assert not rig.is_safe(has_word=True)


def test_knocking() -> None:
    """A listening port is there, one that nobody has is over."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        endpoint = server.getsockname()
        assert knock(endpoint) is Reach.THERE
    assert knock(endpoint) is Reach.OVER


def test_a_watch_looks_by_itself() -> None:
    """With its thread it knocks as soon as something is held."""
    import threading

    knocked = threading.Event()

    def note(endpoint: tuple[str, int]) -> Reach:
        knocked.set()
        return Reach.THERE

    watch = ReleaseWatch(ManualClock(), note)
    watch.hold(ROOM, [PREFILL])
    assert knocked.wait(60.0)
