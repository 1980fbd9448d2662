"""The index of a disk tier is read while the tier is used."""

import threading

import numpy as np
import pytest

from sgl_tiered.tiers.disk_format import INDEX_NAME, record_dtype
from sgl_tiered.tiers.disk_format import _own_checksums as own_checksums
from sgl_tiered.tiers.disk_io import SystemCalls
from tests.unit.tiers.disk_support import (
    PAGE_TOKENS,
    assert_holds,
    load,
    open_tier,
    recovered,
    store,
)

PAGES = {3: 103, 9: 109, 30: 130}


class HeldReads(SystemCalls):
    """Reads that wait, once they are told to."""

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()
        self.reached = threading.Event()

    def preadv(self, fd, views, offset):
        """Read, once the gate is open."""
        self.reached.set()
        self.gate.wait()
        return super().preadv(fd, views, offset)


@pytest.fixture
def calls():
    """Return reads that can be held; let go at the end whatever happens."""
    calls = HeldReads()
    yield calls
    calls.gate.set()


def begin_scan(tier, calls):
    """Scan on a thread; return it, held in its first read, and where its result is."""
    found = []
    calls.gate.clear()
    calls.reached.clear()
    thread = threading.Thread(target=lambda: found.append(tier.recover()))
    thread.start()
    calls.reached.wait()
    return thread, found


def fill(path):
    tier = open_tier(path)
    store(tier, list(PAGES), list(PAGES.values()))
    tier.close()


def test_what_was_forgotten_during_a_scan_is_not_found(path, calls):
    """``forget`` does not wait for the scan, and the scan does not undo it."""
    fill(path)
    tier = open_tier(path, calls=calls)
    thread, found = begin_scan(tier, calls)
    tier.forget(np.array([9]))
    calls.gate.set()
    thread.join()
    assert sorted(found[0].addresses.tolist()) == [3, 30]
    assert not load(tier, [9])[1].ok.any()
    assert_holds(tier, {3: 103, 30: 130})
    tier.close()
    tier = open_tier(path)
    assert recovered(tier) == {3: 103, 30: 130}
    tier.close()


def test_a_scan_ends_with_the_tier(path, calls, monkeypatch):
    """Close lets the part that is read end, and no other; nothing is lost."""
    monkeypatch.setattr("sgl_tiered.tiers.disk_files.SCAN_BYTES", 1)
    fill(path)
    tier = open_tier(path, calls=calls)
    thread, found = begin_scan(tier, calls)
    closer = threading.Thread(target=tier.close)
    closer.start()
    calls.gate.set()
    thread.join()
    closer.join()
    assert not len(found[0]) or len(found[0]) == len(PAGES)
    tier = open_tier(path)
    assert recovered(tier) == PAGES
    tier.close()


def test_holds_tells_of_this_and_of_former_processes(path):
    """A look at a few records, without a scan; torn ones are none."""
    fill(path)
    dtype = record_dtype(PAGE_TOKENS)
    raw = np.fromfile(path / INDEX_NAME, dtype)
    raw["tokens"][9] += 1
    raw.tofile(path / INDEX_NAME)
    tier = open_tier(path)
    store(tier, [12], [5])
    asked = np.array([31, 3, 9, 12, 30, 0])
    assert tier.holds(asked).tolist() == [False, True, False, True, True, False]
    tier.close()


def test_every_bit_counts_in_a_record_s_checksum():
    """Any flipped bit, two words exchanged, and the halves of two records."""
    dtype = record_dtype(PAGE_TOKENS)
    random = np.random.default_rng(1)
    raw = random.integers(0, 256, (2, dtype.itemsize), np.uint8)
    ours = own_checksums(raw.view(dtype)[:, 0])
    size = dtype.itemsize - 8
    flipped = np.repeat(raw[:1], 8 * size, axis=0)
    bits = np.arange(8 * size)
    flipped[bits, bits // 8] ^= (1 << bits % 8).astype(np.uint8)
    sums = own_checksums(flipped.view(dtype)[:, 0])
    assert len({*sums.tolist(), int(ours[0])}) == 8 * size + 1
    exchanged = raw[:1].copy()
    exchanged[0, :16] = np.roll(raw[0, :16], 8)
    torn = raw[:1].copy()
    torn[0, size // 2 :] = raw[1, size // 2 :]
    for other in (exchanged, torn):
        assert own_checksums(other.view(dtype)[:, 0])[0] not in ours
