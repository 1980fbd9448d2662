"""One server's part in a pool: node, store and pulls, and when the scheduler has them.

Everything here runs on the scheduler's thread. The node is looked at once per turn of
SGLang's loop, which costs a microsecond where nothing happens; where SGLang sleeps
while idle, a message wakes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from sgl_tiered.cache.prefetcher import DEFAULT_WINDOW
from sgl_tiered.engines.sglang.pooled.settings import PoolSettings
from sgl_tiered.engines.sglang.pooled.shape import pool_shape
from sgl_tiered.engines.sglang.runtime import TieredRuntime
from sgl_tiered.pipelines.completions import PromoteFinished
from sgl_tiered.pool.base import BlockStore
from sgl_tiered.pool.cache_store import CacheStore
from sgl_tiered.pool.disk_reads import DiskReads
from sgl_tiered.pool.layouts import KVShape
from sgl_tiered.pool.membership import InstanceKind, Lease
from sgl_tiered.pool.node import NodeConfig, NodeMemory, PoolNode, store_memories
from sgl_tiered.pool.node_peers import NodePeers
from sgl_tiered.pool.pulls import PeerPulls
from sgl_tiered.transport.by_name import open_transport

__all__ = [
    "ServedPool",
    "join_pool",
    "peer_tokens",
]

logger = logging.getLogger(__name__)

_MAX_ACTIVE_SHARE = 0.5
"""Of the host tier, that blocks of others and pulls under way may take: the rest stays
this server's own cache, whatever peers ask for."""
_KINDS = {"prefill": InstanceKind.PREFILL, "decode": InstanceKind.DECODE}


class ServedPool:
    """What a runtime in a pool has.

    Args:
        node: membership, messages, bytes.
        store: the cache's copies as blocks.
        pulls: of pages that peers hold.
        reads: of this server's disk, for peers.
        close_transport: called when the node has been closed.
    """

    def __init__(
        self,
        node: PoolNode,
        store: CacheStore,
        pulls: PeerPulls,
        reads: DiskReads,
        close_transport: Callable[[], None],
    ) -> None:
        self.node = node
        self.store = store
        self.pulls = pulls
        self.reads = reads
        self._close_transport = close_transport

    def poll(self) -> None:
        """Look after messages, pulls and reads."""
        self.node.poll()
        self.pulls.poll()
        self.reads.poll()

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
    settings: PoolSettings,
    runtime: TieredRuntime,
    server_args: Any,
    kv_heads: int,
    *,
    spoils_sent: bool = False,
) -> ServedPool:
    """Enter a pool with the copies of a runtime's cache.

    Args:
        settings: with a name.
        runtime: of this server's only rank.
        server_args: SGLang's.
        kv_heads: of a layer.
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

    shape = pool_shape(layout, kv_heads)
    mode = str(getattr(server_args, "disaggregation_mode", "null"))
    config = NodeConfig(
        name=settings.name,
        registry=settings.url,
        kind=_KINDS.get(mode, InstanceKind.COLOCATED),
        host=settings.host,
        keys=settings.keys,
        endpoints={"http": _url(server_args, settings.host)},
    )
    transport = open_transport(settings.transport, settings.host)
    try:
        node = PoolNode(
            config,
            shape,
            make_store,
            transport,
            memories=(lambda s: _spoiled(s, shape)) if spoils_sent else None,
            make_reads=make_reads,
        )
    except BaseException:
        transport.close()
        raise
    pulls = PeerPulls(
        made[0],
        NodePeers(node),
        parts.cost,
        parts.clock,
        parts.metrics,
        page_tokens=layout.page_tokens,
        page_bytes=layout.page_bytes,
        load_policy=lambda: parts.cache.planner.load_policy,
    )
    logger.info(
        "sgl-tiered: in the pool %s as %s (instance %d), bytes by %s",
        settings.url,
        settings.name,
        node.instance,
        transport.address.kind,
    )
    return ServedPool(node, made[0], pulls, reads[0], transport.close)


def _url(server_args: Any, pool_host: str) -> str:
    """Return where this server's HTTP is, as a router would name it."""
    host = str(getattr(server_args, "host", "") or pool_host)
    if host in ("0.0.0.0", "::"):
        host = pool_host
    return f"http://{host}:{getattr(server_args, 'port', 0)}"


def _spoiled(store: BlockStore, shape: KVShape) -> list[NodeMemory]:
    """Return memory of the same form that peers get in place of the blocks."""
    return [
        NodeMemory(each.medium, np.zeros_like(each.memory), each.form)
        for each in store_memories(store, shape)
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
