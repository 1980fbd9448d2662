"""Who speaks between a prefill and a decode instance."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_tiered.serving.disagg import speaking
from sgl_tiered.serving.disagg.speaking import Asked, Asking, StrangerError, gives_key

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


def heard(asked: Asked, message: list[bytes], rooms: Any = None) -> list[bytes]:
    """What SGLang hears of a message."""
    key, said = asked.hear(message)
    is_heard = said[0] == b"None" or asked.admit(key, said, rooms or {})
    return said if is_heard else []


@pytest.fixture
def pair() -> tuple[Asking, Asked]:
    """A decode instance that has registered, and where it has."""
    asking, asked = Asking(never), Asked(place_of)
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
    said = heard(asked, asking.say(ROOM, PLACE, word()))
    assert gives_key(said[3].decode())
    assert said == [*word()[:3], said[3], b"pages"]
    answer = asked.say("tcp://10.0.0.1:5000", [b"7", b"4", b"0"])
    assert asking.hear(answer) == [b"7", b"4", b"0"]


@given(data=st.data())
def test_no_other_key_is_heard(data):
    """Not one with a bit changed, cut, longer, or missing."""
    asking, asked = Asking(never), Asked(place_of)
    *said, key = asking.say(ROOM, PLACE, word())
    bit = data.draw(st.integers(0, 8 * len(key) - 1))
    changed = int.from_bytes(key, "big") ^ (1 << bit)
    other = data.draw(
        st.sampled_from(
            [[], [b""], [key[: bit // 8]], [key + b"x"], [changed.to_bytes(32, "big")]]
        )
    )
    with pytest.raises(StrangerError):
        heard(asked, [*said, *other])
    heard(asked, [*said, key])
    *said, key = asked.say("tcp://10.0.0.1:5000", [b"7", b"4", b"0"])
    with pytest.raises((StrangerError, ValueError)):
        asking.hear([*said, *other])


def test_it_needs_to_be_told_nothing_first(pair):
    """One that has forgotten all, or has started anew, hears the pair's words."""
    asking, _ = pair
    anew = Asked(place_of)
    for message in (word(), [b"ABORT", b"7", b"10.0.0.1", b"5000", b"1"]):
        assert heard(anew, asking.say(ROOM, PLACE, message))
    ack = [b"ABORT_ACK", b"7", b"0", b"1"]
    assert asking.hear(anew.say("tcp://10.0.0.1:5000", ack)) == ack


def test_a_room_is_of_those_who_asked_first(pair):
    """As many as the first one said: ranks of one instance may be several."""
    asking, asked = pair
    other = Asking(never).say(ROOM, PLACE, word(port=b"5001"))
    session = heard(asked, asking.say(ROOM, PLACE, word()))[3]
    for num, may in ((1, False), (2, True)):
        rooms = {ROOM: {session: SimpleNamespace(required_dst_info_num=num)}}
        assert bool(heard(asked, other, rooms)) is may


def test_ranks_that_ask_for_one_room_are_bounded(pair):
    """Whatever number the first one says."""
    asking, asked = pair
    heard(asked, asking.say(ROOM, PLACE, word()))
    rooms = {ROOM: {"first": SimpleNamespace(required_dst_info_num=10**9)}}
    for port in range(1, speaking._MOST_RANKS):
        heard(asked, Asking(never).say(ROOM, PLACE, word(port=b"%d" % port)), rooms)
    assert not heard(asked, Asking(never).say(ROOM, PLACE, word(port=b"6000")), rooms)


def test_a_room_is_asked_for_by_others_when_its_request_has_ended(pair):
    """Not before, though SGLang does not know yet who has asked."""
    asking, asked = pair
    second = Asking(never)
    heard(asked, asking.say(ROOM, PLACE, word()))
    other = second.say(ROOM, PLACE, word(port=b"5001"))
    assert not heard(asked, other)
    abort = [b"ABORT", b"7", b"10.0.0.1", b"5001", b"1"]
    assert heard(asked, second.say(ROOM, PLACE, abort)) == []
    asked.end(ROOM)
    assert heard(asked, other)


def test_a_word_on_its_way_when_its_request_ends_is_said(pair, monkeypatch):
    """To whoever had asked, also when others have the room; of the last ones that
    ended."""
    monkeypatch.setattr(speaking, "_MOST_ROOMS", 8)
    asking, asked = pair
    status = [b"7", b"0", b"0"]
    heard(asked, asking.say(ROOM, PLACE, word()))
    asked.end(ROOM)
    second = Asking(never)
    heard(asked, second.say(ROOM, PLACE, word(port=b"5001")))
    assert asking.hear(asked.say("tcp://10.0.0.1:5000", status)) == status
    assert second.hear(asked.say("tcp://10.0.0.1:5001", status)) == status
    for room in range(100, 108):
        heard(asked, asking.say(room, PLACE, word(room)))
        asked.end(room)
    with pytest.raises(StrangerError, match="nobody at"):
        asked.say("tcp://10.0.0.1:5000", status)


def test_who_leaves_a_room_leaves_it_to_the_others(pair):
    """And takes none from them."""
    asking, asked = pair
    second, rooms = Asking(never), {ROOM: {}}
    heard(asked, asking.say(ROOM, PLACE, word()))
    rooms[ROOM]["first"] = SimpleNamespace(required_dst_info_num=2)
    heard(asked, second.say(ROOM, PLACE, word(port=b"5001")), rooms)
    status = [b"7", b"0", b"0"]
    asked.leave(word())
    assert second.hear(asked.say("tcp://10.0.0.1:5001", status)) == status
    with pytest.raises(StrangerError, match="nobody at"):
        asked.say("tcp://10.0.0.1:5000", status)
    asked.leave(word(port=b"5001"))
    asked.leave(word())
    assert asked._rooms == {}


def test_an_abort_is_answered_to_who_said_it_last(pair):
    """Others may say one at the same place before; who waits says it again."""
    asking, asked = pair
    abort = [b"ABORT", b"7", b"10.0.0.1", b"5000", b"1"]
    ack = [b"ABORT_ACK", b"7", b"0", b"1"]
    for first in (Asking(never), asking):
        heard(asked, first.say(ROOM, PLACE, abort))
        heard(asked, asking.say(ROOM, PLACE, abort))
        assert asking.hear(asked.say("tcp://10.0.0.1:5000", ack)) == ack


def test_rooms_that_have_ended_are_forgotten_and_others_are_not(monkeypatch):
    """Whoever names rooms, on either side; those that are live are all kept."""
    monkeypatch.setattr(speaking, "_MOST_ROOMS", 8)
    live = {ROOM}
    asking, asked = Asking(live.__contains__), Asked(place_of)
    for room in (ROOM, *range(100, 140)):
        heard(asked, asking.say(room, PLACE, word(room)))
    assert len(asking._asked) == 8

    def is_heard(room: int) -> bool:
        said = [str(room).encode(), b"4", b"0"]
        try:
            return asking.hear(asked.say("tcp://10.0.0.1:5000", said)) == said
        except StrangerError:
            return False

    assert [is_heard(room) for room in (ROOM, 139, 100)] == [True, True, False]
    live.update(range(200, 220))
    for room in sorted(live):
        heard(asked, asking.say(room, PLACE, word(room)))
    assert all(is_heard(room) for room in live)


def test_no_key_is_told(pair):
    """Neither key nor secret is in a sentence about a stranger."""
    asking, asked = pair
    (*said, key) = asking.say(ROOM, PLACE, REGISTRATION)
    with pytest.raises(StrangerError) as refused:
        heard(asked, [*said, bytes(32)])
    assert key.hex() not in str(refused.value)
