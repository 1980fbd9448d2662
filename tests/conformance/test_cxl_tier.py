"""The CXL tier does what every tier must, wherever its memory comes from.

On real CXL memory the same kit is run by tests/cxl.
"""

from pathlib import Path

import pytest

from sgl_tiered.testing.throttled import ThrottledTier
from sgl_tiered.testing.tier_kit import TierKit
from sgl_tiered.tiers.cxl import CxlTier
from sgl_tiered.tiers.cxl_source import CxlSource
from tests.unit.tiers.sysfs_support import add_dax, dax_file, first_node


def cxl(kit, source, **settings):
    return CxlTier(
        source, kit.SLOT_BYTES, kit.NUM_SLOTS, page_bytes=kit.PAGE_BYTES, **settings
    )


class TestPlainMemory(TierKit):
    """A stand-in."""

    @pytest.fixture
    def tier(self):
        tier = cxl(self, CxlSource(emulated=True))
        yield tier
        tier.close()


class TestThrottledMemory(TierKit):
    """A stand-in at the speed of a link."""

    @pytest.fixture
    def tier(self):
        tier = ThrottledTier(cxl(self, CxlSource(emulated=True)), 10e9, 1e-6)
        yield tier
        tier.close()


class TestNode(TierKit):
    """Memory bound to a node, verified."""

    @pytest.fixture
    def tier(self):
        tier = cxl(self, CxlSource(nodes=(first_node(),), emulated=True))
        yield tier
        tier.close()


class TestTmpfs(TierKit):
    """A shared mapping of a file in memory."""

    @pytest.fixture
    def tier(self):
        tier = cxl(self, CxlSource(path=Path("/dev/shm"), emulated=True))
        yield tier
        tier.close()


class TestDevdax(TierKit):
    """A shared mapping in units of 2 MiB; a file stands in for the device."""

    @pytest.fixture
    def tier(self, tmp_path):
        sysfs = add_dax(tmp_path / "sys")
        source = CxlSource(path=dax_file(tmp_path), offset_bytes=2 << 20)
        tier = cxl(self, source, sysfs=sysfs)
        yield tier
        tier.close()
