"""Flags of servers in a pool, as the part of SGLang's arguments that they are."""

from __future__ import annotations

from typing import Optional

from sglang.srt.arg_groups.arg_utils import NS, A, Arg

from sgl_tiered.engines.sglang.disagg.args import PdServerArgs
from sgl_tiered.engines.sglang.pooled.settings import POOL_CHOICES

__all__ = ["PoolServerArgs"]

_NS = NS("tiered")


class PoolServerArgs(PdServerArgs, dict=True):  # type: ignore[call-arg]
    """SGLang's arguments and those of pools; all None where they are not given."""

    tiered_pool: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="Registry of a pool of servers that hand KV to each other: local (of "
            "this user and machine, see sgl-tiered pool up), file:PATH or "
            "etcd://HOST:PORT/PREFIX; default none. What a server of the pool has "
            "computed another one then pulls, where that is faster than computing it."
        ),
        _NS,
    ] = None
    tiered_pool_name: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="Name of this server in its pool, the same after a restart; default "
            "one made of the machine's name and --port."
        ),
        _NS,
    ] = None
    tiered_pool_host: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="Address on which other servers of the pool reach this one; default "
            "127.0.0.1. Beyond this machine it needs --tiered-pool-keys and a private "
            "network."
        ),
        _NS,
    ] = None
    tiered_pool_transport: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="What carries KV between servers: auto (mooncake or nixl, else "
            "loopback on one machine; default), mooncake, nixl or loopback.",
            choices=list(POOL_CHOICES["pool_transport"]),
        ),
        _NS,
    ] = None
    tiered_pool_keys: A[
        Optional[str],  # noqa: UP045
        Arg(help="Folder of the CURVE keys of the pool's control messages."),
        _NS,
    ] = None
