"""One server's part in a pool: node, store and pulls, and when the scheduler has them.

Everything here runs on the scheduler's thread. The node is looked at once per turn of
SGLang's loop, which costs a microsecond where nothing happens; where SGLang sleeps
while idle, a message wakes it.

Of several ranks each has all of this over its own part of the pages, and acts on what
all have heard at their last meeting (`pool/facts.py`): at the same point of the turn,
after that meeting. So requests wait, load and compute alike on all ranks, and a pull
has come when all parts of all its pages have.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from sgl_tiered.cache.prefetcher import DEFAULT_WINDOW
from sgl_tiered.engines.sglang.pooled.endpoints import endpoints_of
from sgl_tiered.engines.sglang.runtime import TieredRuntime
from sgl_tiered.pipelines.completions import CompletionQueue, PromoteFinished
from sgl_tiered.pool.base import BlockStore
from sgl_tiered.pool.cache_store import CacheStore
from sgl_tiered.pool.config import PoolConfig
from sgl_tiered.pool.crew import Crew
from sgl_tiered.pool.disk_reads import DiskReads
from sgl_tiered.pool.membership import InstanceKind, Lease
from sgl_tiered.pool.node import NodeConfig, NodeMemory, PoolNode, store_memories
from sgl_tiered.pool.node_peers import NodePeers
from sgl_tiered.pool.pulls import PeerPulls
from sgl_tiered.pool.rank_node import RankNode
from sgl_tiered.serving.agreement import Agreement
from sgl_tiered.serving.options import Pool
from sgl_tiered.serving.pool_shape import pool_shape
from sgl_tiered.transport.by_name import open_transport

__all__ = [
    "ServedPool",
    "join_pool",
    "peer_tokens",
]

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.001
"""Nothing to compute and pages on their way: a nap that leaves the peer a core."""
_MAX_ACTIVE_SHARE = 0.5
"""Of the host tier, that blocks of others and pulls under way may take: the rest stays
this server's own cache, whatever peers ask for."""
_POOL = PoolConfig(keeps_arrivals=False)
"""A server takes pages for its cache, and nothing else."""
_KINDS = {"prefill": InstanceKind.PREFILL, "decode": InstanceKind.DECODE}


class ServedPool:
    """What a runtime in a pool has.

    Args:
        node: membership, messages, bytes.
        store: the cache's copies as blocks.
        pulls: of pages that peers hold.
        reads: of this server's disk, for peers.
        agreement: between the ranks.
        close_transport: called when the node has been closed.
    """

    def __init__(
        self,
        node: PoolNode | RankNode,
        store: CacheStore,
        pulls: PeerPulls,
        reads: DiskReads,
        agreement: Agreement,
        close_transport: Callable[[], None],
    ) -> None:
        self._agreement = agreement
        self.node = node
        self.store = store
        self.pulls = pulls
        self.reads = reads
        self._close_transport = close_transport

    def poll(self) -> None:
        """Look after messages, pulls and reads; ranks do after each meeting."""
        self.node.poll()
        self.pulls.poll()
        self.reads.poll()
        if self.is_shared and not self.node.pool.is_idle:
            under_way = (self.pulls.num_under_way, self.reads.num_under_way)
            self._agreement.note("pool", self.node.pool.usage(), *under_way)

    @property
    def is_shared(self) -> bool:
        """Whether there are several ranks."""
        return self._agreement.is_shared

    def rest(self, completions: CompletionQueue) -> None:
        """Give others the core for a moment: the engine has nothing to compute.

        Only where something of the pool is soon to end; nobody sleeps longer then.

        Args:
            completions: where this server's own reads end.
        """
        if self._agreement.rank:
            # It waits for rank 0 in any case.
            return
        if self.reads.num_under_way or (self.is_shared and self.node.pool.is_talking):
            # Neither a disk nor another rank wakes who sleeps while idle.
            completions.wait(_IDLE_WAIT_S)
            self.node.stay_awake()
        elif self.pulls.num_awaited:
            self.node.wait(_IDLE_WAIT_S)

    def took(self, event: PromoteFinished) -> bool:
        """Take the end of a read for a peer; False for any other promotion."""
        return self.reads.finished(event.plan, event.positions, event.result)

    def reset(self) -> None:
        """Forget requests: the cache is emptied. What is under way ends unused."""
        self.pulls.reset()
        self.reads.cancel_all()

    def stats(self) -> dict[str, Any]:
        """Return a JSON-able picture, for ``GET /tiered/stats``."""
        return {**self.node.state(), "pulls": self.pulls.stats()}

    def close(self) -> None:
        """Leave the pool."""
        self.node.close()
        self._close_transport()


def join_pool(
    settings: Pool,
    runtime: TieredRuntime,
    server_args: Any,
    kv_heads: int,
    *,
    spoils_sent: bool = False,
) -> ServedPool:
    """Enter a pool with the copies of a runtime's cache.

    Args:
        settings: with a name.
        runtime: of this rank.
        server_args: SGLang's.
        kv_heads: of a layer on this rank.
        spoils_sent: for tests: peers are sent other bytes than those they ask for.

    Raises:
        ConfigError: a setting is wrong; says which one.
        TransportUnavailableError: registry, address or transport cannot be used.
    """
    parts = runtime.parts
    layout = parts.device.layout
    made: list[CacheStore] = []
    reads: list[DiskReads] = []

    def make_store(lease: Lease) -> BlockStore:
        made.append(
            CacheStore(
                parts.cache,
                lease.instance,
                parts.memory,
                lease.incarnation,
                _MAX_ACTIVE_SHARE,
            )
        )
        return made[0]

    def make_reads(store: BlockStore) -> DiskReads:
        assert store is made[0], "there is one store"
        reads.append(
            DiskReads(
                parts.cache,
                made[0],
                runtime.transfers.promoter,
                parts.clock,
                lambda: runtime.is_reading,
                lambda: runtime.coordinator.waiting_prompts(DEFAULT_WINDOW),
            )
        )
        return reads[0]

    agreement = runtime.agreement
    crew = Crew(agreement) if agreement.is_shared else None
    rank, num_ranks = agreement.rank, agreement.num_ranks
    own = pool_shape(layout, kv_heads)
    # Heads that several ranks have count as often: a rank pulls from its like only.
    shape = replace(own, num_heads=own.num_heads * num_ranks)
    mode = str(getattr(server_args, "disaggregation_mode", "null"))
    config = NodeConfig(
        name=settings.name,
        registry=settings.url,
        kind=_KINDS.get(mode, InstanceKind.COLOCATED),
        host=settings.host,
        keys=settings.keys,
        endpoints=endpoints_of(server_args, settings.host),
        pool=_POOL,
    )

    def memories(store: BlockStore) -> list[NodeMemory]:
        found = store_memories(store, shape, rank, num_ranks)
        return _spoiled(found) if spoils_sent else found

    with contextlib.ExitStack() as undo:
        try:
            transport = open_transport(settings.transport, settings.host)
            undo.callback(transport.close)
            node: PoolNode | RankNode
            if crew is None or rank == 0:
                node = PoolNode(
                    config,
                    shape,
                    make_store,
                    transport,
                    memories=memories,
                    make_reads=make_reads,
                    crew=crew,
                    tell=lambda kind: parts.metrics.add(f"pool_refused_{kind}"),
                )
            else:
                node = RankNode(
                    crew,
                    shape,
                    make_store,
                    transport,
                    _POOL,
                    memories=memories,
                    make_reads=make_reads,
                )
        except BaseException as error:
            if crew is not None:
                crew.give_up(error)
            raise
        undo.pop_all()
    pulls = PeerPulls(
        made[0],
        NodePeers(node),
        parts.cost,
        parts.clock,
        parts.metrics,
        page_tokens=layout.page_tokens,
        page_bytes=layout.page_bytes,
        load_policy=lambda: parts.cache.planner.load_policy,
        incidents=node.incidents,
    )
    logger.info(
        "sgl-tiered: in the pool %s as %s (instance %d), bytes by %s",
        settings.url,
        settings.name,
        node.instance,
        transport.address.kind,
    )
    return ServedPool(node, made[0], pulls, reads[0], agreement, transport.close)


def _spoiled(memories: list[NodeMemory]) -> list[NodeMemory]:
    """Return memory of the same form that peers get in place of the blocks."""
    return [
        NodeMemory(each.medium, np.zeros_like(each.memory), each.form)
        for each in memories
    ]


def peer_tokens(
    served: ServedPool, rid: str, span: tuple[int, int], from_host: int
) -> int:
    """Return how many tokens of a load's span were pulled for the request.

    Args:
        served: the pool.
        rid: of the request.
        span: first and one past the last token of the load.
        from_host: tokens of it that come from the host tier.
    """
    wanted = served.pulls.wanted(rid)
    if wanted is None or not wanted.num_pages:
        return 0
    page = served.store.layout.page_tokens
    begin = max(span[0], wanted.first_page * page)
    end = min(span[1], (wanted.first_page + wanted.num_pages) * page)
    return min(max(end - begin, 0), from_host)
