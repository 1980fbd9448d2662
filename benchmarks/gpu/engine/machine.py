"""A device with SGLang's two streams: CUDA's, or one that the CPU plays.

SGLang's overlap schedule works on two streams: its scheduler queues on one (slots,
indices, uploads), its model on the other, which waits for the first when a batch is
launched. The played device runs what is queued late, and in any order that streams and
events allow, so that a wait that is missing shows as wrong bytes for some seed.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from sgl_tiered.core.layout import PageLayout
from sgl_tiered.pipelines.stream_pool import LoadWay, StreamPool
from sgl_tiered.tiers.memory import Register

__all__ = ["CudaMachine", "Machine", "PlayedMachine"]


class Machine(Protocol):
    """What the engine needs of a device.

    Attributes:
        torch: of the tensors.
        schedule, forward: the two streams.
        is_played: nothing runs before a thread waits, and times mean nothing.
    """

    torch: torch.device
    schedule: Any
    forward: Any
    is_played: bool

    def on(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the thread queues on a stream."""
        ...

    def run(self, work: Callable[[], None], cost_ms: float = 0.0) -> None:
        """Queue work on the thread's stream."""
        ...

    def record(self) -> Any:
        """Return an event with a time, behind what the thread's stream holds."""
        ...

    def delay(self, seconds: float) -> None:
        """Hold the thread's stream up for about so long."""
        ...

    def pool(self, buffers: Any, layout: PageLayout, *, way: LoadWay) -> StreamPool:
        """Return the product's pool over KV buffers."""
        ...

    def register(self, setting: str) -> Register:
        """Return what pins host memory."""
        ...

    def host_numbers(self, count: int) -> torch.Tensor:
        """Return int64 [count] of pinned memory."""
        ...

    def synchronize(self) -> None:
        """Wait for all work."""
        ...


class CudaMachine:
    """The first CUDA device."""

    is_played = False

    def __init__(self) -> None:
        self.torch = torch.device("cuda:0")
        self.schedule: Any = torch.cuda.Stream()
        self.forward: Any = torch.cuda.Stream()
        properties = torch.cuda.get_device_properties(0)
        # In kHz, where torch tells it.
        self._hz = 1e3 * float(getattr(properties, "clock_rate", 0) or 1_700_000)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Queue on a stream."""
        with torch.cuda.stream(stream):
            yield

    def run(self, work: Callable[[], None], cost_ms: float = 0.0) -> None:
        """Queue what torch queues."""
        del cost_ms
        work()

    def record(self) -> Any:
        """Record an event on the current stream."""
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record()
        return event

    def delay(self, seconds: float) -> None:
        """Let the device spin."""
        if seconds > 0.0:
            torch.cuda._sleep(int(seconds * self._hz))

    def pool(self, buffers: Any, layout: PageLayout, *, way: LoadWay) -> StreamPool:
        """Return a pool on the product's copies."""
        from sgl_tiered.engines.device.cuda_ops import CudaOps

        ops = CudaOps(buffers, layout, self.forward)
        return StreamPool(ops, staging=ops, way=way)

    def register(self, setting: str) -> Register:
        """Pin as the tiers do."""
        from sgl_tiered.engines.device.cuda_ops import cuda_register

        return cuda_register(setting, "cuda")

    def host_numbers(self, count: int) -> torch.Tensor:
        """Return pinned memory."""
        return torch.empty(count, dtype=torch.int64, pin_memory=True)

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()


class PlayedMachine:
    """Played by the CPU, after ``tests/contract/cuda_stand_ins.py``.

    Args:
        seed: of the order in which streams go on.
    """

    is_played = True

    def __init__(self, seed: int) -> None:
        played = importlib.import_module("tests.contract.cuda_stand_ins")
        self.torch = torch.device("cpu")
        self.played: Any = played.PlayedCuda(seed)
        self.device = self.played.device
        self.schedule: Any = self.played.new_stream("schedule")
        self.forward: Any = self.played.new_stream("forward")
        self.played.engine = self.schedule

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Queue on a stream; only the engine's thread asks which is current."""
        before = self.played.engine
        self.played.engine = stream
        try:
            yield
        finally:
            self.played.engine = before

    def run(self, work: Callable[[], None], cost_ms: float = 0.0) -> None:
        """Queue work, which runs when the device comes to it."""
        self.played.engine.run(work, cost_ms)

    def record(self) -> Any:
        """Record an event behind what is queued."""
        return self.played.engine.record_event()

    def delay(self, seconds: float) -> None:
        """Queue several pieces of nothing: others may go before."""
        for _ in range(8 if seconds > 0.0 else 0):
            self.played.engine.run(lambda: None, cost_ms=1e3 * seconds / 8)

    def pool(self, buffers: Any, layout: PageLayout, *, way: LoadWay) -> StreamPool:
        """Return a pool on the product's copies and addresses."""
        ops: Any = self.played.pool_ops_class()(buffers, layout, self.forward)
        return StreamPool(ops, staging=ops, way=way)

    def register(self, setting: str) -> Register:
        """Note what is pinned."""
        register: Register = self.played.register(setting)
        return register

    def host_numbers(self, count: int) -> torch.Tensor:
        """Return memory full of what nobody should read."""
        return torch.full((count,), -1, dtype=torch.int64)

    def synchronize(self) -> None:
        """Run everything that is queued."""
        self.device.settle()

    def pass_time(self) -> None:
        """Let some of what is queued run, as time does between two passes."""
        with self.device.lock:
            count = int(self.device._rng.integers(0, 12))
        for _ in range(count):
            if not self.device.step():
                # Threads that queue copies go on meanwhile.
                time.sleep(0)
                return
