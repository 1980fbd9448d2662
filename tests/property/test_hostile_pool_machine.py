"""A member that says anything, to pools at work: nothing ends, and nothing is wrong.

Instances 0 and 1 work with each other; 2 is a member with an entry of its own, and all
that comes from it is made up (``sgl_tiered.testing.hostile``), or is said in the name
of another one; so is what its entry says of where it can be reached. Whatever it is: no
exception, no page of an honest namespace that is not what its tokens say, no answer to
who has another's key, bounded memory; and when it has left, no block is missing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from sgl_tiered.core.ids import TierId
from sgl_tiered.pool import messages, receiver, requests
from sgl_tiered.pool.base import BlockType
from sgl_tiered.pool.channel import MESSAGES
from sgl_tiered.pool.fetch import Fetch, Search
from sgl_tiered.pool.guard import Guard
from sgl_tiered.pool.membership import View, member_fields, members_from
from sgl_tiered.pool.mempool import PoolUsage
from sgl_tiered.pool.messages import Answer, Envelope, from_wire
from sgl_tiered.testing.hostile import (
    answers,
    envelopes,
    odd_endpoints,
    on_the_wire,
)
from sgl_tiered.testing.strategies import prompts
from sgl_tiered.transport.base import TransferStatus
from sgl_tiered.transport.messages import Refused
from tests.property.pool_world import (
    LAYOUT,
    SHAPE,
    Node,
    Strict,
    World,
    content,
    key_of,
    pages_of,
)

BLOCKS = {TierId.DEVICE: 5, TierId.HOST: 5}
EVIL = 2
HONEST = st.integers(0, 1)
PROMPTS = prompts(
    page_tokens=SHAPE.page_tokens, words=["abca", "abcb", "abb", "ba"]
).filter(lambda tokens: len(tokens) >= SHAPE.page_tokens)
SOME = [np.array([7, ord(c)] * n, np.int32) for c in "ab" for n in (1, 2, 3)]
TYPE = st.sampled_from([BlockType.DEVICE, BlockType.HOST, BlockType.MIXED])
NOTHING = PoolUsage(0, 0, 0, 0, 0)
ZEROS = xxhash.xxh3_64_intdigest(bytes(LAYOUT.page_bytes))
MAX_KEPT = 32


class HostilePoolMachine(RuleBasedStateMachine):
    """Work of two, and whatever a third one says."""

    in_cache = False

    @initialize()
    def begin(self) -> None:
        """Start all instances."""
        self.world = World(in_cache=self.in_cache)
        self.endpoints: dict[str, str] = {}
        self.members = self.world.view
        self.world.view = self.view  # type: ignore[method-assign]
        self.known: list[int] = []
        self.numbers: list[int] = []
        self.asked: list[Envelope] = []
        self.fetches: list[tuple[Node, np.ndarray, Fetch]] = []
        self.searches: list[tuple[int, Search]] = []
        for n in range(3):
            self.world.start(n, BLOCKS)
        self.evil = self.world.nodes[EVIL]
        # It says and does nothing of its own accord.
        self.evil.poll = self.evil.transport.pump  # type: ignore[method-assign]
        self.world.see()
        receiver._MAX_KEPT, self.former = MAX_KEPT, receiver._MAX_KEPT

    def teardown(self) -> None:
        """The hostile one leaves; then all is as it should be."""
        if not hasattr(self, "world"):
            return
        receiver._MAX_KEPT = self.former
        self.world.start(EVIL, BLOCKS)
        # Who has left stays known by its last entry.
        self.endpoints = {}
        for _ in range(3):
            self.world.settle(15.0)
            self.take()
        for n in (0, 1):
            node = self.world.nodes[n]
            assert node.pool.usage() == NOTHING, node.pool.usage()
            for usage in node.usage():
                assert usage.active == usage.held == 0, usage
                assert usage.free + usage.historical == usage.capacity

    # Work.

    @rule(n=HONEST, tokens=PROMPTS, kind=TYPE)
    def compute(self, n: int, tokens: np.ndarray, kind: BlockType) -> None:
        """A prompt is computed, and its pages are kept."""
        node = self.world.nodes[n]
        pages = pages_of(tokens)
        blocks = node.pool.alloc_mem(len(pages), kind)
        if blocks is not None:
            node.write(blocks, pages)
            self.note(blocks)
            node.pool.insert(tokens, blocks, free_duplicates=True)

    @rule(n=HONEST, to=st.integers(0, 2), tokens=PROMPTS, only_missing=st.booleans())
    def send(self, n: int, to: int, tokens: np.ndarray, only_missing: bool) -> None:
        """Pages go to another one, which may be the hostile one."""
        node = self.world.nodes[n]
        found = node.pool.match(tokens)
        if len(found):
            node.pool.transfer_with_insert(
                to, tokens, found, only_missing=only_missing, checked=True
            )
            self.hear()

    @rule(n=HONEST, holder=st.integers(0, 2), tokens=PROMPTS)
    def fetch(self, n: int, holder: int, tokens: np.ndarray) -> None:
        """Pages are fetched from another one, which may be the hostile one."""
        node = self.world.nodes[n]
        blocks = node.pool.alloc_mem(len(pages_of(tokens)), BlockType.MIXED)
        if blocks is not None:
            self.note(blocks)
            fetch = node.pool.fetch(holder, tokens, blocks)
            self.fetches.append((node, tokens, fetch))
            self.hear()

    @rule(n=HONEST, tokens=PROMPTS)
    def locate(self, n: int, tokens: np.ndarray) -> None:
        """All are asked what they hold."""
        search = self.world.nodes[n].pool.locate(tokens)
        self.searches.append((len(tokens), search))
        self.hear()

    @rule()
    def go_on(self) -> None:
        """Messages and bytes go where they should."""
        self.world.pump()
        self.hear()
        self.take()

    # What the hostile one says.

    @rule(n=HONEST, data=st.data())
    def says(self, n: int, data: st.DataObject) -> None:
        """Anything, under its own key."""
        self.deliver(n, self.made_up(n, data), key_of(EVIL))

    @rule(endpoints=st.one_of(st.just({}), odd_endpoints()))
    def registers(self, endpoints: dict[str, str]) -> None:
        """Another entry, of where it can be reached; one that is odd is no member's."""
        self.endpoints = endpoints
        self.world.version += 1
        self.world.see()

    @rule(n=HONEST, data=st.data())
    def begins(self, n: int, data: st.DataObject) -> None:
        """Blocks are allocated for it, which it names then, in whatever way."""
        size = data.draw(st.integers(1, 3))
        number = max([0, *(r for r in self.numbers if r < 1 << 41)]) + 1
        right = {
            "message": "Envelope",
            "sender": self.evil.me,
            "receiver": self.world.nodes[n].me,
            "request": number,
            # Or nothing of it would be heard after a while.
            "settled": number,
            "body": {"message": "AskBlocks", "num_blocks": size, "type": 2},
        }
        self.known = []
        self.deliver(n, right, key_of(EVIL))
        self.hear()
        for _ in range(3):
            self.deliver(n, self.made_up(n, data), key_of(EVIL))

    @rule(n=HONEST, data=st.data())
    def answers(self, n: int, data: st.DataObject) -> None:
        """Something wrong to what it was really asked."""
        asked = [each for each in self.asked if each.sender[0] == n]
        if not asked:
            return
        request = data.draw(st.sampled_from(asked[-3:]))
        known = st.sampled_from([*self.known, 0])
        body = data.draw(answers(addresses=self.known, sums=[ZEROS, data.draw(known)]))
        message = {
            "message": "Envelope",
            "sender": self.evil.me,
            "receiver": request.sender,
            "request": request.request,
            "settled": 0,
            "body": body,
            "nonce": request.nonce,
        }
        self.deliver(n, message, key_of(EVIL))

    @rule(n=HONEST, data=st.data(), who=st.integers(0, 3))
    def pretends(self, n: int, data: st.DataObject, who: int) -> None:
        """Anything in the name of another, under its own key or none."""
        node = self.world.nodes[n]
        self.world.pump()
        self.hear()
        before = node.pool.usage(), len(self.world.messages)
        key = data.draw(st.sampled_from([key_of(EVIL), "", "key of nobody"]))
        message = self.made_up(n, data)
        message["sender"] = (who, self.world.incarnations.get(who, 1))
        if who == EVIL and key == key_of(EVIL):
            key = ""
        if message["body"]["message"] == "Answer" and self.asked:
            former = data.draw(st.sampled_from(self.asked))
            message |= {"request": former.request, "nonce": former.nonce}
        self.deliver(n, message, key, poll=False)
        # Not by ``poll``, which does more than to take.
        for envelope in node.take():
            node.pool._take(envelope)
        after = node.pool.usage(), len(self.world.messages)
        assert before == after, "who is not the sender has had an effect"

    # Laws.

    @invariant()
    def pages_are_right(self) -> None:
        """Whoever finds a page finds the right one; what is kept is bounded."""
        if not hasattr(self, "world"):
            return
        for n in (0, 1):
            node = self.world.nodes[n]
            for tokens in SOME:
                found = node.pool.match(tokens)
                names = pages_of(tokens)[: len(found)]
                assert node.read(found) == [content(p).tobytes() for p in names]
            assert node.pool._receiver.num_answers <= 3 * (MAX_KEPT + 1)
        for num_tokens, search in self.searches:
            for held in search.held.values():
                assert held.num_pages <= num_tokens, "more pages than tokens"

    # Below: what the rules share.

    def view(self) -> View:
        """Return the members, as they are read from the registry."""
        found = self.members()
        entries = {str(each.instance): member_fields(each) for each in found.members}
        if str(EVIL) in entries:
            entries[str(EVIL)]["endpoints"] |= self.endpoints
        return View(found.version, members_from(entries, Strict()))

    def made_up(self, n: int, data: st.DataObject) -> dict:
        return data.draw(
            envelopes(
                sender=self.evil.me,
                receiver=self.world.nodes[n].me,
                addresses=self.known,
                numbers=self.numbers,
                namespaces=[b"", b"x" * 65, b"evil"],
                prompts=SOME,
            )
        )

    def deliver(self, n: int, message: dict, key: str, *, poll: bool = True) -> None:
        """Let a message arrive, if it can be read."""
        read = MESSAGES.decode(on_the_wire(message))
        if isinstance(read, Refused):
            assert read.reason == "unreadable"
            return
        envelope = read[1]
        assert isinstance(envelope, Envelope)
        self.numbers.append(envelope.request)
        node = self.world.nodes[n]
        node.inbox.append((envelope, key))
        if poll:
            node.poll()
            self.take()

    def hear(self) -> None:
        """Let the hostile one read what is for it."""
        arrived = [message for message, _ in self.evil.inbox]
        self.evil.inbox.clear()
        arrived += [m for m in self.world.messages if m.receiver[0] == EVIL]
        for_others = [m for m in self.world.messages if m.receiver[0] != EVIL]
        self.world.messages[:] = for_others
        for message in arrived:
            if isinstance(message.body, Answer):
                self.note(from_wire(message.body.addresses))
            else:
                self.asked.append(message)

    def note(self, addresses: np.ndarray) -> None:
        self.known = (self.known + addresses.tolist())[-40:]

    def take(self) -> None:
        """Take arrivals, and the ends of fetches."""
        for n in (0, 1):
            node = self.world.nodes[n]
            for arrival in node.pool.take_arrivals():
                if not arrival.num_inserted:
                    # In the index where all were there already.
                    node.pool.free_mem(arrival.addresses)
        running = TransferStatus.RUNNING
        ended = [each for each in self.fetches if each[2].status is not running]
        self.fetches = [each for each in self.fetches if each[2].status is running]
        for node, tokens, fetch in ended:
            num = fetch.num_blocks
            if fetch.status is TransferStatus.DONE:
                assert fetch.peer[0] != EVIL, "pages that nobody has sent"
                names = pages_of(tokens)[:num]
                expected = [content(page).tobytes() for page in names]
                assert node.read(fetch.addresses[:num]) == expected
            assert not node.pool.free_mem(fetch.addresses)


class HostileCacheMachine(HostilePoolMachine):
    """The same over a cache in use."""

    in_cache = True


LIMITS = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestHostilePool = HostilePoolMachine.TestCase
TestHostilePool.settings = LIMITS
TestHostileCache = HostileCacheMachine.TestCase
TestHostileCache.settings = LIMITS


def _unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_demand_addresses", lambda raw: None)


def _unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guard, "admits", lambda self, envelope, key: True)


def _unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "misfit", lambda answer, body, peer: "")


class OnlyBlocks(HostilePoolMachine):
    """What is said of blocks, alone: a smaller room, for a fault that is known."""

    says = pretends = answers = locate = send = fetch = None  # type: ignore[assignment]
    registers = None  # type: ignore[assignment]


class OnlyQuestions(HostilePoolMachine):
    """What is answered, alone."""

    says = pretends = begins = compute = send = fetch = None  # type: ignore[assignment]
    registers = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("remove", "machine"),
    [
        # 200 examples until it is found.
        pytest.param(_unchecked, OnlyBlocks, marks=pytest.mark.full),
        (_unknown, HostilePoolMachine),
        (_unfit, OnlyQuestions),
    ],
)
def test_a_check_that_is_missing_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
    remove: Callable[[pytest.MonkeyPatch], None],
    machine: type[HostilePoolMachine],
) -> None:
    """The machine fails without any one of the checks."""
    remove(monkeypatch)
    few = settings(
        LIMITS,
        max_examples=200,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=few)
