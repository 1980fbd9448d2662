"""Whose turn it is, and when the one before has come to rest.

Systems take turns, and who begins changes from turn to turn, so that drift of the
machine falls on all alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from sgl_tiered_workloads.server import SglangServer

__all__ = ["PATIENCE_S", "bytes_by_edge", "rotated", "settle"]

T = TypeVar("T")

_QUIET_S = 0.5
PATIENCE_S = 60.0
"""Enough for what the small models of the CPU benches write."""


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """Return the items with another one first in every turn."""
    start = turn % len(items)
    return [*items[start:], *items[:start]]


def bytes_by_edge(server: SglangServer) -> dict[str, int]:
    """Return what a tiered server has moved so far; empty for any other server."""
    if "tiered" not in server.spec.flags:
        return {}
    stats: list[dict[str, Any]] = server.get("/tiered/stats")
    edges = stats[0]["edges"]
    return {name: int(edge["bytes"]) for name, edge in edges.items()}


async def settle(
    server: SglangServer, store: Path | None, patience_s: float = PATIENCE_S
) -> None:
    """Wait until a server writes no more, so that it disturbs nobody's figures.

    Args:
        server: that may still write.
        store: folder of its disk; None where it has none.
        patience_s: when to give up; longer where much is to be written.

    Raises:
        RuntimeError: it never came to rest.
    """

    def written() -> object:
        files = 0 if store is None else sum(1 for _ in store.rglob("*"))
        return files, bytes_by_edge(server)

    before = await asyncio.to_thread(written)
    for _ in range(int(patience_s / _QUIET_S)):
        await asyncio.sleep(_QUIET_S)
        now = await asyncio.to_thread(written)
        if now == before:
            return
        before = now
    raise RuntimeError(f"{server.spec.name} still writes after {patience_s:.0f} s")
