"""A forward whose prefix lies in host memory, layer by layer through two halves.

Each layer of the prefix is copied into one half of the staging memory while the layer
before it is computed from the other, by the product's mover and copier, and read there
by indices that are written before the layer runs. Measured: the forward with all layers
on the device, the copies by themselves, and both; then the way down, a layer at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from movement.place import Place
from movement.stack import Stack, StackShape

from sgl_tiered.core.layout import PageLayout
from sgl_tiered.engines.device.indices import fill_slots, page_positions, page_starts
from sgl_tiered.engines.device.layer_copier import CpuLayerCopier
from sgl_tiered.engines.sglang.layered.cuda import cuda_copies
from sgl_tiered.layered.mover import LayerMover
from sgl_tiered.layered.units import Unit

__all__ = ["measure_layers"]


def measure_layers(
    place: Place,
    model: StackShape,
    *,
    page_tokens: int,
    cached_tokens: int,
    new_tokens: int,
    repeats: int,
) -> Iterator[dict[str, Any]]:
    """Yield one record per kind of host memory: pinned, and (on a GPU) pageable.

    Raises:
        AssertionError: the streamed forward gave another answer, or other bytes came
            down.
    """
    for pinned in (True, False) if place.is_cuda else (False,):
        torch.manual_seed(0)
        x = torch.randn(
            new_tokens, model.hidden, device=place.device, dtype=torch.bfloat16
        )
        run = _Run(place, model, page_tokens, cached_tokens // page_tokens, pinned)
        try:
            yield {
                "kind": "layers",
                "way": "pinned" if pinned else "pageable",
                "page_tokens": page_tokens,
                "cached_tokens": cached_tokens,
                "new_tokens": new_tokens,
                "stream_bytes": run.stream_bytes,
                **run.measure(x, repeats),
            }
        finally:
            run.close()


class _Run:
    """One tensor of layer-pages: all layers of a prefix, and two halves."""

    def __init__(
        self,
        place: Place,
        model: StackShape,
        page_tokens: int,
        count: int,
        pinned: bool,
    ) -> None:
        self._place, self._count, self._page_tokens = place, count, page_tokens
        self._num_layers = model.num_layers
        self._stack = Stack(model, place.device)
        size = (
            (model.num_layers + 2) * count * page_tokens,
            model.num_heads,
            model.head_dim,
        )
        keys, values = (
            torch.zeros(size, device=place.device, dtype=torch.bfloat16)
            for _ in range(2)
        )
        token_bytes = model.hidden * keys.element_size()
        self._layout = PageLayout(model.num_layers, page_tokens, token_bytes)
        self._memory = place.region(count, self._layout, pinned=pinned)
        shape = self._memory.array.shape
        noise = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        # Finite KV: noise of all bit patterns holds NaN, which equals nothing.
        self._memory.array[:] = noise & 0x3F
        self._buffers = SimpleNamespace(
            k_buffer=[keys] * model.num_layers,
            v_buffer=[values] * model.num_layers,
            region=self._memory,
        )
        self._copier: Any = (
            cuda_copies(self._buffers, self._layout, None).copier
            if place.is_cuda
            else CpuLayerCopier(self._buffers, self._layout)
        )
        self._mover = LayerMover(self._copier, self._layout.layer_page_bytes)
        self._rows = np.random.default_rng(1).permutation(count).astype(np.int64)
        places = np.arange((model.num_layers + 2) * count, dtype=np.int32)
        *self._resident, first, second = places.reshape(-1, count)
        self._halves = (first, second)
        tokens = np.arange(count * page_tokens, dtype=np.int32)
        logical = torch.from_numpy(tokens).to(place.device)
        self._positions = page_positions(logical, page_tokens)
        self._offsets = logical % page_tokens
        self._indices = torch.empty_like(logical)
        self._slots = torch.empty_like(logical, dtype=torch.int64)

    @property
    def stream_bytes(self) -> int:
        """Bytes of all layers of the prefix."""
        return self._count * self._layout.page_bytes

    def close(self) -> None:
        self._place.synchronize()
        self._mover.close()
        self._memory.close()

    def measure(self, x: torch.Tensor, repeats: int) -> dict[str, Any]:
        """Return the raw seconds of each form."""
        for layer, places in enumerate(self._resident):
            self._copier.to_device(layer, self._rows, places, self._copier.mark())
        self._place.synchronize()
        wanted = self._forward(x)
        seconds: dict[str, list[float]] = {"forward_s": [], "link_s": [], "both_s": []}
        stalls = []
        for turn in range(repeats + 1):
            for name in seconds:
                self._place.synchronize()
                began = time.perf_counter()
                answer = self._streamed(x) if name == "both_s" else None
                if name == "forward_s":
                    answer = self._forward(x)
                if name == "link_s":
                    self._stream(None)
                self._place.synchronize()
                taken_s = time.perf_counter() - began
                if turn:
                    seconds[name].append(taken_s)
                if answer is not None:
                    assert torch.equal(answer, wanted), f"{name}: another answer"
            if turn:
                stalls.append(self._stall_s)
        return {**seconds, "stall_s": stalls, "down_s": self._down(repeats)}

    def _read_at(self, places: np.ndarray) -> None:
        """Write where the prefix lies, as the attention backend does for a layer."""
        starts = torch.from_numpy(page_starts(places, self._page_tokens))
        fill_slots(
            self._indices,
            starts.to(self._place.device),
            self._positions,
            self._offsets,
        )
        self._slots.copy_(self._indices)

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._stack.forward(
            x, self._buffers, self._slots, lambda n: self._read_at(self._resident[n])
        )

    def _streamed(self, x: torch.Tensor) -> torch.Tensor:
        answer = self._stream(x)
        assert answer is not None
        return answer

    def _stream(self, x: torch.Tensor | None) -> torch.Tensor | None:
        """Bring all layers through the halves, under a forward or by themselves."""
        for half in self._halves:
            self._buffers.k_buffer[0][int(half[0]) * self._page_tokens] = 7.0  # spoil
        stream = self._mover.stream(
            [
                Unit(layer, 0, self._rows, self._halves[layer % 2])
                for layer in range(self._num_layers)
            ]
        )

        def wait_layer(layer: int) -> None:
            if layer:
                stream.done(layer - 1)
            stream.wait(layer)
            self._read_at(self._halves[layer % 2])

        answer = None
        if x is None:
            for layer in range(self._num_layers):
                wait_layer(layer)
        else:
            answer = self._stack.forward(x, self._buffers, self._slots, wait_layer)
        self._stall_s = stream.end()
        assert not stream.failed, f"copies failed: {stream.failed}"
        return answer

    def _down(self, repeats: int) -> list[float]:
        """Bring layers down, one at a time; return the seconds of each turn."""
        rows = self._rows[::-1].copy()
        before = self._memory.array[self._rows].copy()
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            for layer, places in enumerate(self._resident):
                self._copier.to_host(layer, places, rows, self._copier.mark())
            seconds.append(time.perf_counter() - began)
        width = self._layout.page_bytes
        same = np.array_equal(self._memory.array[rows][:, :width], before[:, :width])
        assert same, "other bytes came down"
        self._memory.array[self._rows] = before
        return seconds
