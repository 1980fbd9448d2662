"""Fetches to the device over SGLang's real tree, with both of its cores."""

import pytest

from tests.contract.story_support import CORES, told_by

pytestmark = pytest.mark.sglang

STORIES = (
    "plain",
    "behind a front",
    "computed in part",
    "computed whole",
    "front gone",
    "short of room",
    "evicting",
    "all needed",
    "failed",
    "aborted",
)


@pytest.fixture(scope="module")
def stories():
    """What happened, by core: one prompt of 8 pages on the host, a pool of 64."""
    return told_by("fetch_program.py")


@pytest.fixture(params=CORES)
def seen(request, stories):
    """The stories of one core."""
    return stories[request.param]


@pytest.mark.parametrize("name", STORIES)
def test_no_slot_is_lost(seen, name):
    """Free, evictable and protected make the pool, and nothing stays lent or pinned."""
    assert seen[name]["lost"] == 0
    assert seen[name]["idle"]


def test_pages_are_in_the_tree_once_all_layers_are_there(seen):
    """With one of four layers copied there is no hit, and the sizes still add up."""
    plain = seen["plain"]
    assert plain["on_device_during"] == 0
    assert plain["lent_during"] == 8
    assert plain["lost_during"] == 0
    assert plain["on_device"] == 8
    assert plain["whole"]


def test_what_the_tree_has_stays_its_own(seen):
    """A front that was there before, and pages computed meanwhile, are not replaced."""
    assert seen["behind a front"]["lent"] == 5
    for name in ("behind a front", "computed in part", "computed whole"):
        assert seen[name]["on_device"] == 8
        assert seen[name]["kept"]
    assert seen["computed whole"]["late"] == 1


def test_pages_without_their_front_are_given_up(seen):
    """The tree has dropped what precedes them."""
    assert seen["front gone"] == {"on_device": 0, "lost": 0, "idle": True, "late": 1}


def test_short_of_room_the_slots_are_given_back(seen):
    """Before anything that the tree holds is evicted."""
    short = seen["short of room"]
    assert short["freed"] == 8
    assert short["others"] == [8] * 6
    assert short["cancelled"] == 1


def test_what_waiting_requests_need_is_evicted_last(seen):
    """The coldest is needed, so the next goes; of the needed the last in the queue."""
    assert seen["evicting"]["others"] == [8, 0, 8, 8, 8, 8, 8, 8]
    assert seen["evicting"]["whole"]
    assert seen["all needed"]["others"] == [8, 8, 8, 8, 8, 8, 8, 0]


def test_a_copy_that_fails_leaves_a_counter(seen):
    """And an error for the tier's breaker."""
    failed = seen["failed"]
    assert failed["on_device"] == 0
    assert failed["failed"] == 1
    assert failed["errors"] == ["RuntimeError: this layer cannot be copied"]


def test_an_abort_ends_the_copy(seen):
    """With nobody left who waits for it."""
    assert seen["aborted"]["on_device"] == 0
    assert seen["aborted"]["cancelled"] == 1
