"""Copies from a device to ordinary host memory, in two stages (LayerKV, section 4).

A device writes to pinned memory only while its threads go on. So a copy to memory that
is not pinned goes through a ring of pinned buffers: the calling thread queues the copy
into a buffer and goes on to the next one, and a thread of its own waits for the device
and copies from the buffer to where the bytes belong. Neither the engine's thread nor
the one that queues copies ever copies bytes on the host.

Everything is engine-independent: what is queued, and how, is the caller's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_tiered.pipelines.streams import BufferRing, Event
from sgl_tiered.pipelines.worker import Worker

__all__ = ["HostCopier", "HostCopy"]

UInt8s = npt.NDArray[np.uint8]


class HostCopy:
    """One copy on its way to ordinary memory."""

    def __init__(
        self, buffer: UInt8s, queued: Event, land: Callable[[UInt8s], None]
    ) -> None:
        self._buffer = buffer
        self._queued = queued
        self._land: Callable[[UInt8s], None] | None = land
        self._ended = threading.Event()
        self._error = ""

    @property
    def ended(self) -> bool:
        """Whether the bytes are where they belong, or never will be."""
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it has ended; False after the timeout.

        Raises:
            RuntimeError: the device, or the copy on the host, failed.
        """
        if not self._ended.wait(timeout_s):
            return False
        if self._error:
            raise RuntimeError(self._error)
        return True

    def run(self) -> None:
        """Do the second stage; on the host thread."""
        assert self._land is not None, "a landing runs once"
        self._queued.synchronize()
        self._land(self._buffer)
        self.end("")

    def end(self, error: str) -> None:
        """Let go of the buffer and of what the caller lent."""
        self._error = error
        self._land = None
        self._ended.set()


class _Through:
    """The ring's view of a landing: only when its buffer is free, not how it went."""

    def __init__(self, landing: HostCopy) -> None:
        self._landing = landing

    def query(self) -> bool:
        return self._landing.ended

    def synchronize(self) -> None:
        self._landing._ended.wait()

    def elapsed_time(self, end_event: Any) -> float:
        raise NotImplementedError("a landing has no time on the device")


class HostCopier:
    """The ring and the host thread; one thread at a time calls ``put``.

    Args:
        allocate: makes a pinned uint8 array of a length.
        num_buffers: copies that may be under way; with two both stages are busy.
        num_bytes: of each buffer at first; a larger copy makes its buffer grow.
        name: of the host thread.
    """

    def __init__(
        self,
        allocate: Callable[[int], UInt8s],
        *,
        num_buffers: int,
        num_bytes: int,
        name: str = "tiered-host-copies",
    ) -> None:
        self._ring = BufferRing(allocate, num_buffers, num_bytes)
        self._worker: Worker[HostCopy] = Worker(name, HostCopy.run, HostCopy.end)

    @property
    def num_bytes(self) -> int:
        """Bytes that a copy may have without making a buffer grow."""
        return self._ring.num_bytes

    def put(
        self,
        num_bytes: int,
        queue: Callable[[UInt8s], Event],
        land: Callable[[UInt8s], None],
    ) -> HostCopy:
        """Queue a copy; blocks only while all buffers are on their way.

        Copies end in the order of the calls.

        Args:
            num_bytes: of the copy.
            queue: queues the device's copy into uint8 [num_bytes] of pinned memory, and
                returns an event behind it; raises only if nothing is queued. On the
                calling thread.
            land: copies from there to where the bytes belong. On the host thread.

        Raises:
            RuntimeError: ``queue`` raised it.
        """
        buffer = self._ring.lend(num_bytes)
        landing = HostCopy(buffer, queue(buffer), land)
        self._ring.passes(_Through(landing))
        if not self._worker.try_put(landing):
            landing.end("the host thread was closed")
        return landing

    def close(self, timeout_s: float = 5.0) -> bool:
        """End what waits as failed; False if a landing did not end in time."""
        return self._worker.close(timeout_s)
