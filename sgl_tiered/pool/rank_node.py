"""A rank of an instance in the pool other than the first: as rank 0 is told, so is it.

It has its own transport and its own part of every block, and neither lease nor endpoint
(`crew.py`). A call that would wait for another instance is not made on ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from sgl_tiered.core.background import give_way
from sgl_tiered.pool.base import BlockStore
from sgl_tiered.pool.config import PoolConfig
from sgl_tiered.pool.crew import Crew
from sgl_tiered.pool.disk_reads import DiskReads
from sgl_tiered.pool.layouts import KVShape
from sgl_tiered.pool.membership import Lease, View
from sgl_tiered.pool.node import NodeMemory, make_pool, store_memories
from sgl_tiered.transport.base import Transport
from sgl_tiered.transport.incidents import Incidents
from sgl_tiered.transport.process import Process

__all__ = ["RankNode"]


class RankNode:
    """What ``PoolNode`` is on rank 0, on another rank. One thread calls it.

    Args:
        crew: the ranks.
        shape: KV of one page, of all ranks.
        make_store: makes this rank's store, given the lease of rank 0.
        transport: moves this rank's bytes. Close it after this.
        config: times of its pool, as on rank 0.
        memories: what peers reach of a store; None for rows of this rank's pages.
        make_reads: what brings pages of a store's disk to memory for peers, if any.

    Attributes:
        pool: the calls; None of them after ``close``.
        store: what ``make_store`` made.
        incidents: counts what fails here.

    Raises:
        TransportUnavailableError: the memory cannot be used; or another rank is not in
            the pool.
    """

    def __init__(
        self,
        crew: Crew,
        shape: KVShape,
        make_store: Callable[[Lease], BlockStore],
        transport: Transport,
        config: PoolConfig | None = None,
        *,
        memories: Callable[[BlockStore], Sequence[NodeMemory]] | None = None,
        make_reads: Callable[[BlockStore], DiskReads] | None = None,
    ) -> None:
        self.incidents = Incidents("pool")
        self._crew = crew
        self._view = View(0)
        self._is_closed = False
        crew.introduce(Process.own().name)
        lease = crew.open(None)
        self.instance = lease.instance
        self.store = make_store(lease)
        reads = None if make_reads is None else make_reads(self.store)
        made = memories or (
            lambda store: store_memories(store, shape, crew.rank, crew.num_ranks)
        )
        with contextlib.ExitStack() as undo:
            self._sums = ThreadPoolExecutor(1, "tiered-pool-sums", give_way)
            undo.callback(self._sums.shutdown)
            self.pool = make_pool(
                self.store,
                lease,
                shape,
                made(self.store),
                transport,
                None,
                crew.clock,
                config or PoolConfig(),
                pause=lambda: None,
                executor=self._sums,
                wake=lambda: None,
                reads=reads,
                crew=crew,
                incidents=self.incidents,
            )
            self._undo = undo.pop_all()

    @property
    def view(self) -> View:
        """The members, as all ranks know them."""
        return self._view

    def poll(self) -> None:
        """Do what all ranks do at this point."""
        self._crew.advance(self.pool, self._see)

    def wait(self, timeout_s: float) -> bool:
        """Return False at once: rank 0 waits for all."""
        del timeout_s
        return False

    def stay_awake(self) -> None:
        """Do nothing: rank 0 is the one that sleeps."""

    def state(self) -> dict[str, Any]:
        """Return nothing: rank 0 tells."""
        return {}

    def close(self) -> None:
        """End what is under way. May be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self.pool.close("this instance has left the pool")
            self._undo.close()

    def _see(self, view: View) -> None:
        self._view = view
        self.incidents.guard("a look at a view", partial(self.pool.see, view))
