"""The device as the tiers below see it, where layers lie singly and copies are queued.

The counterpart of ``engines/sglang/layered/device_pool.py`` on streams. What lies on
the device goes by queued copies, a layer at a time, for the layers of a page have no
place in common. What lies in the host region is copied by the calling thread, which is
never the engine's. So are activations: from the act area by copies of their own, and
else between rows.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
from sgl_tiered_kernels import page_copy

from sgl_tiered.core.layout import PageLayout
from sgl_tiered.engines.device.act_transfers import ActTransfers
from sgl_tiered.pipelines.stream_layers import LayerCopyOps, LayerStores
from sgl_tiered.pipelines.stream_pool import LoadWay, StreamPool
from sgl_tiered.pipelines.streams import StreamArrival

__all__ = ["LayeredStreamPool", "Places", "StreamActBytes"]

UInt8s = npt.NDArray[np.uint8]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


class Places(Protocol):
    """Says where pages of a transfer lie.

    Attributes:
        transfers: int32 [num_layers, num_pages], a layer-page, or -1 for the host row.
        act_transfers: the same of activations; None where pages are KV only.
    """

    transfers: Int32s
    act_transfers: ActTransfers | None


class StreamActBytes:
    """The memory that holds activations, on a device with streams.

    Args:
        ops: the device's copies; pages are places of the act area.
        region: uint8 [num_act_rows, >= page_bytes], their host region.
    """

    def __init__(self, ops: LayerCopyOps, region: UInt8s) -> None:
        self._layout = ops.layout
        self._region = region
        self._stores = LayerStores(ops)

    def load(self, layer: int, region: UInt8s, rows: Int64s, act_rows: Int64s) -> None:
        """Copy one layer of rows of another region to rows of ours."""
        _between(self._layout, layer, self._region, act_rows, region, rows)

    def store(
        self,
        region: UInt8s,
        rows: Int64s,
        places: Int32s,
        act_rows: Int64s,
        after: object,
    ) -> None:
        """Copy activations, all layers, to rows of another region.

        Args:
            region: uint8 [num_rows, >= page_bytes].
            rows: int64 [n], where they go.
            places: int32 [num_layers, n], in the act area, or -1 where the host row is
                to be read.
            act_rows: int64 [n], of our region.
            after: mark of the work that writes the places.

        Raises:
            RuntimeError: the device, or a copy on the host, failed.
        """
        self._stores.begin(after)
        try:
            for layer, some in enumerate(places):
                here, away = some >= 0, some < 0
                if here.any():
                    numbers = some[here].astype(np.int64)
                    self._stores.queue(layer, region, rows[here], numbers)
                if away.any():
                    to, frm = rows[away], act_rows[away]
                    _between(self._layout, layer, region, to, self._region, frm)
        finally:
            self._stores.end()

    def close(self) -> None:
        """End the host thread, if there is one."""
        self._stores.close()


class LayeredStreamPool:
    """A ``DevicePool`` over a `LayeredPool` on streams; one thread loads, one stores.

    Args:
        ops: the device's copies; pages are layer-pages of one tensor.
        region: uint8 [num_pages, >= page_bytes], the host region.
        places: of pages that are transferred; noted before a transfer is submitted.
        by_kernel: load layers by the kernel, not by the copy engines.
        acts: holds activations; None where pages are KV only.
    """

    def __init__(
        self,
        ops: LayerCopyOps,
        region: UInt8s,
        places: Places,
        *,
        by_kernel: bool = False,
        acts: StreamActBytes | None = None,
    ) -> None:
        self._acts = acts
        self._layout = ops.layout
        self._region = region
        self._places = places
        way = LoadWay.KERNEL if by_kernel else LoadWay.ENGINES
        self._loads = StreamPool(ops, way=way)
        self._stores = LayerStores(ops)

    @property
    def layout(self) -> PageLayout:
        """Shape of one page."""
        return self._layout

    @property
    def waiter_copies(self) -> bool:
        """The copies run beside the forward."""
        return False

    @property
    def way(self) -> LoadWay:
        """How layers are loaded to where they lie."""
        return self._loads.way

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
        host_rows = device_pages
        if self._acts is not None:
            noted = self._noted
            host_rows, is_act = noted.rows[device_pages], noted.is_act[device_pages]
            if is_act.any():
                self._acts.load(layer, region, rows[is_act], host_rows[is_act])
                rows, device_pages = rows[~is_act], device_pages[~is_act]
                host_rows = host_rows[~is_act]
        places = self._places.transfers[layer, device_pages]
        here, away = places >= 0, places < 0
        if away.any():
            self._between(layer, self._region, host_rows[away], region, rows[away])
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
        host_rows = device_pages
        if self._acts is not None:
            noted = self._noted
            host_rows, is_act = noted.rows[device_pages], noted.is_act[device_pages]
            if is_act.any():
                pages = device_pages[is_act]
                places = noted.places[:, pages]
                self._acts.store(region, rows[is_act], places, host_rows[is_act], after)
                rows, device_pages = rows[~is_act], device_pages[~is_act]
                host_rows = host_rows[~is_act]
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
                    frm = host_rows[away]
                    self._between(layer, region, rows[away], self._region, frm)
        finally:
            # Also after an error: the caller may write to rows and pages then.
            self._stores.end()

    def close(self) -> None:
        """End the host threads, if there are any."""
        self._stores.close()
        if self._acts is not None:
            self._acts.close()

    @property
    def _noted(self) -> ActTransfers:
        noted = self._places.act_transfers
        assert noted is not None, "activations without a binding that knows of them"
        return noted

    def _between(
        self, layer: int, dst: UInt8s, dst_rows: Int64s, src: UInt8s, src_rows: Int64s
    ) -> None:
        _between(self._layout, layer, dst, dst_rows, src, src_rows)


def _between(
    layout: PageLayout,
    layer: int,
    dst: UInt8s,
    dst_rows: Int64s,
    src: UInt8s,
    src_rows: Int64s,
) -> None:
    """Copy one layer of rows; its keys and its values lie side by side."""
    offset, num_bytes = layout.key_offset(layer), layout.layer_page_bytes
    page_copy.copy_rows(dst, dst_rows, offset, src, src_rows, offset, num_bytes)
