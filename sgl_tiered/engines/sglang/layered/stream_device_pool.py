"""The device as the tiers below see it, where layers lie singly and copies are queued.

The counterpart of ``device_pool.py`` on streams. What lies on the device goes by
queued copies, a layer at a time, for the layers of a page have no place in common. What
lies in the host region is copied by the calling thread, which is never the engine's.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
from sgl_tiered_kernels import page_copy

from sgl_tiered.core.layout import PageLayout
from sgl_tiered.pipelines.stream_layers import LayerCopyOps, LayerStores
from sgl_tiered.pipelines.stream_pool import StreamPool
from sgl_tiered.pipelines.streams import StreamArrival

__all__ = ["LayeredStreamPool", "Places"]

UInt8s = npt.NDArray[np.uint8]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

_ALL = 1 << 62


class Places(Protocol):
    """Says where pages of a transfer lie.

    Attributes:
        transfers: int32 [num_layers, num_pages], a layer-page, or -1 for the host row.
    """

    transfers: Int32s


class LayeredStreamPool:
    """A ``DevicePool`` over a `LayeredPool` on streams; one thread loads, one stores.

    Args:
        ops: the device's copies; pages are layer-pages of one tensor.
        region: uint8 [num_pages, >= page_bytes], the host region.
        places: of pages that are transferred; noted before a transfer is submitted.
        by_kernel: load layers by the kernel, not by the copy engines.
    """

    def __init__(
        self,
        ops: LayerCopyOps,
        region: UInt8s,
        places: Places,
        *,
        by_kernel: bool = False,
    ) -> None:
        self._layout = ops.layout
        self._region = region
        self._places = places
        self._loads = StreamPool(ops, kernel_below_bytes=_ALL if by_kernel else 0)
        self._stores = LayerStores(ops)

    @property
    def layout(self) -> PageLayout:
        """Shape of one page."""
        return self._layout

    @property
    def waiter_copies(self) -> bool:
        """The copies run beside the forward."""
        return False

    def mark(self) -> object:
        """Record an event behind all work that the engine has queued so far."""
        return self._loads.mark()

    def load_layer(
        self,
        layer: int,
        region: UInt8s,
        rows: Int64s,
        device_pages: Int64s,
        *,
        after: object = None,
        by_waiter: bool = False,
    ) -> StreamArrival:
        """Bring one layer of pages from rows of ``region`` to where they are to lie.

        What goes to the host region is there when the call returns. The rest is
        queued; the arrival stands for all that was queued before as well.
        """
        del by_waiter
        places = self._places.transfers[layer, device_pages]
        here, away = places >= 0, places < 0
        if away.any():
            self._between(layer, self._region, device_pages[away], region, rows[away])
        if not here.any():
            return self._loads.fence()
        physical = places[here].astype(np.int64)
        return self._loads.load_layer(layer, region, rows[here], physical, after=after)

    def store_pages(
        self, region: UInt8s, rows: Int64s, device_pages: Int64s, after: object
    ) -> None:
        """Copy all layers of pages from where they lie to rows of ``region``.

        Raises:
            RuntimeError: the device, or a copy on the host, failed.
        """
        if not len(rows):
            return
        self._stores.begin(after)
        try:
            for layer in range(self._layout.num_layers):
                places = self._places.transfers[layer, device_pages]
                here, away = places >= 0, places < 0
                if here.any():
                    physical = places[here].astype(np.int64)
                    self._stores.queue(layer, region, rows[here], physical)
                if away.any():
                    pages = device_pages[away]
                    self._between(layer, region, rows[away], self._region, pages)
        finally:
            # Also after an error: the caller may write to rows and pages then.
            self._stores.end()

    def close(self) -> None:
        """End the host thread, if there is one."""
        self._stores.close()

    def _between(
        self, layer: int, dst: UInt8s, dst_rows: Int64s, src: UInt8s, src_rows: Int64s
    ) -> None:
        """Copy one layer of rows; its keys and its values lie side by side."""
        offset = self._layout.key_offset(layer)
        num_bytes = self._layout.layer_page_bytes
        page_copy.copy_rows(dst, dst_rows, offset, src, src_rows, offset, num_bytes)
