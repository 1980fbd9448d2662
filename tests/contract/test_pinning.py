"""Memory that is not pinned is counted; what is pinned is used part by part."""

import pytest

from tests.contract.story_support import output_of

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("kind", ["pages", "layers"])
def test_memory_that_is_not_pinned_is_counted(kind):
    """The host tier's and the device pool's own buffers, or layer-wise KV's memory."""
    told = output_of("pinning_program.py")[kind]
    assert told["host"] > 0
    assert told["counted"] == told["host"] + told["elsewhere"]


def test_memory_tiers_serve_before_their_last_part_is_pinned():
    """The host's and CXL's: a rank is built with the first part of each."""
    told = output_of("pinning_program.py")["parts"]
    assert all(told["whole"])
    assert told["first"] == [slots // 4 for slots in told["whole"]]
    assert told["last"] == told["whole"]
    assert told["shares at first"] == [0.25, 0.25]
    assert told["shares at last"] == [1.0, 1.0]
    assert told["settings"] == ["--tiered-cxl-size", "--tiered-host-size"]
