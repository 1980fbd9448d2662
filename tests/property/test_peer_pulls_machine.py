"""Tier peer among three caches, against losses, deaths and spoiled bytes.

Requests arrive, hinted or not; pulls go over the pool's own messages and transport,
both of which fail as the test likes. Every page's bytes follow from its tokens:
whatever a cache finds is the right thing, however it came. Nobody waits longer than
computing would have taken, and when all is well again no block is lost.
"""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
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
from sgl_tiered.core.plans import TransferResult
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.pool.membership import View
from sgl_tiered.pool.mempool import MemPool
from sgl_tiered.pool.node_peers import NodePeers
from sgl_tiered.pool.peers import Hint
from sgl_tiered.pool.pulls import PeerPulls
from sgl_tiered.testing.strategies import prompts
from tests.property.pool_world import (
    LAYOUT,
    SHAPE,
    Node,
    World,
    content,
    long_name,
    pages_of,
)

BLOCKS = {TierId.HOST: 7}
DISK_PAGES = 12
NUM_NODES = 3
DIGESTS = [long_name(b""), long_name(b"x")]
PROMPTS = prompts(
    page_tokens=SHAPE.page_tokens, words=["abca", "abcb", "abbbb", "ac", "bacab"]
).filter(lambda tokens: len(tokens) >= SHAPE.page_tokens)
NODE = st.integers(0, NUM_NODES - 1)
DIGEST = st.sampled_from(DIGESTS)
PICK = st.integers(0, 1000)
RARELY = st.sampled_from([False] * 5 + [True])
TOKEN_S = 0.5


def slow_model() -> CostModel:
    """A token takes half a second to compute: pulls that go well always pay."""
    prefill = PrefillCost(1000, 1, 1, 2000 / TOKEN_S, overhead_s=1e-6)
    return CostModel(prefill, {TierId.HOST: LinkCost(1e-6, 1e9)})


COST = slow_model()


class Instance:
    """A node of the world with its pulls."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.instance = node.me[0]
        assert node.cache is not None
        self.cache = node.cache
        assert node.disk is not None
        self.disk = node.disk
        self.pulls = PeerPulls(
            node.store,
            NodePeers(self),
            COST,
            node.world.clock,
            MetricsRegistry(),
            page_tokens=SHAPE.page_tokens,
            page_bytes=LAYOUT.page_bytes,
            incidents=node.incidents,
        )

    @property
    def view(self) -> View:
        return self.node.pool._view

    @property
    def pool(self) -> MemPool:
        return self.node.pool

    def poll(self) -> None:
        self.node.poll()
        self.pulls.poll()
        self.disk.reads.poll()


class PeerPullsMachine(RuleBasedStateMachine):
    """Random requests, losses and deaths."""

    @initialize()
    def begin(self) -> None:
        """Start all instances."""
        self.world = World(in_cache=True, disk_pages=DISK_PAGES)
        self.instances: dict[int, Instance] = {}
        self.requests: dict[str, tuple[Instance, float, int]] = {}
        self.num_requests = 0
        for n in range(NUM_NODES):
            self.instances[n] = Instance(self.world.start(n, BLOCKS))
        for instance in self.instances.values():
            instance.node.see(self.world.view())

    # One instance alone.

    @rule(n=NODE, tokens=PROMPTS, digest=DIGEST)
    def compute(self, n: int, tokens: np.ndarray, digest: bytes) -> None:
        """An engine has computed a prompt, and its cache keeps what it has room for."""
        instance = self.instances[n]
        plan = instance.cache.plan_offload(digest, tokens)
        if plan is None:
            return
        names = pages_of(tokens)
        for at, slot in zip(plan.positions, plan.addresses, strict=True):
            region = instance.node.regions[TierId.HOST]
            region[slot] = page(digest, names[int(at)])
        num = len(plan.pages)
        result = TransferResult(
            np.ones(num, np.bool_), 0, 0.0, np.zeros(num, np.uint64), ""
        )
        instance.cache.finish_offload(plan, result)

    @rule(
        n=NODE,
        tokens=PROMPTS,
        digest=DIGEST,
        on_device=st.integers(0, 1),
        hinted=st.sampled_from([None, None, 1, 2]),
        held=st.integers(1, 6),
    )
    def arrive(
        self,
        n: int,
        tokens: np.ndarray,
        digest: bytes,
        on_device: int,
        hinted: int | None,
        held: int,
    ) -> None:
        """A request comes in; a hint may be right or wrong."""
        instance, rid = self.instances[n], f"r{self.num_requests}"
        self.num_requests += 1
        hints: tuple[Hint, ...] = ()
        if hinted is not None:
            name = f"node-{(n + hinted) % NUM_NODES}"
            hints = (Hint(name, "", held * SHAPE.page_tokens),)
        num_pages = len(tokens) // SHAPE.page_tokens
        instance.pulls.arrived(rid, digest, tokens, on_device, num_pages, hints)
        if instance.pulls.is_waiting(rid):
            now_s = self.world.clock.now()
            self.requests[rid] = (instance, now_s, len(tokens))

    @rule(
        n=NODE,
        away=st.integers(1, 2),
        tokens=PROMPTS,
        digest=DIGEST,
        spoil=st.booleans(),
        at=PICK,
    )
    def pull(
        self,
        n: int,
        away: int,
        tokens: np.ndarray,
        digest: bytes,
        spoil: bool,
        at: int,
    ) -> None:
        """What one has computed another one wants at once; bytes may be spoiled."""
        self.compute((n + away) % NUM_NODES, tokens, digest)
        self.arrive(n, tokens, digest, 0, away, 6)
        self.go_well()
        if spoil and self.world.pieces:
            self.spoil_piece(at, at)
        for piece in list(self.world.pieces):
            self.world.end_piece(piece, arrives=True)
        self.go_well()
        self.find(n, tokens, digest)

    @rule(n=NODE, forget=st.booleans())
    def write_out(self, n: int, forget: bool) -> None:
        """The disk gets copies, and perhaps nothing else keeps any."""
        disk = self.instances[n].disk
        if forget:
            disk.forget_host()
        else:
            disk.write_out()

    @rule(n=NODE, busy=st.booleans())
    def be_busy(self, n: int, busy: bool) -> None:
        """An instance reads its disk for its own requests, or no longer does."""
        self.instances[n].disk.is_busy = busy

    @precondition(lambda self: any(i.disk.running for i in self.instances.values()))
    @rule(pick=PICK, num=st.sampled_from([None, None, 0, 1, 2]), bad=RARELY)
    def end_read(self, pick: int, num: int | None, bad: bool) -> None:
        """A read of a disk ends, whole or in part."""
        some = [(i.disk, r) for i in self.instances.values() for r in i.disk.running]
        disk, reading = some[pick % len(some)]
        disk.end(reading, num, bad=int(bad))

    @rule(n=NODE, away=st.integers(1, 2), tokens=PROMPTS, digest=DIGEST)
    def pull_from_disk(
        self, n: int, away: int, tokens: np.ndarray, digest: bytes
    ) -> None:
        """What only the disk of one has another one wants at once."""
        holder = self.instances[(n + away) % NUM_NODES]
        self.compute(holder.instance, tokens, digest)
        holder.disk.forget_host()
        self.arrive(n, tokens, digest, 0, None, 6)
        self.go_well()
        for reading in list(holder.disk.running):
            holder.disk.end(reading)
        for _ in range(2):
            self.go_well()
            for piece in list(self.world.pieces):
                self.world.end_piece(piece, arrives=True)
        self.go_well()
        self.find(n, tokens, digest)

    @precondition(lambda self: self.requests)
    @rule(pick=PICK)
    def look(self, pick: int) -> None:
        """SGLang looks at a request; it may wait, but not for ever."""
        rid = list(self.requests)[pick % len(self.requests)]
        instance, began_s, num_tokens = self.requests[rid]
        if instance.pulls.should_wait(rid):
            # A tenth for the search, and what computing takes, by the cost model.
            all_s = COST.recompute_s(0, num_tokens)
            assert self.world.clock.now() - began_s <= 1.2 * all_s + 0.1
        else:
            del self.requests[rid]

    @precondition(lambda self: self.requests)
    @rule(pick=PICK)
    def leave(self, pick: int) -> None:
        """A request ends, or is aborted."""
        rid = list(self.requests)[pick % len(self.requests)]
        instance, _, _ = self.requests.pop(rid)
        instance.pulls.forget(rid)

    @rule(n=NODE, really=RARELY)
    def reset(self, n: int, really: bool) -> None:
        """A cache is emptied: its weights change."""
        if really:
            self.instances[n].cache.reset()
            self.instances[n].pulls.reset()

    @rule(n=NODE, tokens=PROMPTS, digest=DIGEST)
    def find(self, n: int, tokens: np.ndarray, digest: bytes) -> None:
        """What is found is the right thing."""
        instance = self.instances[n]
        found = instance.node.store.match(digest, tokens)
        names = pages_of(tokens)[: len(found)]
        assert instance.node.read(found) == [page(digest, n).tobytes() for n in names]

    # The world.

    @rule(n=NODE)
    def poll(self, n: int) -> None:
        """One instance looks after its affairs."""
        self.instances[n].poll()

    @rule(num=st.integers(1, 4))
    def deliver(self, num: int) -> None:
        """Messages arrive."""
        self.world.deliver(num)
        for instance in self.instances.values():
            instance.poll()

    @rule()
    def go_well(self) -> None:
        """All goes well for a moment, up to where bytes are under way."""
        for _ in range(3):
            self.world.deliver(len(self.world.messages))
            for instance in self.instances.values():
                instance.poll()

    @precondition(lambda self: self.world.messages)
    @rule(num=st.integers(1, 2))
    def lose_messages(self, num: int) -> None:
        """Messages get lost."""
        del self.world.messages[:num]

    @precondition(lambda self: self.world.pieces)
    @rule(pick=PICK, arrives=st.sampled_from([True, True, True, False]))
    def end_piece(self, pick: int, arrives: bool) -> None:
        """Some bytes move, or never will."""
        pieces = self.world.pieces
        self.world.end_piece(pieces[pick % len(pieces)], arrives=arrives)

    @precondition(lambda self: self.world.pieces)
    @rule(pick=PICK, at=PICK)
    def spoil_piece(self, pick: int, at: int) -> None:
        """Some bytes arrive as others."""
        piece = self.world.pieces[pick % len(self.world.pieces)]
        self.world.end_piece(piece, arrives=True)
        self.world._bytes(piece.remote, piece.length)[at % piece.length] ^= 1

    @rule(seconds=st.sampled_from([0.05, 0.6, 2.5, 9.0]))
    def advance(self, seconds: float) -> None:
        """Time passes while nobody does anything."""
        self.world.advance(seconds)

    @rule(n=NODE)
    def see(self, n: int) -> None:
        """One instance learns who is there."""
        self.instances[n].node.see(self.world.view())

    @rule(n=NODE, really=RARELY)
    def die(self, n: int, really: bool) -> None:
        """An instance dies and comes back empty; its last bytes are under way."""
        if really:
            old = self.instances[n]
            self.requests = {r: v for r, v in self.requests.items() if v[0] is not old}
            self.instances[n] = Instance(self.world.start(n, BLOCKS))
            self.instances[n].node.see(self.world.view())

    @invariant()
    def laws(self) -> None:
        """Table, index, slots, pins and plans of each cache agree."""
        if hasattr(self, "world"):
            for instance in self.instances.values():
                instance.cache.check()

    def teardown(self) -> None:
        """When all is well again, nothing is under way and nothing lost."""
        if not hasattr(self, "world"):
            return
        for instance in self.instances.values():
            for reading in list(instance.disk.running):
                instance.disk.end(reading, 0)
        for _ in range(2):
            self.world.settle(40.0)
            for instance in self.instances.values():
                instance.poll()
        for rid, (instance, _, _) in self.requests.items():
            assert not instance.pulls.should_wait(rid)
        for instance in self.instances.values():
            assert instance.pulls.num_under_way == 0
            # What began after that, the world ends with its peers.
            for reading in list(instance.disk.running):
                instance.disk.end(reading)
            assert instance.disk.reads.num_under_way == 0
            assert not any(asdict(instance.pool.usage()).values())
            usage = instance.node.store.usage(TierId.HOST)
            assert (usage.active, usage.held) == (0, 0), usage


def page(digest: bytes, name: bytes) -> np.ndarray:
    """Return the bytes of a page in a namespace."""
    return content(digest + name)


def test_a_disk_is_read_for_a_peer() -> None:
    """The machine's world pulls what only a disk has, and says so."""
    machine = PeerPullsMachine()
    machine.begin()
    tokens = np.arange(3 * SHAPE.page_tokens, dtype=np.int32)
    holder, puller = machine.instances[0], machine.instances[1]
    machine.compute(0, tokens, DIGESTS[0])
    holder.disk.forget_host()
    assert not len(holder.node.store.match(DIGESTS[0], tokens))
    machine.arrive(1, tokens, DIGESTS[0], 0, None, 1)
    machine.go_well()
    (reading,) = holder.disk.running
    assert not machine.world.pieces, "something is sent before it was read"
    holder.disk.end(reading)
    for _ in range(4):
        machine.go_well()
        for piece in list(machine.world.pieces):
            machine.world.end_piece(piece, arrives=True)
    wanted = puller.pulls.wanted("r0")
    assert wanted is not None
    assert (wanted.num_pages, wanted.disk_pages) == (3, 3)
    machine.find(1, tokens, DIGESTS[0])
    machine.teardown()


def test_all_goes_well() -> None:
    """The machine's world pulls what it should, where nothing fails."""
    machine = PeerPullsMachine()
    machine.begin()
    tokens = np.arange(3 * SHAPE.page_tokens, dtype=np.int32)
    machine.compute(0, tokens, DIGESTS[0])
    machine.arrive(1, tokens, DIGESTS[0], 0, None, 1)
    machine.arrive(2, tokens, DIGESTS[1], 0, None, 1)
    for _ in range(4):
        machine.go_well()
        for piece in list(machine.world.pieces):
            machine.world.end_piece(piece, arrives=True)
    here, other = machine.instances[1], machine.instances[2]
    assert len(here.node.store.match(DIGESTS[0], tokens)) == 3
    assert not len(other.node.store.match(DIGESTS[1], tokens))
    machine.find(1, tokens, DIGESTS[0])
    machine.teardown()


TestPeerPulls = PeerPullsMachine.TestCase
TestPeerPulls.settings = settings(
    # 30, and 300 in the profile ``full``.
    max_examples=settings.default.max_examples * 3 // 10,
    stateful_step_count=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
