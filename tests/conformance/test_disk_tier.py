"""The disk tier does what every tier must: every I/O engine, one directory or more."""

import errno
import gc
import os

import numpy as np
import pytest

from sgl_tiered.testing.tier_kit import TierKit
from sgl_tiered.tiers.disk import DiskTier
from sgl_tiered.tiers.disk_io import SystemCalls
from sgl_tiered.tiers.disk_mmap import why_not_mapped
from sgl_tiered.tiers.disk_nixl import open_nixl_ring
from sgl_tiered.tiers.disk_striped import StripedTier


class RefusesDirectIO(SystemCalls):
    """A file system without O_DIRECT."""

    def open(self, path, flags, mode=0o600):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return super().open(path, flags, mode)


class TestDiskTier(TierKit):
    """O_DIRECT where the file system of the tests takes it."""

    SURVIVES_RESTART = True
    CALLS = SystemCalls
    IO = "threads"

    def open(self, path, num_slots):
        return DiskTier.open(
            path,
            slot_bytes=self.SLOT_BYTES,
            page_bytes=self.PAGE_BYTES,
            page_tokens=self.PAGE_TOKENS,
            max_bytes=num_slots * (self.SLOT_BYTES + 512),
            slab_bytes=7 * self.SLOT_BYTES,
            fingerprint="kit",
            io=self.IO,
            calls=self.CALLS(),
        )

    @pytest.fixture
    def tier(self, tmp_path):
        tier = self.open(tmp_path / "tier", self.NUM_SLOTS)
        yield tier
        tier.close()

    def test_many_pages_in_any_order(self, tier):
        """A batch of many I/Os comes back byte for byte, whatever its order."""
        rng = np.random.default_rng(3)
        slots = rng.permutation(self.NUM_SLOTS)
        pages, stored = self.store(tier, slots, seed=12)
        assert stored.ok.all(), stored.error
        for _ in range(20):
            order = rng.permutation(len(slots))
            buffer, loaded = self.load(tier, slots[order], stored.checksums[order])
            assert loaded.ok.all(), loaded.error
            wanted = pages[order][:, : self.PAGE_BYTES]
            assert np.array_equal(buffer[:, : self.PAGE_BYTES], wanted)


class TestBufferedDiskTier(TestDiskTier):
    """Through the page cache."""

    CALLS = RefusesDirectIO

    def test_falls_back_and_says_so(self, tier):
        """Where O_DIRECT is refused the tier goes through the page cache."""
        assert not tier.direct
        assert "buffered" in tier.health().detail


class TestBouncingDiskTier(TestDiskTier):
    """Reads by way of small buffers."""

    IO = "bounce"


@pytest.mark.skipif(bool(why_not_mapped()), reason=why_not_mapped())
class TestMappedDiskTier(TestDiskTier):
    """Mapped slabs."""

    IO = "mmap"

    def test_is_mapped(self, tier):
        """The engine is the one that was asked for, and health says so."""
        assert tier.io == "mmap"
        assert tier.health().detail == "mmap"


class TestUringDiskTier(TestDiskTier):
    """io_uring through NIXL."""

    IO = "uring"

    @pytest.fixture
    def tier(self, tmp_path):
        reason = open_nixl_ring()
        if isinstance(reason, str):
            pytest.skip(reason)
        # A ring of a former test that is collected while the next is opened lends it
        # its descriptor, by which that is not found.
        gc.collect()
        tier = self.open(tmp_path / "tier", self.NUM_SLOTS)
        yield tier
        # No I/O has failed, so the ring has to be in use to the end.
        assert tier.io == "uring"
        tier.close()


class TestStripedDiskTier(TestDiskTier):
    """Three directories, chunks of two pages."""

    @pytest.fixture
    def tier(self, tmp_path):
        share = -(-self.NUM_SLOTS // 3) + 1
        tiers = [self.open(tmp_path / name, share) for name in ("a", "b", "c")]
        tier = StripedTier(tiers, chunk_bytes=2 * self.SLOT_BYTES)
        yield tier
        tier.close()
