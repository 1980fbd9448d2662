"""Loads that fail behind accepted work under the overlap schedule: no wrong token.

SGLang's scheduler runs over a played CUDA device (``overlap_program.py``): a batch is
launched before the results of the one before are taken.
"""

import functools

import pytest

from tests.contract.story_support import CORES, output_of

pytestmark = pytest.mark.sglang

ENDED = (
    *("two_passes", "fails_alone", "fails_behind_another", "fails_before_a_chunk"),
    *("fails_and_is_asked_again", "fails_and_is_aborted", "fails_beside_a_decoder"),
    *("refused", "crowd"),
)
UNAVAILABLE = 503


@functools.cache
def told(core):
    """Return what all stories tell."""
    return output_of("overlap_program.py", core)


@pytest.fixture(params=CORES)
def seen(request):
    """The stories of one core."""
    found = told(request.param)
    assert found["core"] == CORES[request.param]
    return found


@pytest.mark.parametrize("name", ENDED)
def test_no_token_is_wrong_or_leaves_too_early(seen, name):
    """A token leaves once the loads that it rests on are known to be good."""
    assert seen[name]["wrong"] == []
    assert seen[name]["too_early"] == []


@pytest.mark.parametrize("name", ENDED)
def test_nobody_waits_for_the_device_and_nothing_is_left(seen, name):
    """It runs only while results are taken; at the end nothing is in flight."""
    story = seen[name]
    assert story["held"] == []
    assert (story["pinned"], story["passes"], story["flows"]) == (0, 0, 0)


def test_passes_in_flight_have_outcomes_of_their_own(seen):
    """Two at a time, of which none fails, or the second."""
    for name, ends in [
        ("two_passes", ["length", "length"]),
        ("fails_behind_another", ["length", "abort"]),
    ]:
        assert seen[name]["most_passes"] == 2
        assert seen[name]["ends"] == ends
    assert seen["fails_behind_another"]["tokens"] == [4, 0]


@pytest.mark.parametrize("name", ["fails_alone", "fails_before_a_chunk"])
def test_a_request_whose_load_failed_on_the_device_ends_without_a_token(seen, name):
    """Also where its next chunk, or its next step, was launched already."""
    story = seen[name]
    assert story["ends"] == ["abort"]
    assert story["codes"] == [UNAVAILABLE]
    assert story["tokens"] == [0]


def test_nothing_of_a_failed_load_is_found_by_others(seen):
    """Who asks for the same prompt later gets it right."""
    assert seen["fails_and_is_asked_again"]["ends"][-1] == "length"
    assert seen["fails_and_is_aborted"]["ends"][-1] == "length"


def test_those_beside_a_failed_load_notice_nothing(seen):
    """One decodes meanwhile, one is computed in the same pass."""
    story = seen["fails_beside_a_decoder"]
    assert story["ends"] == ["length", "abort", "length"]
    assert story["tokens"] == [24, 0, 4]


def test_what_is_known_to_fail_at_the_launch_is_computed(seen):
    """No request notices, and the results are right."""
    story = seen["refused"]
    assert story["repaired"] == 2
    assert story["ends"] == ["length"] * 3


def test_a_crowd_was_served_while_loads_failed(seen):
    """Requests were answered, and loads repaired."""
    assert seen["crowd"]["tokens"] > 0
    assert seen["crowd"]["repaired"] > seen["refused"]["repaired"]


def test_a_wait_that_is_left_out_is_caught(seen):
    """Negative controls: nobody asks how loads ended, or waits for their layers."""
    story = seen["nobody_asks_how_loads_ended"]
    assert story["tokens"]
    assert story["wrong"]
    assert story["early"]
    assert seen["nobody_waits_for_layers"]["wrong"]
