"""What activations are weighed by on CUDA, sampled when a server starts.

Before there is a pool: how fast pinned host memory comes up (T_load_kv of HybridServe;
papers: hybridserve, section 4.3), how fast the device reads memory of its own, and how
long a layer's projection takes. T_kv_gen is ``rebuild_probe.py``'s.

Each is a line through two sizes, each waited for, so that launches and waits are not
taken for work. Copies are of one piece, which pages are not: what this is off makes the
link look faster, and activations worse, than they are.

Never run on a GPU; tests play the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sgl_tiered.core.clock import Clock, SystemClock

__all__ = ["DeviceFigures", "DeviceWork", "TorchWork", "sample_device", "sample_work"]

_UPLOADS = 16 << 20, 64 << 20
_COPIES = 64 << 20, 256 << 20
"""Bytes; the caches of no device hold both sides of the smaller one."""
_PROJECTIONS = 4, 20
_RUNS = 5
_MIN_TIME_S = 1e-9


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """Of one device and one model.

    Attributes:
        latency_s: of a copy up from pinned host memory, 0 or more.
        upload_bytes_per_s: of such copies.
        memory_bytes_per_s: that the device reads of its own memory.
        projection_s: one layer's projection, of some decoding requests.
    """

    latency_s: float
    upload_bytes_per_s: float
    memory_bytes_per_s: float
    projection_s: float


class DeviceWork(Protocol):
    """What is timed; each call returns when the device has done it."""

    def upload(self, num_bytes: int) -> None:
        """Copy from pinned host memory to the device."""
        ...

    def copy(self, num_bytes: int) -> None:
        """Copy within the device's memory."""
        ...

    def project(self, num_runs: int) -> None:
        """Compute so many projections, those of the layers in turn."""
        ...


class TorchWork:
    """By torch, on any device; memory is pinned where that is CUDA.

    Args:
        device: that computes.
        weights: of projections, [outputs, hidden]; those in host memory are left out,
            unless all are there.
        num_rows: tokens of a projection.
        upload_bytes, copy_bytes: the most that a call is given.

    Raises:
        RuntimeError: there is not so much memory.
    """

    def __init__(
        self,
        device: torch.device,
        weights: Sequence[torch.Tensor],
        num_rows: int,
        *,
        upload_bytes: int = _UPLOADS[1],
        copy_bytes: int = _COPIES[1],
    ) -> None:
        self._device = device
        is_cuda = device.type == "cuda"
        self.host = torch.ones(upload_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        room = max(upload_bytes, copy_bytes)
        self.near, self.far = (
            torch.zeros(room, dtype=torch.uint8, device=device) for _ in range(2)
        )
        there = [one for one in weights if one.device.type == device.type]
        self._weights = there or [weights[0].to(device)]
        hidden, dtype = self._weights[0].shape[1], self._weights[0].dtype
        self._inputs = torch.zeros((num_rows, hidden), dtype=dtype, device=device)
        self._turn = 0

    def upload(self, num_bytes: int) -> None:
        """Copy from host memory, in one piece."""
        self.near[:num_bytes].copy_(self.host[:num_bytes], non_blocking=True)
        self._wait()

    def copy(self, num_bytes: int) -> None:
        """Copy within the device's memory, in one piece."""
        self.far[:num_bytes].copy_(self.near[:num_bytes])
        self._wait()

    def project(self, num_runs: int) -> None:
        """Compute projections: by the next layer's weights each, as a forward does."""
        with torch.inference_mode():
            for _ in range(num_runs):
                weight = self._weights[self._turn % len(self._weights)]
                torch.nn.functional.linear(self._inputs, weight)
                self._turn += 1
        self._wait()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def sample_device(
    device: torch.device, weights: Sequence[torch.Tensor], num_rows: int
) -> DeviceFigures:
    """Return the figures of a device, and give back the memory that they took.

    Args:
        device: CUDA's.
        weights: of the layers' projections.
        num_rows: tokens of a decode step.

    Raises:
        RuntimeError: there is too little memory, or CUDA fails.
    """
    try:
        return sample_work(TorchWork(device, weights, num_rows), SystemClock())
    finally:
        # The pool takes what is free, in one piece.
        if device.type == "cuda":
            torch.cuda.empty_cache()


def sample_work(work: DeviceWork, clock: Clock) -> DeviceFigures:
    """Return the figures of what does the work, by a clock."""
    latency_s, up_byte_s = _line(work.upload, _UPLOADS, clock)
    _, copy_byte_s = _line(work.copy, _COPIES, clock)
    _, projection_s = _line(work.project, _PROJECTIONS, clock)
    # A copy reads as many bytes as it writes.
    return DeviceFigures(latency_s, 1.0 / up_byte_s, 2.0 / copy_byte_s, projection_s)


def _line(
    work: Callable[[int], None], sizes: tuple[int, int], clock: Clock
) -> tuple[float, float]:
    """Return seconds for none, and for each more; the shortest of some runs counts.

    A start is a busy time: what takes longer has waited for something else.
    """
    fastest = [float("inf")] * 2
    # The first round pays for memory and kernels that nobody has touched.
    for num_run in range(_RUNS + 1):
        for n, size in enumerate(sizes):
            started_s = clock.now()
            work(size)
            seconds = clock.now() - started_s
            if num_run:
                fastest[n] = min(fastest[n], seconds)
    small, large = sizes
    each_s = max(fastest[1] - fastest[0], _MIN_TIME_S) / (large - small)
    return max(fastest[0] - each_s * small, 0.0), each_s
