"""A CUDA device with its streams and events, or a CPU that stands for one.

On the CPU work is done when a call returns, and times are the wall clock's.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from typing import Any

import numpy as np
import torch

from sgl_tiered.engines.device.cuda_ops import cuda_register
from sgl_tiered.tiers.memory import MemoryRegion

__all__ = ["Device", "Pinned"]


class Pinned:
    """Host memory that the device reaches; uint8 [num_bytes]."""

    def __init__(self, num_bytes: int, *, is_cuda: bool) -> None:
        register = cuda_register("memory of the benchmark", "cuda") if is_cuda else None
        row = 4096
        self._region = MemoryRegion(-(-num_bytes // row), row, register=register)
        self.array: np.ndarray = self._region.array.reshape(-1)[:num_bytes]

    def close(self) -> None:
        """Unpin it."""
        self._region.close()


class Device:
    """The first CUDA device, or the CPU."""

    def __init__(self, dry_run: bool) -> None:
        self.is_cuda = not dry_run and torch.cuda.is_available()
        assert dry_run or self.is_cuda, "torch sees no CUDA device"
        self.torch = torch.device("cuda" if self.is_cuda else "cpu")

    def pinned(self, num_bytes: int) -> Pinned:
        """Return pinned memory."""
        return Pinned(num_bytes, is_cuda=self.is_cuda)

    def stream(self) -> Any:
        """Return a stream; None on the CPU."""
        return torch.cuda.Stream() if self.is_cuda else None

    def on(self, stream: Any) -> Any:
        """Return a context in which torch queues on a stream."""
        if not self.is_cuda:
            return contextlib.nullcontext()
        return torch.cuda.stream(stream)

    def handle(self, stream: Any) -> int:
        """Return what the driver calls a stream."""
        return int(stream.cuda_stream) if self.is_cuda else 0

    def record(self, stream: Any) -> Any:
        """Return an event behind the work of a stream."""
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        stream.record_event(event)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        """Hold a stream back until an event has passed."""
        if self.is_cuda:
            stream.wait_event(event)

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two events; waits for the later one."""
        if not self.is_cuda:
            return max(float(end - begin), 1e-9)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def synchronize(self) -> None:
        """Wait for all work."""
        if self.is_cuda:
            torch.cuda.synchronize()

    @staticmethod
    def memmove(to: int, frm: int, num_bytes: int, stream: int) -> int:
        """Copy at once, in the place of a copy engine."""
        del stream
        ctypes.memmove(to, frm, num_bytes)
        return 0
