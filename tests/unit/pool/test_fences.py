"""Blocks lent to who is gone: kept until it has its say, or is known to be over."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_tiered.core.ids import TierId
from sgl_tiered.pool.base import BlockType
from sgl_tiered.pool.channel import CONTROL
from sgl_tiered.pool.config import PoolUsage
from sgl_tiered.pool.fences import NOT_YET, PROCESS, _places
from sgl_tiered.pool.membership import InstanceKind, Member
from sgl_tiered.pool.messages import Answer, AskDone
from sgl_tiered.transport.knocking import Place, Reach
from sgl_tiered.transport.process import Process
from tests.property.pool_world import (
    CONFIG,
    TRANSPORT_GRACE_S,
    Node,
    World,
    content,
    pages_of,
)

BLOCKS = {TierId.HOST: 4}
NOTHING = PoolUsage(0, 0, 0, 0, 0)
PROMPT = np.arange(6, dtype=np.int32)
LONG_S = 100_000.0


@pytest.fixture(params=[False, True], ids=["own table", "cache in use"])
def world(request: pytest.FixtureRequest) -> World:
    """Two that know each other; the first one has a prompt of three pages."""
    world = World(in_cache=request.param)
    for n in range(2):
        world.start(n, BLOCKS)
    world.see()
    here = world.nodes[0]
    addresses = here.pool.alloc_mem(3, BlockType.HOST)
    assert addresses is not None
    here.write(addresses, pages_of(PROMPT))
    here.pool.insert(PROMPT, addresses)
    return world


def talk(world: World, num: int = 6) -> None:
    """Carry messages to and fro; no time passes and no byte moves."""
    for _ in range(num):
        world.deliver(len(world.messages))
        for node in world.nodes.values():
            node.poll()


def pushing(world: World) -> None:
    """The first one writes to three blocks of the second one, however that began."""
    pool = world.nodes[0].pool
    pool.transfer(1, pool.match(PROMPT), type=BlockType.HOST)
    talk(world)
    assert world.pieces


def serving(world: World) -> None:
    """The same by a fetch of the second one, which has freed its blocks by now."""
    pool = world.nodes[1].pool
    blocks = pool.alloc_mem(3, BlockType.HOST)
    assert blocks is not None
    fetch = pool.fetch(0, PROMPT, blocks)
    talk(world)
    assert world.pieces
    fetch.fail("not wanted any more")
    assert not pool.free_mem(blocks)


WAYS = pytest.mark.parametrize("begin", [pushing, serving])


def taken(node: Node) -> list[np.ndarray]:
    """All blocks that can be had, one by one."""
    found = []
    while (some := node.pool.alloc_mem(1, BlockType.HOST)) is not None:
        found.append(some)
    return found


def arrive(world: World) -> None:
    """Let all bytes move that are on their way."""
    for piece in list(world.pieces):
        world.end_piece(piece, arrives=True)


def pass_time(world: World, seconds: float) -> None:
    """Let time pass; nobody but the one that stands still sees the network fail."""
    world.advance(seconds)
    talk(world)


@WAYS
def test_a_stopped_sender_is_waited_for(world: World, begin) -> None:
    """However long; its bytes hit nobody when it goes on, and its word frees them."""
    begin(world)
    there = world.nodes[1]
    stopped = world.stop(0)
    talk(world)
    (own,) = taken(there)
    there.write(own, [b"mine"])
    for _ in range(3):
        pass_time(world, LONG_S)
        assert taken(there) == []
        assert there.pool.usage().num_fences == 1
    arrive(world)
    assert there.read(own) == [content(b"mine").tobytes()]
    world.go_on(stopped)
    world.settle(1.0)
    assert taken(there) == [], "the sender's own transport has its grace time first"
    world.settle(TRANSPORT_GRACE_S + 5.0)
    assert len(taken(there)) == 3
    assert there.pool.usage() == NOTHING


@WAYS
def test_the_end_of_the_process_frees_them_after_a_while(world: World, begin) -> None:
    """What it had handed to the network arrives until then; nobody has to say so."""
    begin(world)
    there = world.nodes[1]
    world.stop(0)
    pass_time(world, LONG_S)
    world.starts[0] += 1
    talk(world)
    pass_time(world, CONFIG.grace_s - 0.1)
    assert len(taken(there)) == 1
    pass_time(world, 0.2)
    assert len(taken(there)) == 3
    assert there.pool.usage() == NOTHING


@WAYS
def test_another_process_under_the_same_name_cannot_vouch(world: World, begin) -> None:
    """It refuses; the former one may run, without anybody's knowing."""
    begin(world)
    there = world.nodes[1]
    runs_on = world.starts[0]
    world.stop(0)
    world.start(0, BLOCKS)
    world.nodes[1].watch._look_for = lambda place: (
        Reach.THERE if place.endpoint[1] == runs_on else Reach.OVER
    )
    world.see()
    for _ in range(3):
        pass_time(world, LONG_S)
        talk(world)
    assert len(taken(there)) == 1
    assert there.pool.usage().num_requests == 0


@WAYS
def test_a_lease_of_ones_own_ends_no_loan(world: World, begin) -> None:
    """Who lent them goes on as another one: the same peer is asked, which is there."""
    begin(world)
    there = world.stop(1)
    world.go_on(there)
    assert len(taken(there)) == 1
    world.deliver(len(world.messages))
    for node in world.nodes.values():
        node.poll()
    assert taken(there) == []
    world.settle(CONFIG.timeout_s + TRANSPORT_GRACE_S + 5.0)
    assert len(taken(there)) == 3
    assert there.pool.usage() == NOTHING


def test_a_silent_machine_is_given_up_after_twenty_minutes(world: World) -> None:
    """Linux repeats what was not acknowledged for less."""
    pushing(world)
    there = world.nodes[1]
    there.watch._look_for = lambda place: Reach.SILENT
    world.stop(0)
    talk(world)
    pass_time(world, 1199.0)
    assert len(taken(there)) == 1
    pass_time(world, 2.0)
    assert len(taken(there)) == 3


def test_who_has_the_port_of_one_that_has_left_is_not_it(world: World) -> None:
    """So that a port which is used again does not keep blocks for ever."""
    pushing(world)
    there = world.nodes[1]
    world.stop(0)
    talk(world)
    port = world.starts[0]
    world.start(2, BLOCKS)
    places: list[Place] = []

    def look_for(place: Place) -> Reach:
        places.append(place)
        return Reach.THERE

    there.watch._look_for = look_for
    pass_time(world, LONG_S)
    assert len(taken(there)) == 1
    assert places[0].endpoint == ("0", port)
    view = world.view()
    newcomer = view.member(2)
    assert newcomer is not None
    newcomer.endpoints["control"] = f"tcp://0:{port}"  # type: ignore[index]
    there.see(view)
    pass_time(world, CONFIG.grace_s + 0.1)
    assert len(taken(there)) == 3


def test_lost_questions_are_asked_again(world: World) -> None:
    """And one that is not done yet is asked until it is."""
    pushing(world)
    there = world.nodes[1]
    world.go_on(world.stop(0))
    seen = []
    for step in range(40):
        for message in world.messages:
            if isinstance(message.body, AskDone):
                seen.append(message.request)
            elif isinstance(message.body, Answer) and message.body.refusal == NOT_YET:
                seen.append(-message.request)
        if step % 3 == 0:
            world.messages.clear()
        talk(world, 1)
        world.advance(0.3)
    assert len(set(seen)) > 2
    arrive(world)
    world.settle(10.0)
    assert there.pool.usage() == NOTHING
    assert len(taken(there)) == 4


def test_what_is_begun_later_is_not_waited_for(world: World) -> None:
    """Only what was begun in the conversation that is over."""
    pushing(world)
    former = list(world.pieces)
    here, there = world.nodes[0], world.nodes[1]
    world.go_on(world.stop(0))
    talk(world)
    another = here.pool.alloc_mem(1, BlockType.HOST)
    assert another is not None
    here.pool.transfer(1, another, type=BlockType.HOST)
    talk(world)
    later = [piece for piece in world.pieces if piece not in former]
    assert later
    assert there.pool.usage().num_fences == 1
    for piece in former:
        world.end_piece(piece, arrives=True)
    for _ in range(20):
        pass_time(world, 0.5)
    assert there.pool.usage().num_fences == 0
    assert world.pieces == later
    world.settle(10.0)
    assert there.pool.usage() == NOTHING


def test_the_processes_of_all_ranks_are_looked_for() -> None:
    """Each of them writes; that of the first rank may be over before the others'."""
    first = Process.own()
    second = Process(first.pid, first.started + 1)
    endpoints = {
        CONTROL: "tcp://127.0.0.1:7",
        PROCESS: f"{first.name},{second.name}",
    }
    member = Member("a", 0, 1, InstanceKind.COLOCATED, endpoints)
    at = ("127.0.0.1", 7)
    assert _places(member) == (Place(at, first), Place(at, second))
    away = {**endpoints, PROCESS: "elsewhere/1:2,elsewhere/3:4"}
    member = Member("a", 0, 1, InstanceKind.COLOCATED, away)
    assert _places(member) == (Place(at),)
