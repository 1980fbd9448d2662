"""Each kind of message that ended a server once, and who may say what."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import xxhash

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.errors import TransportUnavailableError
from sgl_tiered.pool import receiver
from sgl_tiered.pool.base import BlockType
from sgl_tiered.pool.channel import MESSAGES, ControlChannel
from sgl_tiered.pool.guard import CONTROL, CONTROL_KEY
from sgl_tiered.pool.layouts import MemoryForm, Shard
from sgl_tiered.pool.membership import InstanceKind, Member, View
from sgl_tiered.pool.messages import (
    Answer,
    AskBlocks,
    AskHeld,
    AskPages,
    Body,
    Envelope,
    Finish,
    FreeBlocks,
    PoolInfo,
    RankInfo,
    as_entry,
    from_wire,
    misfit,
    to_wire,
    tokens_to_wire,
)
from sgl_tiered.testing.hostile import on_the_wire
from sgl_tiered.transport.base import PeerAddress, Pieces, Region, TransferStatus
from sgl_tiered.transport.incidents import Incidents
from sgl_tiered.transport.loopback import open_loopback
from sgl_tiered.transport.messages import Refused
from tests.property.pool_world import LAYOUT, SHAPE, Node, World, key_of, pages_of

BLOCKS = {TierId.DEVICE: 4, TierId.HOST: 4}
PROMPT = np.arange(6, dtype=np.int32)
TOKENS = tokens_to_wire(PROMPT)


@pytest.fixture(params=[False, True], ids=["own table", "cache in use"])
def world(request: pytest.FixtureRequest) -> World:
    """Two instances that know each other."""
    world = World(in_cache=request.param)
    for n in range(2):
        world.start(n, BLOCKS)
    world.see()
    return world


def says(world: World, body: Body, number: int, settled: int = 0) -> Answer | None:
    """Let instance 1 say something to instance 0; return what that answers."""
    node = world.nodes[0]
    message = Envelope((1, 1), node.me, number, settled, body)
    return arrives(world, message, key_of(1))


def arrives(world: World, message: Envelope, key: str) -> Answer | None:
    node = world.nodes[0]
    world.messages.clear()
    node.inbox.append((message, key))
    node.poll()
    bodies = [m.body for m in world.messages if m.request == message.request]
    return next((body for body in bodies if isinstance(body, Answer)), None)


def lent(world: World) -> np.ndarray:
    answer = says(world, AskBlocks(2, BlockType.HOST), 1)
    assert answer is not None
    return from_wire(answer.addresses)


def test_an_address_named_twice_is_read_by_nobody(world: World) -> None:
    """Where it is read; and none is freed."""
    blocks = lent(world)
    twice = to_wire(np.concatenate([blocks, blocks]))
    prompt = {"namespace": b"", "tokens": TOKENS, "first_page": 0}
    for body in (
        {"message": "FreeBlocks", "addresses": twice},
        {"message": "Cancel", "addresses": twice, "request": 1},
        {"message": "Finish", "addresses": twice, "type": 1, "private": b""},
        {"message": "AskPages", "addresses": twice, "timeout_s": 1.0, **prompt},
    ):
        whole = {
            "message": "Envelope",
            "sender": (1, 1),
            "receiver": (0, 1),
            "request": 2,
            "settled": 0,
            "body": body,
        }
        read = MESSAGES.decode(on_the_wire(whole))
        assert isinstance(read, Refused)
        assert "named twice" in read.detail
        once = {**whole, "body": body | {"addresses": to_wire(blocks)}}
        assert not isinstance(MESSAGES.decode(on_the_wire(once)), Refused)
    assert world.nodes[0].pool.usage().num_guest_blocks == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: AskHeld(b"", TOKENS, -1),
        lambda: AskHeld(b"", TOKENS[:-1]),
        lambda: AskHeld(b"x" * 65, TOKENS),
        lambda: AskBlocks(1 << 40, BlockType.HOST),
        lambda: FreeBlocks(bytes(7)),
        lambda: AskPages(b"", b"", TOKENS, 0, float("nan")),
        lambda: Answer(read_s=float("inf")),
        lambda: Answer(media=((1, -1),)),
        lambda: Envelope((1, 1), (0, 1), 5, 6, Answer()),
        lambda: Envelope((1 << 16, 1), (0, 1), 5, 0, Answer()),
        lambda: Region(0, 1 << 62, 1 << 62),
        lambda: PeerAddress("fake", "x", (Region(1, 0, 8),)),
    ],
)
def test_what_is_out_of_range_cannot_be_made(make: Callable[[], object]) -> None:
    """So it cannot be read either."""
    with pytest.raises(ValueError, match=r"\w"):
        make()


def test_a_medium_of_a_later_version_is_passed_over(world: World) -> None:
    """The rest of the answer counts."""
    node = world.nodes[0]
    search = node.pool.locate(PROMPT)
    (asked,) = [m for m in world.messages if isinstance(m.body, AskHeld)]
    answer = Answer(num_pages=3, media=((9, 1), (1, 2)))
    message = Envelope((1, 1), node.me, asked.request, 0, answer, asked.nonce)
    arrives(world, message, key_of(1))
    assert search.held[1].num_pages == 3
    assert search.held[1].media == {TierId.HOST: 2}


def with_entry(world: World, text: str) -> None:
    """Let instance 1 have another entry."""
    view = world.view()
    members = tuple(
        replace(m, memory=text) if m.instance == 1 else m for m in view.members
    )
    world.nodes[0].see(replace(view, members=members, version=99))


def held_by(node: Node) -> np.ndarray:
    blocks = node.pool.alloc_mem(3)
    assert blocks is not None
    node.write(blocks, pages_of(PROMPT))
    assert node.pool.insert(PROMPT, blocks).num_inserted == 3
    return blocks


def test_how_a_peer_is_built_is_checked(world: World) -> None:
    """No places, half of the heads, a region too small, no JSON: refused, and said."""
    held_by(world.nodes[0])
    info = world.nodes[1].pool.info
    (rank,) = info.ranks
    place = rank.places[0]
    half = MemoryForm.aggregated(SHAPE, Shard(0, 1, 0, 1))
    other = tuple(replace(p, form=half) for p in rank.places)
    for number, (odd, refusal) in enumerate(
        [
            (RankInfo(rank.address, ()), "no memory"),
            (RankInfo(rank.address, (place,)), "medium 1 cannot be reached"),
            # Its own affair: it gets the half that it says it has.
            (RankInfo(rank.address, other), None),
        ]
    ):
        with_entry(world, as_entry(PoolInfo(SHAPE, (odd,))))
        blocks = to_wire(world.nodes[1].store.alloc(TierId.HOST, 1))
        answer = says(world, AskPages(blocks, b"", TOKENS, 0, 1.0), 10 + number)
        assert (answer is None) == (refusal is None)
        assert answer is None or refusal in answer.refusal
    for wrong in ("{", "[]", as_entry(info).replace('"num_bytes":', '"num_bytes":-')):
        with_entry(world, wrong)
        assert world.nodes[0].incidents.counts["entry"] >= 1
        body = AskBlocks(1, BlockType.HOST)
        answer = says(world, body, 20 + len(wrong))
        assert answer is not None
        assert "does not say how" in answer.refusal
    tiny = PeerAddress("fake", "x", (Region(0, 0, 8),))
    with pytest.raises(ValueError, match="longer than its region"):
        PoolInfo(SHAPE, (RankInfo(tiny, (replace(place, region=0),)),))


def test_messages_name_no_memory() -> None:
    """What is written where follows from the registry."""
    for message in (AskBlocks, AskPages, Answer):
        named = {field.name for field in msgspec.structs.fields(message)}
        assert not named & {"info", "address", "host", "port", "endpoint", "shape"}


def test_nobody_speaks_for_another(world: World) -> None:
    """Neither frees its blocks, nor mutes it, nor answers in its place."""
    blocks, node = lent(world), world.nodes[0]
    for key in ("another's", "", key_of(0)):
        free = Envelope((1, 1), node.me, 5, 5, FreeBlocks(to_wire(blocks)))
        assert arrives(world, free, key) is None
    assert node.pool.usage().num_guest_blocks == 2
    mute = Envelope((1, 1), node.me, 1 << 61, 1 << 61, AskHeld(b"", TOKENS))
    assert arrives(world, mute, "another's") is None
    assert says(world, AskHeld(b"", TOKENS), 7) is not None
    assert node.incidents.counts["stranger"] == 4


def forged(world: World, key: str, nonce: int | None) -> TransferStatus:
    """Answer a fetch with the sum of a page of zeros, which nobody has sent."""
    node = world.nodes[0]
    blocks = node.pool.alloc_mem(3, BlockType.HOST)
    assert blocks is not None
    fetch = node.pool.fetch(1, PROMPT, blocks)
    asked = [m for m in world.messages if isinstance(m.body, AskPages)][-1]
    zeros = xxhash.xxh3_64_intdigest(bytes(LAYOUT.page_bytes))
    answer = Answer(num_pages=3, sums=to_wire(np.full(3, zeros, np.uint64)))
    number = asked.nonce if nonce is None else nonce
    arrives(world, Envelope((1, 1), node.me, asked.request, 0, answer, number), key)
    return fetch.status


def test_a_fetch_ends_by_its_holder_alone(world: World) -> None:
    """Not by another key, and not by who does not know the request."""
    assert forged(world, "another's", None) is TransferStatus.RUNNING
    assert world.nodes[0].incidents.counts == {"stranger": 1}


def test_an_answer_without_the_nonce_is_none(world: World) -> None:
    """As of who shares the holder's key, and has not got the request."""
    assert forged(world, key_of(1), 12345) is TransferStatus.RUNNING
    assert world.nodes[0].incidents.counts == {"nonce": 1}


def test_a_sum_of_zeros_is_no_page(world: World) -> None:
    """Even from the holder: in blocks that nobody has written to nothing is right."""
    assert forged(world, key_of(1), None) is TransferStatus.FAILED


@pytest.mark.parametrize(
    ("answer", "body", "expected"),
    [
        (Answer(), AskBlocks(2, BlockType.HOST), "0 blocks for 2"),
        (Answer(num_pages=9), AskHeld(b"", TOKENS), "fewer tokens"),
        (Answer(), AskPages(bytes(8), b"", TOKENS, 0, 1.0), "sums of 0 pages"),
        (
            Answer(num_pages=1, sums=bytes(8), num_read=2),
            AskPages(bytes(8), b"", TOKENS, 0, 1.0),
            "read more",
        ),
        (Answer(addresses=bytes(8)), AskBlocks(1, BlockType.HOST), "of another"),
        (Answer("no"), AskBlocks(2, BlockType.HOST), ""),
    ],
)
def test_an_answer_fits_its_request(answer: Answer, body: Body, expected: str) -> None:
    """Whatever was asked."""
    found = misfit(answer, body, (1, 1))
    assert expected in found
    assert bool(found) == bool(expected)


def test_a_wrong_answer_ends_its_request(world: World) -> None:
    """At once, and what the peer may have done for it is undone."""
    node = world.nodes[0]
    search = node.pool.locate(PROMPT)
    (asked,) = [m for m in world.messages if isinstance(m.body, AskHeld)]
    message = Envelope(
        (1, 1), node.me, asked.request, 0, Answer(num_pages=99), asked.nonce
    )
    arrives(world, message, key_of(1))
    assert search.is_over
    assert search.held == {}
    assert node.incidents.counts["answer"] == 1


def test_answers_are_not_kept_without_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who never says that it has them is heard again when it does."""
    monkeypatch.setattr(receiver, "_MAX_KEPT", 10)
    for number in range(1, 50):
        says(world, AskHeld(b"", TOKENS), number)
    kept = world.nodes[0].pool._receiver
    assert kept.num_answers == 10
    assert world.nodes[0].incidents.counts["unsettled"] == 39
    assert says(world, AskHeld(b"", TOKENS), 60, settled=60) is not None
    assert kept.num_answers == 1


def test_a_peer_that_is_silent_costs_nothing_at_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hold its lease for hours; others forget what they have answered."""
    monkeypatch.setattr(receiver, "_MAX_KEPT", 10)
    node, silent = world.start(2, BLOCKS), 1
    world.see()
    node.pool._requests.ask((silent, 1), AskBlocks(1, BlockType.HOST), 1.0)
    for number in range(40):
        search = node.pool.locate(PROMPT, ids=[0], timeout_s=1.0)
        for _ in range(4):
            kept = [m for m in world.messages if m.receiver[0] != silent]
            world.messages[:] = kept
            world.deliver(len(kept))
            world.nodes[0].poll()
            node.poll()
        assert search.held, number
        # The request to the silent one is given up, and is to be undone there.
        world.advance(1.0)
    assert world.nodes[0].pool._receiver.num_answers == 1


def test_what_fails_here_is_counted_and_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner's thread lives on, whatever a handler raises."""
    node = world.nodes[0]
    counting = Incidents()
    for part in (node.pool, node.pool._receiver):
        name = "incidents" if part is node.pool else "_incidents"
        monkeypatch.setattr(part, name, counting)

    def fails(*args: object) -> object:
        raise IndexError("planted")

    monkeypatch.setattr(node.pool._receiver, "_say", fails)
    answer = says(world, AskHeld(b"", TOKENS), 3)
    assert answer is not None
    assert "failed here" in answer.refusal
    monkeypatch.setattr(node.pool._receiver, "handle", fails)
    assert says(world, AskHeld(b"", TOKENS), 4) is None
    assert counting.counts == {"failed": 2}


def test_who_takes_no_arrivals_gets_none(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a server: blocks that enter no index would be nobody's for ever."""
    node = world.nodes[0]
    monkeypatch.setattr(node.pool._receiver, "_keeps_arrivals", False)
    blocks = to_wire(lent(world))
    answer = says(world, Finish(blocks, BlockType.HOST, b""), 2)
    assert answer is not None
    assert "for its index only" in answer.refusal
    inserted = Finish(blocks, BlockType.HOST, b"", True, b"", TOKENS)
    answer = says(world, inserted, 3)
    assert answer is not None
    assert answer.num_inserted == 2
    assert node.pool.take_arrivals() == []
    assert node.pool.usage().num_guest_blocks == 0


@pytest.mark.parametrize("side", [0, 1])
def test_pages_that_cannot_be_summed_up_are_not_used(
    world: World, monkeypatch: pytest.MonkeyPatch, side: int
) -> None:
    """At neither side; no sum stands for one that could not be made."""
    here, holder = world.nodes[0], world.nodes[1]
    held_by(holder)
    blocks = here.pool.alloc_mem(3, BlockType.HOST)
    assert blocks is not None
    sums = world.nodes[side].pool._sums
    failed: Future[np.ndarray] = Future()
    failed.set_exception(MemoryError("planted"))
    monkeypatch.setattr(sums, "_of", lambda addresses: failed)
    fetch = here.pool.fetch(1, PROMPT, blocks)
    world.settle(20.0)
    assert fetch.status is TransferStatus.FAILED
    assert not here.pool.free_mem(blocks)
    world.settle(20.0)
    assert here.pool.is_idle
    assert holder.pool.is_idle


# Over real sockets.


@pytest.fixture
def channels() -> Iterator[Callable[[], tuple[ControlChannel, Incidents]]]:
    """What makes a channel on loopback."""
    with ExitStack() as stack:

        def make() -> tuple[ControlChannel, Incidents]:
            incidents = Incidents()
            channel = ControlChannel("127.0.0.1", 0, None, lambda: None, incidents)
            stack.callback(channel.close)
            return channel, incidents

        yield make


def member(instance: int, channel: ControlChannel) -> Member:
    return Member(
        f"n{instance}", instance, 1, InstanceKind.COLOCATED, dict(channel.endpoints)
    )


def heard(channel: ControlChannel, done: Callable[[list], bool]) -> list[Envelope]:
    """Take until it is so; a deadline that only a defect meets."""
    found: list[Envelope] = []
    for _ in range(20000):
        found += channel.take()
        if done(found):
            return found
        time.sleep(1e-3)
    raise AssertionError("it never happened")


def test_keys_are_there_on_loopback_too(
    channels: Callable[[], tuple[ControlChannel, Incidents]],
) -> None:
    """Each process has its own; a message under another's is not heard."""
    (one, incidents), (two, _), (evil, _) = channels(), channels(), channels()
    assert len({c.endpoints[CONTROL_KEY] for c in (one, two, evil)}) == 3
    view = View(1, (member(0, one), member(1, two)))
    one.see(view)
    two.see(view)
    # The hostile one knows whom to write to, and is no member.
    evil.see(view)
    evil.send(Envelope((1, 1), (0, 1), 1, 0, AskHeld(b"", b"")))
    heard(one, lambda found: incidents.counts.get("stranger") == 1)
    # As a member it is heard, and may speak for itself only.
    one.see(View(2, (*view.members, member(2, evil))))
    evil.send(Envelope((1, 1), (0, 1), 2, 0, AskHeld(b"", b"")))
    evil.send(Envelope((2, 1), (0, 1), 3, 0, AskHeld(b"", b"")))
    two.send(Envelope((1, 1), (0, 1), 4, 0, AskHeld(b"", b"")))
    found = heard(one, lambda found: len(found) == 2)
    assert sorted(each.request for each in found) == [3, 4]
    assert incidents.counts["stranger"] == 2
    # An answer without the request's nonce is none.
    (asked,) = (each for each in found if each.request == 4)
    one.send(Envelope((0, 1), (1, 1), 4, 0, Answer()))
    one.send(Envelope((0, 1), (1, 1), 4, 0, Answer(), asked.nonce))
    assert len(heard(two, lambda found: len(found) == 1)) == 1


def test_an_entry_without_a_key_is_not_spoken_to(
    channels: Callable[[], tuple[ControlChannel, Incidents]],
) -> None:
    """As an older version writes it; it is said why."""
    (one, _), (two, _) = channels(), channels()
    other = replace(member(1, two), endpoints={CONTROL: two.endpoints[CONTROL]})
    one.see(View(1, (member(0, one), other)))
    one.send(Envelope((0, 1), (1, 1), 1, 0, AskHeld(b"", b"")))
    (trouble,) = one.troubles().values()
    assert "older version" in trouble


def test_loopback_writes_to_no_other_process() -> None:
    """Whose address it is must have the token of that address where it says."""
    try:
        here, there = open_loopback(), open_loopback()
    except TransportUnavailableError as error:
        pytest.skip(f"not run: {error}")
    memory, target = np.ones(32, np.uint8), np.zeros(32, np.uint8)
    here.register(memory)
    there.register(target)
    right = there.address
    # This very process, where the kernel would write, under a token of nobody's.
    wrong = replace(right, metadata=right.metadata[:8] + bytes(32))
    failed = here.push(here.connect(wrong), Pieces.one(0, 0, 32)).wait()
    assert failed is TransferStatus.FAILED
    assert not target.any()
    for odd in (b"", right.metadata[:-1]):
        with pytest.raises(ValueError, match="not an address"):
            here.connect(replace(right, metadata=odd))
    assert here.push(here.connect(right), Pieces.one(0, 0, 32)).wait() is (
        TransferStatus.DONE
    )
    assert target.all()
    here.close()
    there.close()


def test_a_log_line_of_each_kind_now_and_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All are counted; what others sent cannot break lines."""
    clock, told = ManualClock(), []
    incidents = Incidents("here", told.append, clock)
    for _ in range(100):
        incidents.note("odd", "a\nb")
    clock.advance(31.0)
    incidents.note("odd", "again")
    assert incidents.counts == {"odd": 101}
    assert told == ["odd"] * 101
    assert [record.getMessage() for record in caplog.records] == [
        "here: odd: a\\nb",
        "here: odd: again (100 since the last such line)",
    ]


def test_one_poll_takes_a_part_of_what_waits(
    channels: Callable[[], tuple[ControlChannel, Incidents]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However much a member sends; the rest, in its order, wakes the owner again."""
    (one, _), (two, _) = channels(), channels()
    for each in (one, two):
        each.see(View(1, (member(0, one), member(1, two))))
    woken: list[int] = []
    monkeypatch.setattr(one, "_wake", lambda: woken.append(1))

    def fill(bodies: list[Body]) -> None:
        for number, body in enumerate(bodies, 1):
            before = len(one._inbox)
            two.send(Envelope((1, 1), (0, 1), number, 0, body))
            for _ in range(20000):
                if len(one._inbox) > before:
                    break
                time.sleep(1e-3)
        assert len(one._inbox) == len(bodies)
        woken.clear()

    def taken() -> list[list[int]]:
        polls = []
        while one._inbox:
            polls.append([each.request for each in one.take()])
        return polls

    fill([AskHeld(b"", b"")] * 300)
    polls = taken()
    assert [len(poll) for poll in polls] == [128, 128, 44]
    assert [number for poll in polls for number in poll] == [*range(1, 301)]
    assert len(woken) == 2, "nobody else wakes who owns the pool"
    assert one.take() == []
    assert one._inbox_bytes == 0
    # By their length: one at least, whatever it has.
    half, whole = AskHeld(b"", bytes(600_000)), AskHeld(b"", bytes(3_000_000))
    fill([half, half, whole, half, AskHeld(b"", b"")])
    assert taken() == [[1], [2], [3], [4, 5]]
    assert one._inbox_bytes == 0


def test_a_peer_names_no_more_blocks_than_there_are(world: World) -> None:
    """A list of others' is not gone through; one with its own among them is."""
    blocks = lent(world)
    node = world.nodes[0]
    guests = node.pool._guests
    others = np.arange(1 << 20, dtype=np.uint64)
    assert guests.free((1, 1), np.concatenate([others, blocks])) == 0
    assert not guests.has((1, 1), others)
    assert guests.free((2, 1), blocks) == 0
    mixed = np.concatenate([others[:3], blocks[:1], others[3:5]])
    answer = says(world, FreeBlocks(to_wire(mixed)), 2)
    assert answer == Answer()
    assert node.pool.usage().num_guest_blocks == 1
    assert says(world, FreeBlocks(to_wire(blocks)), 3) == Answer()
    assert node.pool.usage().num_guest_blocks == 0
