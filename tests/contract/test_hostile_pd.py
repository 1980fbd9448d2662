"""What others say to SGLang's own threads of our backend ends none of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.story_support import output_of

pytestmark = pytest.mark.sglang

STRANGERS = ("strangers_to_prefill", "strangers_to_decode")
FACTS = (
    *("late_aborts", "names", "floods", "forgotten"),
    *("registers_again", "unreadable", "unasked", "ends", "forgets"),
    *("unclaimed", "unread", "full"),
)


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """What came of all modes."""
    modes = ("prefill", "decode", "worker", "receiver", "keyless")
    return output_of("hostile_pd_program.py", *modes, *STRANGERS, *FACTS)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_message_that_cannot_be_read_is_dropped(
    told: dict[str, Any], side: str
) -> None:
    """It is counted; the next one is heard, and no byte lies where none was lent."""
    assert isinstance(told[side], dict), told[side]
    assert told[side]["message"] > 20
    assert told[side]["stranger"] > 20
    assert set(told[side]) == {"message", "stranger"}


@pytest.mark.parametrize("side", STRANGERS)
def test_a_message_of_a_stranger_is_dropped(told: dict[str, Any], side: str) -> None:
    """It is counted and changes nothing; who may say it is heard after it."""
    assert isinstance(told[side], dict), told[side]
    assert len(told[side]) > 8
    for what, counted in told[side].items():
        expected = "message" if what == "aborts from nowhere" else "stranger"
        assert counted == expected, what


def test_an_abort_of_a_room_that_others_have_is_answered(told: dict[str, Any]) -> None:
    """Who says it holds memory until then; the room is not ended."""
    assert set(told["late_aborts"]) == {"stranger"}, told["late_aborts"]


def test_a_name_is_of_who_has_its_key(told: dict[str, Any]) -> None:
    """Whoever registers it first."""
    expected = {"with his key": "stranger", "without one": "stranger"}
    assert told["names"] == expected


def test_others_without_end_keep_no_word_from_a_pair(told: dict[str, Any]) -> None:
    """However many sessions, rooms and aborts, before its request has come."""
    assert isinstance(told["floods"], dict), told["floods"]
    assert set(told["floods"]) <= {"stranger"}


def test_one_that_is_not_known_is_told_so(told: dict[str, Any]) -> None:
    """Its request fails at once, and the next one registers anew."""
    assert told["forgotten"] == {"stranger": 2}


def test_a_session_is_well_when_nothing_can_arrive_any_more(
    told: dict[str, Any],
) -> None:
    """Not by its word alone, which it gives after each transfer that failed."""
    assert told["registers_again"] == {
        "at first": False,
        "while bytes are held": True,
        "started anew": False,
        "when they are free": False,
        "when it was lost": False,
        "where nobody is": True,
    }


def test_why_a_registration_cannot_be_read_is_told(told: dict[str, Any]) -> None:
    """Each time that its session asks, as long as it gives no other."""
    assert isinstance(told["unreadable"], dict), told["unreadable"]
    assert "no rank" in told["unreadable"]["asked"]


def test_an_abort_before_its_request_leaves_no_room(told: dict[str, Any]) -> None:
    """Only that of who says it."""
    assert told["unasked"] == {}


def test_a_status_without_room_is_said_later(told: dict[str, Any]) -> None:
    """The last one, unless another took its place; data not sent is an error."""
    assert isinstance(told["full"], dict), told["full"]
    # Each status, and each word with data, of which two were made.
    counted = told["full"].pop("unsaid")
    assert counted >= 5
    assert told["full"] == {"raised": 2, "last": True, "left": 0, "final": True}


def test_no_word_is_lost_where_a_request_ends(told: dict[str, Any]) -> None:
    """Whoever has the room next; and what can be said to nobody is counted."""
    assert told["ends"] == {"stranger": 1, "unsaid": 1}


def test_who_asks_while_a_room_is_forgotten_is_told_so(told: dict[str, Any]) -> None:
    """He does not wait for a request of which nothing is known any more."""
    assert told["forgets"] == {"stranger": 1}


def test_one_that_gives_no_key_is_told_so(told: dict[str, Any]) -> None:
    """Its requests fail with a sentence that it can read; its aborts are heard."""
    assert isinstance(told["keyless"], dict), told["keyless"]
    assert "older version" in told["keyless"]["older"]
    assert "does not speak ours" in told["keyless"]["another backend"]


def test_a_transfer_that_cannot_be_made_fails(told: dict[str, Any]) -> None:
    """And the thread makes the next one."""
    assert told["worker"] == {"failed": 2}


def test_a_prefill_instance_that_is_nowhere_is_silent(told: dict[str, Any]) -> None:
    """The scheduler's thread goes on, and the memory is held as for a silent one."""
    assert told["receiver"] == {}


def test_without_a_look_at_messages_it_is_noticed() -> None:
    """Of either side."""
    told = output_of("hostile_pd_program.py", "unguarded", "prefill", "decode")
    for side in ("prefill", "decode"):
        assert isinstance(told[side], str), told[side]


def test_without_a_look_at_who_speaks_it_is_noticed() -> None:
    """On either side."""
    told = output_of("hostile_pd_program.py", "unproven", *STRANGERS)
    for side in STRANGERS:
        assert isinstance(told[side], str), told[side]


def test_a_room_whose_request_never_comes_is_forgotten(told: dict[str, Any]) -> None:
    """Once the decode instance has given it up; its pages were kept for ever."""
    assert told["unclaimed"] == {"unclaimed": 1}, told["unclaimed"]


def test_who_reads_no_answer_holds_up_no_thread(told: dict[str, Any]) -> None:
    """Each word beyond a thousand held SGLang's thread for 30 s."""
    assert told["unread"] == {}, told["unread"]
