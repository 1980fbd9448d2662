"""Instances of several ranks in the tests' world: each rank's bytes move as they like.

All ranks of an instance are asked the same at the same points, as schedulers of a
tensor-parallel server do; between two meetings each sees only its own transport.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from sgl_tiered.core.addresses import slots_of
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import TransferResult
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.pool.cache_store import CacheStore
from sgl_tiered.pool.crew import Crew
from sgl_tiered.pool.facts import Facts
from sgl_tiered.pool.guard import Guard
from sgl_tiered.pool.layouts import KVShape, MemoryForm, Shard
from sgl_tiered.pool.membership import View
from sgl_tiered.pool.mempool import MemPool
from sgl_tiered.pool.messages import Envelope, Place, PoolInfo, RankInfo, as_entry
from sgl_tiered.pool.node_peers import NodePeers
from sgl_tiered.pool.pulls import PeerPulls
from sgl_tiered.pool.transfer import Rank
from sgl_tiered.tiers.region import RegionTier
from sgl_tiered.transport.batched import BatchedTransport
from sgl_tiered.transport.release import ReleaseWatch
from tests.property.pool_disk import Disk
from tests.property.pool_world import (
    CONFIG,
    TRANSPORT_GRACE_S,
    Array,
    FakeLibrary,
    Strict,
    World,
    _over_the_wire,
    content,
    make_cache,
    pages_of,
)

SHAPE = KVShape(num_layers=2, num_heads=3, head_bytes=2, page_tokens=2)
LEASE_S = 30.0
TOKEN_S = 0.5


class Seat:
    """One rank's place at the meetings of its instance."""

    def __init__(self, table: Table, rank: int) -> None:
        self._table = table
        self.rank = rank
        self.num_ranks = table.num_ranks
        self.shared_s = table.clock.now()
        self.told: dict[str, tuple[Callable[[], Any], Callable[..., None]]] = {}

    def now(self) -> float:
        return self.shared_s

    def tell(
        self, name: str, tell: Callable[[], Any], hear: Callable[..., None]
    ) -> None:
        self.told[name] = tell, hear

    def gathered(self, value: Any) -> list[Any]:
        raise AssertionError("nobody starts here")


class Table:
    """The meetings of one instance, in one thread."""

    def __init__(self, clock: Any, num_ranks: int) -> None:
        self.clock = clock
        self.num_ranks = num_ranks
        self.seats = [Seat(self, rank) for rank in range(num_ranks)]

    def meet(self) -> None:
        """Let all tell and all hear, over the wire."""
        found = []
        for seat in self.seats:
            facts = {name: tell() for name, (tell, _) in seat.told.items()}
            found.append(json.loads(json.dumps(facts)))
        for seat in self.seats:
            seat.shared_s = self.clock.now()
            for name, (_, hear) in seat.told.items():
                hear([one[name] for one in found])


@dataclass
class Recorder:
    """A channel that remembers what its rank has said.

    Attributes:
        sent: all of it.
        world: where it goes; None on other ranks than the first.
        guard: of the node.
    """

    world: World | None
    guard: Guard
    sent: list[Envelope] = field(default_factory=list)

    def send(self, message: Envelope) -> None:
        self.sent.append(message)
        if self.world is not None:
            message = self.guard.stamp(message)
            self.world.messages.append(_over_the_wire(message))

    def take(self) -> list[Envelope]:
        raise AssertionError("the crew takes")


class OneRank:
    """A rank: cache, memory, transport, pool and pulls of its own."""

    def __init__(self, node: RankedNode, rank: int, blocks: int, disk: int) -> None:
        world = node.world
        self.number = rank
        self.crew = Crew(node.table.seats[rank])
        self.shard = Shard.split(SHAPE, node.num_ranks, 1)[rank]
        layout = self.shard.layout(SHAPE)
        host = {TierId.HOST: blocks}
        self.cache = make_cache(self.crew.clock, host, disk)
        tier = RegionTier(TierId.HOST, Array(blocks, layout.page_bytes))
        self.region = tier.region
        self.store = CacheStore(self.cache, node.instance, {TierId.HOST: tier}, node.me)
        self.disk = Disk(self.cache, self.store, self.region, self.crew.clock, disk)
        self.transport = BatchedTransport(
            FakeLibrary(world, node.instance),
            clock=world.clock,
            grace_s=TRANSPORT_GRACE_S,
            threaded=False,
        )
        world.memories[self.region.ctypes.data] = self.region
        number = self.transport.register(self.region).number
        form = MemoryForm.aggregated(SHAPE, self.shard)
        place = Place(TierId.HOST, number, form)
        self.info = RankInfo(self.transport.address, (place,))
        self.view = View(0)
        self.instance = node.instance

    def open(self, node: RankedNode, infos: tuple[RankInfo, ...], facts: Facts) -> None:
        """Make the pool, once it is known how all ranks are built."""
        self.recorder = Recorder(node.world if self.number == 0 else None, node.guard)
        world = node.world
        self.watch = ReleaseWatch(
            world.clock,
            world.look_for,
            after_death_s=CONFIG.grace_s,
            threaded=False,
            incidents=node.incidents,
        )
        self.pool = MemPool(
            self.store,
            node.me,
            PoolInfo(SHAPE, infos),
            [Rank(self.number, self.transport, {})],
            self.crew.channel(self.recorder),
            self.crew.clock,
            CONFIG,
            reads=self.disk.reads,
            watch=self.watch,
            facts=facts,
            incidents=node.incidents,
        )
        prefill = PrefillCost(1000, 1, 1, 2000 / TOKEN_S, overhead_s=1e-6)
        self.pulls = PeerPulls(
            self.store,
            NodePeers(self),
            CostModel(prefill, {TierId.HOST: LinkCost(1e-6, 1e9)}),
            self.crew.clock,
            MetricsRegistry(),
            page_tokens=SHAPE.page_tokens,
            page_bytes=self.shard.layout(SHAPE).page_bytes,
            incidents=node.incidents,
        )

    def see(self, view: View) -> None:
        """Take a view that all ranks see."""
        self.view = view
        self.pool.see(view)

    def turn(self) -> None:
        """Do what a scheduler's turn does after the meeting."""
        self.crew.advance(self.pool, self.see)
        self.pulls.poll()
        self.disk.reads.poll()
        self.watch.look()

    def page(self, digest: bytes, name: bytes) -> np.ndarray:
        """Return the bytes of this rank's part of a page."""
        return content(digest + name + bytes([self.number]), self.region.shape[1])

    def compute(self, digest: bytes, tokens: np.ndarray) -> None:
        """Offload what an engine has computed; copies end on all ranks at once."""
        plan = self.cache.plan_offload(digest, tokens)
        if plan is None:
            return
        names = pages_of(tokens)
        for at, slot in zip(plan.positions, plan.addresses, strict=True):
            self.region[slot] = self.page(digest, names[int(at)])
        num = len(plan.pages)
        sums = np.zeros(num, np.uint64)
        self.cache.finish_offload(
            plan, TransferResult(np.ones(num, np.bool_), 0, 0.0, sums)
        )

    def are_right(self, digest: bytes, tokens: np.ndarray) -> int:
        """Return how many pages are found; all of them are what they should be."""
        found = self.store.match(digest, tokens)
        names = pages_of(tokens)[: len(found)]
        for slot, name in zip(slots_of(found).tolist(), names, strict=True):
            assert (self.region[slot] == self.page(digest, name)).all(), "a wrong page"
        return len(found)

    def picture(self) -> dict[str, Any]:
        """Return all that decisions may follow from; equal on all ranks."""
        return {
            "cache": self.cache.state_digest(),
            "host": self.store.usage(TierId.HOST),
            "names": self.store._kept[0].names.tobytes(),
            "pool": self.pool.usage(),
            "pulls": self.pulls.num_under_way,
            "wanted": {r: w.as_dict() for r, w in self.pulls._wanted.items()},
            "reads": self.disk.reads.num_under_way,
            "costs": self.pulls.stats(),
            "said": self.recorder.sent,
        }


class RankedNode:
    """An instance of several ranks, as a ``World`` sees it.

    Args:
        world: where.
        instance: its id.
        num_ranks: how many.
        blocks, disk: of its tiers.
        agrees: False for the negative control: ranks act on their own facts.
    """

    def __init__(
        self,
        world: World,
        instance: int,
        num_ranks: int,
        blocks: int,
        disk: int,
        *,
        agrees: bool = True,
    ) -> None:
        self.world = world
        self.instance = instance
        self.num_ranks = num_ranks
        self.me = world.incarnations[instance]
        self.inbox: list[tuple[Envelope, str]] = []
        self.incidents = Strict()
        self.guard = Guard(self.incidents)
        self.next_view: View | None = world.view()
        self.lease_ends_s = world.clock.now() + LEASE_S
        self.table = Table(world.clock, num_ranks)
        self.ranks = [OneRank(self, rank, blocks, disk) for rank in range(num_ranks)]
        infos = tuple(rank.info for rank in self.ranks)
        for rank in self.ranks:
            facts = rank.crew.facts if agrees else Alone(num_ranks)
            rank.open(self, infos, facts)
        self.ranks[0].crew.leading = self
        # As ``World`` tells a node that it has a new life.
        self.pool = SimpleNamespace(begin_anew=lambda number: None)
        world.memory_of[instance] = as_entry(self.ranks[0].pool.info)

    def see(self, view: View) -> None:
        """Rank 0 learns who is there."""
        self.guard.see(view)
        self.next_view = view

    # What rank 0 has for all.

    def take(self) -> list[Envelope]:
        found, self.inbox = self.inbox, []
        return [each for each, key in found if self.guard.admits(each, key)]

    def take_view(self) -> View | None:
        view, self.next_view = self.next_view, None
        return view

    def lease(self) -> tuple[int, float]:
        return self.world.incarnations[self.instance], self.lease_ends_s

    # The world's node.

    def poll(self) -> None:
        """Do one turn on all ranks."""
        for rank in self.ranks:
            rank.transport.pump()
        self.turn()

    def turn(self) -> None:
        """Do one turn, while transports do what they like."""
        self.lease_ends_s = self.world.clock.now() + LEASE_S
        self.table.meet()
        for rank in self.ranks:
            rank.turn()

    def assert_alike(self) -> None:
        """Every rank is where rank 0 is."""
        first = self.ranks[0].picture()
        for rank in self.ranks[1:]:
            for name, part in rank.picture().items():
                assert part == first[name], f"rank {rank.number} differs in {name}"


class Alone(Facts):
    """Facts that every rank believes by itself, at once: what must not be."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self._num_ranks = num_ranks

    def watch(self, look: Callable[[], Any]) -> Any:
        return Believed(look, self._num_ranks)


class Believed:
    """What this rank knows, taken for what all know."""

    def __init__(self, look: Callable[[], Any], num_ranks: int) -> None:
        self._look = look
        self._num_ranks = num_ranks

    @property
    def told(self) -> list[Any]:
        known = self._look()
        return [] if known is None else [known] * self._num_ranks

    @property
    def is_common(self) -> bool:
        return bool(self.told)


def make_node(
    world: World, instance: int, num_ranks: int, blocks: int, disk: int, **how: Any
) -> RankedNode:
    """Start an instance, or start it anew."""
    world.incarnations[instance] = world.incarnations.get(instance, 0) + 1
    world.starts[instance] = world.starts.get(instance, 0) + 1
    world.version += 1
    node = RankedNode(world, instance, num_ranks, blocks, disk, **how)
    world.nodes[instance] = node  # type: ignore[assignment]
    for other in world.nodes.values():
        other.see(world.view())
    return node
