"""SGLang's KV pool as the pipelines see it: layers of pages, as bytes.

Two forms: `CpuDevicePool` copies with the page_copy kernel, without the interpreter
lock, on the transfer thread; on CUDA a `StreamPool` over `CudaOps` queues copies on
streams of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sgl_tiered_kernels import page_copy

from sgl_tiered.core.layout import PageLayout
from sgl_tiered.engines.device.cuda_ops import CudaOps, as_byte_pages
from sgl_tiered.engines.device.read_rows import ReadRows
from sgl_tiered.errors import EngineCompatibilityError
from sgl_tiered.pipelines.base import DevicePool
from sgl_tiered.pipelines.stream_pool import StreamPool

__all__ = ["CpuDevicePool", "make_device_pool", "page_layout"]

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


def make_device_pool(
    pool: Any,
    layout: PageLayout,
    forward_stream: Any,
    refused: Callable[[int], None] = lambda num_bytes: None,
    *,
    stores_between_forwards: bool = False,
) -> DevicePool:
    """Return the device pool that fits where the tensors of ``pool`` are.

    Args:
        pool: SGLang's.
        layout: of a page.
        forward_stream: on which SGLang's overlap scheduler runs the model; or None.
        refused: told of buffers that CUDA did not pin, in bytes.
        stores_between_forwards: none runs beside a forward.

    Raises:
        EngineCompatibilityError: they are on a device that we do not know.
    """
    device = pool.k_buffer[0].device.type
    if device == "cpu":
        return CpuDevicePool(pool, layout)
    if device == "cuda":
        ops = CudaOps(pool, layout, forward_stream, refused=refused)
        store_stream = ops.engine_streams()[-1] if stores_between_forwards else None
        return StreamPool(ops, staging=ops, store_stream=store_stream)
    raise EngineCompatibilityError(
        f"sgl-tiered moves KV on CPU and CUDA devices, not on {device!r}; serve "
        "without --radix-cache-backend tiered."
    )


class CpuDevicePool:
    """The device pool of the CPU platform; work is done when a call returns.

    Attributes:
        read_rows: also filled by what the engine's thread loads; None for the pool
            alone. Set, before each forward, by its attention.
    """

    def __init__(self, pool: Any, layout: PageLayout) -> None:
        self.read_rows: ReadRows | None = None
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
        after: object = None,
        by_waiter: bool = False,
    ) -> None:
        """Copy one layer of pages from rows of ``region`` to the pool."""
        del after
        read = self.read_rows if by_waiter else None
        if read is None:
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
            return
        read_rows = read.of_pages(device_pages)
        page_copy.copy_layer_twice(
            self._keys[layer],
            self._values[layer],
            device_pages,
            read.keys,
            read.values,
            read_rows,
            region,
            rows,
            self._layout.key_offset(layer),
            self._layout.value_offset(layer),
            self._layout.part_bytes,
            by_team=True,
        )
        read.fill(layer, read_rows)

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


def _as_pages(buffer: torch.Tensor, layout: PageLayout) -> Bytes:
    pages: Bytes = as_byte_pages(buffer, layout).numpy()
    return pages
