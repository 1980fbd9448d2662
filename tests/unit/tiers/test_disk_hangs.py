"""A disk that does not answer: whoever forgets pages or asks for health never waits."""

import errno
import os
import shutil
import threading

import numpy as np
import pytest

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.tiers import disk_access, disk_directory
from tests.unit.tiers.disk_support import (
    PATIENCE_S,
    REST_S,
    FailingCalls,
    Gate,
    HeldCalls,
    assert_holds,
    load,
    open_tier,
    recovered,
    store,
)


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.open()


def promptly(work):
    """Run ``work`` on a thread of its own and return what it returned."""
    found = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert found, "it waits for the disk"
    return found[0]


def beside(work):
    """Start ``work`` on a thread of its own; return the thread."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def ask_as_the_scheduler_does(tier):
    """What the engine's thread asks of a tier; returns its health."""
    tier.forget(np.array([9]))
    assert tier.num_slots == 32
    return tier.health()


@pytest.mark.parametrize("kind", ["read", "write", "allocate"])
def test_an_io_that_hangs_holds_nobody_else(path, gate, kind):
    """Of the index too: it is read and written while nobody holds the state's lock."""
    calls = HeldCalls(gate)
    tier = open_tier(path, calls=calls)
    store(tier, [0, 9], [1, 2])
    calls.kinds = {kind}
    gate.shut()
    works = {
        "read": lambda: load(tier, [0]),
        "write": lambda: store(tier, [1], [3]),
        "allocate": lambda: store(tier, [24], [3]),
    }
    thread = beside(works[kind])
    assert gate.entered.wait(PATIENCE_S)
    assert promptly(lambda: ask_as_the_scheduler_does(tier)).usable
    gate.open()
    thread.join(PATIENCE_S)
    assert not load(tier, [9])[1].ok.any()
    assert_holds(tier, {0: 1})
    tier.close()


def test_a_scan_of_the_index_holds_nobody(path, gate):
    """What is forgotten while it is read is a miss after it, and void on disk."""
    calls = HeldCalls(gate)
    first = open_tier(path)
    store(first, [0, 9], [1, 2])
    first.close()
    tier = open_tier(path, calls=calls)
    calls.kinds = {"read"}
    gate.shut()
    thread = beside(tier.recover)
    assert gate.entered.wait(PATIENCE_S)
    promptly(lambda: ask_as_the_scheduler_does(tier))
    gate.open()
    thread.join(PATIENCE_S)
    assert load(tier, [0, 9])[1].ok.tolist() == [True, False]
    tier.close()
    again = open_tier(path)
    assert recovered(again) == {0: 1}
    again.close()


def test_a_directory_that_does_not_answer(path, gate, monkeypatch):
    """Health is what was seen last, and says for how long nothing was."""
    monkeypatch.setattr(disk_access, "LOOK_S", 0.01)
    real_os = os

    class HeldOs:
        stat = staticmethod(gate.hold(os.stat))

        def __getattr__(self, name):
            return getattr(real_os, name)

    monkeypatch.setattr(disk_directory, "os", HeldOs())
    tier = open_tier(path)
    store(tier, [0, 9], [1, 2])
    assert promptly(lambda: ask_as_the_scheduler_does(tier)).usable
    gate.shut()
    assert gate.entered.wait(PATIENCE_S), "nobody watches the directory"
    watch = ManualClock(start_s=tier._access._looked_at_s + 60.0)
    monkeypatch.setattr(tier._access, "_watch_clock", watch)
    health = promptly(lambda: ask_as_the_scheduler_does(tier))
    assert not health.usable
    assert health.detail == "the directory has not answered for 60 s"
    assert health.age_s == pytest.approx(60.0)
    # Its slabs are open: they are read all the same.
    assert_holds(tier, {0: 1})
    gate.open()
    tier.look()
    assert tier.health().usable
    tier.close()


@pytest.mark.parametrize("kind", ["open", "fsync", "read"])
def test_opening_afresh_holds_nobody(path, gate, clock, monkeypatch, kind):
    """A disk that comes back hangs; what is forgotten meanwhile stays forgotten."""
    calls = HeldCalls(gate)
    tier = open_tier(path, calls=calls, clock=clock, rest_s=REST_S)
    store(tier, [0, 9], [1, 2])
    # A copy of it: another directory, which has to be opened.
    moved = path.with_name("elsewhere")
    shutil.copytree(path, moved)
    shutil.rmtree(path)
    for _ in range(3):
        assert not store(tier, [16], [3]).ok.any()
    if kind == "fsync":
        # Without its meta file: one is written.
        (moved / "tiered-meta.json").unlink()
        monkeypatch.setattr(disk_directory.os, "fsync", gate.hold(os.fsync))
    else:
        calls.kinds = {kind}
    moved.rename(path)
    clock.advance(REST_S + 1)
    gate.shut()
    thread = beside(lambda: store(tier, [16], [3]))
    assert gate.entered.wait(PATIENCE_S)
    health = promptly(lambda: ask_as_the_scheduler_does(tier))
    assert not health.usable
    assert "opened afresh" in health.detail
    # Others are refused at once, and do not count as failures of the disk.
    result = promptly(lambda: load(tier, [0])[1])
    assert "opened afresh" in result.error
    gate.open()
    thread.join(PATIENCE_S)
    kept = {} if kind == "fsync" else {0: 1}
    assert_holds(tier, kept | {16: 3})
    assert not load(tier, [9])[1].ok.any()
    assert tier.health().usable
    tier.close()
    again = open_tier(path)
    assert recovered(again) == kept | {16: 3}
    again.close()


def test_voiding_hangs_and_forgetting_goes_on(path, gate):
    """However much is forgotten, one run of the voiding thread waits, and no more."""
    calls = HeldCalls(gate)
    tier = open_tier(path, calls=calls)
    store(tier, range(20), range(100, 120))
    calls.kinds = {"write"}
    gate.shut()
    tier.forget(np.array([0]))
    assert gate.entered.wait(PATIENCE_S)

    def forget_all():
        for slot in range(1, 18):
            tier.forget(np.array([slot]))
        return True

    assert promptly(forget_all)
    assert tier._voider._work_queue.qsize() <= 1
    gate.open()
    tier.close()
    again = open_tier(path)
    assert recovered(again) == {18: 118, 19: 119}
    again.close()


@pytest.mark.parametrize(
    ("number", "text"),
    [(errno.EMFILE, "ulimit -n"), (errno.ENFILE, "file-max"), (errno.ENOSPC, "df -i")],
)
def test_a_slab_that_cannot_be_made(path, clock, number, text):
    """No descriptor or no inode: a sentence and a counter; what is open goes on."""

    class Refuses(FailingCalls):
        refuse = False

        def open(self, name, flags, mode=0o600):
            if self.refuse and "slab" in name:
                raise OSError(number, os.strerror(number))
            return super().open(name, flags, mode)

    calls = Refuses()
    tier = open_tier(path, calls=calls, clock=clock, rest_s=REST_S)
    store(tier, [0], [1])
    calls.refuse = True
    result = store(tier, [1, 8], [2, 3])
    assert result.ok.tolist() == [True, False]
    assert os.strerror(number) in result.error
    assert text in result.error
    assert tier.health().errors == {errno.errorcode[number]: 1}
    assert_holds(tier, {0: 1, 1: 2})
    assert not (path / "tiered-slab-000001.kv").exists()
    calls.refuse = False
    clock.advance(REST_S + 1)
    assert store(tier, [8], [3]).ok.all()
    tier.close()


def test_a_disk_that_comes_back_without_descriptors(path, clock):
    """Opening afresh fails with a sentence and is tried again after the next rest."""

    class Refuses(FailingCalls):
        refuse = False

        def open(self, name, flags, mode=0o600):
            if self.refuse:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return super().open(name, flags, mode)

    calls = Refuses()
    tier = open_tier(path, calls=calls, clock=clock, rest_s=REST_S)
    store(tier, [0], [1])
    shutil.rmtree(path)
    for _ in range(3):
        store(tier, [8], [2])
    calls.refuse = True
    clock.advance(REST_S + 1)
    result = store(tier, [8], [2])
    assert "Too many open files" in result.error
    assert tier.health().errors == {"EMFILE": 1}
    calls.refuse = False
    clock.advance(REST_S + 1)
    assert store(tier, [8], [2]).ok.all()
    tier.close()


def test_no_thread_to_be_had_for_voiding(path, monkeypatch):
    """Pages are a miss at once, and void on disk once there is a thread again."""
    tier = open_tier(path)
    store(tier, [0, 1, 2], [1, 2, 3])

    def refuse(*args):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(tier._voider, "submit", refuse)
        tier.forget(np.array([0]))
    assert not load(tier, [0])[1].ok.any()
    tier.forget(np.array([1]))
    tier.close()
    again = open_tier(path)
    assert recovered(again) == {2: 3}
    again.close()
