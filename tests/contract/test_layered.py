"""Layer-wise KV on SGLang's own batches, pool and allocator."""

import pytest

from tests.contract.story_support import output_of

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def told():
    """The stories of the program."""
    return output_of("layered_program.py")


@pytest.fixture(scope="module")
def pausing(told):
    """What happened to batches of which parts decode."""
    return told["pausing"]


def test_parts_decode_and_the_whole_stays(pausing):
    """The program has compared lengths, rows and sampling of each part."""
    assert pausing["plain"]["ran"] == [
        ["r0", "r2"],
        ["r1"],
        ["r0", "r1", "r2", "r3", "r4"],
    ]
    assert pausing["plain"]["whole"] == [False, False, True]
    assert pausing["plain"]["kept"] == 5


def test_a_request_joins_while_others_wait(pausing):
    """Its rows go behind those of the whole, whose lengths are made again."""
    assert pausing["joined"]["ran"] == [["r4"], ["r3", "r6"]]
    assert pausing["joined"]["kept"] == 6


def test_no_step_is_made_where_nobody_is_chosen(pausing):
    """Nobody is taken in that has no room, be it to end; all are there for the next."""
    assert pausing["none"] == {
        "is_none": True,
        "ran": [["r1"], ["r0", "r1", "r2", "r3", "r4"]],
        "kept": 5,
    }


def test_an_aborted_request_has_room_or_waits(pausing):
    """Whoever chooses has reckoned with its page: nobody else is taken in."""
    assert pausing["aborted"]["ran"] == [["r2"], ["r1"]]
    assert pausing["aborted"]["kept"] == ["r0", "r2", "r3", "r4", "r6"]


def test_a_retracted_request_leaves_the_whole(pausing):
    """Its KV is gone, so it must not decode again before it was computed again."""
    assert pausing["retracted"]["ran"] == [["r0"]]
    assert pausing["retracted"]["kept"] == ["r0", "r2", "r3", "r6"]
    assert not pausing["retracted"]["is_full"]


def test_without_room_all_are_shown_to_sglang(pausing):
    """It retracts whom it would retract without us."""
    assert pausing["no room"]["ran"] == [["r0", "r2", "r3", "r6"]]


def test_without_room_who_is_left_out_may_wait(pausing):
    """No step is made and nobody is retracted until they need not wait any more."""
    assert pausing["waits"] == {
        "is_none": True,
        "ran": [],
        "then": [["r0", "r2", "r3"]],
    }


def test_penalties_count_the_tokens_of_their_own_request(told):
    """In whatever parts it decodes: each logit is what it is for the request alone."""
    counted = told["counted"]
    assert counted["ran"][:4] == [
        ["r0", "r2"],
        ["r1"],
        ["r1", "r3"],
        ["r0", "r1", "r2", "r3"],
    ]
    assert counted["together"] == counted["alone"]
    for rid, steps in counted["alone"].items():
        assert (steps[-1] == counted["untouched"]) == (rid == "r1")


def test_parts_sample_under_their_own_constraints(told):
    """Grammars, biases and processors of those that take part, row by row.

    A grammar goes on only with its own request's tokens.
    """
    everything = list(range(10))
    assert told["constrained"]["seen"] == [
        {
            "rids": ["r0", "r1", "r4"],
            "allowed": [everything, [1], [4]],
            "bias": [0, 1, 4],
            "processed": {"1": [0]},
            "params": [0, 1, 4],
        },
        {
            "rids": ["r2", "r3"],
            "allowed": [[2], everything],
            "bias": [2, 3],
            "processed": {"1": [0]},
            "params": [2, 3],
        },
        {
            "rids": ["r0", "r3"],
            "allowed": None,
            "bias": [0, 3],
            "processed": {"1": [0]},
            "params": [0, 3],
        },
        {
            "rids": ["r0", "r1", "r2", "r3", "r4"],
            "allowed": [everything, [6], [7], everything, [9]],
            "bias": [0, 1, 2, 3, 4],
            "processed": {"1": [0, 2]},
            "params": [0, 1, 2, 3, 4],
        },
    ]
    assert told["constrained"]["has_grammar"]


def test_one_alone_has_its_layers_moved(told):
    """Nobody else is there to wait for, but room may have returned."""
    assert told["alone"] == {"asked": [1], "ran": [["r3"]], "whole": True}


def test_a_scheduler_naps_where_no_step_is_made(told):
    """It asks again at once, and what it waits for needs the core; else it goes on."""
    assert told["napping"] == {
        "naps_after": [1, 2],
        "ran": [["r0", "r1"], ["r0"], ["r0", "r1"]],
    }
