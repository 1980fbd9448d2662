"""Pinning a region: in parts, by several threads, in use before the last one."""

import logging
import threading
from pathlib import Path

import pytest

from sgl_tiered.errors import ConfigError
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


def test_progress_is_told(driver, caplog):
    """One line as often as asked for, with what is ready and what is wanted."""
    with caplog.at_level(logging.INFO):
        pinning = pin(driver, 16, progress_s=0.0)
        assert pinning.wait(PATIENCE_S)
    texts = [record.getMessage() for record in caplog.records]
    assert any("of 0.00 GB" in text and "pinned" in text for text in texts)
    pinning.close()


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
