"""Pages of KV and of activations between SGLang's real tree and the tiers below."""

import pytest

from tests.contract.story_support import CORES, told_by

pytestmark = pytest.mark.sglang

ACT, KV = 60, 384
"""Bytes of a page, over all layers."""


@pytest.fixture(scope="module")
def stories():
    """What happened, by core: a prompt of six pages, of which three are KV."""
    return told_by("kinds_program.py")


@pytest.fixture(params=CORES)
def seen(request, stories):
    """The story of one core."""
    return stories[request.param]


def test_pages_go_down_as_what_they_are_kept_as(seen):
    """The plan says so, and the driver has noted it before the copy begins."""
    assert seen["kinds"] == [0, 1]
    assert seen["noted"][0] == [False, True]


def test_a_page_that_is_whole_in_no_form_waits(seen):
    """What is behind it could not be found again, so it waits as well; then it goes."""
    assert seen["positions"] == [0, 1]
    assert seen["later"] == [[2, 3, 4, 5], [1, 0, 1, 0]]
    assert seen["again"] == 0
    assert seen["left"] == [None, None]


def test_a_load_takes_room_for_what_comes(seen):
    """Behind a front that the device has; it pays for what it brings."""
    assert seen["load"] == [5 * 4, [ACT, ACT, KV, ACT, KV]]
    assert seen["asked"] == [True, True, False, True, False]
    assert seen["loading"] == seen["asked"]


def test_without_rows_the_pages_are_computed(seen):
    """The slots are given back."""
    assert seen["without_room"] == [0, None]
    assert seen["given_back"]


def test_what_is_saved_ahead_of_an_eviction_is_told_apart_too(seen):
    """Under on-evict the kinds are those of the pages as they are then."""
    assert seen["before_eviction"] == 0
    assert seen["on_evict"] == [0, 1, 1, 0, 1, 0]
    assert seen["on_evict_noted"] == [[False, True, True, False, True, False]]
