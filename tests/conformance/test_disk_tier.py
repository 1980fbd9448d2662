"""The disk tier does what every tier must, with O_DIRECT and without."""

import errno
import os

import pytest

from sgl_tiered.testing.tier_kit import TierKit
from sgl_tiered.tiers.disk import DiskTier
from sgl_tiered.tiers.disk_io import SystemCalls


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

    @pytest.fixture
    def tier(self, tmp_path):
        tier = DiskTier.open(
            tmp_path / "tier",
            slot_bytes=self.SLOT_BYTES,
            page_bytes=self.PAGE_BYTES,
            page_tokens=self.PAGE_TOKENS,
            max_bytes=self.NUM_SLOTS * (self.SLOT_BYTES + 512),
            slab_bytes=7 * self.SLOT_BYTES,
            fingerprint="kit",
            calls=self.CALLS(),
        )
        yield tier
        tier.close()


class TestBufferedDiskTier(TestDiskTier):
    """Through the page cache."""

    CALLS = RefusesDirectIO

    def test_falls_back_and_says_so(self, tier):
        """Where O_DIRECT is refused the tier goes through the page cache."""
        assert not tier.direct
        assert "buffered" in tier.health().detail
