"""What stands in the registry as a member's endpoints: read by one rule, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from sgl_tiered.core.ids import TierId
from sgl_tiered.errors import ConfigError
from sgl_tiered.pool.base import BlockType
from sgl_tiered.pool.channel import CONTROL, CONTROL_KEY, ControlChannel
from sgl_tiered.pool.fences import PROCESS
from sgl_tiered.pool.local_registry import LocalRegistry
from sgl_tiered.pool.membership import (
    InstanceKind,
    Member,
    View,
    member_fields,
    members_from,
)
from sgl_tiered.pool.messages import AskBlocks
from sgl_tiered.pool.node import PoolNode
from sgl_tiered.pool.rank_node import RankNode
from sgl_tiered.transport.incidents import Incidents
from tests.property.pool_world import World

BLOCKS = {TierId.DEVICE: 4, TierId.HOST: 4}
PROMPT = np.arange(4, dtype=np.int32)
MANY_DIGITS = "9" * 5000
ODD = {
    "digits": f"tcp://h:{MANY_DIGITS}",
    "port-0": "tcp://h:0",
    "port-above": "tcp://h:65536",
    "negative": "tcp://h:-1",
    "other-digits": "tcp://h:\N{ARABIC-INDIC DIGIT FIVE}",
    "no-port": "tcp://h",
    "no-host": "tcp://:5",
    "scheme": "ipc://h:5",
    "nothing": "",
    "empty-label": "tcp://a..b:5",
    "long-label": f"tcp://{'a' * 64}:5",
    "long-host": f"tcp://{'a.' * 200}b:5",
    "half-surrogate": "tcp://\ud800:5",
    "nul": "tcp://a\0b:5",
    "line": "tcp://a\nb:5",
    "space": "tcp://a b:5",
    "no-ipv6": "tcp://[::x]:5",
    "open-bracket": "tcp://[::1:5",
    "bare-ipv6": "tcp://::1:5",
    "letters": "tcp://h\N{LATIN SMALL LETTER U WITH DIAERESIS}:5",
}
each_odd = pytest.mark.parametrize("odd", ODD.values(), ids=list(ODD))


def entry(**endpoints: str) -> dict[str, object]:
    fields = member_fields(Member("b", 1, 1, InstanceKind.PREFILL, endpoints))
    # As etcd's entries are read, which lets half surrogates in.
    read: dict[str, object] = json.loads(json.dumps(fields))
    return read


def taken(fields: object) -> tuple[int, dict[str, int]]:
    incidents = Incidents()
    return len(members_from({"1": fields}, incidents)), incidents.counts


@each_odd
def test_an_entry_with_an_odd_endpoint_is_passed_over(odd: str) -> None:
    """And counted; nobody who reads views meets it."""
    assert taken(entry(**{CONTROL: odd})) == (0, {"entry": 1})


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://127.0.0.1:1",
        "tcp://[::1]:65535",
        "tcp://[fe80::1%2]:5",
        "tcp://node-3.rack_1.example.:5557",
        f"tcp://{'a' * 63}:5",
    ],
)
def test_right_endpoints_are_taken(endpoint: str) -> None:
    """As nodes and their operators write them."""
    assert taken(entry(**{CONTROL: endpoint})) == (1, {})


def test_other_endpoints_are_text_of_a_bounded_length() -> None:
    """What they mean is for who uses them; a later version may have others."""
    ranks = ",".join(f"{'0' * 36}.4026531836/{n}:{n}" for n in range(512))
    right = {"http": "x:1", PROCESS: ranks, "later": "\N{SNOWMAN} any text"}
    assert taken(entry(**right)) == (1, {})
    for name, text in (
        ("http", "http://\udfff:1"),
        ("http", "a\nb"),
        ("http", "x" * (1 << 20)),
        ("x" * 1000, "y"),
        ("\ud800", "y"),
    ):
        assert taken(entry(**{name: text})) == (0, {"entry": 1})
    many = {f"e{n}": "x" for n in range(1000)}
    assert taken(entry(**many)) == (0, {"entry": 1})


def test_what_is_read_can_be_told_to_other_ranks() -> None:
    """A view goes to them as JSON: half surrogates anywhere are no entry."""
    fields = entry() | {"memory": "\ud800"}
    assert taken(fields) == (0, {"entry": 1})
    incidents = Incidents()
    members = members_from({"1": entry(http="x:1")}, incidents)
    assert msgspec.json.encode(View(1, members))


@each_odd
def test_nobody_joins_with_an_odd_endpoint(odd: str, tmp_path) -> None:
    """Others would pass it over, and it would not know why."""
    registry = LocalRegistry(tmp_path / "registry.json")
    with pytest.raises(ConfigError, match="endpoint"):
        registry.join("p0", InstanceKind.PREFILL, {CONTROL: odd})
    assert registry.view().members == ()


# Views that have it all the same.


def with_endpoint(world: World, instance: int, **endpoints: str) -> None:
    """Let an instance have other endpoints in all views from now on."""
    real = world.view

    def view() -> View:
        found = real()
        members = tuple(
            replace(m, endpoints={**m.endpoints, **endpoints})
            if m.instance == instance
            else m
            for m in found.members
        )
        return View(found.version, members)

    world.view = view  # type: ignore[method-assign]
    world.version += 1
    world.see()


@pytest.fixture
def world() -> World:
    """Two instances; the second one has borrowed two blocks of the first."""
    world = World()
    for n in range(2):
        world.start(n, BLOCKS)
    world.see()
    return world


def borrow(world: World) -> None:
    there = world.nodes[1]
    there.pool._requests.ask((0, 1), AskBlocks(2, BlockType.HOST), 5.0)
    for _ in range(4):
        world.pump()
    assert world.nodes[0].pool.usage().num_guest_blocks == 2


@each_odd
def test_who_leaves_with_an_odd_endpoint_ends_nothing(world: World, odd: str) -> None:
    """Its blocks are kept as those of any other that is gone."""
    with_endpoint(world, 1, **{CONTROL: odd})
    borrow(world)
    world.stop(1)
    usage = world.nodes[0].pool.usage()
    assert (usage.num_guest_blocks, usage.num_fences) == (0, 1)
    assert world.nodes[0].pool.incidents.counts == {}


@pytest.mark.parametrize("process", [f"x/{MANY_DIGITS}:1", f"x/1:{MANY_DIGITS}"])
def test_who_leaves_with_an_odd_process_ends_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, process: str
) -> None:
    """No process of this machine has such a number."""
    monkeypatch.setattr("sgl_tiered.transport.process._machine", lambda: "x")
    with_endpoint(world, 1, **{PROCESS: process})
    borrow(world)
    world.stop(1)
    assert world.nodes[0].pool.usage().num_fences == 1


def fails(*args: object, **kwargs: object) -> None:
    raise ValueError("planted")


@pytest.mark.parametrize(
    "part", ["_entries", "_fences", "_receiver", "_words", "_watch", "_sender"]
)
def test_a_view_is_seen_by_all_parts_whatever_one_of_them_does(
    world: World, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """It is counted, and the next view makes good what was left."""
    borrow(world)
    pool = world.nodes[0].pool
    counting = Incidents()
    for owner, name in (
        (pool, "incidents"),
        (pool._receiver, "_incidents"),
        (pool._entries, "_incidents"),
    ):
        monkeypatch.setattr(owner, name, counting)
    with monkeypatch.context() as planted:
        call = {"_watch": "hold", "_sender": "lose"}.get(part, "see")
        planted.setattr(getattr(pool, part), call, fails)
        world.stop(1)
    assert counting.counts["failed"] >= 1
    world.version += 1
    world.see()
    usage = pool.usage()
    assert (usage.num_guest_blocks, usage.num_fences) == (0, 1)


def test_a_new_incarnation_begins_whatever_a_part_does(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is another one from then on, in all its parts."""
    pool = world.nodes[0].pool
    counting = Incidents()
    monkeypatch.setattr(pool, "incidents", counting)
    monkeypatch.setattr(pool._fetches, "end_all", fails)
    monkeypatch.setattr(pool._requests, "begin_anew", fails)
    pool.begin_anew(7)
    assert counting.counts == {"failed": 2}
    assert pool.incarnation == 7
    assert pool._receiver._me == pool._fences._me == (0, 7)


def test_what_cannot_be_sent_is_a_lost_message(world: World) -> None:
    """Also to an endpoint that no text is; the caller's thread lives on."""
    incidents = Incidents()
    channel = ControlChannel("127.0.0.1", 0, None, lambda: None, incidents)
    pool = world.nodes[0].pool
    pool._channel = pool._requests._channel = channel
    key = "x" * 40
    for odd in (*ODD.values(), "tcp://127.0.0.1:9"):
        with_endpoint(world, 1, **{CONTROL: odd, CONTROL_KEY: key})
        channel.see(world.view())
        assert not pool.locate(PROMPT).is_over
        if odd == ODD["half-surrogate"]:
            blocks = pool.alloc_mem(2, BlockType.HOST)
            assert blocks is not None
            pool.fetch(1, PROMPT, blocks).fail("enough")
            assert not pool.free_mem(blocks)
    assert not [each for each in channel._courier._lines if each[0] in ODD.values()]
    channel._courier.send = fails  # type: ignore[assignment, method-assign]
    pool.locate(PROMPT)
    assert incidents.counts == {"failed": 1}
    channel.close()


@pytest.mark.parametrize("part", ["_channel", "pool"])
def test_a_node_sees_on_whatever_a_part_does(part: str) -> None:
    """The scheduler's thread calls it."""
    seen: list[View] = []
    fine = SimpleNamespace(see=seen.append)
    node = object.__new__(PoolNode)
    node.incidents = Incidents()
    node._transport = SimpleNamespace(take_lost=list)  # type: ignore[assignment]
    node._channel = node.pool = fine  # type: ignore[assignment]
    setattr(node, part, SimpleNamespace(see=fails))
    view = View(3)
    node._see(view)
    assert node.view == view
    assert seen == [view]
    assert node.incidents.counts == {"failed": 1}


def test_a_rank_sees_on_whatever_its_pool_does() -> None:
    """As rank 0 does."""
    node = object.__new__(RankNode)
    node.incidents = Incidents()
    node.pool = SimpleNamespace(see=fails)  # type: ignore[assignment]
    see: Callable[[], None] = partial(node._see, View(3))
    see()
    assert node.view == View(3)
    assert node.incidents.counts == {"failed": 1}
