"""A world of pools in one thread: messages that get lost, bytes that come late.

Instances stand on the real transport over a library of ours, whose pieces move when the
test says so: long after a transfer has timed out, or after its sender has died.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field

import numpy as np

from sgl_tiered.cache.config import CacheConfig, TierConfig
from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.core.addresses import mediums_of, slots_of
from sgl_tiered.core.clock import Clock, ManualClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import KEY_BYTES
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost
from sgl_tiered.policies.eviction.lru import LRUPolicy
from sgl_tiered.pool.base import MediumUsage
from sgl_tiered.pool.cache_store import CacheStore
from sgl_tiered.pool.channel import CONTROL, CONTROL_KEY, MESSAGES
from sgl_tiered.pool.fences import PROCESS
from sgl_tiered.pool.guard import Guard
from sgl_tiered.pool.layouts import KVShape, MemoryForm, Shard
from sgl_tiered.pool.membership import InstanceKind, Member, View
from sgl_tiered.pool.mempool import MemPool, PoolConfig
from sgl_tiered.pool.messages import Envelope, Place, PoolInfo, RankInfo, as_entry
from sgl_tiered.pool.table_store import TableStore
from sgl_tiered.pool.transfer import Rank
from sgl_tiered.tiers.region import RegionTier
from sgl_tiered.transport.base import PeerAddress, TransferStatus
from sgl_tiered.transport.batched import BatchedTransport
from sgl_tiered.transport.incidents import Incidents
from sgl_tiered.transport.knocking import Place as Whereabouts
from sgl_tiered.transport.knocking import Reach
from sgl_tiered.transport.messages import Part, Times
from sgl_tiered.transport.release import ReleaseWatch
from tests.property.pool_disk import Disk

SHAPE = KVShape(num_layers=2, num_heads=2, head_bytes=2, page_tokens=2)
(SHARD,) = Shard.split(SHAPE, 1, 1)
LAYOUT = SHARD.layout(SHAPE)
CONFIG = PoolConfig(timeout_s=2.0, retry_s=0.5, grace_s=10.0)
TRANSPORT_GRACE_S = 1.0
PIECE_LIFE_S = 8.0
"""No piece moves later than so long after the end of the process that sent it."""
STEP_S = 0.25


class Array:
    """A region that is a plain array."""

    def __init__(self, num_rows: int, row_bytes: int = LAYOUT.page_bytes) -> None:
        self.array = np.zeros((num_rows, row_bytes), np.uint8)

    def close(self) -> None:
        """Nothing to close."""


@dataclass(eq=False)
class Piece:
    """A range on its way: moves when the test lets it, however late that is."""

    sender: int
    local: int
    remote: int
    length: int
    until_s: float = math.inf
    status: TransferStatus = TransferStatus.RUNNING


@dataclass
class World:
    """The clock, the network and the memory of all instances.

    Attributes:
        in_cache: the stores are those of caches in use, else of their own.
        disk_pages: of a disk below the memory of such a cache; 0 for none.
        num_open: slots that each memory of such a cache has at first; 0 for all.
    """

    in_cache: bool = False
    disk_pages: int = 0
    num_open: int = 0
    clock: ManualClock = field(default_factory=ManualClock)
    memories: dict[int, np.ndarray] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    messages: list[Envelope] = field(default_factory=list)
    nodes: dict[int, Node] = field(default_factory=dict)
    incarnations: dict[int, int] = field(default_factory=dict)
    starts: dict[int, int] = field(default_factory=dict)
    memory_of: dict[int, str] = field(default_factory=dict)
    version: int = 0

    def view(self) -> View:
        """Return the members now."""
        members = tuple(
            Member(
                f"node-{n}",
                n,
                self.incarnations[n],
                InstanceKind.COLOCATED,
                {
                    CONTROL: f"tcp://{n}:{self.starts[n]}",
                    PROCESS: f"{n}.{self.starts[n]}",
                    CONTROL_KEY: key_of(n),
                },
                memory=self.memory_of[n],
            )
            for n in sorted(self.nodes)
        )
        return View(self.version, members)

    def start(self, instance: int, blocks: dict[TierId, int]) -> Node:
        """Start an instance, or start it anew."""
        self.incarnations[instance] = self.incarnations.get(instance, 0) + 1
        self.starts[instance] = self.starts.get(instance, 0) + 1
        for piece in self.pieces:
            if piece.sender == instance:
                # The process that has sent it is over.
                until_s = self.clock.now() + PIECE_LIFE_S
                piece.until_s = min(piece.until_s, until_s)
        self.version += 1
        node = Node(self, instance, self.incarnations[instance], blocks)
        self.nodes[instance] = node
        return node

    def look_for(self, place: Whereabouts) -> Reach:
        """Say whether a process is there, whatever the registry says."""
        host, start = place.endpoint
        is_there = host.isdecimal() and self.starts.get(int(host)) == start
        return Reach.THERE if is_there else Reach.OVER

    def stop(self, instance: int) -> Node:
        """Let an instance stop until its lease is over, which all others see."""
        node = self.nodes.pop(instance)
        self.version += 1
        self.see()
        return node

    def go_on(self, node: Node) -> None:
        """Let a stopped instance go on: it takes another lease."""
        instance = node.instance
        self.nodes[instance] = node
        self.incarnations[instance] += 1
        self.version += 1
        node.me = (instance, self.incarnations[instance])
        node.pool.begin_anew(node.me[1])
        self.see()

    def rejoin(self, instance: int) -> None:
        """Let an instance lose its lease, which all see, and take another."""
        self.go_on(self.stop(instance))

    def see(self) -> None:
        """Let everybody know who is there."""
        for node in self.nodes.values():
            node.see(self.view())

    def end_piece(self, piece: Piece, *, arrives: bool) -> None:
        """Let a piece arrive, or not; then nothing of it moves any more."""
        if piece.status is not TransferStatus.RUNNING:
            return
        piece.status = TransferStatus.FAILED
        if arrives:
            piece.status = TransferStatus.DONE
            source = self._bytes(piece.local, piece.length)
            self._bytes(piece.remote, piece.length)[:] = source
        self.pieces.remove(piece)

    def deliver(self, num: int) -> None:
        """Let the oldest messages arrive."""
        some, self.messages = self.messages[:num], self.messages[num:]
        for message in some:
            node = self.nodes.get(message.receiver[0])
            if node is not None:
                node.inbox.append((message, key_of(message.sender[0])))

    def advance(self, seconds: float) -> None:
        """Let time pass; pieces whose time is over have failed."""
        self.clock.advance(seconds)
        now_s = self.clock.now()
        for piece in [p for p in self.pieces if p.until_s <= now_s]:
            self.end_piece(piece, arrives=False)

    def pump(self) -> None:
        """Let everything go well for a moment."""
        for piece in list(self.pieces):
            self.end_piece(piece, arrives=True)
        for _ in range(4):
            self.deliver(len(self.messages))
            for node in self.nodes.values():
                node.poll()
        self.advance(STEP_S)

    def settle(self, seconds: float) -> None:
        """Let everybody know everything, and so much time pass without faults."""
        for _ in range(int(seconds / STEP_S)):
            self.see()
            self.pump()

    def _bytes(self, address: int, length: int) -> np.ndarray:
        for start, memory in self.memories.items():
            if start <= address and address + length <= start + memory.size:
                return memory.reshape(-1)[address - start : address - start + length]
        raise AssertionError("a piece outside all memory")


class FakeLibrary:
    """The library of one instance: pieces wait until the world ends them."""

    kind = "fake"
    max_in_flight = 64

    def __init__(self, world: World, instance: int) -> None:
        self._world = world
        self._instance = instance
        self._name = f"{instance}.{world.starts[instance]}"

    def endpoint(self) -> tuple[str, bytes]:
        """Return a name of this process's."""
        return self._name, b""

    def register(self, address: int, num_bytes: int) -> None:
        """The world knows the memory already."""

    def connect(self, address: PeerAddress) -> str:
        """Return the peer's name."""
        return address.endpoint

    def reach(self, link: str) -> str:
        """Return whether that process runs."""
        instance, _, start = link.partition(".")
        lives = self._world.starts.get(int(instance)) == int(start)
        return "" if lives and int(instance) in self._world.nodes else "it is gone"

    gone = reach

    def submit(
        self,
        link: str,
        is_push: bool,
        local: np.ndarray,
        remote: np.ndarray,
        lengths: np.ndarray,
    ) -> list[tuple[int, Piece]]:
        """Put pieces on their way."""
        assert is_push
        rows = zip(local.tolist(), remote.tolist(), lengths.tolist(), strict=True)
        made = [Piece(self._instance, a, b, n) for a, b, n in rows]
        self._world.pieces += made
        return [(1, piece) for piece in made]

    def check(self, ticket: Piece) -> TransferStatus:
        """Return what the world has decided."""
        return ticket.status

    def disconnect(self, link: str) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


class ShortlyNamed(CacheStore):
    """Takes short names of namespaces: those of caches have a fixed length."""

    def insert(self, namespace, tokens, addresses, first_page=0):
        """Insert under the long name."""
        return super().insert(long_name(namespace), tokens, addresses, first_page)

    def match(self, namespace, tokens):
        """Match under the long name."""
        return super().match(long_name(namespace), tokens)

    def delete(self, namespace, tokens):
        """Delete under the long name."""
        return super().delete(long_name(namespace), tokens)


class Node:
    """One incarnation of an instance."""

    def __init__(
        self, world: World, instance: int, incarnation: int, blocks: dict[TierId, int]
    ) -> None:
        self.world = world
        self.instance = instance
        self.me = (instance, incarnation)
        self.inbox: list[tuple[Envelope, str]] = []
        self.incidents = Strict()
        self.guard = Guard(self.incidents)
        tiers = {m: RegionTier(m, Array(n)) for m, n in blocks.items()}
        self.regions = {m: tier.region for m, tier in tiers.items()}
        self.transport = BatchedTransport(
            FakeLibrary(world, instance),
            clock=world.clock,
            grace_s=TRANSPORT_GRACE_S,
            threaded=False,
        )
        form = MemoryForm.aggregated(SHAPE, SHARD)
        places = []
        for medium, region in self.regions.items():
            world.memories[region.ctypes.data] = region
            number = self.transport.register(region).number
            places.append(Place(medium, number, form))
        info = PoolInfo(SHAPE, (RankInfo(self.transport.address, tuple(places)),))
        self.cache: TieredCache | None = None
        self.disk: Disk | None = None
        if world.in_cache:
            self.cache = make_cache(
                world.clock, blocks, world.disk_pages, world.num_open
            )
            store = ShortlyNamed(self.cache, instance, tiers, incarnation)
            self.store: TableStore = store
            if world.disk_pages:
                host = self.regions[TierId.HOST]
                self.disk = Disk(self.cache, store, host, world.clock, world.disk_pages)
        else:
            self.store = TableStore(
                instance,
                LAYOUT,
                blocks,
                {medium: LRUPolicy() for medium in blocks},
                world.clock,
                tiers,
                incarnation,
            )
        self.watch = ReleaseWatch(
            world.clock,
            world.look_for,
            after_death_s=CONFIG.grace_s,
            threaded=False,
            incidents=self.incidents,
        )
        self.pool = MemPool(
            self.store,
            incarnation,
            info,
            [Rank(0, self.transport, {})],
            self,
            world.clock,
            CONFIG,
            pause=world.pump,
            watch=self.watch,
            reads=None if self.disk is None else self.disk.reads,
            incidents=self.incidents,
        )
        world.memory_of[instance] = as_entry(info)
        self.see(world.view())

    def see(self, view: View) -> None:
        """Learn who is there."""
        self.guard.see(view)
        self.pool.see(view)

    # The channel.

    def send(self, message: Envelope) -> None:
        """Hand a message to the network."""
        self.world.messages.append(_over_the_wire(self.guard.stamp(message)))

    def take(self) -> list[Envelope]:
        """Return what the network has brought, of whom it says that it is."""
        found, self.inbox = self.inbox, []
        return [each for each, key in found if self.guard.admits(each, key)]

    def poll(self) -> None:
        """Move transport and pool along."""
        self.transport.pump()
        self.pool.poll()
        self.watch.look()

    # Memory.

    def write(self, addresses: np.ndarray, pages: list[bytes]) -> None:
        """Put the contents of pages into blocks."""
        for medium, slot, page in self._rows(addresses, pages):
            self.regions[medium][slot] = content(page)

    def read(self, addresses: np.ndarray) -> list[bytes]:
        """Return the contents of blocks."""
        return [
            self.regions[TierId(medium)][slot].tobytes()
            for medium, slot in zip(
                mediums_of(addresses).tolist(),
                slots_of(addresses).tolist(),
                strict=True,
            )
        ]

    def usage(self) -> list[MediumUsage]:
        """Return who has the blocks, medium by medium."""
        return [self.store.usage(medium) for medium in self.store.media]

    def _rows(
        self, addresses: np.ndarray, pages: list[bytes]
    ) -> list[tuple[TierId, int, bytes]]:
        media = [TierId(m) for m in mediums_of(addresses).tolist()]
        return list(zip(media, slots_of(addresses).tolist(), pages, strict=True))


def key_of(instance: int) -> str:
    """Return the public key of an instance, as its connections prove it."""
    return f"key of {instance}"


class Strict(Incidents):
    """Counts, but does not let anything fail in silence."""

    def note(self, kind: str, detail: str, error: BaseException | None = None) -> None:
        """Count one; what fails here is a fault of ours."""
        super().note(kind, detail, error)
        if error is not None:
            raise error


def long_name(namespace: bytes) -> bytes:
    """Return 16 bytes for the short name of a namespace."""
    return namespace.ljust(KEY_BYTES, b"-")


def make_cache(
    clock: Clock, blocks: dict[TierId, int], disk_pages: int = 0, num_open: int = 0
) -> TieredCache:
    """Return a cache over tiers of so many slots, ``num_open`` of memory's at first."""
    tiers = tuple(TierConfig(TierId.HOST, n, num_open or n) for n in blocks.values())
    if disk_pages:
        blocks = {**blocks, TierId.DISK: disk_pages}
        tiers += (TierConfig(TierId.DISK, disk_pages),)
    for tier, medium in zip(tiers, blocks, strict=True):
        # No cache of an engine has a device; that of these tests is as good as a host.
        object.__setattr__(tier, "tier", medium)
    return TieredCache(
        CacheConfig(LAYOUT, tiers),
        cost=CostModel(
            PrefillCost(1000, 1, 1, 1e9, overhead_s=1e-6),
            {medium: LinkCost(1e-6, 5e8) for medium in blocks},
        ),
        eviction={medium: LRUPolicy() for medium in blocks},
        clock=clock,
    )


def _over_the_wire(message: Envelope) -> Envelope:
    """Return what arrives of a message: what does not survive the codec shows here."""
    data = MESSAGES.encode(1, Part.REQUEST, message, Times())
    assert isinstance(data, bytes), data
    read = MESSAGES.decode(data)
    assert isinstance(read, tuple), read
    assert isinstance(read[1], Envelope)
    return read[1]


def content(page: bytes, num_bytes: int = LAYOUT.page_bytes) -> np.ndarray:
    """Return the bytes of a page that is named by its tokens and all before them."""
    digest = hashlib.shake_128(page).digest(num_bytes)
    return np.frombuffer(digest, np.uint8)


def pages_of(tokens: np.ndarray) -> list[bytes]:
    """Return the names of a prompt's whole pages."""
    step = SHAPE.page_tokens
    ends = range(step, len(tokens) + 1, step)
    return [tokens[:end].astype(np.int32).tobytes() for end in ends]
