"""The host tier does what every tier must."""

import pytest

from sgl_tiered.testing.tier_kit import TierKit
from sgl_tiered.tiers.host import HostTier


class TestHostTier(TierKit):
    """Anonymous memory."""

    @pytest.fixture
    def tier(self):
        tier = HostTier(self.SLOT_BYTES, self.NUM_SLOTS, page_bytes=self.PAGE_BYTES)
        yield tier
        tier.close()
