"""A machine that locks no memory is told of by a counter, wherever it was refused."""

import pytest

from tests.contract.story_support import output_of

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("kind", ["pages", "layers"])
def test_memory_that_is_not_pinned_is_counted(kind):
    """The host tier's and the device pool's own buffers, or layer-wise KV's memory."""
    told = output_of("pinning_program.py")[kind]
    assert told["host"] > 0
    assert told["counted"] == told["host"] + told["elsewhere"]
