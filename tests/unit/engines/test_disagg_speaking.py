"""Who speaks between a prefill and a decode instance."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_tiered.engines.sglang.disagg import speaking
from sgl_tiered.engines.sglang.disagg.speaking import Asked, Asking, StrangerError

PLACE, OTHER = "tcp://10.0.0.7:6000", "tcp://10.0.0.8:6000"
REGISTRATION = [b"None", b"10.0.0.1", b"5000", b"", *[b""] * 17]
ROOM = 7


def place_of(host: str, port: int) -> str:
    return f"tcp://{host}:{port}"


def word(room: int = ROOM, port: bytes = b"5000") -> list[bytes]:
    """What asks for a room."""
    return [str(room).encode(), b"10.0.0.1", port, b"", b"pages"]


def never(room: int) -> bool:
    return False


def heard(asked: Asked, message: list[bytes], rooms: Any = None) -> tuple[str, Any]:
    """What a prefill instance makes of a message."""
    session, said = asked.hear(message)
    asked.admit(session, said, rooms or {})
    return session, said


@pytest.fixture
def pair() -> tuple[Asking, Asked]:
    """A decode instance that has registered, and where it has."""
    asking, asked = Asking(never), Asked(never, place_of)
    heard(asked, asking.say(ROOM, PLACE, REGISTRATION))
    return asking, asked


def test_each_place_and_start_has_its_own_name_and_key(pair):
    """So what is known of one pair opens no other."""
    asking, _ = pair
    all_said = [
        by.say(ROOM, place, REGISTRATION)
        for by in (asking, Asking(never))
        for place in (PLACE, OTHER)
    ]
    assert len({said[3] for said in all_said}) == 4
    assert len({said[-1] for said in all_said}) == 4


def test_both_ways_what_is_said_is_heard_as_it_was(pair):
    """The session alone is the pair's."""
    asking, asked = pair
    session, said = heard(asked, asking.say(ROOM, PLACE, word()))
    assert said == [*word()[:3], session.encode(), b"pages"]
    answer = asked.say("tcp://10.0.0.1:5000", [b"7", b"4", b"0"])
    assert asking.hear(answer) == [b"7", b"4", b"0"]


@given(data=st.data())
def test_no_other_message_is_proved(data):
    """Not one with a part changed, missing, doubled, or cut at another place."""
    asking, asked = Asking(never), Asked(never, place_of)
    # What is drawn below goes by lengths, which are to be the same each time.
    asking._secret = bytes(32)
    heard(asked, asking.say(ROOM, PLACE, REGISTRATION))
    right = asking.say(ROOM, PLACE, word())
    at = data.draw(st.integers(0, len(right) - 1))
    part = right[at]
    how = data.draw(st.sampled_from(["changed", "missing", "doubled", "cut"]))
    if how == "changed":
        bit = data.draw(st.integers(0, 8 * len(part) - 1))
        number = int.from_bytes(part, "big") ^ (1 << bit)
        parts = [number.to_bytes(len(part), "big")]
    elif how == "cut":
        cut = data.draw(st.integers(0, len(part)))
        parts = [part[:cut], part[cut:]]
    else:
        parts = [part] * (2 if how == "doubled" else 0)
    wrong = [*right[:at], *parts, *right[at + 1 :]]
    with pytest.raises((StrangerError, LookupError, ValueError)):
        heard(asked, wrong)


def test_a_room_is_of_those_who_asked_first(pair):
    """As many as the first one said: ranks of one instance may be several."""
    asking, asked = pair
    second = Asking(never)
    moved = [*REGISTRATION[:2], b"5001", *REGISTRATION[3:]]
    heard(asked, second.say(ROOM, PLACE, moved))
    other = second.say(ROOM, PLACE, word(port=b"5001"))
    session, _ = heard(asked, asking.say(ROOM, PLACE, word()))
    for num, may in ((1, False), (2, True)):
        rooms = {ROOM: {session: SimpleNamespace(required_dst_info_num=num)}}
        if may:
            heard(asked, other, rooms)
        else:
            with pytest.raises(StrangerError, match="room 7 is of others"):
                heard(asked, other, rooms)


def test_a_room_is_asked_for_by_others_when_its_request_has_ended(pair):
    """Not before, whether SGLang knows yet who has asked or not."""
    asking, asked = pair
    second = Asking(never)
    heard(asked, second.say(ROOM, PLACE, [*REGISTRATION[:2], b"5001", *[b""] * 18]))
    heard(asked, asking.say(ROOM, PLACE, [b"BOOTSTRAP", b"7", b"10.0.0.1", b"5000"]))
    for message in (word(port=b"5001"), [b"ABORT", b"7", b"10.0.0.1", b"5001", b"1"]):
        with pytest.raises(StrangerError, match="room 7 is of others"):
            heard(asked, second.say(ROOM, PLACE, message))
    asked.end(ROOM)
    heard(asked, second.say(ROOM, PLACE, word(port=b"5001")))


def test_rooms_that_have_ended_are_forgotten_and_others_are_not(monkeypatch):
    """Whoever names rooms, on either side."""
    monkeypatch.setattr(speaking, "_MOST_ROOMS", 8)
    asking, asked = (
        Asking(lambda room: room == ROOM),
        Asked(lambda room: room == ROOM, place_of),
    )
    heard(asked, asking.say(ROOM, PLACE, REGISTRATION))
    for room in (ROOM, *range(100, 140)):
        heard(asked, asking.say(room, PLACE, word(room)))
    assert len(asking._asked) == len(asked._rooms) == 8
    for room in (ROOM, 139):
        said = [str(room).encode(), b"4", b"0"]
        assert asking.hear(asked.say("tcp://10.0.0.1:5000", said)) == said
    late = asked.say("tcp://10.0.0.1:5000", [b"100", b"4", b"0"])
    with pytest.raises(StrangerError, match="room 100"):
        asking.hear(late)


def test_the_session_that_was_silent_longest_is_forgotten(pair, monkeypatch):
    """One that speaks is kept, however many others register."""
    asking, asked = pair
    monkeypatch.setattr(speaking, "_MOST_SESSIONS", 4)
    for number in range(20):
        heard(asked, Asking(never).say(number, PLACE, REGISTRATION))
        heard(asked, asking.say(number, PLACE, [*word(number)]))
    assert len(asked._sessions) == 4


def test_no_key_is_told(pair):
    """Neither key nor secret is in a sentence about a stranger."""
    asking, asked = pair
    (*said, key) = asking.say(ROOM, PLACE, REGISTRATION)
    with pytest.raises(StrangerError) as refused:
        heard(asked, [*said, bytes(32)])
    assert key.hex() not in str(refused.value)
