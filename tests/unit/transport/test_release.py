"""When memory that a peer was to write to may be used again."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sgl_tiered.core.clock import ManualClock, SystemClock
from sgl_tiered.transport import release
from sgl_tiered.transport.knocking import Knocker, Place, Reach, knock
from sgl_tiered.transport.process import Process
from sgl_tiered.transport.release import ReleaseWatch

ROOM = 5
PREFILL = Place(("10.0.0.1", 1000))
OTHER = Place(("10.0.0.2", 1000))
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
    knocked = threading.Event()

    def note(place: Place) -> Reach:
        knocked.set()
        return Reach.THERE

    watch = ReleaseWatch(ManualClock(), note)
    watch.hold(ROOM, [PREFILL])
    assert knocked.wait(60.0)
    watch.close()


def test_who_is_known_to_be_over_is_not_looked_for(rig: Rig) -> None:
    """Another process may have its port by now."""
    rig.watch.note_over(ROOM)
    rig.watch.look()
    rig.clock.advance(9.9)
    assert not rig.is_safe()
    rig.clock.advance(0.2)
    assert rig.is_safe()


def test_the_end_of_a_process_of_this_machine_is_exact() -> None:
    """No port says it better; its last bytes get ten seconds at most."""
    for after_death_s, limit_s in ((60.0, 10.0), (2.0, 2.0)):
        clock = ManualClock()
        watch = ReleaseWatch(
            clock,
            lambda place: Reach.ENDED,
            after_death_s=after_death_s,
            threaded=False,
        )
        watch.hold(ROOM, [PREFILL])
        watch.look()
        clock.advance(limit_s - 0.1)
        assert not watch.is_safe(ROOM, has_word=False)
        clock.advance(0.2)
        assert watch.is_safe(ROOM, has_word=False)


def test_who_is_there_is_reminded_until_its_word_comes() -> None:
    """The question or the answer may be lost."""
    clock = ManualClock()
    watch = ReleaseWatch(clock, lambda place: Reach.THERE, threaded=False)
    reminders: list[float] = []
    watch.hold(ROOM, [PREFILL], lambda: reminders.append(clock.now()))
    for _ in range(12):
        watch.look()
        clock.advance(1.0)
    assert reminders == [5.0, 10.0]
    assert not watch.is_safe(ROOM, has_word=True)
    clock.advance(10.0)
    watch.look()
    assert len(reminders) == 2
    assert watch.is_safe(ROOM, has_word=False), "a word is not taken back"


def test_one_connection_is_enough_for_a_process_that_is_stopped() -> None:
    """It takes none, so that its queue would be full after a while."""
    knocker = Knocker()
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        place = Place(server.getsockname())
        assert {knocker(place) for _ in range(8)} == {Reach.THERE}
        line, _ = server.accept()
        with line:
            line.sendall(b"a greeting")
            assert knocker(place) is Reach.THERE
        # The other side has ended this one; a new one is taken.
        while knocker._lines and (former := knocker._lines[place.endpoint]):
            assert knocker(place) is Reach.THERE
            if knocker._lines[place.endpoint] is not former:
                break
    assert knocker(place) is Reach.OVER
    knocker.keep(())


def test_a_process_of_this_machine_is_known_by_more_than_its_port() -> None:
    """A child may hold the port on, or a later process have it."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1)
        text = Path(f"/proc/{child.pid}/stat").read_text()
        process = Process(child.pid, int(text.rpartition(")")[2].split()[19]))
        place = Place(server.getsockname(), process)
        knocker = Knocker()
        assert knocker(place) is Reach.THERE
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert knocker(place) is Reach.THERE
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process.state() == "Z"
        assert knocker(place) is Reach.ENDED
        assert child.stdin is not None
        child.stdin.close()
        child.wait()
        assert knocker(place) is Reach.ENDED
        knocker.keep(())


def test_a_process_has_a_name_on_its_machine_only() -> None:
    """What another machine, or nobody, has named is none of ours."""
    own = Process.own()
    assert Process.named(own.name) == own
    assert not own.has_ended()
    assert Process(own.pid, own.started + 1).has_ended()
    machine, _, numbers = own.name.partition("/")
    for name in ("", "x", f"{machine}x/{numbers}", f"{machine}/{own.pid}", machine):
        assert Process.named(name) is None


@contextmanager
def no_open_files() -> Iterator[None]:
    """Let this process open no more than it has open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_who_cannot_be_looked_up_is_not_over() -> None:
    """Without open files here; what it may write to would be given to others."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as child,
    ):
        endpoint = server.getsockname()
        began = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2]
        process = Process(child.pid, int(began.split()[19]))
        knocker = Knocker()
        with no_open_files():
            assert not process.has_ended()
            assert process.state() == "?"
            assert knocker(Place(endpoint, process)) is Reach.THERE
            assert knocker(Place(endpoint)) is Reach.THERE, "silence ends a hold"
        assert process.state() in "RS"
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        with no_open_files():
            assert not process.has_ended()
        assert process.has_ended()
        knocker.keep(())


@pytest.mark.parametrize(
    "endpoint",
    [
        ("a..b", 5),
        ("a" * 64, 5),
        ("\ud800", 5),
        ("a\0b", 5),
        ("127.0.0.1", 65536),
        ("127.0.0.1", -1),
        ("127.0.0.1", 0),
        ("127.0.0.1", 1 << 70),
        ("", -1),
    ],
    ids=range(9),
)
def test_what_is_no_endpoint_is_silent(endpoint: tuple[str, int]) -> None:
    """As a name that nobody knows: no answer comes from there."""
    assert knock(endpoint) is Reach.SILENT
    assert Knocker()(Place(endpoint)) is Reach.SILENT


def fails(*args: object) -> Reach:
    raise RuntimeError("planted")


def test_a_place_that_cannot_be_looked_for_is_held_and_no_other(rig: Rig) -> None:
    """What is not known of one says nothing of others; it is counted."""
    rig.watch.hold("odd", [OTHER], fails)
    rig.watch.hold("both", [PREFILL, OTHER])
    del rig.said[OTHER]
    rig.said[PREFILL] = Reach.OVER
    for _ in range(12):
        rig.watch.look()
        rig.clock.advance(1.0)
    assert rig.is_safe()
    rig.clock.advance(LONG_S)
    assert not rig.watch.is_safe("odd", has_word=False)
    assert not rig.watch.is_safe("both", has_word=False)
    # Twelve looks and two reminders.
    assert rig.watch.incidents.counts == {"failed": 14}


@pytest.mark.parametrize("part", ["place", "reminder", "knocker", "look"])
def test_the_thread_of_a_watch_lives_on(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Whatever fails: a later hold becomes safe."""
    monkeypatch.setattr(release, "_LOOK_S", 0.01)
    monkeypatch.setattr(release, "_REMIND_S", 0.0)
    has_failed = threading.Event()

    def failing(*args: object) -> Reach:
        has_failed.set()
        raise RuntimeError("planted")

    def look_for(place: Place) -> Reach:
        return failing() if place == OTHER and part == "place" else Reach.OVER

    watch = ReleaseWatch(SystemClock(), look_for, after_death_s=0.0)
    with monkeypatch.context() as planted:
        if part == "knocker":
            planted.setattr(watch._knocker, "keep", failing)
        if part == "look":
            planted.setattr(watch, "look", failing)
        remind = (failing,) if part == "reminder" else ()
        watch.hold("odd", [OTHER], *remind)
        assert has_failed.wait(60.0)
    watch.hold("good", [PREFILL])
    end_s = time.monotonic() + 60.0
    while not watch.is_safe("good", has_word=False):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    assert watch.incidents.counts["failed"] >= 1
    watch.close()


def test_a_thread_that_cannot_be_started_is_started_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the next hold; and who holds goes on."""
    watch = ReleaseWatch(SystemClock(), lambda place: Reach.OVER, after_death_s=0.0)
    with monkeypatch.context() as planted:
        planted.setattr(threading.Thread, "start", fails)
        watch.hold("first", [PREFILL])
    assert watch.num_held == 1
    assert watch.incidents.counts == {"failed": 1}
    watch.hold("second", [OTHER])
    end_s = time.monotonic() + 60.0
    while not watch.is_safe("first", has_word=False):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    watch.close()
