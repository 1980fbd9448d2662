"""What all I/O engines promise, and how each one fails."""

import errno
import logging
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from sgl_tiered.core.clock import ManualClock, SystemClock
from sgl_tiered.errors import ConfigError
from sgl_tiered.tiers import disk_engines, disk_uring
from sgl_tiered.tiers.disk_engines import is_virtual_disk, make_engine
from sgl_tiered.tiers.disk_format import slab_name
from sgl_tiered.tiers.disk_io import Extent, SystemCalls
from sgl_tiered.tiers.disk_mmap import MappedCalls, why_not_mapped
from sgl_tiered.tiers.disk_nixl import open_nixl_ring
from tests.unit.tiers.disk_support import (
    EIO,
    FailingCalls,
    assert_holds,
    load,
    open_tier,
    recovered,
    store,
)

PAGES = {slot: 100 + slot for slot in range(24)}


class FakeRing:
    """A ring whose I/Os are done by the calling thread, when it is polled.

    Attributes:
        fail_at: number of the I/O that fails; -1 for none. After it nothing works.
        most_at_a_time: I/Os that were in flight together.
    """

    def __init__(self, fail_at=-1):
        self.fail_at = fail_at
        self.most_at_a_time = 0
        self.polled_after_failure = 0
        self._numbers = iter(range(1 << 30))
        self._pending = {}
        self._failed = False

    def submit(self, fd, views, offset, *, writes):
        """Take an I/O."""
        number = next(self._numbers)
        self._pending[number] = (fd, views, offset, writes)
        self.most_at_a_time = max(self.most_at_a_time, len(self._pending))
        return number

    def ended(self, handle):
        """Do the I/O now."""
        if self._failed:
            self.polled_after_failure += 1
        fd, views, offset, writes = self._pending[handle]
        if handle == self.fail_at:
            self._failed = True
            raise OSError(EIO, os.strerror(EIO))
        (os.pwritev if writes else os.preadv)(fd, views, offset)
        del self._pending[handle]
        return True

    def num_running(self):
        """Count down what a failure left, as a kernel does."""
        if self._pending:
            self._pending.popitem()
        return len(self._pending)


@pytest.fixture
def rings(monkeypatch):
    """Let ``uring`` stand on fake rings; the test appends those to be opened."""
    waiting = []

    def open_ring():
        return waiting.pop(0) if waiting else "there are no more rings"

    monkeypatch.setattr(disk_engines, "open_nixl_ring", open_ring)
    return waiting


def test_unknown_engine_is_refused(tmp_path):
    """A wrong name is refused with the right ones, before anything is made."""
    with pytest.raises(ConfigError, match="threads, bounce, uring, mmap"):
        open_tier(tmp_path / "tier", io="aio")
    assert not (tmp_path / "tier").exists()


def test_auto_follows_the_disk(tmp_path):
    """Threads, by way of small buffers where a hypervisor copies; no dependency."""
    tier = open_tier(tmp_path / "tier")
    assert tier.io == ("bounce" if is_virtual_disk(tmp_path) else "threads")
    tier.close()


@pytest.mark.parametrize(
    ("device", "is_virtual"),
    [("pci0000:00/virtio1/block/vda/vda1", True), ("pci0000:00/nvme/nvme0n1", False)],
)
def test_virtual_disks_are_known_by_their_bus(tmp_path, device, is_virtual):
    """The kernel's link from the number of the device tells."""
    number = tmp_path.stat().st_dev
    target = tmp_path / "devices" / device
    target.mkdir(parents=True)
    link = tmp_path / f"{os.major(number)}:{os.minor(number)}"
    assert not is_virtual_disk(tmp_path, devices=tmp_path / "none")
    link.symlink_to(target)
    assert is_virtual_disk(tmp_path / "not" / "yet", devices=tmp_path) == is_virtual


def test_uring_without_a_ring_falls_back(tmp_path, rings, caplog):
    """Without io_uring there are threads, and one line says why."""
    tier = open_tier(tmp_path / "tier", io="uring")
    assert tier.io == "threads"
    assert store(tier, list(PAGES), list(PAGES.values())).ok.all()
    assert_holds(tier, PAGES)
    tier.close()
    lines = [line for line in caplog.messages if "no io_uring" in line]
    assert len(lines) == 1
    assert "there are no more rings" in lines[0]


def test_mmap_that_does_not_work_falls_back(tmp_path, monkeypatch, caplog):
    """Where the kernel refuses the copy there are threads, and one line says why."""
    monkeypatch.setattr(disk_engines, "why_not_mapped", lambda: "it is forbidden")
    tier = open_tier(tmp_path / "tier", io="mmap")
    assert tier.io == "threads"
    tier.close()
    assert [line for line in caplog.messages if "it is forbidden" in line]


def test_a_ring_is_kept_full_and_not_overfull(tmp_path, rings):
    """As many I/Os are in flight as allowed, and no more; writes are fewer."""
    ring = FakeRing()
    rings.append(ring)
    tier = open_tier(tmp_path / "tier", io="uring", num_threads=5, max_io_bytes=8192)
    assert tier.io == "uring"
    store(tier, list(PAGES)[::2], list(PAGES.values())[::2])
    assert ring.most_at_a_time <= disk_uring.MAX_WRITES
    assert load(tier, list(PAGES)[::2])[1].ok.all()
    assert ring.most_at_a_time == 5
    tier.close()


@pytest.mark.parametrize("fail_at", [0, 3, 11, 17])
def test_a_failed_ring_is_retired(tmp_path, rings, caplog, fail_at):
    """After a failure no page is lost, and the ring is never polled again."""
    ring, another = FakeRing(fail_at), FakeRing()
    rings.extend([ring, another])
    tier = open_tier(tmp_path / "tier", io="uring", max_io_bytes=8192)
    some = {slot: seed for slot, seed in PAGES.items() if slot % 2}
    assert store(tier, list(some), list(some.values())).ok.all()
    assert_holds(tier, some)
    assert ring.polled_after_failure == 0
    assert another.most_at_a_time > 0
    tier.close()
    lines = [line for line in caplog.messages if "io_uring failed" in line]
    assert len(lines) == 1


def test_threads_take_over_when_rings_keep_failing(tmp_path, rings):
    """A device that fails every ring is served by threads in the end."""
    rings.extend(FakeRing(0) for _ in range(disk_uring.MAX_RINGS))
    tier = open_tier(tmp_path / "tier", io="uring")
    for _ in range(disk_uring.MAX_RINGS + 1):
        assert store(tier, list(PAGES), list(PAGES.values())).ok.all()
    assert_holds(tier, PAGES)
    assert rings == []
    tier.close()


def test_an_error_behind_a_ring_is_a_value(tmp_path, rings):
    """Where the threads fail as well, the pages are not ok and the error is told."""
    rings.append(FakeRing(0))
    calls = FailingCalls()
    tier = open_tier(tmp_path / "tier", io="uring", calls=calls)
    calls.write_error = EIO
    result = store(tier, [0, 9], [1, 2])
    assert not result.ok.any()
    assert "Input/output error" in result.error
    calls.write_error = 0
    tier.close()


def test_a_real_ring_that_fails(tmp_path, caplog):
    """A descriptor that cannot be read fails the real ring; threads bring the rest."""
    ring = open_nixl_ring()
    if isinstance(ring, str):
        pytest.skip(ring)
    tier = open_tier(tmp_path / "tier", io="uring")
    assert store(tier, list(PAGES), list(PAGES.values())).ok.all()
    real = tier._access.volume.slabs.fd
    write_only = os.open(tmp_path / "tier" / slab_name(1), os.O_WRONLY | os.O_DIRECT)
    tier._access.volume.slabs.fd = lambda slab: write_only if slab == 1 else real(slab)
    ok = load(tier, list(PAGES))[1].ok
    assert ok.tolist() == [slot // 8 != 1 for slot in PAGES]
    tier._access.volume.slabs.fd = real
    assert_holds(tier, PAGES)
    tier.close()
    os.close(write_only)
    assert [line for line in caplog.messages if "io_uring failed" in line]


@pytest.fixture
def mapped():
    if why_not_mapped():
        pytest.skip(why_not_mapped())
    calls = MappedCalls(SystemCalls())
    yield calls
    calls.close()


def test_a_mapping_does_not_reach_over_the_end(tmp_path, mapped):
    """A cut file reads short and refuses writes; touching it would be SIGBUS."""
    file = tmp_path / "file"
    file.write_bytes(bytes(range(256)) * 64)
    fd = os.open(file, os.O_RDWR)
    view = memoryview(bytearray(8192))
    assert mapped.preadv(fd, [view], 8192) == 8192
    os.ftruncate(fd, 12288)
    assert mapped.preadv(fd, [view], 8192) == 4096
    assert mapped.preadv(fd, [view], 12288) == 0
    with pytest.raises(OSError, match="shorter"):
        mapped.pwritev(fd, [view], 8192)
    os.ftruncate(fd, 1 << 20)
    assert mapped.pwritev(fd, [view], (1 << 20) - 8192) == 8192
    os.close(fd)


def test_a_file_cut_under_the_copy_is_an_error(tmp_path, mapped, monkeypatch):
    """A page that vanishes between the check and the copy is an error, no signal."""
    file = tmp_path / "file"
    file.write_bytes(bytes(16384))
    fd = os.open(file, os.O_RDWR)
    view = memoryview(bytearray(4096))
    assert mapped.preadv(fd, [view], 0) == 4096
    seen = os.fstat(fd)
    os.ftruncate(fd, 4096)
    monkeypatch.setattr(os, "fstat", lambda _: seen)
    with pytest.raises(OSError, match="Input/output") as caught:
        mapped.preadv(fd, [view], 8192)
    assert caught.value.errno == errno.EIO
    os.close(fd)


def test_a_reused_descriptor_is_mapped_anew(tmp_path, mapped):
    """A number that now means another file does not give the old one's bytes."""
    for content in (b"a", b"b"):
        file = tmp_path / content.decode()
        file.write_bytes(content * 4096)
        fd = os.open(file, os.O_RDWR)
        view = bytearray(4096)
        assert mapped.preadv(fd, [memoryview(view)], 0) == 4096
        assert view == content * 4096
        os.close(fd)


def test_the_oldest_io_in_flight_is_told():
    """An I/O that hangs is seen from outside while it hangs."""
    clock, go_on, entered = ManualClock(), threading.Event(), threading.Event()

    class Hangs(SystemCalls):
        def preadv(self, fd, views, offset):
            entered.set()
            go_on.wait()
            return 0

    class Reads:
        writes = False

        def target(self, extent):
            return -1, [memoryview(bytearray(10))]

        def moved(self, extent, num_bytes, seconds):
            self.seconds = seconds

    engine = make_engine("threads", Path("/"), Hangs(), clock, num_threads=1)
    assert engine.oldest_s() == 0
    work = Reads()
    extents = [Extent(0, 0, [0])]
    thread = threading.Thread(target=engine.run, args=(extents, work))
    thread.start()
    entered.wait()
    clock.advance(7.0)
    assert engine.oldest_s() == 7.0
    go_on.set()
    thread.join()
    assert engine.oldest_s() == 0
    assert work.seconds == 7.0
    engine.close()


@pytest.mark.parametrize("io", ["threads", "bounce", "uring", "mmap"])
def test_engines_read_what_another_one_wrote(tmp_path, io):
    """The bytes on disk are the same, so the engine may change at every start."""
    tier = open_tier(tmp_path / "tier", io="threads")
    store(tier, list(PAGES), list(PAGES.values()))
    tier.close()
    tier = open_tier(tmp_path / "tier", io=io)
    assert recovered(tier) == PAGES
    assert_holds(tier, PAGES)
    more = {25: 1, 26: 2}
    store(tier, list(more), list(more.values()))
    tier.close()
    tier = open_tier(tmp_path / "tier", io="threads")
    assert recovered(tier) == PAGES | more
    assert_holds(tier, PAGES | more)
    tier.close()


def test_closing_an_engine_twice_does_nothing(rings):
    """Every engine may be closed again."""
    rings.append(FakeRing())
    for io in ("threads", "bounce", "uring", "mmap"):
        engine = make_engine(io, Path("/"), SystemCalls(), SystemClock(), num_threads=2)
        engine.close()
        engine.close()


def test_logging_is_quiet_when_all_is_well(tmp_path, rings, caplog):
    """No engine warns about anything while it works."""
    caplog.set_level(logging.WARNING)
    rings.append(FakeRing())
    for number, io in enumerate(("threads", "bounce", "uring", "mmap")):
        tier = open_tier(tmp_path / str(number), io=io)
        store(tier, list(PAGES), list(PAGES.values()))
        assert np.all(load(tier, list(PAGES))[1].ok)
        tier.close()
    assert caplog.messages == []
