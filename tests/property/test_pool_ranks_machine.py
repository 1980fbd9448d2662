"""Ranks of instances in a pool never differ, whatever becomes of messages and bytes.

Two instances of three ranks. Messages are lost, doubled and overtake each other; pieces
of each rank arrive, fail or are spoiled by themselves, and each transport is looked at
when it likes; instances die and lose their leases. After every step all ranks of an
instance have the same cache, blocks, pulls and conversations, to the byte of what they
say. What any rank finds is right, and when all is well again no block is lost.
"""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from sgl_tiered.core.ids import TierId
from sgl_tiered.pool.peers import Hint
from sgl_tiered.testing.strategies import prompts
from tests.property.pool_world import World, long_name
from tests.property.rank_world import SHAPE, RankedNode, make_node

NUM_NODES, NUM_RANKS = 2, 3
BLOCKS, DISK = 7, 12
DIGESTS = (long_name(b""), long_name(b"x"))
PROMPTS = prompts(
    page_tokens=SHAPE.page_tokens, words=["abca", "abcb", "abbbb", "ac"]
).filter(lambda tokens: len(tokens) >= SHAPE.page_tokens)
NODE = st.integers(0, NUM_NODES - 1)
DIGEST = st.sampled_from(DIGESTS)
PICK = st.integers(0, 1000)
RARELY = st.sampled_from([False] * 5 + [True])


class RanksMachine(RuleBasedStateMachine):
    """Random requests, losses, deaths, and ranks of different speed."""

    @initialize()
    def begin(self) -> None:
        """Start all instances."""
        self.world = World()
        self.nodes: dict[int, RankedNode] = {}
        self.requests: dict[str, int] = {}
        self.num_requests = 0
        for n in range(NUM_NODES):
            self.start(n)
        for n in range(NUM_NODES):
            self.nodes[n].poll()

    def start(self, n: int) -> None:
        """Start an instance, with an empty cache."""
        self.nodes[n] = make_node(self.world, n, NUM_RANKS, BLOCKS, DISK)

    # What schedulers do: on all ranks alike.

    @rule(n=NODE, tokens=PROMPTS, digest=DIGEST)
    def compute(self, n: int, tokens: np.ndarray, digest: bytes) -> None:
        """An engine has computed a prompt."""
        for rank in self.nodes[n].ranks:
            rank.compute(digest, tokens)

    @rule(
        n=NODE,
        tokens=PROMPTS,
        digest=DIGEST,
        on_device=st.integers(0, 1),
        hinted=st.booleans(),
        held=st.integers(1, 6),
    )
    def arrive(
        self,
        n: int,
        tokens: np.ndarray,
        digest: bytes,
        on_device: int,
        hinted: bool,
        held: int,
    ) -> None:
        """A request comes in; a hint may be right or wrong."""
        rid = f"r{self.num_requests}"
        self.num_requests += 1
        hints: tuple[Hint, ...] = ()
        if hinted:
            hints = (Hint(f"node-{1 - n}", "", held * SHAPE.page_tokens),)
        num_pages = len(tokens) // SHAPE.page_tokens
        for rank in self.nodes[n].ranks:
            rank.pulls.arrived(rid, digest, tokens, on_device, num_pages, hints)
        waiting = {rank.pulls.is_waiting(rid) for rank in self.nodes[n].ranks}
        assert len(waiting) == 1, "one rank waits and another does not"
        if waiting == {True}:
            self.requests[rid] = n

    @precondition(lambda self: self.requests)
    @rule(pick=PICK)
    def look(self, pick: int) -> None:
        """SGLang looks at a request on every rank."""
        rid = list(self.requests)[pick % len(self.requests)]
        ranks = self.nodes[self.requests[rid]].ranks
        waits = {rank.pulls.should_wait(rid) for rank in ranks}
        assert len(waits) == 1, "one rank waits and another goes on"
        if waits == {False}:
            del self.requests[rid]

    @precondition(lambda self: self.requests)
    @rule(pick=PICK)
    def leave(self, pick: int) -> None:
        """A request ends, or is aborted."""
        rid = list(self.requests)[pick % len(self.requests)]
        for rank in self.nodes[self.requests.pop(rid)].ranks:
            rank.pulls.forget(rid)

    @rule(n=NODE, really=RARELY)
    def reset(self, n: int, really: bool) -> None:
        """A cache is emptied."""
        for rank in self.nodes[n].ranks if really else ():
            rank.pulls.reset()
            rank.disk.reads.cancel_all()
            rank.cache.reset()

    @rule(n=NODE, forget=st.booleans())
    def write_out(self, n: int, forget: bool) -> None:
        """The disk gets copies, and perhaps nothing else keeps any."""
        for rank in self.nodes[n].ranks:
            if forget:
                rank.disk.forget_host()
            else:
                rank.disk.write_out()

    @rule(n=NODE, busy=st.booleans())
    def be_busy(self, n: int, busy: bool) -> None:
        """An instance reads its disk for its own requests, or no longer does."""
        for rank in self.nodes[n].ranks:
            rank.disk.is_busy = busy

    @precondition(
        lambda self: any(n.ranks[0].disk.running for n in self.nodes.values())
    )
    @rule(num=st.sampled_from([None, None, 0, 1, 2]), bad=RARELY)
    def end_read(self, num: int | None, bad: bool) -> None:
        """A read of a disk has ended for the cache: on all ranks together."""
        for node in self.nodes.values():
            for rank in node.ranks:
                for reading in rank.disk.running[:1]:
                    rank.disk.end(reading, num, bad=int(bad))

    @rule(n=NODE)
    def turn(self, n: int) -> None:
        """One turn of all schedulers of an instance: they meet."""
        self.nodes[n].turn()

    # What each rank's machine does by itself.

    @rule(n=NODE, rank=st.integers(0, NUM_RANKS - 1))
    def pump(self, n: int, rank: int) -> None:
        """One rank's transport looks at its pieces."""
        self.nodes[n].ranks[rank].transport.pump()

    @precondition(lambda self: self.world.pieces)
    @rule(pick=PICK, arrives=st.sampled_from([True, True, True, False]))
    def end_piece(self, pick: int, arrives: bool) -> None:
        """Some bytes of one rank move, or never will."""
        pieces = self.world.pieces
        self.world.end_piece(pieces[pick % len(pieces)], arrives=arrives)

    @precondition(lambda self: self.world.pieces)
    @rule(pick=PICK, at=PICK)
    def spoil_piece(self, pick: int, at: int) -> None:
        """Some bytes of one rank arrive as others."""
        piece = self.world.pieces[pick % len(self.world.pieces)]
        self.world.end_piece(piece, arrives=True)
        self.world._bytes(piece.remote, piece.length)[at % piece.length] ^= 1

    # The network.

    @rule(num=st.integers(1, 4))
    def deliver(self, num: int) -> None:
        """Messages reach rank 0."""
        self.world.deliver(num)

    @precondition(lambda self: self.world.messages)
    @rule(num=st.integers(1, 2))
    def lose_messages(self, num: int) -> None:
        """Messages get lost."""
        del self.world.messages[:num]

    @precondition(lambda self: self.world.messages)
    @rule(pick=PICK)
    def double(self, pick: int) -> None:
        """A message comes twice."""
        messages = self.world.messages
        messages.append(messages[pick % len(messages)])

    @precondition(lambda self: len(self.world.messages) > 1)
    @rule(pick=PICK)
    def overtake(self, pick: int) -> None:
        """A message overtakes the others."""
        messages = self.world.messages
        messages.insert(0, messages.pop(pick % len(messages)))

    @rule()
    def go_well(self) -> None:
        """All goes well for a moment, up to where bytes are under way."""
        for _ in range(6):
            self.world.deliver(len(self.world.messages))
            for node in self.nodes.values():
                node.poll()

    @rule(n=NODE, tokens=PROMPTS, digest=DIGEST, on_disk=st.booleans(), spoil=RARELY)
    def pull(
        self, n: int, tokens: np.ndarray, digest: bytes, on_disk: bool, spoil: bool
    ) -> None:
        """What one has computed the other wants at once; bytes may be spoiled."""
        self.compute(1 - n, tokens, digest)
        if on_disk:
            self.write_out(1 - n, forget=True)
        self.arrive(n, tokens, digest, 0, hinted=False, held=1)
        self.go_well()
        self.end_read(None, bad=False)
        self.go_well()
        if spoil and self.world.pieces:
            self.spoil_piece(1, 1)
        for piece in list(self.world.pieces):
            self.world.end_piece(piece, arrives=True)
        self.go_well()

    @rule(seconds=st.sampled_from([0.05, 0.6, 2.5, 9.0]))
    def advance(self, seconds: float) -> None:
        """Time passes while nobody does anything."""
        self.world.advance(seconds)

    @rule(n=NODE, really=RARELY)
    def die(self, n: int, really: bool) -> None:
        """An instance dies and comes back empty; its last bytes are under way."""
        if really:
            self.requests = {r: m for r, m in self.requests.items() if m != n}
            self.start(n)

    @rule(n=NODE, really=RARELY)
    def rejoin(self, n: int, really: bool) -> None:
        """An instance has lost its lease, and gets another."""
        if really:
            self.world.rejoin(n)

    @invariant()
    def alike(self) -> None:
        """All ranks of an instance are the same; what they find is right."""
        if not hasattr(self, "world"):
            return
        for node in self.nodes.values():
            node.assert_alike()
            for rank in node.ranks:
                rank.cache.check()

    @rule(n=NODE, tokens=PROMPTS, digest=DIGEST)
    def find(self, n: int, tokens: np.ndarray, digest: bytes) -> None:
        """What is found is the right thing, on every rank, and as much."""
        found = {rank.are_right(digest, tokens) for rank in self.nodes[n].ranks}
        assert len(found) == 1

    def teardown(self) -> None:
        """When all is well again, nothing is under way and nothing lost."""
        if not hasattr(self, "world"):
            return
        self.end_reads()
        for _ in range(2):
            self.world.settle(40.0)
            self.end_reads()
            for node in self.nodes.values():
                node.poll()
        for node in self.nodes.values():
            node.assert_alike()
            for rank in node.ranks:
                assert rank.pulls.num_under_way == 0
                assert rank.crew.facts.num_open == 0
                assert not any(asdict(rank.pool.usage()).values()), rank.pool.usage()
                usage = rank.store.usage(TierId.HOST)
                assert (usage.active, usage.held) == (0, 0), usage

    def end_reads(self) -> None:
        """Let every disk be done."""
        for node in self.nodes.values():
            for rank in node.ranks:
                for reading in list(rank.disk.running):
                    rank.disk.end(reading)


TestRanks = RanksMachine.TestCase
TestRanks.settings = settings(
    # 20, and 200 in the profile ``full``.
    max_examples=settings.default.max_examples // 5,
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

TOKENS = np.arange(3 * SHAPE.page_tokens, dtype=np.int32)


def two(*, agrees: bool = True, num_ranks: tuple[int, int] = (3, 3)) -> World:
    """Two instances that know each other; the first has computed a prompt."""
    world = World()
    for n in range(NUM_NODES):
        make_node(world, n, num_ranks[n], BLOCKS, DISK, agrees=agrees)
    for node in world.nodes.values():
        node.poll()
    for rank in world.nodes[0].ranks:
        rank.compute(DIGESTS[0], TOKENS)
    return world


def ask(world: World) -> None:
    """The second wants the prompt; go on up to where bytes are under way."""
    for rank in world.nodes[1].ranks:
        rank.pulls.arrived("r", DIGESTS[0], TOKENS, 0, 3, ())
    talk(world)


def talk(world: World) -> None:
    for _ in range(8):
        world.deliver(len(world.messages))
        for node in world.nodes.values():
            node.poll()


def test_a_pull_counts_when_all_ranks_have_all_of_it() -> None:
    """Two ranks have their parts, and nobody finds anything; then the third has too."""
    world = two()
    ask(world)
    holder, puller = world.nodes[0], world.nodes[1]
    assert len(world.pieces) >= 3
    slow = puller.ranks[2].region
    late = [
        piece
        for piece in world.pieces
        if 0 <= piece.remote - slow.ctypes.data < slow.nbytes
    ]
    assert 0 < len(late) < len(world.pieces)
    for piece in [piece for piece in world.pieces if piece not in late]:
        world.end_piece(piece, arrives=True)
    talk(world)
    for rank in puller.ranks:
        assert not len(rank.store.match(DIGESTS[0], TOKENS))
        assert rank.pulls.should_wait("r")
    for piece in late:
        world.end_piece(piece, arrives=True)
    talk(world)
    for rank in puller.ranks:
        assert rank.are_right(DIGESTS[0], TOKENS) == 3
        assert not rank.pulls.should_wait("r")
    for node in (holder, puller):
        node.assert_alike()


@pytest.mark.parametrize("how", ["failed", "spoiled"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_what_fails_on_one_rank_is_computed_on_all(rank: int, how: str) -> None:
    """No rank keeps its part of such a page."""
    world = two()
    ask(world)
    puller = world.nodes[1]
    region = puller.ranks[rank].region
    for piece in list(world.pieces):
        mine = 0 <= piece.remote - region.ctypes.data < region.nbytes
        world.end_piece(piece, arrives=not mine or how == "spoiled")
        if mine and how == "spoiled":
            world._bytes(piece.remote, piece.length)[0] ^= 1
    talk(world)
    reasons = set()
    for each in puller.ranks:
        assert not each.pulls.should_wait("r")
        assert not len(each.store.match(DIGESTS[0], TOKENS))
        wanted = each.pulls.wanted("r")
        assert wanted is not None
        reasons.add(wanted.reason)
    assert len(reasons) == 1
    assert ("not those" in reasons.pop()) == (how == "spoiled")
    puller.assert_alike()


@pytest.mark.parametrize("num_ranks", [(3, 1), (1, 3)])
def test_instances_of_other_ranks_are_not_pulled_from(
    num_ranks: tuple[int, int],
) -> None:
    """In a clause; nothing is set aside, and the request computes."""
    world = two(num_ranks=num_ranks)
    ask(world)
    assert not world.pieces
    for rank in world.nodes[1].ranks:
        assert not rank.pulls.should_wait("r")
        wanted = rank.pulls.wanted("r")
        assert wanted is not None
        assert "between as many only" in wanted.reason
    world.settle(1.0)
    for rank in world.nodes[1].ranks:
        assert rank.store.usage(TierId.HOST).active == 0


def test_ranks_that_act_on_their_own_facts_part() -> None:
    """The negative control: what the machine looks for is found."""
    world = two(agrees=False)
    ask(world)
    holder = world.nodes[0]
    region = holder.ranks[0].region
    for piece in list(world.pieces):
        if 0 <= piece.local - region.ctypes.data < region.nbytes:
            world.end_piece(piece, arrives=False)
    holder.poll()
    with pytest.raises(AssertionError, match="differs in"):
        holder.assert_alike()
