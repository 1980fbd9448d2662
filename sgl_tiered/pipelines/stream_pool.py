"""A device pool over streams: copies are queued, and the device orders them.

Loads go to a stream of their own. The loader thread only queues; an event behind each
layer is what the engine's stream waits for, so that no thread waits for a copy except
the loader's, once, at the end. A load starts after the work that the engine had queued
when it was submitted: that work may still read what its slots held before.

Pieces reach the device in one of three ways (``LoadWay``): by its copy engines, which
leave its cores alone; by a kernel that reads pinned memory over the link, which small
scattered pieces need; or some layers at once by the copy engines to device memory of
our own, so that pieces are large, and from there by a kernel, which then takes the
device's cores for no longer than its own memory needs. The copy engines alone cannot be
queued before the host knows where pages lie (see ``page_numbers.py``), so where they
would have to wait it is the kernel. ``StreamPool.tune`` finds which is best. Stores
gather pages into device memory first, so that a page leaves as one piece, and then go
by the copy engines; two halves let the one run under the other.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.layout import PageLayout
from sgl_tiered.pipelines.page_numbers import (
    PageNumbers,
    QueuedNumbers,
    QueuedPages,
    host_numbers,
)
from sgl_tiered.pipelines.streams import BufferRing, Event, Stream, StreamArrival

__all__ = ["CopyOps", "LoadWay", "StagingOps", "StreamPool", "scattered"]

UInt8s = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]

_KERNEL_BELOW_BYTES = 64 << 10
"""Pieces of a layer smaller than this go by the kernel, until ``tune`` has measured."""
_STAGED_BYTES = 256 << 10
"""Of a piece that is staged: as many layers of a page. 5 us at 50 GB/s, of which the
engines' own time for each copy is a fraction; and few layers wait for each other."""
_TUNE_RUNS = 5
_TUNE_PAGES = 256
"""Of 16 tokens: a prompt of 4,096. The better way at 32 may be the worse at 256."""
_NUM_BUFFERS = 4
_BUFFER_BYTES = 4 << 20
"""Pinned memory per buffer: 80 us at 50 GB/s, against some 10 us to queue a copy."""
_NUM_NUMBER_BUFFERS = 32
_NUMBER_BYTES = 4 << 10
"""Of page numbers on their way to the device. A load of two batches at once has some
ten of them, and each of the fetches under way has one. They pass only when the forward
before them has, and whoever launches the next one waits for its loads to be queued: so
there are more of them where these do not suffice."""
_HALVES = 2
_NUM_INDICES = 16


class LoadWay(enum.Enum):
    """How a layer of pages comes from pinned memory."""

    ENGINES = "engines"
    STAGED = "staged"
    KERNEL = "kernel"


_GAINS = {LoadWay.ENGINES: 1.0, LoadWay.STAGED: 1.05, LoadWay.KERNEL: 1.1}
"""So much faster has a way to be than the copy engines: kernels take cores from the
forward, one that reads over the link for as long as that takes."""


class CopyOps(Protocol):
    """What a device offers; all copies are queued, and run in the stream's order.

    ``numbers`` are int64 on the device, as returned by ``upload``. ``memory`` is uint8
    [rows, row_bytes], pinned; it must not change before the copy has run.
    """

    @property
    def layout(self) -> PageLayout:
        """Shape of one page."""
        ...

    @property
    def half_pages(self) -> int:
        """Pages that a half of the store's device memory holds."""
        ...

    def new_stream(self, *, urgent: bool) -> Stream:
        """Return a stream of its own."""
        ...

    def new_event(self) -> Event:
        """Return an event with a time."""
        ...

    def current_stream(self) -> Stream:
        """Return the stream on which the calling thread queues work."""
        ...

    def engine_streams(self) -> Sequence[Stream]:
        """Return the streams that may hold work of the engine, on its thread."""
        ...

    def pinned(self, num_bytes: int) -> UInt8s:
        """Allocate pinned host memory."""
        ...

    def is_pinned(self, memory: UInt8s) -> bool:
        """Return whether the device can reach this memory."""
        ...

    def upload(self, stream: Stream, numbers: Int64s) -> Any:
        """Copy int64 numbers from pinned memory to the device."""
        ...

    def download(self, numbers: Any) -> tuple[Int64s, Event]:
        """Queue a copy of numbers to pinned memory; the event stands behind it.

        Args:
            numbers: int64 [n] of the engine's, on the device; on the engine's thread.
        """
        ...

    def choose(self, stream: Stream, parts: Sequence[tuple[Any, Any]]) -> Any:
        """Put chosen ones of numbers behind each other.

        Args:
            stream: for this work.
            parts: numbers, and positions in them, or None for all.
        """
        ...

    def load_by_engines(
        self,
        stream: Stream,
        layer: int,
        memory: UInt8s,
        rows: Int64s,
        first_byte: int,
        pages: Int64s,
    ) -> None:
        """Copy a layer's keys and values from ``first_byte`` of rows to pages."""
        ...

    def load_by_kernel(
        self,
        stream: Stream,
        layer: int,
        memory: UInt8s,
        rows: Any,
        first_byte: int,
        pages: Any,
    ) -> None:
        """Do the same by a kernel; rows and pages are numbers on the device."""
        ...

    def gather(
        self, stream: Stream, half: int, pages: Any, begin: int, end: int
    ) -> None:
        """Copy pages[begin:end], all layers, to the first rows of a half."""
        ...

    def copy_out(self, stream: Stream, half: int, memory: UInt8s, rows: Int64s) -> None:
        """Copy the first rows of a half to rows of ``memory``, by the copy engines."""
        ...


class StagingOps(Protocol):
    """Device memory through which loads go, in two halves; see ``LoadWay.STAGED``."""

    @property
    def staging_bytes(self) -> int:
        """Bytes of a half; at least those of a page."""
        ...

    def bring(
        self,
        stream: Stream,
        half: int,
        memory: UInt8s,
        rows: Int64s,
        first_byte: int,
        num_bytes: int,
    ) -> None:
        """Copy ``num_bytes`` of each row to a half, one piece behind the other."""
        ...

    def scatter(
        self, stream: Stream, half: int, layers: range, pages: Any, part: slice
    ) -> None:
        """Copy pieces of these layers from a half to ``pages[part]`` by a kernel."""
        ...

    def free_staging(self) -> None:
        """Give the memory back until it is used again."""
        ...


class StreamPool:
    """A ``DevicePool`` on ``CopyOps``: one thread may load while another stores.

    Args:
        ops: the device.
        staging: where whoever loads a layer loads all that follow it as well, so that
            they may come with it; None if loads are of single layers.
        store_stream: on which stores run, in the order of its other work; streams of
            their own if None.
        way: of loading, until ``tune`` has measured; by the size of pieces if None.
        staged_bytes: of a piece that is staged: the layers that make as much.
        num_buffers: pinned buffers per direction.
        buffer_bytes: of each; grows to hold one page of a layer.
    """

    def __init__(
        self,
        ops: CopyOps,
        *,
        staging: StagingOps | None = None,
        store_stream: Stream | None = None,
        way: LoadWay | None = None,
        staged_bytes: int = _STAGED_BYTES,
        num_buffers: int = _NUM_BUFFERS,
        buffer_bytes: int = _BUFFER_BYTES,
    ) -> None:
        self._ops = ops
        self._layout = ops.layout
        self._staging = staging
        is_small = ops.layout.part_bytes < _KERNEL_BELOW_BYTES
        self._way = way or (LoadWay.KERNEL if is_small else LoadWay.ENGINES)
        layers = -(-staged_bytes // ops.layout.layer_page_bytes)
        self._staged_layers = min(layers, ops.layout.num_layers)
        self._load_stream = ops.new_stream(urgent=True)
        self._gather_stream = store_stream or ops.new_stream(urgent=False)
        self._store_stream = store_stream or ops.new_stream(urgent=False)

        def ring(num_bytes: int) -> BufferRing:
            return BufferRing(ops.pinned, num_buffers, max(buffer_bytes, num_bytes))

        self._load_ring = ring(self._layout.layer_page_bytes)
        self._number_ring = BufferRing(
            ops.pinned, _NUM_NUMBER_BUFFERS, _NUMBER_BYTES, grows=True
        )
        self._store_ring = ring(self._layout.page_bytes)
        self._waited_for: object = None
        self._indices: list[tuple[Int64s, PageNumbers, Any, Any]] = []
        self._staging_stream: Stream | None = None
        # When the half was last read; and the layers that came with earlier ones.
        self._staging_free: list[Event | None] = [None] * _HALVES
        self._next_half = 0
        self._came: list[tuple[Int64s, PageNumbers, range]] = []

    @property
    def layout(self) -> PageLayout:
        """Shape of one page."""
        return self._layout

    @property
    def waiter_copies(self) -> bool:
        """The copies run beside the forward."""
        return False

    @property
    def loads_by_kernel(self) -> bool:
        """Whether layers are loaded by the kernel, not by the copy engines."""
        return self._way is LoadWay.KERNEL

    @property
    def way(self) -> LoadWay:
        """How layers are loaded where nothing forbids it."""
        return self._way

    def reaches(self, region: UInt8s) -> bool:
        """Return whether the device reads a region in place, not through buffers."""
        return self._ops.is_pinned(region)

    def mark(self) -> object:
        """Record an event behind all work that the engine has queued so far."""
        return [stream.record_event() for stream in self._ops.engine_streams()]

    def queue_pages(self, numbers: Any) -> QueuedPages:
        """Return page numbers that the engine has on the device; never waits.

        Args:
            numbers: int64 [n], made by work that is queued; on the engine's thread.
        """
        on_host, ready = self._ops.download(numbers)
        return QueuedPages([(QueuedNumbers(numbers, on_host, ready), None)])

    def load_layer(
        self,
        layer: int,
        region: UInt8s,
        rows: Int64s,
        device_pages: PageNumbers,
        *,
        after: object = None,
        by_waiter: bool = False,
    ) -> StreamArrival:
        """Queue one layer of pages from rows of ``region`` to the device."""
        del by_waiter
        ops, stream = self._ops, self._load_stream
        self._wait_for(after)
        begin, end = ops.new_event(), ops.new_event()
        stream.record_event(begin)
        try:
            if ops.is_pinned(region):
                offset = self._layout.key_offset(layer)
                self._load(layer, region, rows, offset, device_pages)
            else:
                self._load_by_buffers(layer, region, rows, device_pages)
        except BaseException:
            # What is queued already reads rows that the caller will give back.
            if self._staging_stream is not None:
                self._staging_stream.synchronize()
            stream.synchronize()
            raise
        stream.record_event(end)
        keep = (region, rows, device_pages)
        return StreamArrival(begin, end, ops.current_stream, ops.new_event, keep)

    def fence(self) -> StreamArrival:
        """Return an arrival that ends once all loads queued so far have."""
        ops, stream = self._ops, self._load_stream
        begin, end = ops.new_event(), ops.new_event()
        stream.record_event(begin)
        stream.record_event(end)
        return StreamArrival(begin, end, ops.current_stream, ops.new_event, None)

    def loaded(self) -> Event:
        """Return an event behind all loads queued so far."""
        event: Event = self._load_stream.record_event()
        return event

    def store_pages(
        self, region: UInt8s, rows: Int64s, device_pages: PageNumbers, after: object
    ) -> None:
        """Copy all layers of pages from the device to rows of ``region``."""
        if not len(rows):
            return
        ops, gathers, stores = self._ops, self._gather_stream, self._store_stream
        for event in _events(after):
            gathers.wait_event(event)
        try:
            pages = self._on_device(gathers, self._store_ring, device_pages)
            is_free: list[Event | None] = [None] * _HALVES
            for i, begin in enumerate(range(0, len(rows), ops.half_pages)):
                half, end = i % _HALVES, min(begin + ops.half_pages, len(rows))
                freed = is_free[half]
                if freed is not None:
                    gathers.wait_event(freed)
                ops.gather(gathers, half, pages, begin, end)
                stores.wait_event(gathers.record_event())
                self._copy_out(half, region, rows[begin:end])
                is_free[half] = stores.record_event()
        finally:
            # Also after an error: the caller may write to rows and pages then.
            gathers.synchronize()
            stores.synchronize()

    def warm(self, device_pages: Int64s, *, stores: bool = True) -> None:
        """Run each kernel once, so that none is compiled or loaded under a server.

        Loads need theirs whatever ``tune`` finds: where pages are not known yet, and
        for other regions than that which it measures.

        Args:
            device_pages: int64 [n > 0] free pages; what the first one holds is lost.
            stores: also those of ``store_pages``.
        """
        ops, loads, gathers = self._ops, self._load_stream, self._gather_stream
        try:
            pages = self._upload(loads, self._number_ring, device_pages[:1])
            row = self._upload(loads, self._number_ring, np.zeros(1, np.int64))
            ops.choose(loads, [(row, row), (row, None)])
            memory = self._load_ring.lend(self._layout.layer_page_bytes).reshape(1, -1)
            if ops.is_pinned(memory):
                ops.load_by_kernel(loads, 0, memory, row, 0, pages)
            self._load_ring.passes(loads.record_event())
            if self._staging is not None:
                for half in range(_HALVES):
                    layers = range(self._staged_layers)
                    self._staging.scatter(loads, half, layers, pages, slice(0, 1))
            gathers.wait_event(loads.record_event())
            for half in range(_HALVES if stores else 0):
                ops.gather(gathers, half, pages, 0, 1)
        finally:
            loads.synchronize()
            gathers.synchronize()

    def tune(
        self, region: UInt8s, rows: Int64s, device_pages: Int64s
    ) -> dict[str, float]:
        """Measure the ways of loading a layer and keep to the best one.

        Args:
            region: pinned rows of pages.
            rows: int64 [n], as many and as scattered as in service (``scattered``).
            device_pages: int64 [n] free pages.

        Returns:
            The seconds of a layer by each way, for reports.
        """
        seconds = {LoadWay.ENGINES: 0.0, LoadWay.KERNEL: 0.0}
        if self._staging is not None and self._staged_layers > 1:
            seconds[LoadWay.STAGED] = 0.0
        for way in seconds:
            self._way = way
            num_layers = self._staged_layers if way is LoadWay.STAGED else 1
            seconds[way] = min(
                sum(
                    self.load_layer(layer, region, rows, device_pages).finish()
                    for layer in range(num_layers)
                )
                / num_layers
                for _ in range(_TUNE_RUNS)
            )
        self._way = min(seconds, key=lambda way: seconds[way] * _GAINS[way])
        if self._staging is not None and self._way is not LoadWay.STAGED:
            self._staging.free_staging()
        return {f"load_layer_by_{way.value}_s": each for way, each in seconds.items()}

    def _wait_for(self, after: object) -> None:
        """Let loads wait for a mark, once for all layers that name it."""
        if after is None or after is self._waited_for:
            return
        for event in _events(after):
            self._load_stream.wait_event(event)
        self._waited_for = after
        self._indices.clear()
        self._came.clear()

    def _load(
        self, layer: int, memory: UInt8s, rows: Int64s, offset: int, pages: PageNumbers
    ) -> None:
        if self._way is LoadWay.STAGED and self._staging is not None:
            self._load_staged(self._staging, layer, memory, rows, pages)
            return
        is_known = not isinstance(pages, QueuedPages) or pages.is_known
        if self._way is LoadWay.KERNEL or not is_known:
            on_device = self._numbers(rows, pages)
            self._ops.load_by_kernel(
                self._load_stream, layer, memory, on_device[0], offset, on_device[1]
            )
        else:
            self._ops.load_by_engines(
                self._load_stream, layer, memory, rows, offset, host_numbers(pages)
            )

    def _load_staged(
        self,
        staging: StagingOps,
        layer: int,
        memory: UInt8s,
        rows: Int64s,
        pages: PageNumbers,
    ) -> None:
        """Bring some layers at once, or nothing where this one came with another."""
        for i, (known_rows, known_pages, layers) in enumerate(self._came):
            if known_rows is rows and known_pages is pages:
                if layer in layers:
                    self._came[i] = (rows, pages, range(layer + 1, layers.stop))
                    return
                del self._came[i]
                break
        layout, loads = self._layout, self._load_stream
        if self._staging_stream is None:
            self._staging_stream = self._ops.new_stream(urgent=True)
        layers = range(layer, min(layer + self._staged_layers, layout.num_layers))
        width = len(layers) * layout.layer_page_bytes
        step = staging.staging_bytes // width
        _, on_device = self._numbers(rows, pages)
        for begin in range(0, len(rows), step):
            half, part = self._next_half, slice(begin, min(begin + step, len(rows)))
            self._next_half = (half + 1) % _HALVES
            # Not after the work that the load waits for: only these halves are written.
            free = self._staging_free[half]
            if free is not None:
                self._staging_stream.wait_event(free)
            offset = layout.key_offset(layer)
            staging.bring(self._staging_stream, half, memory, rows[part], offset, width)
            loads.wait_event(self._staging_stream.record_event())
            staging.scatter(loads, half, layers, on_device, part)
            self._staging_free[half] = loads.record_event()
        del self._came[: 1 - _NUM_INDICES]
        self._came.append((rows, pages, range(layer + 1, layers.stop)))

    def _load_by_buffers(
        self, layer: int, region: UInt8s, rows: Int64s, pages: PageNumbers
    ) -> None:
        """Bring rows of ordinary memory, through pinned buffers."""
        width, offset = self._layout.layer_page_bytes, self._layout.key_offset(layer)
        step = max(self._load_ring.num_bytes // width, 1)
        # The thread waits for buffers in any case: what lay in them was read behind
        # the work that the numbers were made behind.
        numbers = host_numbers(pages)
        for begin in range(0, len(rows), step):
            part = rows[begin : begin + step]
            buffer = self._load_ring.lend(len(part) * width).reshape(-1, width)
            np.copyto(buffer, region[part, offset : offset + width])
            self._ops.load_by_engines(
                self._load_stream,
                layer,
                buffer,
                np.arange(len(part), dtype=np.int64),
                0,
                numbers[begin : begin + step],
            )
            self._load_ring.passes(self._load_stream.record_event())

    def _copy_out(self, half: int, region: UInt8s, rows: Int64s) -> None:
        ops, stream, width = self._ops, self._store_stream, self._layout.page_bytes
        if ops.is_pinned(region):
            ops.copy_out(stream, half, region, rows)
            return
        buffer = self._store_ring.lend(len(rows) * width).reshape(-1, width)
        ops.copy_out(stream, half, buffer, np.arange(len(rows), dtype=np.int64))
        done = stream.record_event()
        self._store_ring.passes(done)
        done.synchronize()
        region[rows, :width] = buffer

    def _numbers(self, rows: Int64s, pages: PageNumbers) -> tuple[Any, Any]:
        """Return both on the device; layers of a load name the same arrays."""
        for known_rows, known_pages, on_device, pages_on_device in self._indices:
            if known_rows is rows and known_pages is pages:
                return on_device, pages_on_device
        del self._indices[: 1 - _NUM_INDICES]
        uploaded = [
            self._on_device(self._load_stream, self._number_ring, numbers)
            for numbers in (rows, pages)
        ]
        self._indices.append((rows, pages, uploaded[0], uploaded[1]))
        return uploaded[0], uploaded[1]

    def _on_device(self, stream: Stream, ring: BufferRing, pages: PageNumbers) -> Any:
        """Return numbers on the device, in the order of the stream."""
        if not isinstance(pages, QueuedPages):
            return self._upload(stream, ring, pages)
        parts = [
            (
                numbers.on_device,
                None if chosen is None else self._upload(stream, ring, chosen),
            )
            for numbers, chosen in pages.parts
        ]
        if len(parts) == 1 and parts[0][1] is None:
            return parts[0][0]
        return self._ops.choose(stream, parts)

    def _upload(self, stream: Stream, ring: BufferRing, numbers: Int64s) -> Any:
        source = ring.lend(numbers.nbytes).view(np.int64)
        np.copyto(source, numbers)
        uploaded = self._ops.upload(stream, source)
        ring.passes(stream.record_event())
        return uploaded


def scattered(
    rng: np.random.Generator, rows: range, device_pages: range
) -> tuple[Int64s, Int64s]:
    """Draw rows and pages for ``StreamPool.tune``, as a load in service has them.

    Args:
        rng: draws; in the order of the numbers as well.
        rows: all that there are.
        device_pages: all that are free.

    Returns:
        int64 [n] each, with n the smallest of both lengths and 256.
    """
    count = min(_TUNE_PAGES, len(rows), len(device_pages))
    drawn = [
        there.start + rng.choice(len(there), count, replace=False)
        for there in (rows, device_pages)
    ]
    return drawn[0], drawn[1]


def _events(after: object) -> Sequence[Event]:
    assert isinstance(after, list), f"not a mark of this pool: {after!r}"
    return after
