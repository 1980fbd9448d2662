"""What the disk tier's tests share: a small tier, and system calls that fail."""

import errno
import os
import threading

import numpy as np

from sgl_tiered.core.plans import PageRecords, namespace_rows
from sgl_tiered.tiers.base import TierIO
from sgl_tiered.tiers.checks import expected_checksums
from sgl_tiered.tiers.disk import DiskTier
from sgl_tiered.tiers.disk_io import SystemCalls
from sgl_tiered.tiers.memory import aligned_buffer

SLOT_BYTES = 8192
PAGE_BYTES = 8000
PAGE_TOKENS = 5
SLOTS_PER_SLAB = 8
REST_S = 5.0
PATIENCE_S = 20.0
"""Upper bound of every wait: only a defect makes a test wait so long."""


class FailingCalls(SystemCalls):
    """System calls that fail on order.

    Attributes:
        read_error, write_error, allocate_error, open_error: errno to raise, 0 for none.
        max_read_bytes, max_write_bytes: longest transfer, 0 for no limit.
    """

    def __init__(self):
        self.read_error = 0
        self.write_error = 0
        self.allocate_error = 0
        self.open_error = 0
        self.max_read_bytes = 0
        self.max_write_bytes = 0
        self.num_reads = 0

    def open(self, path, flags, mode=0o600):
        """Open, or fail."""
        if self.open_error:
            raise OSError(self.open_error, os.strerror(self.open_error))
        return super().open(path, flags, mode)

    def preadv(self, fd, views, offset):
        """Read, fail, or read a part only."""
        self.num_reads += 1
        if self.read_error:
            raise OSError(self.read_error, os.strerror(self.read_error))
        return super().preadv(fd, shortened(views, self.max_read_bytes), offset)

    def pwritev(self, fd, views, offset):
        """Write, fail, or write a part only."""
        if self.write_error:
            raise OSError(self.write_error, os.strerror(self.write_error))
        return super().pwritev(fd, shortened(views, self.max_write_bytes), offset)

    def fallocate(self, fd, offset, num_bytes):
        """Set space aside, or fail after a part of it, as a full disk does."""
        if self.allocate_error:
            os.ftruncate(fd, offset + 3 * num_bytes // 4)
            raise OSError(self.allocate_error, os.strerror(self.allocate_error))
        super().fallocate(fd, offset, num_bytes)


class Gate:
    """Holds calls up while it is shut."""

    def __init__(self):
        self._open = threading.Event()
        self._open.set()
        self.entered = threading.Event()

    def shut(self):
        """Hold everybody who comes from now on."""
        self.entered.clear()
        self._open.clear()

    def open(self):
        """Let them go."""
        self._open.set()

    @property
    def is_open(self):
        """Whether everybody passes."""
        return self._open.is_set()

    def passed(self):
        """Come to the gate."""
        if not self._open.is_set():
            self.entered.set()
            assert self._open.wait(10 * PATIENCE_S), "nobody opened the gate"

    def hold(self, call):
        """Return the call, held up before it is made."""

        def held(*args, **kwargs):
            self.passed()
            return call(*args, **kwargs)

        return held


class HeldCalls(FailingCalls):
    """System calls of which some kinds wait at a gate."""

    def __init__(self, gate):
        super().__init__()
        self.gate = gate
        self.kinds = set()

    def _come(self, kind):
        if kind in self.kinds:
            self.gate.passed()

    def open(self, path, flags, mode=0o600):
        self._come("open")
        return super().open(path, flags, mode)

    def preadv(self, fd, views, offset):
        self._come("read")
        return super().preadv(fd, views, offset)

    def pwritev(self, fd, views, offset):
        self._come("write")
        return super().pwritev(fd, views, offset)

    def fallocate(self, fd, offset, num_bytes):
        self._come("allocate")
        super().fallocate(fd, offset, num_bytes)


def shortened(views, max_bytes):
    if not max_bytes:
        return views
    return [views[0][:max_bytes]]


def open_tier(path, *, num_slots=32, fingerprint="model-a", **settings):
    """Open a tier with four slabs of eight slots, unless told otherwise."""
    sizes = {
        "slot_bytes": SLOT_BYTES,
        "page_bytes": PAGE_BYTES,
        "page_tokens": PAGE_TOKENS,
        "max_bytes": num_slots * (SLOT_BYTES + 112),
        "slab_bytes": SLOTS_PER_SLAB * SLOT_BYTES,
    }
    return DiskTier.open(path, **(sizes | settings), fingerprint=fingerprint)


def page_of(seed):
    """Return the bytes of the page that ``seed`` names: uint8 [PAGE_BYTES]."""
    return np.random.default_rng(seed).integers(0, 256, PAGE_BYTES, np.uint8)


def store(tier, addresses, seeds, namespace=b"0123456789abcdef", kinds=None):
    """Store the page of each seed; its key and tokens say the seed as well."""
    slots = np.asarray(addresses, np.int64)
    buffer = aligned_buffer(len(slots), SLOT_BYTES)
    keys = np.zeros((len(slots), 16), np.uint8)
    for i, seed in enumerate(seeds):
        buffer[i, :PAGE_BYTES] = page_of(seed)
        keys[i, :8] = np.frombuffer(int(seed).to_bytes(8, "little"), np.uint8)
    records = PageRecords(
        namespaces=namespace_rows(namespace, len(slots)),
        keys=keys,
        parents=keys + np.uint8(1),
        tokens=np.asarray(seeds, np.int32)[:, None]
        + np.arange(PAGE_TOKENS, dtype="i4"),
        checksums=np.zeros(len(slots), np.uint64),
        addresses=slots,
        representations=kinds,
    )
    return tier.store(TierIO(slots, buffer, np.arange(len(slots)), records))


def load(tier, addresses, checksums=None):
    """Load pages; return (bytes uint8 [n, PAGE_BYTES], result)."""
    slots = np.asarray(addresses, np.int64)
    buffer = aligned_buffer(len(slots), SLOT_BYTES)
    records = None if checksums is None else expected_checksums(checksums, slots)
    result = tier.load(TierIO(slots, buffer, np.arange(len(slots)), records))
    return buffer[:, :PAGE_BYTES], result


def recovered(tier):
    """Return what ``recover`` found as {address: seed}."""
    found = {}
    for group in tier.recover():
        for address, key in zip(group.addresses.tolist(), group.keys, strict=True):
            found[address] = int.from_bytes(key[:8].tobytes(), "little")
    return found


def assert_holds(tier, expected):
    """Check that each address has the page of its seed."""
    if not expected:
        return
    pages, result = load(tier, list(expected))
    assert result.ok.all(), result.error
    for page, seed in zip(pages, expected.values(), strict=True):
        assert np.array_equal(page, page_of(seed))


EIO, ENOSPC = errno.EIO, errno.ENOSPC
