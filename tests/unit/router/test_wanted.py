"""Flags, the registry and operators, as one set of instances."""

from __future__ import annotations

import pytest

from sgl_tiered.errors import ConfigError
from sgl_tiered.pool.membership import InstanceKind, Member
from sgl_tiered.router.config import InstanceConfig, parse_instance
from sgl_tiered.router.feed import FeedSource
from sgl_tiered.router.wanted import (
    FLAG,
    REGISTRY,
    REQUEST,
    Change,
    change_from,
    change_text,
    config_of,
    is_over,
    wanted_instances,
)

COLOCATED = InstanceKind.COLOCATED


def member(name, incarnation=1, url=None, *, draining=False, **endpoints):
    url = url or f"http://127.0.0.1:{1000 + ord(name[0])}"
    kind = endpoints.pop("kind", COLOCATED)
    number = ord(name[0])
    told = {"http": url, **endpoints}
    return Member(name, number, incarnation, kind, told, draining)


def flag(name, port=1):
    return parse_instance(f"http://h:{port},name={name}")


def wanted(given=(), members=(), **changes):
    return wanted_instances(given, members, changes)


def test_a_member_tells_all_that_a_router_has_to_know() -> None:
    """Kind, address, events, bootstrap port; words of others are passed over."""
    told = {
        "http": "http://127.0.0.1:30000",
        "control": "tcp://127.0.0.1:7000",
        "events": "tcp://127.0.0.1:5557",
        "replay": "tcp://127.0.0.1:5558",
        "topic": "kv",
        "bootstrap": "9001",
        "of_later_times": "x=y,z",
    }
    assert config_of(Member("p0", 0, 1, InstanceKind.PREFILL, told)) == InstanceConfig(
        "p0",
        "http://127.0.0.1:30000",
        "prefill",
        discovers_events=False,
        sources=(FeedSource("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558", "kv"),),
        bootstrap_port=9001,
    )
    older = Member("d0", 1, 1, InstanceKind.DECODE, {"http": "http://10.0.0.1:1"})
    assert config_of(older) == InstanceConfig("d0", "http://10.0.0.1:1", "decode")
    silent = member("a", events="none")
    assert not config_of(silent).discovers_events


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({}, "no HTTP address"),
        ({"http": "127.0.0.1:1"}, "no address"),
        ({"http": "http://["}, "no address"),
        ({"http": "http://[::x]:5"}, "no address"),
        ({"http": "http://\N{ACCOUNT OF}.com:5"}, "no address"),
        ({"http": "http://h:1", "events": "tcp://h:" + "9" * 5000}, "is no"),
        ({"http": "http://h:1", "events": "tcp://h:65536"}, "is no"),
        ({"http": "http://h:1", "events": "tcp://a..b:5"}, "is no"),
        ({"http": "http://h:1,kind=prefill"}, "said before"),
        ({"http": "http://h:1", "bootstrap": "0"}, "bootstrap"),
        ({"http": "http://h:1", "events": "tcp://*:1"}, "what the server binds"),
        (
            {"http": "http://127.0.0.1:1", "control": "tcp://10.0.0.1:7"},
            "its own loopback",
        ),
    ],
)
def test_a_member_that_cannot_be_served_is_said_and_left_out(told, says) -> None:
    """The others are served."""
    wrong = Member("w", 9, 1, COLOCATED, told)
    with pytest.raises(ConfigError) as raised:
        config_of(wrong)
    assert "w in the registry" in str(raised.value)
    found = wanted((), [wrong, member("a")])
    assert list(found.entries) == ["a"]
    (trouble,) = found.troubles
    assert says in trouble


def test_flags_registry_and_requests_go_together() -> None:
    """Each entry knows where it comes from, and what its lease says."""
    found = wanted(
        [flag("f")],
        [member("m", 7, draining=True)],
        r=Change(words="http://h:9,name=r,kind=decode"),
    )
    entries = found.entries
    assert {name: each.source for name, each in entries.items()} == {
        "r": REQUEST,
        "f": FLAG,
        "m": REGISTRY,
    }
    assert entries["r"].config.kind == "decode"
    m = entries["m"]
    assert (m.is_draining, m.drains_itself, m.incarnation) == (True, True, 7)
    assert found.troubles == ()


def test_a_member_that_a_flag_names_keeps_the_flags_words() -> None:
    """Its lease adds when it drains, and which start it is."""
    given = [parse_instance("http://127.0.0.1:1097,name=mine,kind=decode,events=none")]
    (entry,) = wanted(given, [member("a", 3, draining=True)]).entries.values()
    assert (entry.config, entry.source) == (given[0], FLAG)
    assert (entry.member, entry.incarnation, entry.is_draining) == ("a", 3, True)


def test_of_two_with_one_name_or_address_the_first_stays() -> None:
    """Requests before flags before the registry; the other one is said."""
    found = wanted([flag("a", 1)], [member("a"), member("b", url="http://h:1/")])
    assert [each.config.url for each in found.entries.values()] == ["http://h:1"]
    assert found.entries["a"].member == "b", "which is at that address"
    (trouble,) = found.troubles
    assert "a at http://127.0.0.1:1097 (registry) is left out" in trouble
    twice = wanted((), (), x=Change(words="http://h:1"), y=Change(words="http://h:1"))
    assert len(twice.entries) == 1
    assert len(twice.troubles) == 1


def test_an_operators_word_counts_for_the_start_it_was_meant_for() -> None:
    """A new start of a member is clean; an instance of a flag has no starts."""
    (entry,) = wanted([flag("f")], (), f=Change(draining=True)).entries.values()
    assert entry.is_draining
    drained = Change(draining=True, incarnation=3)
    assert wanted((), [member("a", 3)], a=drained).entries["a"].is_draining
    assert not wanted((), [member("a", 4)], a=drained).entries["a"].is_draining
    removed = Change(removed=True, incarnation=3)
    assert wanted((), [member("a", 3)], a=removed).entries == {}
    assert list(wanted((), [member("a", 4)], a=removed).entries) == ["a"]
    assert wanted([flag("f")], (), f=Change(removed=True)).entries == {}


def test_a_flag_that_was_removed_hides_its_server_and_can_come_back() -> None:
    """Also where that server is in the pool under another name."""
    change = Change(removed=True)
    there = member("m", url="http://h:1")
    assert wanted([flag("f", 1)], [there], f=change).entries == {}
    again = wanted([flag("f", 1)], [there], f=Change(words="http://h:1,name=f"))
    assert again.entries["f"].source == REQUEST
    assert again.entries["f"].member == "m"


def test_words_that_cannot_be_read_are_said_and_left_out() -> None:
    """Somebody else may have written them."""
    found = wanted((), (), x=Change(words="nowhere"))
    assert found.entries == {}
    assert "x, added by request" in found.troubles[0]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (Change(), True),
        (Change(words="http://h:1"), False),
        (Change(draining=True), False),
        (Change(removed=True), False),
        (Change(removed=True, incarnation=1), True),
        (Change(removed=True, incarnation=2), False),
        (Change(draining=True, incarnation=3), True),
    ],
)
def test_what_a_leader_may_take_away(change, expected) -> None:
    """What says nothing, or speaks of a start that is over."""
    assert is_over(change, "a", [member("a", 2), member("b", 3)]) is expected


def test_changes_are_read_as_they_were_written() -> None:
    """And what is none of ours is None."""
    for change in (Change(), Change("w", True, True, 9)):
        assert change_from(change_text(change)) == change
    assert change_from(change_text(Change())) == Change()
    assert change_from('{"of_later_times": 1, "draining": true}') == Change("", True)
    for wrong in ("", "[]", '{"draining": 7}', "\ud800"):
        assert change_from(wrong) is None
