"""A CUDA device that is played by a CPU, under the product's own addresses and calls.

The tensors are real, in the CPU's memory, and so are the addresses that `CudaLayerOps`
works out. Copies are queued on streams of a ``FakeDevice``, which run them late and in
any order that streams and events allow. The engine's own stream is torch on the CPU:
its work is done at once, so it stands still until what it waits for has passed.
"""

from __future__ import annotations

import contextlib
import ctypes
from functools import partial
from typing import Any

import numpy as np
import torch
from sgl_tiered_kernels.page_copy.dma import CopyEngines

from sgl_tiered.engines.device.cuda_ops import CudaOps
from sgl_tiered.engines.sglang.layered.activations.cuda import CudaActOps
from sgl_tiered.engines.sglang.layered.cuda import CudaLayerOps
from sgl_tiered.testing.fake_streams import FakeDevice, FakeEvent, FakeStream

_REFUSED = 700
"""What the driver returns where it does not take a copy."""


class EngineStream(FakeStream):
    """A stream whose work has ended as soon as it is queued."""

    def wait_event(self, event: FakeEvent) -> None:
        """Stand still until it has passed."""
        event.synchronize()

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        """Record an event, which passes at once."""
        recorded = FakeEvent(self._device) if event is None else event
        recorded.num_recorded += 1
        recorded.num_passed = recorded.num_recorded
        recorded.at_ms = self._device.now_ms
        return recorded


def plain(numbers: Any) -> Any:
    """Return the numbers of a tensor as the device itself sees them."""
    return numbers.as_subclass(torch.Tensor).numpy()


class PlayedCuda:
    """The device: its streams, and what of the host it can reach."""

    def __init__(self, seed: int, *, pins: bool = True, number: int = 0) -> None:
        self.device = FakeDevice(np.random.default_rng(seed), number)
        self.engine = EngineStream(self.device, "engine")
        self.device.engine = self.engine
        self.pins = pins
        self.pinned: set[int] = set()
        self.num_copies = self.num_rebuilds = 0
        self.breaks_order = False
        # Copies fail on the device, or cannot be queued, while True; up or down only.
        self.fails = self.refuses = False
        self.fails_on = ("load", "store")
        self.streams: list[FakeStream] = []
        # Names of the kernels that were launched.
        self.kernels: list[str] = []

    def register(self, setting: str, device: Any = None) -> Any:
        """Stand in for ``cuda_register``."""
        del device
        from sgl_tiered.errors import ConfigError

        def pin(address: int, num_bytes: int) -> Any:
            if not self.pins:
                raise ConfigError(setting, f"CUDA cannot pin {num_bytes}", "give less")
            self.pinned.add(address)
            return lambda: self.pinned.discard(address)

        return pin

    def new_stream(self, name: str) -> FakeStream:
        """Return a stream with a handle."""
        stream: Any = self.device.new_stream(name)
        self.streams.append(stream)
        stream.cuda_stream = len(self.streams)
        return stream

    def copy(self, to: int, frm: int, num_bytes: int, handle: int) -> int:
        """Queue one copy, as the driver does."""
        self.num_copies += 1
        self.device.issue()
        is_meant = self.streams[handle - 1].name in self.fails_on
        fails = self.fails and is_meant

        def work() -> None:
            if fails:
                raise RuntimeError("the copy was told to fail")
            ctypes.memmove(to, frm, num_bytes)

        if self.refuses and is_meant:
            return _REFUSED
        self.streams[handle - 1].run(work, cost_ms=0.01)
        return 0

    def pool_ops_class(self) -> type[CudaOps]:
        """Return the product's copies of whole pages, on this device."""
        played, streams = self, self._streams_class()

        class PlayedPoolOps(streams, CudaOps):  # type: ignore[misc, valid-type]
            def __init__(self, pool: Any, layout: Any, forward_stream: Any) -> None:
                engines = CopyEngines(None, played.copy)
                super().__init__(pool, layout, forward_stream, engines=engines)

            def gather(
                self, stream: Any, half: int, pages: Any, begin: int, end: int
            ) -> None:
                def work() -> None:
                    chosen = torch.from_numpy(plain(pages)[begin:end])
                    parts = [part[chosen] for layer in self._parts for part in layer]
                    self._halves[half, : end - begin] = torch.cat(parts, dim=1)

                played.device.issue()
                stream.run(work, cost_ms=0.01)

            def scatter(
                self, stream: Any, half: int, layers: range, pages: Any, part: slice
            ) -> None:
                def work() -> None:
                    parts = [each for layer in layers for each in self._parts[layer]]
                    count, width = part.stop - part.start, self._layout.part_bytes
                    num_bytes = count * len(parts) * width
                    pieces = self._staging_halves()[half][:num_bytes]
                    chosen = torch.from_numpy(plain(pages)[part])
                    for number, to in enumerate(parts):
                        to[chosen] = pieces.view(count, len(parts), width)[:, number]

                played.kernels.append("scatter")
                played.device.issue()
                stream.run(work, cost_ms=0.01)

        return PlayedPoolOps

    def ops_class(self) -> type[CudaLayerOps]:
        """Return the product's copies, on this device."""
        played, streams = self, self._streams_class()

        class PlayedOps(streams, CudaLayerOps):  # type: ignore[misc, valid-type]
            def __init__(self, pool: Any, layout: Any, forward_stream: Any) -> None:
                engines = CopyEngines(None, played.copy)
                super().__init__(pool, layout, forward_stream, engines=engines)

        return PlayedOps

    def act_ops_class(self) -> type[CudaActOps]:
        """Return the product's copies and rebuilds of activations, on this device."""
        played, streams = self, self._streams_class()

        class PlayedActOps(streams, CudaActOps):  # type: ignore[misc, valid-type]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                engines = CopyEngines(None, played.copy)
                super().__init__(*args, engines=engines, **kwargs)

            def _on(self, stream: Any) -> Any:
                return contextlib.nullcontext()

            def rebuild(self, stream: Any, *args: Any) -> object:
                played.kernels.append("rebuild")

                def work() -> None:
                    played.num_rebuilds += 1
                    super(PlayedActOps, self).rebuild(stream, *args)

                stream.run(work, cost_ms=0.01)
                return None

            def _copy_all(self, stream: Any, pairs: Any) -> None:
                def work() -> None:
                    for to, frm in pairs:
                        to.copy_(frm)

                for to, _ in pairs:
                    # While it is under way a slot holds nobody's weights.
                    stream.run(partial(to.fill_, float("nan")))
                stream.run(work, cost_ms=0.01)

        return PlayedActOps

    def _streams_class(self) -> type[Any]:
        """Return streams, events and memory of this device."""
        played = self

        class PlayedStreams:
            def new_stream(self, *, urgent: bool) -> Any:
                return played.new_stream("load" if urgent else "store")

            def new_event(self) -> Any:
                return FakeEvent(played.device)

            def current_stream(self) -> Any:
                return played.engine

            def pinned(self, num_bytes: int) -> Any:
                buffer = np.full(num_bytes, 0xEE, np.uint8)
                played.pinned.add(buffer.ctypes.data)
                return buffer

            def is_pinned(self, memory: Any) -> bool:
                return memory.ctypes.data in played.pinned

            def upload(self, stream: Any, numbers: Any) -> torch.Tensor:
                del stream
                played.device.issue()
                return torch.from_numpy(numbers.copy())

            def download(self, numbers: Any) -> Any:
                # The product's own as well: what it would wait for is to be seen.
                super().download(numbers)  # type: ignore[misc]
                on_host = np.full(len(numbers), -1, np.int64)

                def work() -> None:
                    on_host[:] = plain(numbers)

                played.engine.run(work)
                return on_host, played.engine.record_event()

            def choose(self, stream: Any, parts: Any) -> torch.Tensor:
                del stream
                played.kernels.append("choose")
                played.device.issue()
                return torch.from_numpy(
                    np.concatenate(
                        [
                            plain(numbers if chosen is None else numbers[chosen])
                            for numbers, chosen in parts
                        ]
                    )
                )

            def load_by_kernel(
                self, stream: Any, layer: int, memory: Any, rows: Any, *rest: Any
            ) -> None:
                first_byte, pages = rest
                played.kernels.append("load")
                self.load_by_engines(  # type: ignore[attr-defined]
                    stream, layer, memory, plain(rows), first_byte, plain(pages)
                )

        return PlayedStreams
