"""The scheduler's thread waits for no disk, whatever that does.

Each kind of call to the disk is held up, the scheduler makes steps while it is, and
only then the call goes on.
"""

import errno
import os
import shutil
import threading

import numpy as np
import pytest

from sgl_tiered.cache.table import FREE
from sgl_tiered.core.clock import ManualClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import LoadPlan
from sgl_tiered.engines.sglang import runtime as runtime_module
from sgl_tiered.serving.emulation import parse_emulation
from sgl_tiered.serving.rank_disk import disk_fingerprint
from sgl_tiered.testing.emulator import Emulator
from sgl_tiered.tiers import disk_access, disk_directory
from tests.draining import drain
from tests.unit.engines.scheduler_thread_support import (
    DISK_SLOTS,
    PATIENCE_S,
    Scheduler,
    ThreadGuard,
    make_runtime,
    open_disk,
    replace_by_a_copy,
)
from tests.unit.engines.weights_support import read_out
from tests.unit.tiers.disk_support import Gate, HeldCalls

DISK_NUMBER = 1
"""Of the disk's tier in the cache."""
NUM_STEPS = 60
"""More than the queues of the pipelines hold."""


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "disk"


@pytest.fixture
def calls(gate):
    return HeldCalls(gate)


@pytest.fixture
def runtime(folder, calls, gate):
    runtime = make_runtime(folder, calls)
    yield runtime
    gate.open()
    runtime.close(runtime.pump)


def warm_up(scheduler):
    """Fill host and disk, so that every step evicts, forgets, writes and reads."""
    cache = scheduler.runtime.cache

    def is_warm():
        stats = cache.stats
        return stats.pages_evicted[TierId.DISK] and stats.pages_loaded[TierId.DISK]

    scheduler.run(lambda: scheduler.until(is_warm))


def is_used_again(scheduler):
    """Make steps until pages are written to the disk again, and read from it."""
    stats = scheduler.runtime.cache.stats
    stored, loaded = stats.pages_stored[TierId.DISK], stats.pages_loaded[TierId.DISK]

    def is_used():
        stats = scheduler.runtime.cache.stats
        return (
            stats.pages_stored[TierId.DISK] > stored
            and stats.pages_loaded[TierId.DISK] > loaded
        )

    scheduler.run(lambda: scheduler.until(is_used))


def flush(scheduler):
    """Forget all pages, as the tree's reset does; return True.

    From then on the device has other content: who is given a page of before sees it.
    """
    runtime = scheduler.runtime
    runtime.forget_plans()
    scheduler.let_go()
    runtime.drain_device()
    runtime.pump()
    runtime.reset()
    runtime.parts.device.fill(np.random.default_rng(scheduler.num_steps))
    return True


def drop(scheduler):
    """Forget each tier, as ``POST /tiered/drop`` does; return True."""
    for tier in (TierId.HOST, TierId.DISK):
        scheduler.runtime.drop(tier)
    return True


def clear(scheduler):
    """Forget what is on disk, whatever runs; return True."""
    scheduler.runtime.forget(TierId.DISK)
    return True


def update_weights(scheduler):
    """Change the weights with a flush, and wait until they are known; return True."""
    runtime = scheduler.runtime
    before = runtime.namespace(None, None)
    runtime.forget_plans()
    scheduler.let_go()
    runtime.weights.changing()
    flush(scheduler)
    runtime.fake_weights.text += "x"
    runtime.weights.changed(device_is_empty=True)
    read_out(runtime.weights)
    runtime.pump()
    return runtime.namespace(None, None) not in (None, before)


def check_folder(runtime, folder, fingerprint=None):
    """Close; the next server finds pages of the last namespace, and no others.

    And none but those that the cache had on disk.
    """
    digest = runtime.namespace(None, None)
    if fingerprint is None:
        fingerprint = disk_fingerprint(runtime.parts.namespace, runtime.agreement)
    runtime.close(runtime.pump)
    disk = open_disk(folder, fingerprint=fingerprint)
    found = disk.recover()
    disk.close()
    assert {row.tobytes() for row in found.namespaces} == {digest}
    table = runtime.cache._table
    held = table.address[(table.state != FREE) & (table.tier == DISK_NUMBER)]
    assert set(found.addresses.tolist()) <= set(held.tolist())


def test_the_thread_makes_no_call_that_may_wait(runtime):
    """Over a played workload, with state and metrics asked for, a drop and a reset."""
    scheduler = Scheduler(runtime)
    warm_up(scheduler)
    with ThreadGuard() as guard:

        def work():
            guard.watch_this_thread()
            scheduler.steps(NUM_STEPS)
            runtime.drop(TierId.DISK)
            scheduler.steps(NUM_STEPS)
            flush(scheduler)
            return scheduler.steps(NUM_STEPS)

        scheduler.run(work)
        assert guard.seen == []
        # It would have been seen.
        scheduler.run(lambda: (guard.watch_this_thread(), runtime.parts.disk.look()))
        assert any("disk_directory.py:vanished" in each for each in guard.seen)


@pytest.mark.parametrize(
    "kind", ["stat", "read", "write", "allocate", "open", "fsync", "scan"]
)
def test_steps_are_made_while_the_disk_is_held(
    runtime, calls, gate, folder, monkeypatch, kind
):
    """Held in each kind of call, opening afresh and its scan of the index included."""
    monkeypatch.setattr(disk_access, "LOOK_S", 0.01)
    scheduler = Scheduler(runtime)
    if kind == "allocate":
        scheduler.run(lambda: scheduler.steps(2))
    else:
        warm_up(scheduler)
    real_os = os

    class HeldOs:
        stat = staticmethod(gate.hold(os.stat)) if kind == "stat" else os.stat
        fsync = staticmethod(gate.hold(os.fsync)) if kind == "fsync" else os.fsync

        def __getattr__(self, name):
            return getattr(real_os, name)

    monkeypatch.setattr(disk_directory, "os", HeldOs())
    if kind in ("open", "fsync", "scan"):
        replace_by_a_copy(folder)
    if kind == "fsync":
        (folder / "tiered-meta.json").unlink()
    calls.kinds = {"read" if kind == "scan" else kind}
    gate.shut()
    scheduler.run(lambda: scheduler.until(gate.entered.is_set))
    before = scheduler.num_steps
    scheduler.run(lambda: scheduler.steps(NUM_STEPS))
    assert scheduler.num_steps == before + NUM_STEPS
    # Whoever waits for the disk, in bounded time or not, waits for ever.
    monkeypatch.setattr(runtime_module, "_DRAIN_TIMEOUT_S", 1e6)
    for forget in (flush, drop, clear, update_weights):
        assert scheduler.run(lambda forget=forget: forget(scheduler))
        scheduler.run(lambda: scheduler.steps(NUM_STEPS))
    assert "drains_given_up" not in runtime.metrics_snapshot()["counters"]
    assert not gate.is_open, "it was not held all the while"
    gate.open()
    calls.kinds = set()
    scheduler.run(lambda: scheduler.steps(NUM_STEPS))
    is_used_again(scheduler)
    scheduler.run(lambda: (drain(runtime), runtime.pump()))
    runtime.cache.check()
    check_folder(runtime, folder)


@pytest.mark.parametrize("forget", [flush, drop, clear])
def test_a_disk_that_comes_back_as_it_was_brings_nothing_back(runtime, folder, forget):
    """What was forgotten and voided before, in files that are not those that return."""
    scheduler = Scheduler(runtime)
    warm_up(scheduler)
    disk, cache = runtime.parts.disk, runtime.cache

    def settle():
        scheduler.let_go()
        drain(runtime)
        runtime.pump()
        while runtime.is_freeing:
            runtime.pump()
        drain(runtime)
        disk._voider.submit(lambda: None).result(PATIENCE_S)
        return True

    scheduler.run(settle)
    copy = shutil.copytree(folder, folder.with_name("as-it-was"))
    scheduler.run(lambda: forget(scheduler) and settle())
    former = disk._access.volume
    assert not cache.occupancy(TierId.DISK).used_slots
    assert not former.book.holds(np.arange(DISK_SLOTS)).any()
    shutil.rmtree(folder)
    copy.rename(folder)
    stored = cache.stats.pages_stored[TierId.DISK]

    def is_used():
        is_back = disk._access.volume not in (None, former)
        return is_back and cache.stats.pages_stored[TierId.DISK] > stored

    scheduler.run(lambda: scheduler.until(is_used) and settle())
    cache.check()
    check_folder(runtime, folder, "model")


def test_what_is_left_to_give_back_is_forgotten_at_the_end(runtime, folder):
    """A server that stops soon after a drop leaves nothing of it on disk."""
    scheduler = Scheduler(runtime)
    warm_up(scheduler)
    scheduler.let_go()
    drain(runtime)
    runtime.cache._store.removal.max_pages = 1
    for tier in (TierId.HOST, TierId.DISK):
        runtime.forget(tier)
    assert runtime.is_freeing
    used = runtime.cache.occupancy(TierId.DISK).used_slots
    runtime.pump()
    assert 0 < runtime.cache.occupancy(TierId.DISK).used_slots < used
    runtime.close(runtime.pump)
    disk = open_disk(folder)
    assert len(disk.recover()) == 0
    disk.close()


def test_reads_that_never_began_say_nothing_of_the_disk(runtime, calls, gate):
    """A flush gives up reads that wait for a thread; the disk does not rest for it."""
    scheduler = Scheduler(runtime)
    warm_up(scheduler)
    breaker, stager = runtime._breakers[TierId.DISK], runtime.parts.stager
    scheduler.run(lambda: (flush(scheduler), drain(runtime), runtime.pump()))
    failed = breaker.probes_failed
    calls.kinds = {"read"}
    gate.shut()
    page = np.zeros(1, np.int32)
    for number in range(8):
        plan = LoadPlan(10**9 + number, 0, page, page, page, page, 0.0)
        staged = stager.try_submit(plan, page)
        stager.release(staged)
    gate.open()
    assert stager.drain(PATIENCE_S)
    runtime.pump()
    assert not breaker.is_open
    assert breaker.probes_failed == failed


def test_several_faults_at_once(runtime, calls, gate, folder):
    """No descriptors, a full disk and a read that hangs: steps go on and come right."""
    scheduler = Scheduler(runtime)
    warm_up(scheduler)

    def fails_by(name):
        counted = runtime.metrics_snapshot()["counters"]
        return f"disk_errors_{name}" in counted

    calls.kinds = {"read"}
    gate.shut()
    scheduler.run(lambda: scheduler.until(gate.entered.is_set))
    calls.write_error = errno.ENOSPC
    scheduler.run(lambda: scheduler.until(lambda: fails_by("ENOSPC")))
    calls.open_error = errno.EMFILE
    replace_by_a_copy(folder)
    scheduler.run(lambda: scheduler.steps(NUM_STEPS))
    assert not gate.is_open
    gate.open()
    scheduler.run(lambda: scheduler.until(lambda: fails_by("EMFILE")))
    calls.kinds = set()
    calls.write_error = calls.open_error = 0
    is_used_again(scheduler)
    drain(runtime)
    runtime.pump()
    runtime.cache.check()


def test_metrics_are_published_once_a_second(runtime, monkeypatch):
    """However many passes there are; the first one at once."""
    now = [100.0]
    monkeypatch.setattr(runtime.parts.clock, "now", lambda: now[0], raising=False)
    published = []
    runtime.publish = published.append
    for _ in range(10):
        runtime.between_passes()
    assert len(published) == 1
    now[0] += 0.5
    runtime.between_passes()
    assert len(published) == 1
    now[0] += 0.5
    runtime.between_passes()
    assert len(published) == 2
    assert published[1]["occupancy"]["disk"]["capacity"] < DISK_SLOTS


def test_a_copy_from_the_device_that_hangs_is_waited_for_in_bounded_time(
    runtime, monkeypatch
):
    """A drain gives it up, with a counter; its pages come right when it ends."""
    monkeypatch.setattr(runtime_module, "_DRAIN_TIMEOUT_S", 0.01)
    pool = runtime.parts.device
    pool.store_gate.clear()
    scheduler = Scheduler(runtime)
    scheduler.run(lambda: scheduler.steps(3))
    assert pool.store_started.acquire(timeout=PATIENCE_S)
    scheduler.run(lambda: (runtime.drain_device(), runtime.pump()))
    assert runtime.metrics_snapshot()["counters"]["drains_given_up"] >= 1
    scheduler.let_go()
    runtime.reset()
    pool.store_gate.set()
    monkeypatch.undo()
    assert runtime.parts.offloader.drain(PATIENCE_S)
    runtime.pump()
    runtime.cache.check()
    # A reset forgets what was under way: nothing of it is found.
    digest = runtime.namespace(None, None)
    tokens = np.arange(8, dtype=np.int32)
    assert runtime.cache.lookup(digest, tokens, 0).num_found == 0
    assert runtime.cache.occupancy(TierId.HOST).used_slots == 0


def flush_while_a_load_runs(scheduler, monkeypatch, let_go):
    """Flush while a load runs that ends when it is let go.

    Returns:
        Whether the flush waited for it, and whether nothing was written to the device
        after the flush.
    """
    runtime = scheduler.runtime
    # Were the wait bounded, it would be over at once.
    monkeypatch.setattr(runtime_module, "_DRAIN_TIMEOUT_S", 0.01)
    drain_loads, came = runtime.loader.drain, threading.Event()
    left = []

    def noted(*timeout):
        came.set()
        return drain_loads(*timeout)

    monkeypatch.setattr(runtime.loader, "drain", noted)

    def main():
        flush(scheduler)
        left.append(runtime.parts.device.layers.copy())

    thread = threading.Thread(target=main, name="scheduler", daemon=True)
    thread.start()
    assert came.wait(PATIENCE_S), "the flush does not look whether a load runs"
    thread.join(0.1)
    waited = not left
    let_go()
    thread.join(PATIENCE_S)
    assert left, "the load has ended, and the flush has not"
    assert drain_loads(PATIENCE_S)
    runtime.pump()
    runtime.cache.check()
    return waited, np.array_equal(left[0], runtime.parts.device.layers)


def test_a_flush_gives_no_page_away_that_a_load_still_writes(runtime, monkeypatch):
    """It ends with the load, whose disk or peer was read before it began."""
    pool = runtime.parts.device
    scheduler = Scheduler(runtime)
    scheduler.run(lambda: scheduler.steps(2))
    scheduler.run(lambda: (scheduler.let_go(), drain(runtime), runtime.pump()))
    pool.gates[-1].clear()
    ticket = scheduler.run(lambda: scheduler.begin_load(0))
    seen = flush_while_a_load_runs(scheduler, monkeypatch, pool.gates[-1].set)
    assert ticket.done
    assert seen == (True, True)
    is_used_again(scheduler)


def test_a_flush_ends_when_a_memory_that_hangs_does(folder, monkeypatch):
    """Nothing else bounds it: the load fails or ends, and the server goes on."""
    clock = ManualClock()
    sections = parse_emulation("host:fault=hang/load/for=30", [TierId.HOST])
    emulator = Emulator(sections, clock=clock)
    runtime = make_runtime(folder, emulator=emulator)
    scheduler = Scheduler(runtime)
    scheduler.run(lambda: scheduler.steps(2))
    scheduler.run(lambda: (scheduler.let_go(), drain(runtime), runtime.pump()))
    emulator.arm()
    ticket = scheduler.run(lambda: scheduler.begin_load(0))
    seen = flush_while_a_load_runs(scheduler, monkeypatch, lambda: clock.advance(31.0))
    assert emulator.num_struck(TierId.HOST)
    assert ticket.done
    assert seen == (True, True)
    is_used_again(scheduler)
    runtime.close(runtime.pump)


def test_a_closing_tier_does_not_wait_for_its_watcher(runtime, gate, monkeypatch):
    """The thread that looks may hang; it is nobody's to wait for."""
    watchers = [t for t in threading.enumerate() if t.name == "tiered-disk-watch"]
    assert watchers
    assert all(thread.daemon for thread in watchers)
