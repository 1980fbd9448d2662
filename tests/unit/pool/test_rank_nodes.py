"""Instances of two ranks over real sockets, a real registry and the kernel's copies.

Each rank runs in a thread of its own, with the agreement that servers have.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgl_tiered.core.addresses import slots_of
from sgl_tiered.core.clock import SystemClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.errors import TransportUnavailableError
from sgl_tiered.policies.eviction.lru import LRUPolicy
from sgl_tiered.pool.base import BlockStore, BlockType
from sgl_tiered.pool.crew import Crew
from sgl_tiered.pool.layouts import KVShape, Shard
from sgl_tiered.pool.membership import Lease
from sgl_tiered.pool.node import NodeConfig, NodeMemory, PoolNode
from sgl_tiered.pool.rank_node import RankNode
from sgl_tiered.pool.registry_url import open_registry
from sgl_tiered.pool.table_store import TableStore
from sgl_tiered.serving.agreement import Agreement
from sgl_tiered.tiers.region import RegionTier
from sgl_tiered.transport.base import TransferStatus
from sgl_tiered.transport.loopback import open_loopback
from tests.unit.engines.ranks_support import Meeting, on_two_ranks

SHAPE = KVShape(num_layers=2, num_heads=2, head_bytes=16, page_tokens=4)
SHARDS = Shard.split(SHAPE, 2, 1)
PROMPT = np.arange(24, dtype=np.int32)
NUM_PAGES = 6
PATIENCE_S = 60.0


class Array:
    """A region that is a plain array."""

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        self.array = np.zeros((num_rows, row_bytes), np.uint8)

    def close(self) -> None:
        """Nothing to close."""


def store(lease: Lease, rank: int) -> TableStore:
    """A store of 32 blocks in host memory, of one rank's part of a page."""
    host = TierId.HOST
    layout = SHARDS[rank].layout(SHAPE)
    return TableStore(
        lease.instance,
        layout,
        {host: 32},
        {host: LRUPolicy()},
        SystemClock(),
        {host: RegionTier(host, Array(32, layout.page_bytes))},
        lease.incarnation,
    )


def enter(
    url: str,
    name: str,
    rank: int,
    crew: Crew,
    memories: Callable[[BlockStore], Sequence[NodeMemory]] | None = None,
) -> tuple[ExitStack, PoolNode | RankNode]:
    """Enter a pool with one rank, as a server does."""
    stack = ExitStack()
    try:
        transport = open_loopback(grace_s=1.0)
    except TransportUnavailableError as error:
        pytest.skip(f"not run: {error}")
    stack.callback(transport.close)

    def make(lease: Lease) -> TableStore:
        return store(lease, rank)

    node: PoolNode | RankNode
    try:
        if rank == 0:
            config = NodeConfig(name, url)
            node = PoolNode(
                config, SHAPE, make, transport, memories=memories, crew=crew
            )
        else:
            node = RankNode(crew, SHAPE, make, transport, memories=memories)
    except BaseException as error:
        crew.give_up(error)
        stack.close()
        raise
    stack.callback(node.close)
    return stack, node


def page(rank: int) -> np.ndarray:
    """The bytes of a rank's parts of the prompt's pages."""
    num_bytes = SHARDS[rank].layout(SHAPE).page_bytes
    draw = np.random.default_rng(rank)
    return draw.integers(0, 256, (NUM_PAGES, num_bytes), np.uint8)


@dataclass
class Played:
    """What the ranks of both instances have done."""

    url: str
    is_over: threading.Event = field(default_factory=threading.Event)
    errors: list[BaseException] = field(default_factory=list)
    found: dict[int, np.ndarray] = field(default_factory=dict)
    incarnations: list[int] = field(default_factory=list)

    def turns(
        self,
        agreement: Agreement,
        node: PoolNode | RankNode,
        is_done: Callable[[], bool],
    ) -> None:
        """Do turns until it is done on rank 0."""
        until_s = agreement.own_clock.now() + PATIENCE_S
        while True:
            late = agreement.own_clock.now() > until_s
            told = agreement.meet({"done": is_done(), "late": late})
            node.poll()
            if told[0]["done"]:
                return
            assert not told[0]["late"], "waited in vain"
            node.wait(0.01)

    def hold(self, rank: int, agreement: Agreement) -> None:
        """The instance that has the pages."""
        stack, node = enter(self.url, "holder", rank, Crew(agreement))
        with stack:
            addresses = node.pool.alloc_mem(NUM_PAGES, BlockType.HOST)
            assert addresses is not None
            memory = node.store.memory(TierId.HOST)
            assert memory is not None
            memory[slots_of(addresses)] = page(rank)
            assert node.pool.insert(PROMPT, addresses).num_inserted == NUM_PAGES
            self.turns(agreement, node, self.is_over.is_set)

    def pull(self, rank: int, agreement: Agreement) -> None:
        """The instance that wants them."""
        stack, node = enter(self.url, "puller", rank, Crew(agreement))
        with stack:
            self.turns(agreement, node, lambda: len(node.view.members) == 2)
            others = [m for m in node.view.members if m.instance != node.instance]
            addresses = node.pool.alloc_mem(NUM_PAGES, BlockType.HOST)
            assert addresses is not None
            fetch = node.pool.fetch(others[0].instance, PROMPT, addresses)
            running = TransferStatus.RUNNING
            self.turns(agreement, node, lambda: fetch.status is not running)
            assert fetch.status is TransferStatus.DONE, fetch.error
            assert fetch.num_blocks == NUM_PAGES
            memory = node.store.memory(TierId.HOST)
            assert memory is not None
            self.found[rank] = memory[slots_of(addresses)].copy()
            self.turns(agreement, node, lambda: node.pool.is_idle)
            self.incarnations.append(node.pool.incarnation)
            if rank == 0:
                self.is_over.set()

    def run(self, play: Callable[[int, Agreement], None], seat: Any) -> None:
        """Run one rank, in its thread."""
        try:
            play(seat.rank, Agreement(SystemClock(), seat))
        except BaseException as error:  # noqa: BLE001 - it is asserted on
            self.errors.append(error)
            self.is_over.set()


def test_each_rank_pulls_from_its_like(tmp_path: Path) -> None:
    """Through one member each; what a rank gets is its part, and it is checked."""
    played = Played(f"file:{tmp_path / 'pool.json'}")
    threads = []
    for play in (played.hold, played.pull):
        meeting = Meeting(2)
        threads += [
            threading.Thread(target=played.run, args=(play, meeting.seat(rank)))
            for rank in range(2)
        ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not played.errors, played.errors
    for rank in range(2):
        assert (played.found[rank] == page(rank)).all()
    assert played.incarnations == [1, 1]


@pytest.mark.parametrize("broken", [0, 1])
def test_a_rank_that_cannot_enter_ends_the_others(tmp_path: Path, broken: int) -> None:
    """Nobody waits for it; each says which rank it was, and nothing stays behind."""
    url = f"file:{tmp_path / 'pool.json'}"

    def refuse(store: BlockStore) -> list[NodeMemory]:
        raise TransportUnavailableError("this memory cannot be registered")

    def work(rank: int, seat: Any) -> str:
        crew = Crew(Agreement(SystemClock(), seat))
        memories = refuse if rank == broken else None
        with pytest.raises(TransportUnavailableError) as caught:
            enter(url, "one", rank, crew, memories)
        return str(caught.value)

    texts = on_two_ranks(work)
    assert texts[broken] == "this memory cannot be registered"
    assert texts[1 - broken].startswith(f"rank {broken} cannot enter the pool: this")
    registry = open_registry(url)
    assert not registry.view().members
    registry.close()


def test_rank_0_without_a_registry_ends_the_others(tmp_path: Path) -> None:
    """Before anybody has a lease."""
    folder = tmp_path / "folder"
    folder.mkdir()

    def work(rank: int, seat: Any) -> str:
        crew = Crew(Agreement(SystemClock(), seat))
        with pytest.raises(Exception) as caught:  # noqa: PT011 - rank 0's own error
            enter(f"file:{folder}", "one", rank, crew)
        return str(caught.value)

    texts = on_two_ranks(work)
    assert texts[1].startswith("rank 0 cannot enter the pool: ")
    assert texts[0] in texts[1]
