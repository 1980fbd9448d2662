"""Encoded pages over SGLang's real requests, pool and tree, with both of its cores."""

import pytest

from tests.contract.story_support import CORES, told_by

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def told():
    """Requests of all kinds, and one prompt through an int8 host tier."""
    return told_by("lossy_program.py")


@pytest.fixture(params=CORES)
def seen(request, told):
    """The story of one core."""
    return told[request.param]


def test_sglangs_requests_get_their_mark_before_anything_is_looked_up(told):
    """Where SGLang makes them; no two that may not share have the same key."""
    keys = told["requests"]["refuse"]["keys"]
    assert keys["silent"] is None
    assert keys["refuses"] is None
    assert keys["refuses with a key"] == "mine"
    apart = [keys[name] for name in keys if name not in ("silent", "refuses")]
    assert len(set(apart)) == len(apart)
    # SGLang finds an adapter's name at the end.
    assert keys["allows with an adapter"].endswith("adapter")


def test_the_flag_moves_only_those_who_say_nothing(told):
    """With allow as the default they are with those that allow."""
    refuse, allow = (told["requests"][word]["keys"] for word in ("refuse", "allow"))
    assert allow["silent"] == refuse["allows"] != refuse["silent"]
    assert {n: k for n, k in allow.items() if n != "silent"} == {
        n: k for n, k in refuse.items() if n != "silent"
    }


@pytest.mark.parametrize("default", ["refuse", "allow"])
def test_a_question_of_ours_is_kept_where_its_request_is(told, default):
    """It is marked anew when SGLang makes it, and finds the same prompt."""
    seen = told["requests"][default]
    assert seen["questions"] == seen["keys"]


def test_words_are_counted(told):
    """Seven requests each."""
    counters = told["requests"]["refuse"]["counters"]
    assert counters["requests_allow_lossy"] == 3
    assert counters["requests_refuse_lossy"] == 4


def test_a_prompt_comes_back_nearly_as_it_was(seen):
    """Through offload and fetch, in as many bytes as the encoding says."""
    assert seen["on_device"] == seen["pages"]
    assert 0 < seen["error"] < 0.05
    assert seen["copied_bytes"] == seen["pages"] * seen["page_bytes"]
    assert seen["lost"] == 0


def test_nobody_else_finds_it_on_the_device(seen):
    """The same tokens, asked for without the mark, are a miss."""
    assert seen["seen_by_lossy"] == seen["pages"]
    assert seen["seen_by_exact"] == 0


def test_who_refuses_is_not_even_looked_up_below(seen):
    """Its prompt never comes to the tiers, so they cannot report it a host hit."""
    assert seen["tracked"] == {"True": "tracked", "False": None}
