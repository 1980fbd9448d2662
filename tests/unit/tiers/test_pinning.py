"""Pinning a region: in parts, by several threads, in use before the last one."""

import errno
import logging
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from sgl_tiered.errors import ConfigError
from sgl_tiered.tiers import numa_calls
from sgl_tiered.tiers.cxl import CxlTier
from sgl_tiered.tiers.cxl_source import CxlSource
from sgl_tiered.tiers.host import HostTier
from sgl_tiered.tiers.memory import MemoryRegion
from sgl_tiered.tiers.pinning import LenientRegister, Pinning
from tests.unit.tiers.sysfs_support import add_dax, dax_file

ROW = 4096
ADDRESS = 1 << 30
PATIENCE_S = 20.0


class Driver:
    """Stands in for CUDA: notes what is pinned, and holds or refuses parts."""

    def __init__(self):
        self.pinned = {}
        self.callers = set()
        self.open = threading.Event()
        self.open.set()
        self.free_parts = 0
        """As many are pinned while the others are held."""
        self.refuses_from = None
        self.raises = False
        self._lock = threading.Lock()

    def __call__(self, address, num_bytes):
        with self._lock:
            self.callers.add(threading.current_thread().name)
            self.free_parts -= 1
            is_free = self.free_parts >= 0
        if not is_free:
            assert self.open.wait(PATIENCE_S)
        if self.refuses_from is not None and address >= self.refuses_from:
            if self.raises:
                raise ConfigError("--size", "cannot be pinned", "raise ulimit -l")
            return None
        with self._lock:
            assert address not in self.pinned
            self.pinned[address] = num_bytes
        return lambda: self.pinned.pop(address)


@pytest.fixture
def driver():
    return Driver()


def pin(driver, num_rows, part_rows=4, **settings):
    part_bytes = part_rows * ROW
    return Pinning(driver, ADDRESS, num_rows, ROW, part_bytes=part_bytes, **settings)


def test_all_is_pinned_in_parts_of_whole_rows(driver):
    """Parts touch and do not overlap; each holds whole rows."""
    pinning = pin(driver, 18)
    assert pinning.wait(PATIENCE_S)
    assert pinning.num_ready == 18
    assert driver.pinned == {
        ADDRESS + first * ROW: min(4, 18 - first) * ROW for first in range(0, 18, 4)
    }
    pinning.close()
    pinning.close()
    assert driver.pinned == {}


def test_the_first_part_is_there_at_once_and_the_rest_comes(driver):
    """Who asks is told of each step, once, in order, and of what was there before."""
    driver.free_parts = 1
    driver.open.clear()
    told = []
    pinning = pin(driver, 18)
    assert pinning.num_ready == 4
    pinning.watch(told.append)
    assert told == [4]
    driver.open.set()
    assert pinning.wait(PATIENCE_S)
    assert told == [4, 8, 12, 16, 18]
    # Who comes late, and knows of some, is told of the others.
    late = []
    pinning.watch(late.append, since=8)
    assert late == [12, 16, 18]
    pinning.close()


def test_rows_are_ready_only_behind_all_before_them(driver):
    """A part that is late holds back those behind it."""
    held, go = ADDRESS + 4 * ROW, threading.Event()
    others = threading.Semaphore(0)

    def register(address, num_bytes):
        if address == held:
            assert go.wait(PATIENCE_S)
        undo = driver(address, num_bytes)
        others.release()
        return undo

    pinning = Pinning(register, ADDRESS, 20, ROW, part_bytes=4 * ROW, num_threads=3)
    for _ in range(4):
        assert others.acquire(timeout=PATIENCE_S)
    assert pinning.num_ready == 4
    go.set()
    assert pinning.wait(PATIENCE_S)
    assert pinning.num_ready == 20
    pinning.close()


def test_several_threads_pin(driver):
    """The first part by who asks for it, which needs an answer; then by others."""
    pinning = pin(driver, 40, num_threads=3)
    assert pinning.wait(PATIENCE_S)
    assert threading.current_thread().name in driver.callers
    assert len(driver.callers) <= 4
    pinning.close()


@pytest.mark.parametrize("raises", [False, True])
def test_what_cannot_be_pinned_is_left_out(driver, caplog, raises):
    """One sentence says how much is used; the rest stays pinned."""
    driver.refuses_from = ADDRESS + 8 * ROW
    driver.raises = raises
    with caplog.at_level(logging.WARNING):
        pinning = pin(driver, 20)
        assert pinning.wait(PATIENCE_S)
    assert pinning.num_ready == 8
    assert not pinning.is_refused
    (message,) = [record.getMessage() for record in caplog.records]
    assert "32768 of 81920 bytes" in message
    assert "ulimit -l" in message
    pinning.close()
    assert driver.pinned == {}


def test_a_refusal_of_the_first_part_is_one_of_all(driver, caplog):
    """The region is used as it is then, as without a device."""
    driver.refuses_from = 0
    pinning = pin(driver, 20)
    assert pinning.is_refused
    assert pinning.num_ready == 20
    assert pinning.pinned_bytes == 0
    assert pinning.wait(PATIENCE_S)
    assert driver.callers == {threading.current_thread().name}
    assert not caplog.records
    pinning.close()


def test_an_error_of_the_first_part_is_raised(driver):
    """A start that is refused leaves neither a thread nor a pin behind."""
    driver.refuses_from, driver.raises = 0, True
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="cannot be pinned"):
        pin(driver, 20)
    assert set(threading.enumerate()) == before
    assert driver.pinned == {}


def test_close_does_not_wait_for_parts_that_were_not_begun(driver):
    """What is pinned by then is unpinned, and no thread is left."""
    before = set(threading.enumerate())
    driver.free_parts = 2
    driver.open.clear()
    pinning = pin(driver, 4000, num_threads=2)
    closing = threading.Thread(target=pinning.close)
    closing.start()
    driver.open.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert driver.pinned == {}
    assert len(driver.callers) <= 3
    assert set(threading.enumerate()) == before


def told_until(caplog, words):
    """Return the lines so far, once one of them has these words."""
    give_up_at_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up_at_s:
        texts = [record.getMessage() for record in caplog.records]
        if any(words in text for text in texts):
            return texts
        time.sleep(0.005)
    raise AssertionError(f"no line has {words!r}")


def test_progress_is_told(driver, caplog):
    """At first, as often as asked for while nothing comes, and with the last part."""
    rows_per_gb = 250_000  # of 4,000 bytes
    driver.free_parts = 1
    driver.open.clear()
    with caplog.at_level(logging.INFO):
        pinning = Pinning(
            driver,
            ADDRESS,
            4 * rows_per_gb,
            4000,
            part_bytes=10**9,
            num_threads=2,
            progress_s=0.01,
        )
        first, *_ = told_until(caplog, "no more for")
        driver.open.set()
        assert pinning.wait(PATIENCE_S)
    texts = [record.getMessage() for record in caplog.records]
    assert first == texts[0]
    assert "1.00 of 4.00 GB of memory are pinned and in use; 2 threads" in first
    (stuck, *_) = [text for text in texts if "no more for" in text]
    assert "1.00 of 4.00 GB" in stuck
    assert re.search(r"all 4.00 GB of memory are pinned, in \d+\.\d s$", texts[-1])
    pinning.close()


def test_no_line_says_all_where_it_is_not(driver, caplog):
    """A refusal and a close end it without."""
    driver.refuses_from = ADDRESS + 8 * ROW
    with caplog.at_level(logging.INFO):
        pin(driver, 20).close()
        driver.refuses_from = None
        driver.free_parts = 1
        driver.open.clear()
        pinning = pin(driver, 4000, num_threads=1)
        closing = threading.Thread(target=pinning.close)
        closing.start()
        assert pinning._stop.wait(PATIENCE_S)
        driver.open.set()
        closing.join(PATIENCE_S)
        assert not closing.is_alive()
    assert "are pinned, in" not in caplog.text


def test_a_region_is_placed_before_it_is_touched(monkeypatch):
    """On the node that was asked for: pages that are there would stay."""
    calls = []

    def prefer(address, num_bytes, node):
        calls.append(("prefer", address, num_bytes, node))

    def register(address, num_bytes):
        calls.append(("pin", address, num_bytes))
        return lambda: None

    monkeypatch.setattr("sgl_tiered.tiers.memory.prefer_node", prefer)
    tier = HostTier(ROW, 8, register=register, node=1)
    address = tier.region.ctypes.data
    assert calls == [("prefer", address, 8 * ROW, 1), ("pin", address, 8 * ROW)]
    tier.close()
    calls.clear()
    HostTier(ROW, 8, register=register).close()
    assert [name for name, *_ in calls] == ["pin"]


@pytest.mark.parametrize("refuses", [False, True])
def test_a_node_is_preferred_and_not_insisted_on(monkeypatch, caplog, refuses):
    """Where the kernel refuses, one line says so, and memory lies anywhere."""
    asked = []

    def bind(*how):
        asked.append(how)
        if refuses:
            raise OSError(errno.EPERM, "Operation not permitted")

    find = classmethod(lambda kind: SimpleNamespace(bind=bind))
    monkeypatch.setattr(numa_calls.NumaCalls, "find", find)
    numa_calls.prefer_node(ADDRESS, 8 * ROW, 1)
    assert asked == [(ADDRESS, 8 * ROW, numa_calls.PREFERRED, [1])]
    assert all("node 1" in record.getMessage() for record in caplog.records)
    assert len(caplog.records) == refuses


def test_a_region_is_whole_unless_parts_of_it_will_do(driver):
    """Rings and staging memory are used at once."""
    region = MemoryRegion(64, ROW, register=driver, part_bytes=8 * ROW)
    assert region.pinning.num_ready == 64
    assert sum(driver.pinned.values()) == 64 * ROW
    region.close()
    assert driver.pinned == {}


def memory_tier(kind, driver, folder):
    """Make a tier of 64 rows that the driver pins."""
    if kind == "host":
        return HostTier(ROW, 64, register=driver)
    sysfs = add_dax(folder / "sys")
    source = {
        "memory": CxlSource(emulated=True),
        "tmpfs": CxlSource(emulated=True, path=Path("/dev/shm")),
        "devdax": CxlSource(path=dax_file(folder)),
    }[kind]
    return CxlTier(source, ROW, 64, register=driver, sysfs=sysfs)


@pytest.mark.parametrize("kind", ["host", "memory", "tmpfs", "devdax"])
def test_a_memory_tier_serves_before_its_last_part_is_pinned(
    driver, monkeypatch, tmp_path, kind
):
    """It says how many slots may be used, and tells of more."""
    monkeypatch.setattr("sgl_tiered.tiers.pinning.PIN_BYTES", 8 * ROW)
    driver.free_parts = 1
    driver.open.clear()
    tier = memory_tier(kind, driver, tmp_path)
    assert (tier.num_ready, tier.num_slots) == (8, 64)
    assert tier.health().pinned_bytes == 8 * ROW
    told, done = [], threading.Event()

    def note(num_slots):
        told.append(num_slots)
        if num_slots == 64:
            done.set()

    tier.watch_ready(note)
    driver.open.set()
    assert done.wait(PATIENCE_S)
    assert told[0] == 8
    assert tier.num_ready == 64
    assert tier.health().pinned_bytes == 64 * ROW
    tier.close()
    assert driver.pinned == {}


@pytest.mark.parametrize("in_steps", [True, False])
@pytest.mark.parametrize(
    ("pinned_parts", "used"), [(0, 20), (1, 4), (2, 8), (4, 16), (5, 20)]
)
def test_what_is_not_pinned_in_the_end_is_counted_once(
    driver, caplog, in_steps, pinned_parts, used
):
    """All rows are used, or those that are pinned; nothing else stays pinned."""

    def register(address, num_bytes):
        if address >= ADDRESS + pinned_parts * 4 * ROW:
            raise ConfigError("--size", "cannot be pinned", "raise ulimit -l")
        return driver(address, num_bytes)

    refused = []
    lenient = LenientRegister(register, refused.append)
    pinning = pin(lenient, 20, in_steps=in_steps)
    assert pinning.wait(PATIENCE_S)
    is_whole = pinned_parts == 5
    leaves_all = not is_whole and (not in_steps or pinned_parts == 0)
    assert pinning.is_refused is leaves_all
    assert pinning.num_ready == (20 if leaves_all else used)
    not_pinned = 20 if leaves_all else 20 - used
    assert sum(driver.pinned.values()) == (20 - not_pinned) * ROW
    assert refused == ([not_pinned * ROW] if not_pinned else [])
    reasons = [r for r in caplog.records if "--size" in r.getMessage()]
    assert len(reasons) == (not is_whole)
    pinning.close()
    assert driver.pinned == {}


def test_a_thread_that_pins_lives_through_any_error(driver, caplog):
    """It is a refusal as others are: told, and what lies behind it is not used."""

    def register(address, num_bytes):
        if address == ADDRESS + 8 * ROW:
            raise RuntimeError("the driver is gone")
        return driver(address, num_bytes)

    pinning = pin(register, 20)
    assert pinning.wait(PATIENCE_S)
    assert pinning.num_ready == 8
    assert sum(driver.pinned.values()) == 8 * ROW
    assert "the driver is gone" in caplog.text
    assert "32768 of 81920 bytes" in caplog.text
    pinning.close()
