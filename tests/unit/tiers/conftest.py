"""A disk tier on system calls that fail and a clock that is set by hand."""

import pytest

from sgl_tiered.core.clock import ManualClock
from tests.unit.tiers.disk_support import REST_S, FailingCalls, open_tier


@pytest.fixture
def path(tmp_path):
    """Where the disk tier lies; nothing is there yet."""
    return tmp_path / "tier"


@pytest.fixture
def calls():
    """The system calls of ``tier``."""
    return FailingCalls()


@pytest.fixture
def clock():
    """The clock of ``tier``."""
    return ManualClock()


@pytest.fixture
def tier(path, calls, clock):
    """A disk tier that rests ``REST_S`` seconds after failures."""
    tier = open_tier(path, calls=calls, clock=clock, rest_s=REST_S)
    yield tier
    tier.close()
