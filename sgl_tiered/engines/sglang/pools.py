"""SGLang's KV pool as the pipelines see it: layers of pages, as bytes.

Two forms: `CpuDevicePool` copies with the page_copy kernel, without the interpreter
lock, on the transfer thread; `CudaDevicePool` copies on a stream of its own and waits
for it there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sgl_tiered_kernels import page_copy

from sgl_tiered.core.layout import PageLayout
from sgl_tiered.errors import EngineCompatibilityError

__all__ = ["CpuDevicePool", "CudaDevicePool", "make_device_pool", "page_layout"]

Bytes = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]


def page_layout(pool: Any, page_tokens: int) -> PageLayout:
    """Read the shape of a page off an MHA pool.

    Raises:
        EngineCompatibilityError: the pool is not laid out as token rows of K and of V.
    """
    keys, values = pool.k_buffer, pool.v_buffer
    for buffer in (*keys, *values):
        if buffer.dim() != 3 or not buffer.is_contiguous():
            raise EngineCompatibilityError(
                "The KV pool of this model is laid out in a way that sgl-tiered does "
                "not know; serve it without --radix-cache-backend tiered."
            )
    row_bytes = {buffer[0].numel() * buffer.element_size() for buffer in keys + values}
    if len(row_bytes) != 1:
        raise EngineCompatibilityError(
            "Keys and values of this model differ in size, which sgl-tiered does not "
            "support yet; serve it without --radix-cache-backend tiered."
        )
    return PageLayout(len(keys), page_tokens, row_bytes.pop())


def make_device_pool(pool: Any, layout: PageLayout, forward_stream: Any) -> Any:
    """Return the device pool that fits where the tensors of ``pool`` are."""
    device = pool.k_buffer[0].device.type
    if device == "cpu":
        return CpuDevicePool(pool, layout)
    if device == "cuda":
        return CudaDevicePool(pool, layout, forward_stream)
    raise EngineCompatibilityError(
        f"sgl-tiered moves KV on CPU and CUDA devices, not on {device!r}; serve "
        "without --radix-cache-backend tiered."
    )


class CpuDevicePool:
    """The device pool of the CPU platform; work is done when a call returns."""

    def __init__(self, pool: Any, layout: PageLayout) -> None:
        self._layout = layout
        self._keys = [_as_pages(buffer, layout) for buffer in pool.k_buffer]
        self._values = [_as_pages(buffer, layout) for buffer in pool.v_buffer]
        page_copy.prepare()

    @property
    def layout(self) -> PageLayout:
        """Shape of one page."""
        return self._layout

    def mark(self) -> object:
        """Return nothing to wait for: the CPU's forward ends before its results."""
        return None

    @property
    def waiter_copies(self) -> bool:
        """Copies and forward share the cores."""
        return True

    def load_layer(
        self,
        layer: int,
        region: Bytes,
        rows: Int64s,
        device_pages: Int64s,
        *,
        by_waiter: bool = False,
    ) -> None:
        """Copy one layer of pages from rows of ``region`` to the pool."""
        page_copy.copy_layer(
            self._keys[layer],
            self._values[layer],
            device_pages,
            region,
            rows,
            self._layout.key_offset(layer),
            self._layout.value_offset(layer),
            self._layout.part_bytes,
            by_team=by_waiter,
        )

    def store_pages(
        self, region: Bytes, rows: Int64s, device_pages: Int64s, after: object
    ) -> None:
        """Copy all layers of pages from the pool to rows of ``region``."""
        del after
        for layer in range(self._layout.num_layers):
            page_copy.gather_layer(
                region,
                rows,
                self._layout.key_offset(layer),
                self._layout.value_offset(layer),
                self._keys[layer],
                self._values[layer],
                device_pages,
                self._layout.part_bytes,
            )


class CudaDevicePool:
    """The device pool on CUDA: one stream per direction, synchronised per call.

    A load waits on its own stream only, so the forward goes on; the layer's event is
    set once the copy is done, and the forward never reads a layer before.
    """

    def __init__(self, pool: Any, layout: PageLayout, forward_stream: Any) -> None:
        self._layout = layout
        self._device = pool.k_buffer[0].device
        self._keys = [_as_byte_pages(buffer, layout) for buffer in pool.k_buffer]
        self._values = [_as_byte_pages(buffer, layout) for buffer in pool.v_buffer]
        self._forward_stream = forward_stream
        self._load_stream = torch.cuda.Stream(self._device)
        self._store_stream = torch.cuda.Stream(self._device)

    @property
    def layout(self) -> PageLayout:
        """Shape of one page."""
        return self._layout

    def mark(self) -> object:
        """Record events behind the scheduler's and the forward's work so far."""
        streams = [torch.cuda.current_stream(self._device)]
        if self._forward_stream is not None:
            streams.append(self._forward_stream)
        events = [torch.cuda.Event() for _ in streams]
        for event, stream in zip(events, streams, strict=True):
            event.record(stream)
        return events

    @property
    def waiter_copies(self) -> bool:
        """The copy engine works beside the forward."""
        return False

    def load_layer(
        self,
        layer: int,
        region: Bytes,
        rows: Int64s,
        device_pages: Int64s,
        *,
        by_waiter: bool = False,
    ) -> None:
        """Copy one layer of pages from rows of ``region`` to the pool."""
        del by_waiter
        begin = self._layout.key_offset(layer)
        end = begin + self._layout.layer_page_bytes
        part = torch.from_numpy(region[rows, begin:end]).pin_memory()
        with torch.cuda.stream(self._load_stream):
            moved = part.to(self._device, non_blocking=True)
            pages = torch.from_numpy(device_pages).to(self._device)
            self._keys[layer].index_copy_(0, pages, moved[:, : self._part])
            self._values[layer].index_copy_(0, pages, moved[:, self._part :])
        self._load_stream.synchronize()

    def store_pages(
        self, region: Bytes, rows: Int64s, device_pages: Int64s, after: object
    ) -> None:
        """Copy all layers of pages from the pool to rows of ``region``."""
        assert isinstance(after, list)
        with torch.cuda.stream(self._store_stream):
            for event in after:
                self._store_stream.wait_event(event)
            pages = torch.from_numpy(device_pages).to(self._device)
            parts = [
                part[pages]
                for layer in range(self._layout.num_layers)
                for part in (self._keys[layer], self._values[layer])
            ]
            whole = torch.cat(parts, dim=1).to("cpu", non_blocking=True)
        self._store_stream.synchronize()
        region[rows, : self._layout.page_bytes] = whole.numpy()

    @property
    def _part(self) -> int:
        return self._layout.part_bytes


def _as_byte_pages(buffer: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """View [slots, heads, dim] as uint8 [pages, part_bytes]."""
    rows = buffer.view(buffer.shape[0], -1).view(torch.uint8)
    num_pages = buffer.shape[0] // layout.page_tokens
    return rows[: num_pages * layout.page_tokens].view(num_pages, layout.part_bytes)


def _as_pages(buffer: torch.Tensor, layout: PageLayout) -> Bytes:
    pages: Bytes = _as_byte_pages(buffer, layout).numpy()
    return pages
