"""SGLang's admin calls over our cache: none ends the scheduler, or loses an end."""

import pytest

from tests.contract.story_support import CORES, told_by

pytestmark = pytest.mark.sglang

NUM_PAGES = 4


@pytest.fixture(scope="module")
def stories():
    """What came of each call, by core."""
    return told_by("admin_program.py")


@pytest.fixture(params=CORES)
def seen(request, stories):
    """The story of one core."""
    return stories[request.param]


def test_clearing_the_storage_waits_for_nothing(seen):
    """The disk is empty at once; the copy to the host that ran meanwhile is kept."""
    told = seen["cleared_while_offloading"]
    assert told == {
        "used_before": NUM_PAGES,
        "success": True,
        "used": 0,
        "idle": True,
        "locked": 0,
        "kept": NUM_PAGES,
        "adopted": 0,
    }


def test_a_drop_loses_no_end_of_an_offload(seen):
    """A node whose copy ended within the call is let go; a restart finds nothing."""
    assert seen["dropped_while_offloading"] == {
        "idle": True,
        "locked": 0,
        "adopted": 0,
    }


def test_nothing_that_forgets_waits_for_a_disk_that_hangs(seen):
    """Slots keep until their writes end; only what came afterwards is left."""
    assert seen["forgotten_while_the_disk_is_held"] == {
        "used_while_held": NUM_PAGES,
        "kept_while_held": 2 * NUM_PAGES,
        "is_held": True,
        "used": NUM_PAGES,
        "kept": NUM_PAGES,
        "adopted": NUM_PAGES,
    }


def test_clearing_a_storage_that_there_is_not_is_refused(seen):
    """The answer is no, and it is counted."""
    assert seen["cleared_without_a_disk"] == {"success": False, "refused": 1}


def test_memory_is_released_when_copies_have_ended(seen):
    """A copy of the last answer neither fails the call nor runs on without memory."""
    told = seen["released_while_offloading"]
    assert told == {"running": 0, "resumed": "kv_cache", "kept": NUM_PAGES}


def test_no_memory_is_released_under_a_store_that_was_given_up(seen):
    """It is when the copy has ended; a flush waits for nothing."""
    assert seen["released_under_a_store_given_up"] == {
        "idle": True,
        "taken_under_it": [],
        "drains": 0,
        "taken": ["kv_cache", "kv_cache again"],
        "refused": 1,
    }


def test_a_paused_server_becomes_idle(seen):
    """Its loop does not look after the cache, and yet offloads end."""
    assert seen["paused_while_offloading"] == {"told_idle": [True]}


def test_an_idle_server_sleeps_when_all_is_done(seen):
    """Not before: the end of one write begins the next, and so does what it forgets."""
    told = seen["slept_while_demoting"]
    assert told == {
        "while_writing": 0,
        "afterwards": 1,
        "used": NUM_PAGES,
        "while_giving_back": 1,
        "at_the_end": 2,
        "left": 0,
    }


def test_beams_are_refused_in_a_sentence(seen):
    """SGLang refuses them for its own caches with storage."""
    told = seen["beams"]
    assert told["refused"] == 1
    assert "--radix-cache-backend tiered" in told["said"]
    assert told["said"].endswith(".")
