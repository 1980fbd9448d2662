"""Instances with real memory over a real transport, in one process or several."""

from __future__ import annotations

import contextlib
import os
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from typing import Any, NoReturn

import numpy as np
from programs.migration import RunningRequest
from programs.sequence_parallel import Pattern, SequenceExchange

from sgl_tiered.core.clock import SystemClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.policies.eviction.lru import LRUPolicy
from sgl_tiered.pool.layouts import MemoryForm, Shard
from sgl_tiered.pool.membership import InstanceKind, Member, View
from sgl_tiered.pool.mempool import MemPool, PoolConfig
from sgl_tiered.pool.messages import Envelope, Place, PoolInfo, RankInfo, as_entry
from sgl_tiered.pool.receiver import Arrival
from sgl_tiered.pool.table_store import TableStore
from sgl_tiered.pool.transfer import Rank
from sgl_tiered.testing.transport_peer import open_transport
from sgl_tiered.transport.base import TransferStatus
from tests.unit.benchmarks.toy_decoder import NUM_LAYERS, PAGE, SHAPE, ToyDecoder

FAR_S = 60.0
"""A deadline that only a defect meets."""
TRANSPORTS = {
    "loopback": "sgl_tiered.transport.loopback:open_loopback",
    "mooncake": "sgl_tiered.transport.mooncake:open_mooncake",
    "nixl": "sgl_tiered.transport.nixl:open_nixl",
}


class ListChannel:
    """Messages between instances of one process."""

    def __init__(self, inboxes: list[list[Envelope]], instance: int) -> None:
        self._inboxes = inboxes
        self._instance = instance

    def send(self, message: Envelope) -> None:
        """Put a message into the receiver's inbox."""
        self._inboxes[message.receiver[0]].append(message)

    def take(self) -> list[Envelope]:
        """Empty our own."""
        inbox = self._inboxes[self._instance]
        found = inbox[:]
        inbox.clear()
        return found

    def publish(self, memory: str) -> dict[int, str]:
        """Do nothing: who makes the instances tells each of all others."""
        return {self._instance: memory}


class QueueChannel:
    """Messages between processes."""

    def __init__(self, inboxes: Sequence[Queue[Any]], instance: int) -> None:
        self._inboxes = inboxes
        self._instance = instance
        self._early: list[Envelope] = []

    def send(self, message: Envelope) -> None:
        """Put a message into the receiver's inbox."""
        self._inboxes[message.receiver[0]].put(message)

    def take(self) -> list[Envelope]:
        """Return what has come."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._inboxes[self._instance].get_nowait())
        early, self._early = self._early, []
        return early + found

    def publish(self, memory: str) -> dict[int, str]:
        """Tell all how this instance's memory is reached; return it of all."""
        for inbox in self._inboxes:
            inbox.put((self._instance, memory))
        told: dict[int, str] = {}
        while len(told) < len(self._inboxes):
            one = self._inboxes[self._instance].get(timeout=FAR_S)
            if isinstance(one, Envelope):
                self._early.append(one)
            else:
                told[one[0]] = one[1]
        return told


class Instance:
    """One instance: memory, transport, pool and model."""

    def __init__(
        self,
        instance: int,
        num_instances: int,
        channel: Any,
        transport: str,
        pause: Callable[[], None],
        num_blocks: int = 48,
    ) -> None:
        (shard,) = Shard.split(SHAPE, 1, 1)
        layout = shard.layout(SHAPE)
        self.instance = instance
        self.memory = np.zeros((num_blocks, layout.page_bytes), np.uint8)
        self.model = ToyDecoder(self.memory)
        self.transport = open_transport(TRANSPORTS[transport])
        region = self.transport.register(self.memory.reshape(-1)).number
        place = Place(TierId.DEVICE, region, MemoryForm.aggregated(SHAPE, shard))
        info = PoolInfo(SHAPE, (RankInfo(self.transport.address, (place,)),))
        clock = SystemClock()
        self.store = TableStore(
            instance,
            layout,
            {TierId.DEVICE: num_blocks},
            {TierId.DEVICE: LRUPolicy()},
            clock,
        )
        self.pool = MemPool(
            self.store,
            1,
            info,
            [Rank(0, self.transport, {})],
            channel,
            clock,
            PoolConfig(timeout_s=FAR_S),
            pause,
        )
        self.early: list[Arrival] = []
        self.memory_of = channel.publish(as_entry(info))
        self.see(range(num_instances))

    def see(self, instances: Sequence[int]) -> None:
        """Know these members."""
        members = tuple(
            Member(
                f"i{n}",
                n,
                1,
                InstanceKind.COLOCATED,
                memory=self.memory_of.get(n, ""),
            )
            for n in instances
        )
        self.pool.see(View(len(members), members))

    def blocks(self, num: int) -> np.ndarray:
        """Allocate blocks here."""
        found = self.pool.alloc_mem(num)
        assert found is not None
        return found

    def prefill(self, rid: str, prompt: np.ndarray, num_blocks: int) -> RunningRequest:
        """Compute a prompt; the request has its first token."""
        blocks = self.blocks(num_blocks)
        logits = self.model.compute(prompt, 0, blocks)
        tokens = np.append(prompt, np.argmax(logits)).astype(np.int32)
        return RunningRequest(rid, tokens, len(prompt), len(prompt), blocks, b"greedy")

    def decode(self, request: RunningRequest, num_steps: int) -> RunningRequest:
        """Compute further tokens; blocks are added as they are needed."""
        tokens, blocks = request.tokens, request.blocks
        for done in range(request.num_computed, request.num_computed + num_steps):
            if done // PAGE >= len(blocks):
                blocks = np.concatenate([blocks, self.blocks(1)])
            logits = self.model.compute(tokens[done : done + 1], done, blocks)
            tokens = np.append(tokens, np.argmax(logits)).astype(np.int32)
        num_computed = request.num_computed + num_steps
        return RunningRequest(
            request.rid, tokens, request.num_prompt, num_computed, blocks, b"greedy"
        )

    def used(self) -> int:
        """Return how many blocks are in use."""
        usage = self.store.usage(TierId.DEVICE)
        return usage.capacity - usage.free


class Part:
    """One member's prefill of its part, as steps that can be taken in turn.

    Args:
        node: the instance.
        members, rank, num_pages: of the group.
        prompt: all of it.
    """

    def __init__(
        self,
        node: Instance,
        members: Sequence[int],
        rank: int,
        num_pages: Sequence[int],
        prompt: np.ndarray,
        pattern: Pattern,
    ) -> None:
        self.node = node
        first = PAGE * sum(num_pages[:rank])
        self.first = first
        self.tokens = prompt[first : first + PAGE * num_pages[rank]]
        own = node.blocks(num_pages[rank])
        self.exchange = SequenceExchange(
            node.pool,
            members,
            rank,
            own,
            num_pages,
            NUM_LAYERS,
            pattern=pattern,
            name=f"prompt by {pattern.value}",
            timeout_s=FAR_S,
        )
        self.own = own
        self.logits: np.ndarray | None = None

    def steps(self) -> Iterator[None]:
        """Compute, and yield whenever others have to go on first."""
        model, exchange = self.node.model, self.exchange
        rows = model.rows(self.tokens, self.first)
        # Blocks before the own ones are not written, and not known yet.
        padded = np.concatenate([np.resize(self.own, self.first // PAGE), self.own])
        for layer in range(NUM_LAYERS):
            model.write(layer, rows, self.first, padded)
            exchange.publish(layer)
            while not exchange.has(layer) and not exchange.error:
                self.poll()
                yield
            if exchange.error:
                return
            rows = model.attend(layer, rows, self.first, exchange.blocks())
        self.logits = rows[-1] @ model.embedding.T
        while not exchange.is_over:
            self.poll()
            yield

    def poll(self) -> None:
        """Look after pool and exchange."""
        self.node.pool.poll()
        # Others may have begun the next exchange.
        arrivals = self.node.early + self.node.pool.take_arrivals()
        self.node.early = self.exchange.poll(arrivals)


def wait(done: Callable[[], bool], pause: Callable[[], None]) -> None:
    """Wait for something that happens, by a deadline that only a defect meets."""
    clock = SystemClock()
    until_s = clock.now() + FAR_S
    while not done():
        assert clock.now() < until_s, "it never happened"
        pause()


def serve_until(stop: Event, node: Instance) -> NoReturn:
    """Answer others until the test has all results; then end this process at once.

    At once, since NIXL may crash when the interpreter takes it down.
    """
    while not stop.is_set():
        node.pool.poll()
        time.sleep(1e-3)
    os._exit(0)


RUNNING, DONE = TransferStatus.RUNNING, TransferStatus.DONE
