"""Passes with loads on a played CUDA device, over both of SGLang's tree cores."""

import pytest

from tests.contract.story_support import CORES, told_by

pytestmark = pytest.mark.sglang

STORIES = (
    *("overlapped", "offloads", "refused", "broken", "retracted", "chunked"),
    "embedded",
)
PAGES = 6
"""Of each prompt."""


@pytest.fixture(scope="module")
def stories():
    """What happened, by core; the device runs nothing until results are taken."""
    return told_by("streams_program.py")


@pytest.fixture(params=CORES)
def seen(request, stories):
    """The stories of one core."""
    return stories[request.param]


def test_no_launch_waits_for_the_device(seen):
    """Three batches, each with a hit, are queued behind a forward that does not run."""
    assert not seen["overlapped"]["held_by_launch"]
    assert seen["overlapped"]["in_flight"] == 3
    assert seen["overlapped"]["right"] == [True] * 3


@pytest.mark.parametrize("name", ["overlapped", "offloads"])
def test_slots_are_not_read_on_the_host(seen, name):
    """Neither for a hit nor for an offload: it would wait for all work before them."""
    assert seen[name]["read_on_host"] == []


def test_an_offload_waits_for_no_forward_and_reads_what_it_wrote(seen):
    """Its pages are gathered behind the forward, by numbers that are on the device."""
    assert not seen["offloads"]["held_by_offload"]
    assert seen["offloads"]["pages"] == 1
    assert seen["offloads"]["right"]


def test_sources_stay_pinned_until_their_load_has_ended(seen):
    """Each batch's loads are settled with its own results, and no earlier."""
    assert seen["overlapped"]["pinned"] == 3 * PAGES
    assert seen["overlapped"]["pinned_after"] == [2 * PAGES, PAGES, 0]
    assert seen["overlapped"]["failed"] == []


def test_a_load_that_cannot_be_queued_is_computed_under_its_launch(seen):
    """No request notices."""
    assert seen["refused"]["again"]
    assert seen["refused"]["spans"] == [[0, 0, 16 * PAGES]]
    assert seen["refused"]["failed"] == 0
    assert not seen["refused"]["discarded"]


def test_no_token_leaves_on_a_load_that_the_device_failed_at(seen):
    """It is known before results are taken; nothing was published meanwhile."""
    story = seen["broken"]
    assert not story["held_by_launch"]
    assert story["published"] == 0
    assert story["failed"] == ["r0"]
    assert story["published_later"] == 0
    assert "told to fail" in story["reason"]


def test_the_sources_of_a_request_that_goes_stay_until_its_load_has_ended(seen):
    """And it may come again meanwhile, by the same id."""
    story = seen["retracted"]
    assert not story["held_by_launch"]
    assert story["pinned_while_it_runs"] == PAGES
    assert story["failed"] == 0
    assert story["pinned_after"] == 0
    assert story["right"]


def test_results_of_a_chunk_wait_for_no_load_of_the_next(seen):
    """They are taken while that one runs."""
    assert not seen["chunked"]["held_by_launch"]
    assert seen["chunked"]["left"] == [1, 0]
    assert seen["chunked"]["right"] == [True] * 2


def test_results_of_models_that_do_not_generate_wait_as_well(seen):
    """Nobody asks whether their loads have to be repaired."""
    assert not seen["embedded"]["held_by_launch"]
    assert seen["embedded"]["failed"] == 0


@pytest.mark.parametrize("name", STORIES)
def test_nothing_is_left(seen, name):
    """No pass is in flight, no page pinned, and nobody had to let the device go."""
    assert seen[name]["pinned_at_end"] == 0
    assert seen[name]["passes_at_end"] == 0
    assert not seen[name]["held"]
