"""Loads that fail behind accepted work under the overlap schedule: all are answered.

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
    *("fails_at_its_only_token", "fails_again_and_again", "fails_for_several"),
    *("fails_and_is_aborted_in_the_queue", "fails_where_the_queue_is_full"),
    *("fails_and_is_retracted", "fails_while_all_is_paused", "fails_in_a_mixed_batch"),
    *("fails_before_a_chunk_that_waits", "fails_beside_logprobs"),
    *("fails_before_a_chunk_with_logprobs", "fails_for_front_and_back"),
    *("fails_where_none_begins_anew", "refused", "crowd", "mixed_crowd"),
)
ANSWERED = {
    "fails_alone": [4],
    "fails_before_a_chunk": [4],
    "fails_behind_another": [4, 4],
    "fails_and_is_asked_again": [4, 4, 4],
    "fails_beside_a_decoder": [24, 4, 4],
    "fails_at_its_only_token": [1, 1],
    "fails_again_and_again": [4, 4, 4, 4],
    "fails_for_several": [3, 3, 3],
    "fails_where_the_queue_is_full": [4],
    "fails_and_is_retracted": [24, 12, 12, 12],
    "fails_while_all_is_paused": [4, 4],
    "fails_in_a_mixed_batch": [24, 12, 4],
    "fails_before_a_chunk_that_waits": [4],
    "fails_beside_logprobs": [4, 4, 4, 4],
    "fails_before_a_chunk_with_logprobs": [4, 4, 4],
    "fails_for_front_and_back": [4, 4],
}
"""Tokens of each answer, all of which were asked for."""


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
    assert seen["two_passes"]["most_passes"] == 2
    assert seen["two_passes"]["cached"] == [112, 112]
    assert seen["fails_behind_another"]["most_passes"] == 2
    assert seen["fails_behind_another"]["cached"] == [112, 0]


@pytest.mark.parametrize("name", ANSWERED)
def test_a_request_whose_load_failed_on_the_device_is_computed(seen, name):
    """It is queued again, whatever happens meanwhile, and no client notices."""
    story = seen[name]
    assert story["requeued"] > 0
    assert story["ends"] == ["length"] * len(story["ends"])
    assert story["tokens"] == ANSWERED[name]
    assert story["wrong_logprobs"] == []


def test_a_request_meets_such_a_failure_once(seen):
    """Though no load comes: it is computed without another, and told as such."""
    story = seen["fails_again_and_again"]
    assert story["requeued"] == len(story["ends"])
    # The last one waited for the first one's pages, which the device has by then.
    assert story["cached"] == [0, 0, 0, 112]


@pytest.mark.parametrize(
    "name", ["fails_and_is_aborted", "fails_and_is_aborted_in_the_queue"]
)
def test_who_has_given_up_gets_nothing_more(seen, name):
    """Before the failure is known and after it; another one is answered."""
    story = seen[name]
    assert story["tokens"][0] == 0
    assert story["ends"][0] != "length"
    assert story["ends"][1] == "length"


def test_what_is_known_to_fail_at_the_launch_is_computed(seen):
    """No request notices, and the results are right."""
    story = seen["refused"]
    assert story["repaired"] == 2
    assert story["ends"] == ["length"] * 3


def test_what_cannot_begin_anew_ends_with_an_error_that_is_logged(seen):
    """One line says how many, and why."""
    story = seen["fails_where_none_begins_anew"]
    assert story["codes"] == [503, 503]
    assert story["requeued"] == 0
    (line,) = story["lines"]
    assert "2 request(s) end with an error" in line
    assert story["refused"] in line
    assert "the copy was told to fail" in line


def test_a_request_with_two_loads_that_fail_is_queued_again_once(seen):
    """A pass from before does not take it out of the one in which it runs again."""
    assert seen["fails_for_front_and_back"]["requeued"] == 2


def test_a_crowd_was_served_while_loads_failed(seen):
    """Who did not go was answered; loads were repaired, and requests queued again."""
    crowd, mixed = seen["crowd"], seen["mixed_crowd"]
    assert crowd["tokens"] > 0
    assert mixed["tokens"] > 0
    assert crowd["given_up"] == mixed["given_up"] == []
    assert mixed["repaired"] > crowd["repaired"] > seen["refused"]["repaired"]
    assert min(crowd["requeued"], mixed["requeued"]) > 0


def test_a_wait_that_is_left_out_is_caught(seen):
    """Negative controls: nobody asks how loads ended, or waits for their layers.

    Nor counts the logprobs of what is dropped.
    """
    story = seen["nobody_asks_how_loads_ended"]
    assert story["tokens"]
    assert story["wrong"]
    assert story["early"]
    assert seen["nobody_waits_for_layers"]["wrong"]
    assert seen["nobody_counts_what_is_dropped"]["wrong"]


def test_what_runs_on_a_dropped_token_would_be_wrong():
    """Negative control: the result of the batch in flight is taken."""
    name = "nobody_drops_the_next_result"
    assert output_of("overlap_program.py", "rust", name)[name]["wrong"]
