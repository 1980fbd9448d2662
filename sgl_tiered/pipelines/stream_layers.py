"""Layer-pages between a device and host rows, on streams.

Up goes through a ``StreamPool`` whose layers all lie in one tensor: its own stream, one
event behind each copy, and the model's stream waits for that event. Down has a stream
of its own too; a layer of a page is two pieces, its keys and its values, which the copy
engines take straight to the row. Where the rows are not pinned, both go through pinned
buffers, and on the way down a host thread does the second half.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sgl_tiered.pipelines.base import Arrival
from sgl_tiered.pipelines.host_copies import HostCopier, HostCopy
from sgl_tiered.pipelines.stream_pool import CopyOps, StreamPool
from sgl_tiered.pipelines.streams import Event, Stream

__all__ = ["LayerCopyOps", "LayerStores", "StreamLayerCopier"]

UInt8s = npt.NDArray[np.uint8]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

_NUM_BUFFERS = 4
_BUFFER_BYTES = 4 << 20
"""160 us of a link of 25 GB/s, against some 10 us to queue a copy or wake a thread."""
_BREAKS_ONE_IN = 4


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


class LayerStores:
    """The way down: one layer after the other, to rows of any region.

    One thread at a time. Has a stream of its own, and a ring of pinned buffers with a
    host thread as soon as a region needs them.

    Args:
        ops: the device's copies.
        num_buffers: pinned buffers, where rows are not pinned.
        buffer_bytes: of each; grows to hold one layer-page.
    """

    def __init__(
        self,
        ops: LayerCopyOps,
        *,
        num_buffers: int = _NUM_BUFFERS,
        buffer_bytes: int = _BUFFER_BYTES,
    ) -> None:
        self._ops = ops
        self._layout = ops.layout
        self._stream = ops.new_stream(urgent=False)
        self._num_buffers = num_buffers
        self._buffer_bytes = max(buffer_bytes, ops.layout.layer_page_bytes)
        self._host: HostCopier | None = None
        self._copies: list[HostCopy] = []

    def begin(self, after: object) -> None:
        """Let what is stored from now on wait for a mark."""
        assert isinstance(after, list), f"not a mark of this device: {after!r}"
        for event in after:
            self._stream.wait_event(event)

    def queue(self, layer: int, region: UInt8s, rows: Int64s, pages: Int64s) -> None:
        """Queue one layer; rows are whole after ``end``, which has to follow.

        Args:
            layer: which part of each row.
            region: uint8 [num_rows, >= page_bytes].
            rows: int64 [n].
            pages: int64 [n], layer-pages.
        """
        offset = self._layout.key_offset(layer)
        if self._ops.is_pinned(region):
            self._ops.store_by_engines(self._stream, layer, region, rows, offset, pages)
        else:
            self._by_buffers(layer, region, rows, offset, pages)

    def end(self) -> None:
        """Block until all that was queued is in its rows; also after an error.

        Raises:
            RuntimeError: the device, or a copy on the host, failed.
        """
        copies, self._copies = self._copies, []
        try:
            self._stream.synchronize()
        finally:
            _end_all(copies)

    def close(self) -> None:
        """End the host thread, if there is one."""
        if self._host is not None:
            self._host.close()

    def _by_buffers(
        self, layer: int, region: UInt8s, rows: Int64s, offset: int, pages: Int64s
    ) -> None:
        host = self._host
        if host is None:
            host = self._host = HostCopier(
                self._ops.pinned,
                num_buffers=self._num_buffers,
                num_bytes=self._buffer_bytes,
            )
        width = self._layout.layer_page_bytes
        step = max(host.num_bytes // width, 1)
        for begin in range(0, len(rows), step):
            part = slice(begin, begin + step)
            count = len(rows[part])

            def queue(buffer: UInt8s, part: slice = part, count: int = count) -> Event:
                event: Event
                self._ops.store_by_engines(
                    self._stream,
                    layer,
                    buffer.reshape(count, width),
                    np.arange(count, dtype=np.int64),
                    0,
                    pages[part],
                )
                event = self._stream.record_event()
                return event

            def land(buffer: UInt8s, part: slice = part, count: int = count) -> None:
                end = offset + width
                region[rows[part], offset:end] = buffer.reshape(count, width)

            self._copies.append(host.put(count * width, queue, land))


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
        breaks_staging: for tests: leave one page in four of what goes up as it was.
    """

    def __init__(
        self,
        ops: LayerCopyOps,
        region: UInt8s,
        *,
        ahead: bool = True,
        num_buffers: int = _NUM_BUFFERS,
        buffer_bytes: int = _BUFFER_BYTES,
        breaks_staging: bool = False,
    ) -> None:
        self._region = region
        self._ahead = ahead
        self._breaks_staging = breaks_staging
        self._pool = StreamPool(ops)
        # Units of a forward and what returns to stay come from two threads.
        self._up = threading.Lock()
        self._stores = LayerStores(
            ops, num_buffers=num_buffers, buffer_bytes=buffer_bytes
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
        if self._breaks_staging:
            kept = np.arange(len(rows)) % _BREAKS_ONE_IN != 0
            rows, physical = rows[kept], physical[kept]
        if not len(rows):
            with self._up:
                return self._pool.fence()
        pages = physical.astype(np.int64)
        with self._up:
            arrival = self._pool.load_layer(
                layer, self._region, rows, pages, after=after
            )
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
        self._stores.begin(after)
        try:
            self._stores.queue(layer, self._region, rows, physical.astype(np.int64))
        finally:
            # Also after an error: the caller may write to rows and pages then.
            self._stores.end()

    def close(self) -> None:
        """End the host thread, if there is one."""
        self._stores.close()


def _end_all(copies: Sequence[HostCopy]) -> None:
    """Wait for all of them; raise what the first that failed says."""
    error: RuntimeError | None = None
    for copy in copies:
        try:
            copy.wait()
        except RuntimeError as problem:
            error = error or problem
    if error is not None:
        raise error
