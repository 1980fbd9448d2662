"""Puts a server into its pool, when its cache is made and when its scheduler is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sgl_tiered.engines.sglang.cache import TieredRadixCache
from sgl_tiered.engines.sglang.pooled.cache import pooled
from sgl_tiered.engines.sglang.pooled.server import ServedPool, join_pool
from sgl_tiered.engines.sglang.runtime import TieredRuntime
from sgl_tiered.pool.membership import default_name
from sgl_tiered.pool.node import PoolNode
from sgl_tiered.serving.options import POOL_FAULT, Options

__all__ = ["attach_scheduler", "enter_pool"]


def enter_pool(
    ctx: Any,
    config: Options,
    runtime: TieredRuntime,
    tree: type[TieredRadixCache],
) -> type[TieredRadixCache]:
    """Join the pool that the settings name; return the class of the tree for it.

    Args:
        ctx: SGLang's ``TreeCacheBuildContext``.
        config: of the server.
        runtime: of its rank.
        tree: the class without a pool.

    Raises:
        ConfigError: a setting does not fit the machine.
        TransportUnavailableError: registry, address or transport cannot be used.
    """
    pool = config.pool
    assert pool is not None
    if not pool.name:
        port = int(getattr(ctx.server_args, "port", 0) or 0)
        pool = replace(pool, name=default_name(port))
    kv_pool = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    runtime.pool = join_pool(
        pool,
        runtime,
        ctx.server_args,
        int(kv_pool.k_buffer[0].shape[1]),
        spoils_sent=config.experiment.fault == POOL_FAULT,
    )
    return pooled(tree)


def attach_scheduler(scheduler: Any, served: ServedPool) -> None:
    """Let messages wake a scheduler that sleeps while idle."""
    poller = getattr(getattr(scheduler, "idle_sleeper", None), "poller", None)
    # Only the first rank sleeps while idle, and only its node is told anything.
    if poller is not None and isinstance(served.node, PoolNode):
        import zmq

        poller.register(served.node.fileno(), zmq.POLLIN)
