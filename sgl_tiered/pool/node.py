"""One instance's place in the pool: lease, endpoint, memory and ``MemPool``.

A ``PoolNode`` joins the registry, keeps its lease on a thread of its own, watches who
is there on another, and carries the messages of a ``MemPool``. The thread that owns the
store calls ``poll``; ``fileno`` is readable when there is something for it to do.

A lease that was lost (the process was stopped, or cut off from the registry) is taken
anew as soon as the registry answers: the instance is another incarnation then, and what
it had under way with others is over. Until then it writes to nobody. A name that
somebody else has taken meanwhile is left to them, and the node stays out.

An instance of several ranks has a ``PoolNode`` on rank 0, for all of them (`crew.py`),
and a ``RankNode`` on each other rank (`rank_node.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from sgl_tiered.core.background import give_way
from sgl_tiered.core.clock import Clock, SystemClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import UInt8s
from sgl_tiered.errors import TieredError
from sgl_tiered.pool.base import BlockStore
from sgl_tiered.pool.channel import ControlChannel
from sgl_tiered.pool.crew import Crew
from sgl_tiered.pool.disk_reads import DiskReads
from sgl_tiered.pool.fences import PROCESS
from sgl_tiered.pool.layouts import KVShape, MemoryForm, Shard
from sgl_tiered.pool.membership import (
    InstanceKind,
    Lease,
    Registry,
    View,
    member_fields,
)
from sgl_tiered.pool.mempool import MemPool, PoolConfig
from sgl_tiered.pool.messages import (
    Channel,
    Envelope,
    Place,
    PoolInfo,
    RankInfo,
    as_entry,
)
from sgl_tiered.pool.registry_url import open_registry
from sgl_tiered.pool.transfer import Rank
from sgl_tiered.transport.base import Transport
from sgl_tiered.transport.incidents import Incidents
from sgl_tiered.transport.keys import load_keyring
from sgl_tiered.transport.process import Process
from sgl_tiered.transport.release import ReleaseWatch

__all__ = ["NodeConfig", "NodeMemory", "PoolNode", "make_pool", "store_memories"]

_LOG = logging.getLogger(__name__)
_TICK_S = 0.1
"""How often the owner is woken while a conversation is under way: requests are sent
again, and deadlines are met, to this exactness."""
_SLOW_TICK_S = 1.0
"""The same while only grace times run."""
_WATCH_S = 1.0
_RENEWALS = 4
"""Renewals of a lease in its time: three may be lost."""


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """How an instance takes part in a pool.

    Attributes:
        name: of the instance; one that comes again gets the same id.
        registry: URL (``registry_url.py``).
        kind: what the instance does.
        host: address of this machine that others reach it by; off loopback, keys are
            needed.
        port: of the control endpoint; 0 for a free one.
        keys: folder with ``pool.key`` and perhaps ``admitted``; None on loopback, where
            a pair is made for this process.
        endpoints: further addresses for the entry in the registry, such as ``http``.
        ttl_s: seconds from one renewal of the lease to its end.
        pool: times of its pool; the grace time is the transport's.
    """

    name: str
    registry: str = "local"
    kind: InstanceKind = InstanceKind.COLOCATED
    host: str = "127.0.0.1"
    port: int = 0
    keys: Path | None = None
    endpoints: Mapping[str, str] = field(default_factory=dict)
    ttl_s: float = 3.0
    pool: PoolConfig = field(default_factory=PoolConfig)


@dataclass(frozen=True, slots=True, eq=False)
class NodeMemory:
    """The blocks of a medium, as peers reach them.

    Attributes:
        medium: which.
        memory: uint8, C-contiguous; stays where it is until the transport is closed.
        form: how pages lie there.
    """

    medium: TierId
    memory: UInt8s
    form: MemoryForm


def store_memories(
    store: BlockStore, shape: KVShape, rank: int = 0, num_ranks: int = 1
) -> list[NodeMemory]:
    """Return the media of a store that has all of a rank's page in one row."""
    shard = Shard.split(shape, num_ranks, 1)[rank]
    found = []
    for medium in store.media:
        memory = store.memory(medium)
        if memory is not None:
            form = MemoryForm.aggregated(shape, shard, memory.shape[1])
            found.append(NodeMemory(medium, memory, form))
    return found


def make_pool(
    store: BlockStore,
    lease: Lease,
    shape: KVShape,
    memories: Sequence[NodeMemory],
    transport: Transport,
    channel: Channel | None,
    clock: Clock,
    config: PoolConfig,
    *,
    pause: Callable[[], None],
    executor: Executor,
    wake: Callable[[], None],
    reads: DiskReads | None,
    crew: Crew | None,
    incidents: Incidents,
) -> MemPool:
    """Return the pool of an instance, or of one of its ranks; see ``MemPool``.

    Args:
        store: the blocks.
        lease: of the instance.
        shape: KV of one page, of all ranks.
        memories: this rank's.
        transport: moves this rank's bytes; its grace time is the pool's.
        channel: carries messages; None where another rank does.
        clock: of an instance of one rank.
        config: times.
        pause, executor, wake, reads: as for ``MemPool``.
        crew: the ranks; None where there is one.
        incidents: counts what is refused.

    Raises:
        TransportUnavailableError: the memory cannot be used; or another rank's.
    """
    places = tuple(
        Place(each.medium, transport.register(each.memory).number, each.form)
        for each in memories
    )
    own = RankInfo(transport.address, places)
    common: Channel | None = channel
    grace_s, watch = transport.quarantine.grace_s, None
    if crew is not None:
        # It looks in its own time, between the meetings of the ranks.
        watch = ReleaseWatch(SystemClock(), after_death_s=grace_s, incidents=incidents)
        common, clock = crew.channel(channel), crew.clock
    assert common is not None, "who is alone has a channel"
    return MemPool(
        store,
        lease.incarnation,
        PoolInfo(shape, (own,) if crew is None else crew.muster(own)),
        [Rank(0 if crew is None else crew.rank, transport, {})],
        common,
        clock,
        replace(config, grace_s=grace_s),
        pause=pause,
        executor=executor,
        wake=wake,
        reads=reads,
        watch=watch,
        facts=None if crew is None else crew.facts,
        incidents=incidents,
    )


class PoolNode:
    """An instance in the pool. The thread that owns the store calls it.

    Args:
        config: names, addresses and times.
        shape: KV of one page.
        make_store: makes this instance's store, given its id (``lease.instance``) and
            the number of its start (``lease.incarnation``); called once.
        transport: moves the bytes; its grace time is the pool's. Close it after this.
        memories: what peers reach of a store; None for rows of whole pages.
        make_reads: what brings pages of a store's disk to memory for peers, if any.
        crew: the ranks, where there are several.
        clock: one that all processes of the machine share.
        tell: takes the kind of whatever is refused or goes wrong, for metrics; any
            thread calls it.

    Attributes:
        pool: the calls; None of them after ``close``.
        store: what ``make_store`` made.

    Raises:
        ConfigError: a setting is wrong; says which one.
        TransportUnavailableError: the registry, the address or the memory cannot be
            used.
    """

    def __init__(
        self,
        config: NodeConfig,
        shape: KVShape,
        make_store: Callable[[Lease], BlockStore],
        transport: Transport,
        *,
        memories: Callable[[BlockStore], Sequence[NodeMemory]] | None = None,
        make_reads: Callable[[BlockStore], DiskReads] | None = None,
        clock: Clock | None = None,
        crew: Crew | None = None,
        tell: Callable[[str], None] = lambda kind: None,
    ) -> None:
        self.incidents = Incidents(f"pool {config.registry}", tell)
        self._memory = ""
        self._config = config
        self._crew = crew
        self._view = View(0)
        self._transport = transport
        self._clock = clock or SystemClock()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waiting = True
        self._closing = threading.Event()
        self._is_closed = False
        self._trouble = ""
        self._published: Lease | None = None
        self._next_view: View | None = None
        self._threads: list[threading.Thread] = []
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._event)
            keyring = None if config.keys is None else load_keyring(config.keys)
            self._registry: Registry = open_registry(
                config.registry,
                ttl_s=config.ttl_s,
                clock=self._clock,
                incidents=self.incidents,
            )
            undo.callback(self._registry.close)
            self._channel = ControlChannel(
                config.host, config.port, keyring, self._wake, self.incidents
            )
            undo.callback(self._channel.close)
            self._sums = ThreadPoolExecutor(1, "tiered-pool-sums", give_way)
            undo.callback(self._sums.shutdown)
            own = Process.own().name
            self._processes = (own,) if crew is None else crew.introduce(own)
            # Joining again may come to another thread; all of it is with the lease's.
            self._lease = self._held = self._join()
            undo.callback(lambda: self._registry.leave(self._held))
            undo.callback(self._end_threads)
            self._start("lease", self._keep_lease)
            undo.callback(transport.notify(self._wake))
            if crew is not None:
                crew.open(self._lease)
            self.store = make_store(self._lease)
            assert self.store.instance == self._lease.instance, "not the id it got"
            self._reads = None if make_reads is None else make_reads(self.store)
            rank, num_ranks = (0, 1) if crew is None else (crew.rank, crew.num_ranks)
            made = memories or (lambda s: store_memories(s, shape, rank, num_ranks))
            self.pool = self._make_pool(shape, made(self.store))
            self._memory = as_entry(self.pool.info)
            self._publish(self._held)
            view = self._registry.view()
            if crew is None:
                self._see(view)
            else:
                # All ranks see it together.
                self._next_view, crew.leading = view, self
            self._start("watch", lambda: self._watch(view.version))
            self._undo = undo.pop_all()

    @property
    def instance(self) -> int:
        """Id of this instance."""
        return self._lease.instance

    @property
    def incarnation(self) -> int:
        """Number of this start, or of the last lease that was taken anew."""
        return self._lease.incarnation

    @property
    def view(self) -> View:
        """The members, as the pool knows them."""
        return self._view

    def fileno(self) -> int:
        """Return a descriptor that is readable when ``poll`` has something to do.

        It is so at least every 0.1 s while something is under way.
        """
        return self._event

    def poll(self) -> None:
        """Act on messages and views, and move what is under way along.

        Costs a microsecond when there is nothing to do.
        """
        if self._crew is not None:
            self._poll_together(self._crew)
            return
        if not self._waiting and self.pool.is_idle:
            return
        # Before looking: what comes from now on must wake again.
        self._waiting = False
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        if self._held is not self._lease:
            self._begin_anew()
        view, self._next_view = self._next_view, None
        if view is not None:
            self._see(view)
        self.pool.poll()

    # For all ranks (``Leading``).

    def take(self) -> list[Envelope]:
        """Return the messages that have come."""
        if not self._waiting:
            return []
        # Before looking: what comes from now on must wake again.
        self._waiting = False
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        return self._channel.take()

    def take_view(self) -> View | None:
        """Return who is there, if that has changed."""
        view, self._next_view = self._next_view, None
        return view

    def lease(self) -> tuple[int, float]:
        """Return the incarnation, and when its lease ends."""
        return self._held.incarnation, self._lease_ends_s

    # Again for who owns the store.

    def wait(self, timeout_s: float) -> bool:
        """Wait until ``poll`` has something to do; False if it has not in time."""
        return bool(select.select([self._event], [], [], timeout_s)[0])

    def stay_awake(self) -> None:
        """Make ``fileno`` readable: something else will soon have ended here."""
        self._wake()

    def drain(self) -> bool:
        """Ask that nobody gives this instance new blocks; False without a lease.

        What it holds can be fetched still. The request comes back as a view.
        """
        return self._registry.drain(self._held)

    def state(self) -> dict[str, Any]:
        """Return what there is to know, as JSON values; O(blocks)."""
        now_s = self._clock.now()
        own = self._view.member(self.instance)
        troubles = self._channel.troubles()
        return {
            "name": self._config.name,
            "registry": self._config.registry,
            "instance": self.instance,
            "incarnation": self.incarnation,
            "kind": self._config.kind.value,
            "lease_left_s": round(max(self.pool.lease_ends_s - now_s, 0.0), 3),
            "draining": own is not None and own.draining,
            "trouble": self._trouble,
            "version": self._view.version,
            "refused": self.incidents.counts,
            "members": [
                {
                    **{k: v for k, v in member_fields(member).items() if k != "memory"},
                    "trouble": troubles.get(member.endpoints.get("control", ""), ""),
                }
                for member in self._view.members
            ],
            "under_way": asdict(self.pool.usage()),
            "media": {
                medium.name.lower(): asdict(self.store.usage(medium))
                for medium in self.store.media
            },
            "transport": {
                "kind": self._transport.address.kind,
                "quarantined_bytes": self._transport.quarantine.num_held_bytes,
            },
        }

    def close(self) -> None:
        """Leave the pool; what is under way fails. May be called twice.

        Peers may write to the memory until the transport is closed.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._crew is not None:
            self._crew.leading = None
        self.pool.close("this instance has left the pool")
        self._undo.close()

    # The owner's thread.

    def _make_pool(self, shape: KVShape, memories: Sequence[NodeMemory]) -> MemPool:
        pool = make_pool(
            self.store,
            self._lease,
            shape,
            memories,
            self._transport,
            self._channel,
            self._clock,
            self._config.pool,
            pause=self._pause,
            executor=self._sums,
            wake=self._wake,
            reads=self._reads,
            crew=self._crew,
            incidents=self.incidents,
        )
        if self._crew is None:
            pool.lease_ends_s = self._lease_ends_s
        return pool

    def _poll_together(self, crew: Crew) -> None:
        """Do what all ranks do; what only one of them knows, they hear of first."""
        self._lease = self._held
        crew.advance(self.pool, self._see)
        if self.pool.is_talking:
            # Nobody else wakes this thread when another rank's bytes have come.
            self._wake()

    def _pause(self) -> None:
        """Wait a moment inside of a call that waits; views are to be seen there too."""
        view, self._next_view = self._next_view, None
        if view is not None:
            self._see(view)
        time.sleep(50e-6)

    def _see(self, view: View) -> None:
        for lost in self._transport.take_lost():
            _LOG.info("bytes do not reach %r: %s", lost.address.endpoint, lost.reason)
        self._view = view
        for see in (self._channel.see, self.pool.see):
            self.incidents.guard("a look at a view", partial(see, view))

    def _begin_anew(self) -> None:
        self._lease = self._held
        self.pool.begin_anew(self._lease.incarnation)
        self.pool.lease_ends_s = self._lease_ends_s

    # Threads.

    def _start(self, name: str, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, name=f"tiered-pool-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _end_threads(self) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join()

    def _wake(self) -> None:
        """Let the owner know that there is something to do."""
        self._waiting = True
        os.eventfd_write(self._event, 1)

    def _join(self) -> Lease:
        config = self._config
        endpoints = {**config.endpoints, **self._channel.endpoints}
        endpoints[PROCESS] = ",".join(self._processes)
        before_s = self._clock.now()
        lease = self._registry.join(config.name, config.kind, endpoints)
        self._lease_ends_s = before_s + lease.ttl_s
        if self._memory:
            self._publish(lease)
        return lease

    def _publish(self, lease: Lease) -> None:
        """Say how this instance's memory is reached, if the registry answers."""
        self._published = None
        if self._registry.publish(lease, self._memory):
            self._published = lease

    def _keep_lease(self) -> None:
        """Renew the lease, and wake the owner while it has something under way."""
        renew_s = self._clock.now() + self._held.ttl_s / _RENEWALS
        slow_s = 0.0
        while not self._closing.wait(_TICK_S):
            now_s = self._clock.now()
            if now_s >= renew_s:
                try:
                    self._renew()
                except Exception as error:  # noqa: BLE001 - the thread has to live on
                    self._say("the lease could not be renewed, see the log")
                    self.incidents.note("registry", "the lease", error)
                renew_s = self._clock.now() + self._held.ttl_s / _RENEWALS
            pool = getattr(self, "pool", None)
            if pool is None or pool.is_idle:
                continue
            if pool.is_talking or now_s >= slow_s:
                slow_s = now_s + _SLOW_TICK_S
                self._wake()

    def _renew(self) -> None:
        before_s = self._clock.now()
        try:
            if self._registry.renew(self._held):
                if self._memory and self._published is not self._held:
                    self._publish(self._held)
                self._lease_ends_s = before_s + self._held.ttl_s
                self._say("")
                pool: MemPool | None = getattr(self, "pool", None)
                # Not for a lease that the owner has not heard of; ranks hear together.
                alone = self._crew is None
                same = pool is not None and pool.incarnation == self._held.incarnation
                if alone and pool is not None and same:
                    pool.lease_ends_s = self._lease_ends_s
                return
            self._take_anew()
        except (TieredError, OSError) as error:
            self._say(f"the registry cannot be used: {error}")

    def _take_anew(self) -> None:
        """Find out why a lease was not renewed, and take another if it is over."""
        member = self._registry.view().member(self._held.instance)
        if member is not None and member.incarnation == self._held.incarnation:
            self._say("the registry does not answer")
            return
        if member is not None:
            self._say(
                f"another process has joined as {self._config.name!r}: give every "
                "instance a name of its own"
            )
            return
        lease = self._join()
        same = lease.instance == self._held.instance
        if not same or lease.incarnation <= self._held.incarnation:
            # Others would take this instance for one that they have known.
            self._registry.leave(lease)
            self._say("the registry has forgotten this instance: start it anew")
            return
        _LOG.warning(
            "the lease of %s was over: it goes on as incarnation %d",
            self._config.name,
            lease.incarnation,
        )
        self._held = lease
        self._wake()

    def _say(self, trouble: str) -> None:
        if trouble and trouble != self._trouble:
            text = f"{self._config.name} is not in its pool: {trouble}"
            self.incidents.note("lease", text)
        self._trouble = trouble

    def _watch(self, version: int) -> None:
        """Hand new views to the owner."""
        while not self._closing.is_set():
            try:
                view = self._registry.watch(version, _WATCH_S)
                if view is None:
                    # A registry that has forgotten everything counts from the start.
                    view = self._registry.view()
                    view = view if view.version < version else None
            except Exception as error:  # noqa: BLE001 - the thread has to live on
                is_known = isinstance(error, TieredError | OSError)
                self.incidents.note(
                    "registry",
                    f"it cannot be watched: {error}",
                    None if is_known else error,
                )
                self._closing.wait(_WATCH_S)
                continue
            if view is not None:
                version = view.version
                self._next_view = view
                self._wake()
