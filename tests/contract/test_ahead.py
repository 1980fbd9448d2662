"""On-evict offloads over SGLang's real tree, with both of its cores."""

import pytest

from tests.contract.story_support import CORES, told_by

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def stories():
    """What happened, by core: seven prompts of 8 pages in a pool of 64."""
    return told_by("ahead_program.py")


@pytest.fixture(params=CORES)
def seen(request, stories):
    """The story of one core."""
    return stories[request.param]


def test_copies_begin_above_the_threshold(seen):
    """None with three quarters of the pool in use, one with a prompt more."""
    assert seen["copies_at_threshold"] == 0
    assert seen["copies_above"] == 1


def test_the_coldest_prompt_is_copied_byte_for_byte(seen):
    """It, and no other, is in the host tier, as the pool has it."""
    assert seen["in_host"] == [8, 0, 0, 0, 0, 0, 0]
    assert seen["bytes_agree"]


def test_its_path_is_locked_as_long_as_the_copy_runs(seen):
    """Eight pages, and none afterwards."""
    assert seen["locked_while_copied"] == 8
    assert seen["locked_after"] == 0


def test_being_copied_makes_no_prompt_hot(seen):
    """SGLang drops it next all the same, and nothing is lost by that."""
    assert seen["on_device"] == [0, 8, 8, 8, 8, 8, 8]
    assert seen["late_after_saved"] == 0


def test_what_goes_before_its_turn_is_counted(seen):
    """Two prompts that were dropped at once are 16 late pages."""
    assert seen["late_after_burst"] == 16


def test_a_dropped_tier_is_filled_again(seen):
    """What had copies in it is copied again when the device is full."""
    assert seen["copies_after_drop"] == 1


def test_every_slot_is_free_or_evictable(seen):
    """As SGLang's own check of its pool wants it."""
    assert seen["available"] + seen["evictable"] == 64 * 16
