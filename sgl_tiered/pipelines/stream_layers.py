"""Layer-pages between a device and host rows, on streams.

Up goes through a ``StreamPool`` whose layers all lie in one tensor: its own stream, one
event behind each copy, and the model's stream waits for that event. Down has a stream
of its own too; a layer of a page is two pieces, its keys and its values, which the copy
engines take straight to the row. Where the rows are not pinned, both go through pinned
buffers, and on the way down a host thread does the second half.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from sgl_tiered.pipelines.base import Arrival
from sgl_tiered.pipelines.host_copies import HostCopier, HostCopy
from sgl_tiered.pipelines.stream_pool import CopyOps, StreamPool
from sgl_tiered.pipelines.streams import Event, Stream

__all__ = ["LayerCopyOps", "StreamLayerCopier"]

UInt8s = npt.NDArray[np.uint8]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

_NUM_BUFFERS = 4
_BUFFER_BYTES = 4 << 20
"""160 us of a link of 25 GB/s, against some 10 us to queue a copy or wake a thread."""


class LayerCopyOps(CopyOps, Protocol):
    """What a device offers besides; its pages are layer-pages of one tensor."""

    def store_by_engines(
        self,
        stream: Stream,
        layer: int,
        memory: UInt8s,
        rows: Int64s,
        first_byte: int,
        pages: Int64s,
    ) -> None:
        """Copy keys and values of pages to ``first_byte`` of rows.

        Args:
            stream: the copy starts after what is queued there.
            layer: which tensor; all are the same here.
            memory: uint8 [rows, row_bytes], pinned.
            rows: int64 [n].
            first_byte: of the layer's keys in a row; its values follow them.
            pages: int64 [n].
        """
        ...


class StreamLayerCopier:
    """The ``LayerCopier`` of a device with streams; see ``layered/base.py``.

    Args:
        ops: the device's copies.
        region: uint8 [num_rows, >= page_bytes], the host region.
        ahead: copies to the device may be queued behind each other. False where a
            guard is asked before each one (``contention.py``): then a call returns
            once its copy has ended, since what is queued cannot be held back.
        num_buffers: pinned buffers on the way down, where rows are not pinned.
        buffer_bytes: of each; grows to hold one layer-page.
    """

    def __init__(
        self,
        ops: LayerCopyOps,
        region: UInt8s,
        *,
        ahead: bool = True,
        num_buffers: int = _NUM_BUFFERS,
        buffer_bytes: int = _BUFFER_BYTES,
    ) -> None:
        self._ops = ops
        self._layout = ops.layout
        self._region = region
        self._ahead = ahead
        self._pool = StreamPool(ops)
        self._down = ops.new_stream(urgent=False)
        self._host: HostCopier | None = None
        if not ops.is_pinned(region):
            self._host = HostCopier(
                ops.pinned,
                num_buffers=num_buffers,
                num_bytes=max(buffer_bytes, ops.layout.layer_page_bytes),
            )

    @property
    def waiter_copies(self) -> bool:
        """The copies run beside the forward."""
        return False

    @property
    def pool(self) -> StreamPool:
        """The way up, for ``tune``."""
        return self._pool

    def mark(self) -> object:
        """Record an event behind all work that the engine has queued so far."""
        return self._pool.mark()

    def to_device(
        self, layer: int, rows: Int64s, physical: Int32s, after: object
    ) -> Arrival:
        """Queue one layer of host rows to layer-pages."""
        pages = physical.astype(np.int64)
        arrival = self._pool.load_layer(layer, self._region, rows, pages, after=after)
        if not self._ahead:
            arrival.finish()
        return arrival

    def to_host(
        self, layer: int, physical: Int32s, rows: Int64s, after: object
    ) -> None:
        """Copy layer-pages to one layer of host rows; return when they are whole.

        Raises:
            RuntimeError: the device failed.
        """
        if not len(rows):
            return
        assert isinstance(after, list), f"not a mark of this copier: {after!r}"
        for event in after:
            self._down.wait_event(event)
        pages = physical.astype(np.int64)
        offset = self._layout.key_offset(layer)
        copies: list[HostCopy] = []
        try:
            if self._host is None:
                self._ops.store_by_engines(
                    self._down, layer, self._region, rows, offset, pages
                )
            else:
                copies = self._by_buffers(self._host, layer, rows, offset, pages)
        finally:
            # Also after an error: the caller may write to rows and pages then.
            try:
                self._down.synchronize()
            finally:
                _end_all(copies)

    def close(self) -> None:
        """End the host thread, if there is one."""
        if self._host is not None:
            self._host.close()

    def _by_buffers(
        self, host: HostCopier, layer: int, rows: Int64s, offset: int, pages: Int64s
    ) -> list[HostCopy]:
        width = self._layout.layer_page_bytes
        step = max(host.num_bytes // width, 1)
        copies = []
        for begin in range(0, len(rows), step):
            part = slice(begin, begin + step)
            count = len(rows[part])

            def queue(buffer: UInt8s, part: slice = part, count: int = count) -> Event:
                event: Event
                self._ops.store_by_engines(
                    self._down,
                    layer,
                    buffer.reshape(count, width),
                    np.arange(count, dtype=np.int64),
                    0,
                    pages[part],
                )
                event = self._down.record_event()
                return event

            def land(buffer: UInt8s, part: slice = part, count: int = count) -> None:
                end = offset + width
                self._region[rows[part], offset:end] = buffer.reshape(count, width)

            copies.append(host.put(count * width, queue, land))
        return copies


def _end_all(copies: list[HostCopy]) -> None:
    """Wait for all of them; raise what the first that failed says."""
    error: RuntimeError | None = None
    for copy in copies:
        try:
            copy.wait()
        except RuntimeError as problem:
            error = error or problem
    if error is not None:
        raise error
