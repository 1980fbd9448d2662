"""Decode and prefill instances that say anything, to the transfer engine between them.

A prefill instance (``RawEngine``) writes to an honest decode instance and to hostile
ones, which register and name whatever they like: addresses, regions, lists of ranges.
The honest one reads what a prefill instance tells of itself, and returns answers by it.
Whatever is said: no exception, no byte of the honest one that was not sent to it, none
outside of what somebody has registered, and nothing is returned to who is no member.
And one speaks in the name of another (``speaking.py``): nothing of it is heard.
What SGLang's own threads read, ``contract/test_hostile_pd.py`` has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from sgl_tiered.core.clock import SystemClock
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.serving.disagg import engine as engine_module
from sgl_tiered.serving.disagg import figures as figures_module
from sgl_tiered.serving.disagg import speaking
from sgl_tiered.serving.disagg.engine import RawEngine
from sgl_tiered.serving.disagg.figures import PrefillTold, read_told
from sgl_tiered.serving.disagg.judging import ReturnJudge
from sgl_tiered.serving.disagg.returning import AnswerReturns, Ended
from sgl_tiered.serving.disagg.speaking import Asked, Asking, StrangerError
from sgl_tiered.transport.base import PeerAddress, Region, TransferStatus
from sgl_tiered.transport.batched import BatchedTransport
from tests.property.pool_world import Strict

NUM_BYTES = 256
LAYOUT = PageLayout(num_layers=2, page_tokens=4, token_bytes=16)
MEMBER = (3, 8)
HONEST = "honest:1"
EVIL = st.sampled_from(["evil:1", "evil:2", "", "evil", "evil:\ud800"])
FAR = 1 << 41
"""Where the memory of the hostile ones would be; nobody follows it."""


class Library:
    """Moves bytes of the honest; what goes to others ends as they like."""

    kind = "fake"
    max_in_flight = 64

    def __init__(self) -> None:
        self.memories: list[np.ndarray] = []
        self.ends = TransferStatus.DONE

    def endpoint(self) -> tuple[str, bytes]:
        """Return that of the honest one."""
        return "honest", b""

    def register(self, address: int, num_bytes: int) -> None:
        """Nothing to do."""

    def connect(self, address: PeerAddress) -> str:
        """Return the endpoint; some say what libraries say of theirs."""
        if "!" in address.endpoint:
            raise RuntimeError("a library's own words")
        if "?" in address.endpoint:
            raise ValueError("malformed")
        return address.endpoint

    def reach(self, link: str) -> str:
        """Return that all are there."""
        return ""

    gone = reach

    def submit(
        self,
        link: str,
        is_push: bool,
        local: np.ndarray,
        remote: np.ndarray,
        lengths: np.ndarray,
    ) -> list[tuple[int, TransferStatus | None]]:
        """Copy at once what is for the honest one."""
        assert is_push
        rows = zip(local.tolist(), remote.tolist(), lengths.tolist(), strict=True)
        for here, there, num in rows:
            source = self._bytes(here, num)
            if link == "honest":
                self._bytes(there, num)[:] = source
        if link == "honest":
            return [(1, TransferStatus.DONE)] * len(lengths)
        return [(1, self.ends)] * len(lengths)

    def check(self, ticket: TransferStatus) -> TransferStatus:
        """Return the end."""
        return ticket

    def disconnect(self, link: str) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""

    def _bytes(self, address: int, num: int) -> np.ndarray:
        for memory in self.memories:
            start = memory.ctypes.data
            if start <= address and address + num <= start + memory.size:
                return memory[address - start : address - start + num]
        raise AssertionError("a range outside of what was registered")


class Pool:
    """Takes returns."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def match(self, tokens: np.ndarray, *, namespace: bytes = b"") -> np.ndarray:
        """Return that all of it is here."""
        return np.zeros(len(tokens) // LAYOUT.page_tokens, np.uint64)

    def transfer_with_insert(self, instance: int, *args: Any, **how: Any) -> Any:
        """Note one, which has ended."""
        self.sent.append(instance)
        return msgspec.defstruct("Ended", ["status", "num_inserted"])(
            TransferStatus.DONE, 1
        )


_NUMBERS = st.one_of(
    st.integers(0, 2 * NUM_BYTES),
    st.sampled_from([-1, -(2**63), 2**31, 2**62, 2**63 - 1, 2**63, 2**64 - 1]),
)
_ENDPOINTS = st.one_of(st.sampled_from(["evil", "!", "?", "", "e" * 300]), st.text())


def mostly(usual: st.SearchStrategy[Any], odd: st.SearchStrategy[Any]) -> Any:
    """Values of the first, now and then of the second."""
    return st.one_of(*[usual] * 5, odd)


ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.text()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=6,
)
REGIONS = st.lists(
    st.tuples(
        mostly(st.integers(0, 3), _NUMBERS),
        mostly(st.integers(FAR, FAR + NUM_BYTES), _NUMBERS),
        mostly(st.integers(1, NUM_BYTES), _NUMBERS),
    ),
    max_size=4,
).map(
    lambda rows: [
        {"number": n if n > 3 else at, "address": address, "num_bytes": size}
        for at, (n, address, size) in enumerate(rows)
    ]
)
ADDRESSES = st.fixed_dictionaries(
    {
        "kind": mostly(st.just("fake"), st.one_of(st.text(max_size=5), ANYTHING)),
        "endpoint": mostly(_ENDPOINTS, ANYTHING),
        "regions": mostly(REGIONS, ANYTHING),
        "metadata": mostly(st.binary(max_size=4), ANYTHING),
    }
)


def packed(value: Any) -> bytes:
    """Return what a peer would send; some of it no encoder of ours makes."""
    try:
        return msgspec.msgpack.encode(value)
    except UnicodeEncodeError:
        return b"\xa1\xff"


TOLD = st.one_of(
    mostly(ADDRESSES.map(packed), ANYTHING.map(packed)),
    mostly(ADDRESSES.map(packed), st.binary(max_size=40)),
    ADDRESSES.map(packed).map(lambda raw: raw[:-1]),
    st.integers(1, 5000).map(lambda num: b"\x91" * num),
)
_RIGHT_COSTS = st.lists(st.floats(0.0, 1.0), min_size=9, max_size=9)
_ODD_COSTS = st.lists(
    st.sampled_from([0.0, -1.0, 1e5, 1e6, 5e-324, math.inf, -math.inf, math.nan]),
    min_size=9,
    max_size=9,
)
_COUNTS = mostly(st.integers(0, 9), st.sampled_from([-1, 2**31, 2**63, 2**64 - 1]))
_SPEEDS = mostly(
    st.floats(1.0, 1e12), st.sampled_from([0.0, 5e-324, 1e308, math.inf, math.nan])
)
_PLACES = mostly(st.just(MEMBER), st.tuples(_COUNTS, _COUNTS))
FIGURES = st.tuples(_PLACES, mostly(_RIGHT_COSTS, _ODD_COSTS), _COUNTS, _SPEEDS).map(
    lambda f: [*f[0], *f[1], True, f[2], True, f[3]]
)
_NAMES = mostly(st.text(max_size=9), st.just(1 << 17).map(lambda num: "x" * num))
OF_PREFILL = st.one_of(
    st.tuples(_NAMES, _NAMES, FIGURES).map(packed),
    st.tuples(_NAMES, _NAMES, mostly(FIGURES, ANYTHING)).map(packed),
    ANYTHING.map(packed),
    st.binary(max_size=40),
    # Half text, where a name should be.
    st.tuples(st.just("~"), st.text(max_size=3), st.none())
    .map(packed)
    .map(lambda raw: raw.replace(b"~", b"\xff")),
)


class HostilePdMachine(RuleBasedStateMachine):
    """Transfers between two, and whatever others say."""

    @initialize()
    def begin(self) -> None:
        """Start both."""
        self.engine_calls = Library()
        self.transport = BatchedTransport(self.engine_calls, grace_s=0.0)
        self.incidents = Strict()
        self.engine = RawEngine(
            self.transport, SystemClock(), timeout_s=60.0, incidents=self.incidents
        )
        self.here = [np.full(NUM_BYTES, 7 + n, np.uint8) for n in range(2)]
        self.there = [np.zeros(NUM_BYTES, np.uint8) for _ in range(2)]
        self.expected = [memory.copy() for memory in self.there]
        self.engine_calls.memories = [*self.here, *self.there]
        self.bases = [memory.ctypes.data for memory in self.here]
        self.engine.batch_register(self.bases, [NUM_BYTES] * 2)
        ordered = sorted(self.there, key=lambda memory: memory.ctypes.data)
        regions = tuple(
            Region(n, memory.ctypes.data, NUM_BYTES) for n, memory in enumerate(ordered)
        )
        right = PeerAddress("fake", "honest", regions)
        assert self.engine.connect(HONEST, packed(asdict(right))) == ""
        # One has registered as it should, before it says anything else.
        theirs = PeerAddress("fake", "evil", (Region(0, FAR, NUM_BYTES),))
        assert self.engine.connect("evil:1", packed(asdict(theirs))) == ""
        self.counts: dict[str, int] = {}
        self.pool = Pool()
        self.judge = ReturnJudge("always", LAYOUT, self.count)
        self.returns = AnswerReturns(
            self.pool,  # type: ignore[arg-type]
            lambda *place: place == MEMBER,
            self.count,
        )
        self.num_ended = 0

    def teardown(self) -> None:
        """The honest ones work to the end; nothing of others is held for ever."""
        if not hasattr(self, "engine"):
            return
        self.push(0, 0, 0, 1, 8)
        self.transport.close()
        assert self.incidents.counts == {}

    def count(self, name: str, number: int) -> None:
        self.counts[name] = self.counts.get(name, 0) + number

    # The honest ones.

    @rule(
        source=st.integers(0, 1),
        begin=st.integers(0, NUM_BYTES - 8),
        at=st.integers(0, NUM_BYTES - 8),
        which=st.integers(0, 1),
        num=st.integers(1, 8),
    )
    def push(self, source: int, begin: int, at: int, which: int, num: int) -> None:
        """A range goes to the honest one, and arrives."""
        ended = self.engine.batch_transfer_sync(
            HONEST,
            [self.bases[source] + begin],
            [self.there[which].ctypes.data + at],
            [num],
        )
        assert ended == 0
        self.expected[which][at : at + num] = 7 + source

    # The hostile ones.

    @rule(session=EVIL, told=TOLD)
    def registers(self, session: str, told: bytes) -> None:
        """Anything in the place of an address."""
        assert isinstance(self.engine.connect(session, told), str)

    @rule(
        session=st.sampled_from([HONEST, "evil:1", "evil:1", "evil:1", "evil:2"]),
        data=st.data(),
    )
    def names(self, session: str, data: st.DataObject) -> None:
        """Ranges that a decode instance names, of its own memory or of nobody's."""
        self.engine_calls.ends = data.draw(
            st.sampled_from([TransferStatus.DONE, TransferStatus.FAILED])
        )
        num = data.draw(st.integers(0, 5))
        anywhere = [*self.bases, FAR, *(each.ctypes.data for each in self.there)]

        def near(bases: list[int], low: int = 0) -> Any:
            inside = st.tuples(st.sampled_from(bases), st.integers(low, NUM_BYTES - 3))
            edge = st.tuples(st.sampled_from(anywhere), st.integers(-2, NUM_BYTES))
            return mostly(inside.map(sum), st.one_of(edge.map(sum), _NUMBERS))

        here, there = near(self.bases), near([FAR])
        if session == HONEST:
            # What is inside would be right: no decode instance writes for another.
            there = near([each.ctypes.data for each in self.there], NUM_BYTES - 3)
            there = there.filter(lambda at: not self.is_inside(at))
        sizes = mostly(st.integers(4, 9), _NUMBERS)
        before = self.engine.num_failed
        lists = [
            data.draw(st.lists(each, min_size=num, max_size=num))
            for each in (here, there, sizes)
        ]
        if data.draw(st.integers(0, 3)) == 0:
            which = data.draw(st.integers(0, 2))
            lists[which] = lists[which][: data.draw(st.sampled_from([-1, 1]))]
        ended = self.engine.batch_transfer_sync(session, *lists)
        assert ended in (0, -1)
        assert self.engine.num_failed - before == -ended
        if session == HONEST:
            assert ended == -1 or not num

    def is_inside(self, address: int) -> bool:
        """Whether four bytes there are the honest one's."""
        starts = [each.ctypes.data for each in self.there]
        return any(s <= address <= s + NUM_BYTES - 4 for s in starts)

    @rule(session=st.one_of(EVIL, st.just(HONEST)))
    def asks(self, session: str) -> None:
        """What SGLang asks of a session, whosesoever."""
        assert self.engine.is_settled(session) in (True, False)
        assert self.engine.send_probe(session) in (0, -1)
        assert 0.0 < self.engine.link_bytes_per_s([session]) < math.inf

    @rule(told=OF_PREFILL, num_prompt=st.integers(0, 20), num=st.integers(1, 5))
    def tells(self, told: bytes, num_prompt: int, num: int) -> None:
        """Anything in the place of what a prefill instance tells with a transfer."""
        found = read_told(told)
        assert isinstance(found, PrefillTold)
        assert max(len(found.weights), len(found.epoch)) <= 1 << 16
        figures = found.figures
        if figures is None:
            return
        # Both are divided by.
        assert 0.0 < figures.bytes_per_s < math.inf
        assert NUM_BYTES / figures.bytes_per_s < math.inf
        tokens = np.arange(num * LAYOUT.page_tokens, dtype=np.int32)
        rid = f"r{self.num_ended}"
        self.num_ended += 1
        if self.judge.is_worth(rid, figures, b"model", tokens, num_prompt):
            self.returns.add(Ended(figures.place, b"model", tokens))
        (*_, last) = self.judge.stats()["last"]
        assert math.isfinite(last["gain_s"])
        assert math.isfinite(last["cost_s"])
        self.returns.poll()

    # Laws.

    @invariant()
    def nothing_is_wrong(self) -> None:
        """The honest one has what was sent to it, and only members get answers."""
        if not hasattr(self, "engine"):
            return
        for memory, expected in zip(self.there, self.expected, strict=True):
            assert (memory == expected).all(), "bytes that nobody sent there"
        for number, memory in enumerate(self.here):
            assert (memory == 7 + number).all(), "bytes here have changed"
        assert set(self.pool.sent) <= {MEMBER[0]}
        assert len(self.engine._sessions) <= 1 + 5


PREFILL = "tcp://10.0.0.7:6000"
DECODE, STRANGER = ("10.0.0.1", 5000), ("10.0.0.2", 5000)
_REQUIRED = msgspec.defstruct("Required", [("required_dst_info_num", int, 1)])
_PLACED = st.sampled_from([DECODE, STRANGER])
_ROOMS = st.integers(0, 3)


class SpeakersMachine(RuleBasedStateMachine):
    """A pair, and another decode instance that says what it likes in its name.

    It knows the sessions and places of the first one, but not its keys. Requests need
    one rank of a decode instance, or two.
    """

    @initialize(num_ranks=st.integers(1, 2))
    def begin(self, num_ranks: int) -> None:
        """Nobody has said anything."""
        makers = [Asking(lambda room: True) for _ in range(num_ranks + 1)]
        *self.ranks, self.evil = makers
        self.asked = Asked(lambda host, port: f"tcp://{host}:{port}")
        # As SGLang has them: who has asked for a room, by session.
        self.rooms: dict[int, dict[str, Any]] = {}
        self.ended: set[int] = set()
        *self.mine, self.its = (
            by.say(0, PREFILL, [b"0", b"", b"", b""])[3].decode() for by in makers
        )

    def said(self, message: list[bytes]) -> bool | None:
        """The prefill instance hears it, and does as SGLang's thread would."""
        try:
            key, said = self.asked.hear(message)
            is_heard = said[0] == b"None" or self.asked.admit(key, said, self.rooms)
        except (StrangerError, ValueError, LookupError):
            return None
        if said[0] == b"ABORT":
            if is_heard:
                self.ended.add(int(said[1]))
        elif is_heard and said[0] != b"None":
            required = _REQUIRED(len(self.ranks))
            self.rooms.setdefault(int(said[0]), {})[said[3].decode()] = required
        return is_heard

    def place(self, rank: int) -> tuple[bytes, bytes]:
        return DECODE[0].encode(), b"%d" % (DECODE[1] + rank)

    @rule(room=_ROOMS, rank=st.integers(0, 1))
    def asks(self, room: int, rank: int) -> None:
        """A rank asks for a room, unless the other has taken it."""
        rank %= len(self.ranks)
        word = [b"%d" % room, *self.place(rank), b"", b"pages"]
        is_taken = self.its in self.rooms.get(room, {})
        heard = self.said(self.ranks[rank].say(room, PREFILL, word))
        assert heard or is_taken

    @rule(room=_ROOMS, rank=st.integers(0, 1))
    def aborts(self, room: int, rank: int) -> None:
        """A rank ends a room, whoever has it, and believes the answer."""
        rank %= len(self.ranks)
        by, (host, port) = self.ranks[rank], self.place(rank)
        word = [b"ABORT", b"%d" % room, host, port, b"1"]
        heard = self.said(by.say(room, PREFILL, word))
        assert heard is not None
        assert heard or self.its in self.rooms[room]
        ack = [b"ABORT_ACK", b"%d" % room, b"0", b"1"]
        assert by.hear(self.asked.say(f"tcp://{host.decode()}:{int(port)}", ack)) == ack

    @rule(room=_ROOMS)
    def clears(self, room: int) -> None:
        """The request ends."""
        self.rooms.pop(room, None)
        self.asked.end(room)
        self.ended.discard(room)

    @rule(
        room=_ROOMS,
        place=_PLACED,
        how=st.sampled_from(["registers", "keyless", "asks", "aborts"]),
        as_other=st.booleans(),
        gives_key=st.booleans(),
    )
    def strange(
        self,
        room: int,
        place: tuple[str, int],
        how: str,
        as_other: bool,
        gives_key: bool,
    ) -> None:
        """The other says something, with its key or without."""
        host, port = place[0].encode(), b"%d" % place[1]
        session = (self.mine[0] if as_other else self.its).encode()
        key = [self.evil._key(PREFILL)] if gives_key else []
        has_room = len(self.rooms.get(room, {})) >= len(self.ranks)
        is_full = has_room and self.its not in self.rooms[room]
        had_ended = room in self.ended
        if how in ("registers", "keyless"):
            word = [b"None", host, port, session, *[b""] * 17]
            heard = self.said([*word, *key])
            assert heard is (True if gives_key and not as_other else None)
            return
        word = [b"%d" % room, host, port, session, b"pages"]
        if how == "aborts":
            word = [b"ABORT", b"%d" % room, host, port, b"1"]
            as_other = False
        heard = self.said([*word, *key])
        if is_full:
            assert not heard
            assert (room in self.ended) == had_ended
        if as_other or (how == "asks" and not gives_key):
            assert heard is None

    @invariant()
    def the_honest_one_is_told(self) -> None:
        """What is said of its rooms, it takes for said by whom it asked."""
        if not hasattr(self, "rooms"):
            return
        for room, sessions in self.rooms.items():
            assert len(sessions) <= len(self.ranks)
            for rank, by in enumerate(self.ranks):
                if self.mine[rank] in sessions:
                    host, port = self.place(rank)
                    word = [b"%d" % room, b"4", b"0"]
                    place = f"tcp://{host.decode()}:{int(port)}"
                    assert by.hear(self.asked.say(place, word)) == word


LIMITS = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestHostilePd = HostilePdMachine.TestCase
TestHostilePd.settings = LIMITS
TestSpeakers = SpeakersMachine.TestCase
TestSpeakers.settings = settings(LIMITS, max_examples=100)


def _unfound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges are not looked up: all begin in the first region."""

    def find(self: Any, addresses: np.ndarray, lengths: np.ndarray) -> Any:
        del lengths
        return np.zeros_like(addresses), addresses - self.starts[0]

    monkeypatch.setattr(engine_module._Regions, "find", find)
    monkeypatch.setattr("sgl_tiered.transport.batched._demand_inside", lambda *a: None)


def _unequal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_are_pairs", lambda *lists: True)


def _uncaught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RawEngine, "connect", RawEngine._take)


def _half_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures_module, "_UNREADABLE", msgspec.MsgspecError)


def _anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(self: AnswerReturns, ended: Ended) -> None:
        self._pool.transfer_with_insert(ended.receiver[0], ended.tokens)

    monkeypatch.setattr(AnswerReturns, "_begin", begin)


def _unproved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speaking.hmac, "compare_digest", lambda one, other: True)


def _unadmitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gives a key may say anything."""
    monkeypatch.setattr(Asked, "admit", lambda self, key, message, rooms: True)


class OnlyTold(HostilePdMachine):
    """What a prefill instance tells, alone: a smaller room for known faults."""

    push = registers = names = asks = None  # type: ignore[assignment]

    def teardown(self) -> None:
        """Nothing was begun."""
        if hasattr(self, "transport"):
            self.transport.close()


@pytest.mark.parametrize(
    ("remove", "machine"),
    [
        (_unfound, HostilePdMachine),
        (_unequal, HostilePdMachine),
        (_uncaught, HostilePdMachine),
        (_half_read, OnlyTold),
        (_anybody, OnlyTold),
        (_unproved, SpeakersMachine),
        (_unadmitted, SpeakersMachine),
    ],
)
def test_a_check_that_is_missing_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
    remove: Callable[[pytest.MonkeyPatch], None],
    machine: type[HostilePdMachine],
) -> None:
    """The machine fails without any one of the checks."""
    remove(monkeypatch)
    few = settings(
        LIMITS,
        max_examples=200,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        print_blob=False,
    )
    # Several may show at once.
    with pytest.raises(Exception):  # noqa: B017, PT011
        run_state_machine_as_test(machine, settings=few)
