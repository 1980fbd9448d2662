"""Wrapped tiers, and the fake, do what every tier must."""

import pytest

from sgl_tiered.core.ids import TierId
from sgl_tiered.testing.delayed import DelayedTier, DelaySwitch
from sgl_tiered.testing.fakes import FakeTier
from sgl_tiered.testing.faulty import FaultyTier
from sgl_tiered.testing.throttled import Link, ThrottledTier
from sgl_tiered.testing.tier_kit import TierKit
from sgl_tiered.tiers.disk import DiskTier
from sgl_tiered.tiers.host import HostTier


def host(kit):
    return HostTier(kit.SLOT_BYTES, kit.NUM_SLOTS, page_bytes=kit.PAGE_BYTES)


def disk(kit, path):
    return DiskTier.open(
        path / "tier",
        slot_bytes=kit.SLOT_BYTES,
        page_bytes=kit.PAGE_BYTES,
        page_tokens=kit.PAGE_TOKENS,
        max_bytes=kit.NUM_SLOTS * (kit.SLOT_BYTES + 512),
        fingerprint="kit",
    )


class TestThrottledHost(TierKit):
    """A slow memory tier."""

    @pytest.fixture
    def tier(self):
        tier = ThrottledTier(host(self), 10e9, 1e-6)
        yield tier
        tier.close()


class TestThrottledDisk(TierKit):
    """A slow disk."""

    SURVIVES_RESTART = True

    @pytest.fixture
    def tier(self, tmp_path):
        tier = ThrottledTier(disk(self, tmp_path), 10e9, 1e-6)
        yield tier
        tier.close()


class TestFaultyHostWithoutFaults(TierKit):
    """A wrapper with nothing switched on changes nothing."""

    @pytest.fixture
    def tier(self):
        tier = FaultyTier(host(self))
        yield tier
        tier.close()


class TestFaultyDelayedThrottledDisk(TierKit):
    """Wrappers stack."""

    SURVIVES_RESTART = True

    @pytest.fixture
    def tier(self, tmp_path):
        link = Link(read_bytes_per_s=10e9, write_bytes_per_s=5e9)
        inner = ThrottledTier(disk(self, tmp_path), link)
        tier = FaultyTier(DelayedTier(inner, DelaySwitch()))
        yield tier
        tier.close()


class TestFakeTier(TierKit):
    """The fake is a tier as well."""

    SLOT_BYTES = 8192
    PAGE_BYTES = 8192

    @pytest.fixture
    def tier(self):
        tier = FakeTier(self.SLOT_BYTES, self.NUM_SLOTS, TierId.DISK)
        yield tier
        tier.close()
