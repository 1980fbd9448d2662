"""Sparse KV on SGLang's own trees, pool, allocator and invariant checker."""

import pytest

from tests.contract.story_support import output_of

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def told():
    """The stories of the program, whose asserts have held at every step."""
    return output_of("sparse_program.py")


@pytest.mark.parametrize("backend", ["rust", "python"])
def test_sglangs_arithmetic_holds_whatever_happens(told, backend):
    """Its checker was green after each step, and what admission counts on was there."""
    story = told[backend]
    for what in ("loaded", "decoded", "finished", "left", "all taken", "mended"):
        assert story["did"].get(what, 0) >= 10, what
    assert story["largest"] > 1.2 * story["base"], "sparse pages made no room"


def test_both_trees_were_used(told):
    """SGLang chooses the Rust one where nobody ranks the device's pages."""
    assert told["rust"]["core"] != told["python"]["core"]


def test_evictable_tokens_must_count_as_what_they_free(told):
    """With SGLang's own count the same steps end in a prefill without room."""
    assert told["dishonest"]


def test_new_pages_get_rows_and_ends_of_old_ones_have_them(told):
    """Prefills and decodes, slot by slot; the program has counted rows and sizes."""
    assert min(told["slots"].get(kind, 0) for kind in ("prefills", "decodes")) > 20
    assert told["slots"]["refused"] > 0


def test_rows_take_and_give_what_is_written(told):
    """In all layers; padding has a place, and a dropped token is never written to."""
    pool = told["pool"]
    assert pool["found"] == [True] * 3
    assert "no row" in pool["refused"]
    assert pool["bytes"] <= pool["plain_bytes"]


def test_a_load_is_told_of_once_it_has_landed(told):
    """Two of one request as one of both; one that broke was computed, and is none."""
    broken = told["broken"]
    assert broken["landed_loads"] == 2
    # Of itself, and with the one before.
    assert broken["landed"] == [8, 16]
    assert broken["broken_loads"] == 0


def test_attention_over_a_broken_load_is_forgotten(told):
    """Of its slots nothing is known, of the page before what was known before."""
    broken = told["broken"]
    assert broken["lacking"] == 0
    assert broken["reads"] == [1.0] * 4 + [0.0] * 12
    assert broken["mean"] == [1.0] * 4


def test_a_broken_load_without_room_fails_its_request_only(told):
    """Nobody tells of it, what it has read is forgotten, and its rows come back."""
    broken = told["broken"]
    assert broken["failed"] == 1
    assert broken["failed_loads"] == 0
    assert broken["failed_reads"] == [1.0] * 4 + [0.0] * 12
    assert broken["lacking_after"] == 0
