"""A cluster that runs while it is entered; started and ended on a thread."""

from __future__ import annotations

import asyncio

from sgl_tiered_workloads.cluster.running import Cluster

__all__ = ["Running"]


class Running:
    """Starts a cluster when entered, and ends it when left."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def __aenter__(self) -> Cluster:
        try:
            return await asyncio.to_thread(self._cluster.__enter__)
        except BaseException:
            # Its thread goes on, whatever befalls this task; stop what it waits for.
            await asyncio.to_thread(self._cluster.stop)
            raise

    async def __aexit__(self, *details: object) -> None:
        await asyncio.to_thread(self._cluster.stop)
