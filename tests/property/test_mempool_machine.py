"""Pools against losses, deaths and late bytes: no wrong KV, and no block is lost.

Every page's bytes follow from its tokens, so whoever finds a page can tell whether it
is the right one. In the end the network is well again, and all that was under way has
to be gone: what is allocated then is what somebody owns.
"""

from __future__ import annotations

from dataclasses import dataclass

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
from sgl_tiered.pool.base import BlockType
from sgl_tiered.pool.fetch import Fetch, Search
from sgl_tiered.pool.layouts import Way
from sgl_tiered.pool.mempool import PoolUsage
from sgl_tiered.pool.transfer import Step, Transfer
from sgl_tiered.testing.strategies import prompts
from sgl_tiered.transport.base import TransferStatus
from tests.property.pool_world import SHAPE, Node, World, content, pages_of

BLOCKS = {TierId.DEVICE: 5, TierId.HOST: 4}
NUM_NODES = 3
PROMPTS = prompts(
    page_tokens=SHAPE.page_tokens, words=["abca", "abcb", "abbbb", "ac", "ba", "bacab"]
).filter(lambda tokens: len(tokens) >= SHAPE.page_tokens)
NODE = st.integers(0, NUM_NODES - 1)
PICK = st.integers(0, 1000)
FLAG = st.booleans()
RARELY = st.sampled_from([False] * 4 + [True])
TYPE = st.sampled_from([BlockType.DEVICE, BlockType.HOST, BlockType.MIXED])
NOTHING = PoolUsage(0, 0, 0, 0, 0)


@dataclass(eq=False)
class Draft:
    """Active blocks that somebody owns, filled with pages of a prompt."""

    node: Node
    tokens: np.ndarray
    first_page: int
    addresses: np.ndarray

    @property
    def pages(self) -> list[bytes]:
        """The names of its pages."""
        first = self.first_page
        return pages_of(self.tokens)[first : first + len(self.addresses)]


@dataclass(eq=False)
class Remote:
    """Blocks at one incarnation that belong to another."""

    owner: Node
    host: Node
    addresses: np.ndarray
    host_me: tuple[int, int]


@dataclass(eq=False)
class Wanted:
    """Pages of a prompt that are being fetched."""

    node: Node
    tokens: np.ndarray
    first_page: int
    fetch: Fetch


class MemPoolMachine(RuleBasedStateMachine):
    """Random calls, faults and deaths."""

    in_cache = False
    num_open = 0

    @initialize()
    def begin(self) -> None:
        """Start all instances."""
        self.world = World(in_cache=self.in_cache, num_open=self.num_open)
        self.drafts: list[Draft] = []
        self.remotes: list[Remote] = []
        self.sent: list[tuple[np.ndarray, int]] = []
        self.transfers: list[tuple[Node, Transfer]] = []
        self.given: list[tuple[Node, Transfer]] = []
        self.stale: list[tuple[int, np.ndarray]] = []
        self.wanted: list[Wanted] = []
        self.searches: list[Search] = []
        for n in range(NUM_NODES):
            self.world.start(n, BLOCKS)
        self.world.see()

    # One instance alone.

    @rule(n=NODE, tokens=PROMPTS, kind=TYPE)
    def draft(self, n: int, tokens: np.ndarray, kind: BlockType) -> None:
        """Allocate blocks for a prompt and compute its pages into them."""
        node = self.world.nodes[n]
        pages = pages_of(tokens)
        addresses = node.pool.alloc_mem(len(pages), kind)
        if addresses is not None:
            node.write(addresses, pages)
            self.drafts.append(Draft(node, tokens, 0, addresses))

    @precondition(lambda self: self.drafts)
    @rule(pick=PICK)
    def insert(self, pick: int) -> None:
        """Retire a draft: what the index had already is freed."""
        draft = self.drafts.pop(pick % len(self.drafts))
        done = draft.node.pool.insert(
            draft.tokens,
            draft.addresses,
            first_page=draft.first_page,
            free_duplicates=True,
        )
        if done.refusal:
            assert draft.first_page > 0, done.refusal
            assert not draft.node.pool.free_mem(draft.addresses)

    @precondition(lambda self: self.drafts)
    @rule(pick=PICK)
    def free(self, pick: int) -> None:
        """Free a draft, under a transfer as well; its addresses are dead at once."""
        draft = self.drafts.pop(pick % len(self.drafts))
        pool = draft.node.pool
        assert not pool.free_mem(draft.addresses)
        assert pool.free_mem(draft.addresses)
        assert pool.insert(draft.tokens, draft.addresses).refusal
        self.stale.append((draft.node.me[0], draft.addresses))

    @rule(n=NODE, tokens=PROMPTS)
    def match(self, n: int, tokens: np.ndarray) -> None:
        """What is found is the right thing."""
        self.check_found(self.world.nodes[n], tokens)

    @rule(n=NODE, tokens=PROMPTS)
    def delete(self, n: int, tokens: np.ndarray) -> None:
        """Pages go, but those that others go on from."""
        self.world.nodes[n].pool.delete(tokens)

    @rule(n=NODE, num=st.integers(1, 4))
    def swap_out(self, n: int, num: int) -> None:
        """Move cold pages to the host."""
        self.world.nodes[n].pool.swap_out(num)

    @rule(n=NODE, tokens=PROMPTS)
    def swap_in(self, n: int, tokens: np.ndarray) -> None:
        """Move what is found to the device."""
        node = self.world.nodes[n]
        found = node.pool.match(tokens)
        if len(found) and (moved := node.pool.swap_in(found)) is not None:
            assert node.read(moved) == [
                content(page).tobytes() for page in pages_of(tokens)[: len(found)]
            ]

    # Several.

    @precondition(lambda self: self.drafts)
    @rule(pick=PICK, to=NODE, kind=TYPE, insert=FLAG)
    def send_draft(self, pick: int, to: int, kind: BlockType, insert: bool) -> None:
        """Send active blocks."""
        draft = self.drafts[pick % len(self.drafts)]
        self.send(draft.node, to, draft.tokens, draft.first_page, draft.addresses)(
            kind, insert
        )

    @rule(n=NODE, away=st.integers(1, 2), tokens=PROMPTS, kind=TYPE, insert=FLAG)
    def send_new(
        self, n: int, away: int, tokens: np.ndarray, kind: BlockType, insert: bool
    ) -> None:
        """Compute a prompt's pages and send them."""
        node = self.world.nodes[n]
        self.draft(n, tokens, BlockType.MIXED)
        if self.drafts and self.drafts[-1].node is node:
            draft = self.drafts[-1]
            self.send(node, (n + away) % NUM_NODES, draft.tokens, 0, draft.addresses)(
                kind, insert
            )
            # Up to where its bytes are under way, more often than chance would.
            for _ in range(6):
                self.world.deliver(len(self.world.messages))
                for other in self.world.nodes.values():
                    other.poll()

    @rule(
        n=NODE,
        to=NODE,
        tokens=PROMPTS,
        skip=st.integers(0, 1),
        kind=TYPE,
        only_missing=FLAG,
    )
    def send_found(
        self,
        n: int,
        to: int,
        tokens: np.ndarray,
        skip: int,
        kind: BlockType,
        only_missing: bool,
    ) -> None:
        """Send historical blocks, perhaps without those that the other should have."""
        node = self.world.nodes[n]
        found = node.pool.match(tokens)[skip:]
        if len(found):
            self.send(node, to, tokens, skip, found)(kind, True, only_missing)

    @rule(n=NODE, to=NODE, num=st.integers(1, 3), kind=TYPE)
    def alloc_there(self, n: int, to: int, num: int, kind: BlockType) -> None:
        """Allocate at another instance, over whatever the network does to it."""
        node, host = self.world.nodes[n], self.world.nodes[to]
        if n != to:
            addresses = node.pool.alloc_mem(num, kind, id=to)
            self.take_arrivals()
            if addresses is not None:
                self.remotes.append(Remote(node, host, addresses, host.me))

    @precondition(lambda self: self.remotes)
    @rule(pick=PICK)
    def free_there(self, pick: int) -> None:
        """Free blocks at another instance: once, and not at a dead one."""
        remote = self.remotes.pop(pick % len(self.remotes))
        pool = remote.owner.pool
        refusal = pool.free_mem(remote.addresses)
        assert bool(refusal) == (not self.knows(remote)), refusal
        assert pool.free_mem(remote.addresses)

    @precondition(lambda self: self.remotes and self.drafts)
    @rule(pick=PICK, other=PICK, more=FLAG, layer=st.integers(0, 1))
    def send_to_list(self, pick: int, other: int, more: bool, layer: int) -> None:
        """Send with explicit destinations, a layer or all of them."""
        remote = self.remotes[pick % len(self.remotes)]
        draft = self.drafts[other % len(self.drafts)]
        if draft.node is not remote.owner:
            return
        num = min(len(remote.addresses), len(draft.addresses))
        if not more:
            self.remotes.remove(remote)
            rest = remote.addresses[num:]
            if len(rest) and self.knows(remote):
                assert not remote.owner.pool.free_mem(rest)
        self.sent.append((draft.tokens, draft.first_page))
        transfer = remote.owner.pool.transfer(
            remote.host.me[0],
            draft.addresses[:num],
            remote.addresses[:num],
            private=str(len(self.sent) - 1).encode(),
            way=Way.BY_LAYER,
            layers=(layer, layer + 1) if more else None,
            more=more,
        )
        assert transfer.error or self.knows(remote)
        if not more:
            self.given.append((remote.owner, transfer))
        self.transfers.append((remote.owner, transfer))

    @rule(
        n=NODE,
        away=st.integers(1, 2),
        tokens=PROMPTS,
        num=st.integers(1, 3),
        first=st.integers(0, 1),
        kind=TYPE,
    )
    def fetch(
        self,
        n: int,
        away: int,
        tokens: np.ndarray,
        num: int,
        first: int,
        kind: BlockType,
    ) -> None:
        """Have pages written here by another instance, which may have them or not."""
        node = self.world.nodes[n]
        blocks = node.pool.alloc_mem(num, kind)
        if blocks is None:
            return
        holder = (n + away) % NUM_NODES
        fetch = node.pool.fetch(holder, tokens, blocks, first_page=first)
        again = node.pool.fetch(holder, tokens, blocks, first_page=first)
        assert fetch.error or again.error, "two may write to one block"
        self.wanted.append(Wanted(node, tokens, first, fetch))

    @rule(n=NODE, away=st.integers(1, 2), tokens=PROMPTS, kind=TYPE)
    def fetch_what_is_there(
        self, n: int, away: int, tokens: np.ndarray, kind: BlockType
    ) -> None:
        """Up to where its bytes are under way, more often than chance would."""
        self.draft((n + away) % NUM_NODES, tokens, BlockType.MIXED)
        if self.drafts:
            self.insert(-1)
        self.fetch(n, away, tokens, len(pages_of(tokens)), 0, kind)
        for _ in range(4):
            self.world.deliver(len(self.world.messages))
            for other in self.world.nodes.values():
                other.poll()

    @rule(n=NODE, away=st.integers(1, 2), tokens=PROMPTS, late=FLAG, heard=FLAG)
    def fetch_in_vain(
        self, n: int, away: int, tokens: np.ndarray, late: bool, heard: bool
    ) -> None:
        """Give up while bytes are under way, and use all blocks that can be had."""
        self.fetch_what_is_there(n, away, tokens, BlockType.MIXED)
        node = self.world.nodes[n]
        if not self.wanted or self.wanted[-1].node is not node:
            return
        if late:
            self.world.clock.advance(2.1)
        self.wanted[-1].fetch.fail("not wanted any more")
        for _ in range(4):
            if heard:
                self.world.deliver(len(self.world.messages))
            for other in self.world.nodes.values():
                other.poll()
        self.take_fetched()
        for _ in range(3):
            self.draft(n, tokens, BlockType.MIXED)

    @precondition(lambda self: self.wanted)
    @rule(pick=PICK)
    def give_up_a_fetch(self, pick: int) -> None:
        """The pages are not wanted any more; their blocks are freed at once."""
        wanted = self.wanted[pick % len(self.wanted)]
        wanted.fetch.fail("not wanted any more")

    @rule(n=NODE, tokens=PROMPTS)
    def locate(self, n: int, tokens: np.ndarray) -> None:
        """Ask who has a prompt; what they say is a hint, and never too long."""
        self.searches.append(self.world.nodes[n].pool.locate(tokens))
        for search in self.searches:
            for held in search.held.values():
                assert sum(held.media.values()) == held.num_pages

    # The world.

    @rule(num=st.integers(1, 5))
    def deliver(self, num: int) -> None:
        """Messages arrive, and all instances look after their affairs."""
        self.world.deliver(num)
        for node in self.world.nodes.values():
            node.poll()

    @precondition(lambda self: self.world.messages)
    @rule(num=st.integers(1, 3))
    def lose_messages(self, num: int) -> None:
        """Messages get lost."""
        del self.world.messages[:num]

    @precondition(lambda self: self.world.messages)
    @rule(pick=PICK)
    def double_message(self, pick: int) -> None:
        """A message comes again, much later."""
        messages = self.world.messages
        messages.append(messages[pick % len(messages)])

    @precondition(lambda self: self.world.pieces)
    @rule(pick=PICK, arrives=st.sampled_from([True, True, False]))
    def end_piece(self, pick: int, arrives: bool) -> None:
        """Some bytes move, or never will."""
        pieces = self.world.pieces
        self.world.end_piece(pieces[pick % len(pieces)], arrives=arrives)

    @precondition(lambda self: self.world.pieces)
    @rule(then=st.sampled_from([2.5, 9.0]))
    def time_out(self, then: float) -> None:
        """Bytes under way are late: transfers end first, the pieces do later."""
        self.world.clock.advance(2.1)
        for node in self.world.nodes.values():
            node.poll()
        self.world.deliver(len(self.world.messages))
        self.world.advance(then)

    @rule(n=NODE)
    def poll(self, n: int) -> None:
        """One instance looks after its affairs."""
        self.world.nodes[n].poll()

    @rule(seconds=st.sampled_from([0.1, 0.6, 2.5, 9.0]))
    def advance(self, seconds: float) -> None:
        """Time passes while nobody does anything."""
        self.world.advance(seconds)

    @rule()
    def pump(self) -> None:
        """All goes well for a while."""
        for _ in range(4):
            self.world.pump()

    @rule(n=NODE)
    def see(self, n: int) -> None:
        """One instance learns who is there."""
        self.world.nodes[n].see(self.world.view())

    @rule(n=NODE, really=RARELY)
    def die(self, n: int, really: bool = True) -> None:
        """An instance dies and comes back clean; its last bytes are under way."""
        if not really:
            return
        old = self.world.nodes[n]
        self.drafts = [d for d in self.drafts if d.node is not old]
        self.remotes = [r for r in self.remotes if r.owner is not old]
        self.transfers = [t for t in self.transfers if t[0] is not old]
        self.given = [t for t in self.given if t[0] is not old]
        self.wanted = [w for w in self.wanted if w.node is not old]
        self.world.start(n, BLOCKS)

    @rule(n=NODE, num=st.integers(1, 4), really=RARELY)
    def lose_lease(self, n: int, num: int, really: bool) -> None:
        """An instance is taken for dead, works on for a while, and starts anew."""
        if not really:
            return
        old = self.world.nodes[n]
        old.pool.lease_ends_s = self.world.clock.now()
        del self.world.nodes[n]
        self.world.version += 1
        for node in self.world.nodes.values():
            node.see(self.world.view())
        for _ in range(num):
            old.poll()
        self.world.nodes[n] = old
        self.die(n)

    @rule(n=NODE, really=RARELY)
    def lose_lease_and_go_on(self, n: int, really: bool) -> None:
        """An instance is taken for dead, and goes on as another one with its blocks."""
        if not really:
            return
        node = self.world.nodes[n]
        self.remotes = [r for r in self.remotes if r.owner is not node]
        self.world.go_on(self.world.stop(n))

    @rule(
        n=NODE,
        away=st.integers(1, 2),
        tokens=PROMPTS,
        fetched=FLAG,
        seconds=st.lists(st.sampled_from([2.5, 9.0, 40.0]), max_size=4),
        arrive=FLAG,
        really=RARELY,
    )
    def stop_in_a_push(
        self,
        n: int,
        away: int,
        tokens: np.ndarray,
        fetched: bool,
        seconds: list[float],
        arrive: bool,
        really: bool,
    ) -> None:
        """A sender is stopped for however long; then it goes on, with its bytes.

        The others give all blocks that can be had to somebody else meanwhile.
        """
        if not really:
            return
        to = (n + away) % NUM_NODES
        if fetched:
            self.fetch_what_is_there(to, NUM_NODES - away, tokens, BlockType.MIXED)
        else:
            self.send_new(n, away, tokens, BlockType.MIXED, False)
        self.take_arrivals()
        self.remotes = [r for r in self.remotes if r.owner.me[0] != n]
        stopped = self.world.stop(n)
        for some in [0.0, *seconds]:
            self.world.advance(some)
            for node in self.world.nodes.values():
                for _ in range(2):
                    self.world.deliver(len(self.world.messages))
                    node.poll()
            self.take_fetched()
            for node in self.world.nodes.values():
                for _ in range(3):
                    self.draft(node.me[0], tokens, BlockType.MIXED)
        self.world.go_on(stopped)
        if arrive:
            for piece in [p for p in self.world.pieces if p.sender == n]:
                self.world.end_piece(piece, arrives=True)

    @precondition(lambda self: self.stale)
    @rule(pick=PICK)
    def use_stale(self, pick: int) -> None:
        """An address that was freed is refused everywhere, now and later."""
        n, addresses = self.stale[pick % len(self.stale)]
        pool = self.world.nodes[n].pool
        assert pool.free_mem(addresses)
        assert pool.transfer((n + 1) % NUM_NODES, addresses).error

    @invariant()
    def arrived_is_right(self) -> None:
        """Blocks that came without an insertion hold what was sent."""
        if hasattr(self, "world"):
            self.take_arrivals()
            self.take_fetched()

    def teardown(self) -> None:
        """When all is well again, nothing is under way and nothing lost."""
        if not hasattr(self, "world"):
            return
        self.world.settle(60.0)
        self.take_arrivals()
        self.take_fetched()
        assert not self.wanted, "a fetch never ends"
        for _, transfer in self.transfers:
            assert transfer.step is Step.OVER, "it never ends"
        # Blocks that were given with a transfer that failed are still the giver's.
        for remote in self.remotes:
            remote.owner.pool.free_mem(remote.addresses)
        for owner, transfer in self.given:
            if transfer.error:
                owner.pool.free_mem(transfer.job.targets)
        self.world.settle(60.0)
        for node in self.world.nodes.values():
            assert node.pool.usage() == NOTHING, (node.me, node.pool.usage())
            owned = sum(len(d.addresses) for d in self.drafts if d.node is node)
            usage = node.usage()
            assert sum(u.active for u in usage) == owned, (node.me, usage, owned)
            assert all(u.held == 0 for u in usage), (node.me, usage)
        for draft in self.drafts:
            read = draft.node.read(draft.addresses)
            assert read == [content(page).tobytes() for page in draft.pages]
            assert not draft.node.pool.free_mem(draft.addresses)
        for node in self.world.nodes.values():
            taken = [node.pool.alloc_mem(n, BlockType(m)) for m, n in BLOCKS.items()]
            assert all(some is not None for some in taken), (
                "blocks that never come back"
            )

    # Parts of rules.

    def send(self, node: Node, to: int, tokens: np.ndarray, first: int, blocks):
        """Return what begins a transfer of pages."""

        def begin(kind: BlockType, insert: bool, only_missing: bool = False) -> None:
            self.sent.append((tokens, first))
            private = str(len(self.sent) - 1).encode()
            if insert:
                transfer = node.pool.transfer_with_insert(
                    to,
                    tokens,
                    blocks,
                    first_page=first,
                    type=kind,
                    private=private,
                    only_missing=only_missing,
                )
            else:
                transfer = node.pool.transfer(to, blocks, type=kind, private=private)
            assert (to == node.me[0]) <= bool(transfer.error)
            self.transfers.append((node, transfer))

        return begin

    def take_arrivals(self) -> None:
        """Own what has arrived, after a look at it."""
        for node in self.world.nodes.values():
            for arrival in node.pool.take_arrivals():
                tokens, first = self.sent[int(arrival.private)]
                if arrival.num_inserted or not len(arrival.addresses):
                    continue
                draft = Draft(node, tokens, first, arrival.addresses)
                self.drafts.append(draft)
                assert node.read(draft.addresses) == [
                    content(page).tobytes() for page in draft.pages
                ]

    def take_fetched(self) -> None:
        """Own what was fetched, after a look at it; free the rest at once."""
        running = TransferStatus.RUNNING
        for wanted in [w for w in self.wanted if w.fetch.status is not running]:
            self.wanted.remove(wanted)
            fetch, node = wanted.fetch, wanted.node
            assert bool(fetch.error) == (fetch.num_blocks == 0)
            whole, rest = (
                fetch.addresses[: fetch.num_blocks],
                fetch.addresses[fetch.num_blocks :],
            )
            if len(whole):
                draft = Draft(node, wanted.tokens, wanted.first_page, whole)
                self.drafts.append(draft)
                assert node.read(whole) == [
                    content(page).tobytes() for page in draft.pages
                ]
            if len(rest):
                assert not node.pool.free_mem(rest)

    def check_found(self, node: Node, tokens: np.ndarray) -> None:
        found = node.pool.match(tokens)
        names = pages_of(tokens)[: len(found)]
        assert node.read(found) == [content(page).tobytes() for page in names]

    def knows(self, remote: Remote) -> bool:
        """Whether the owner takes the host for alive, as it was."""
        return remote.owner.pool._peer(remote.host_me[0]) == remote.host_me


TestMemPool = MemPoolMachine.TestCase
TestMemPool.settings = settings(
    # 30, and 300 in the profile ``full``.
    max_examples=settings.default.max_examples * 3 // 10,
    stateful_step_count=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
