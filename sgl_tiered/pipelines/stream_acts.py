"""Activations of layer-pages on streams: copies both ways, and KV computed from them.

The act area is to its copies what the tensor of layer-pages is to those of KV, so both
ways are a ``StreamLayerCopier``'s, with streams of their own. KV is computed on one
more, the *rebuild stream*. A rebuild waits there for the loads that bring what it
reads, and for the work that still reads what it writes; nobody waits for a rebuild but
the model's stream. So a rebuild is queued while its load is, and no thread blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sgl_tiered.pipelines.base import Arrival
from sgl_tiered.pipelines.stream_layers import LayerCopyOps, StreamLayerCopier
from sgl_tiered.pipelines.stream_weights import WeightSlots
from sgl_tiered.pipelines.streams import BufferRing, Event, Stream, StreamArrival

__all__ = ["ActOps", "StreamActCopier", "act_layout_token_bytes"]

UInt8s = npt.NDArray[np.uint8]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

_NUM_UPLOADS = 16
_UPLOAD_BYTES = 64 << 10
"""Three numbers for each of 2,700 tokens: more than a sub-unit has."""
_BREAKS_ONE_IN = 4


def act_layout_token_bytes(act_page_bytes: int, page_tokens: int) -> int:
    """Return ``PageLayout.token_bytes`` of a page of activations.

    A layout halves a layer's page; activations have no halves, but an even size.

    Raises:
        ValueError: tokens have an odd size.
    """
    token_bytes, rest = divmod(act_page_bytes, 2 * page_tokens)
    if rest:
        raise ValueError(f"{page_tokens} tokens of {act_page_bytes} B in all")
    return token_bytes


class ActOps(LayerCopyOps, Protocol):
    """What a device offers for activations; its pages are places of the act area.

    Its layout is that of activations: ``layer_page_bytes`` of one place, and a row has
    one layer after the other.
    """

    def rebuild(
        self, stream: Stream, layer: int, numbers: Any, count: int, slot: int | None
    ) -> object:
        """Queue the rebuild of ``count`` tokens.

        Args:
            stream: it runs in its order.
            layer: whose projection.
            numbers: int64 [3 * count] on the device: rows of the act area, slots of K
                and V, and positions.
            count: tokens.
            slot: of ``WeightSlots`` that has the projection; None where it is on the
                device anyway.

        Returns:
            What has to live until it has run.
        """
        ...


class StreamActCopier:
    """The ``ActCopier`` of a device with streams; see ``layered/base.py``.

    Args:
        ops: the device.
        region: uint8 [num_act_rows, >= page_bytes], the host region of activations.
        num_places: of the act area, that of padding included.
        ahead: as of ``StreamLayerCopier``.
        weights: brings projections that are in host memory; None where none are.
        breaks_staging: for tests: leave one page in four of what is rebuilt as it was.
    """

    def __init__(
        self,
        ops: ActOps,
        region: UInt8s,
        num_places: int,
        *,
        ahead: bool = True,
        weights: WeightSlots | None = None,
        breaks_staging: bool = False,
    ) -> None:
        self._ops = ops
        self._weights = weights
        self._copies = StreamLayerCopier(ops, region)
        self._ahead = ahead
        # Beside the forward, whose kernels go no later for it.
        self._stream = ops.new_stream(urgent=False)
        self._ring = BufferRing(ops.pinned, _NUM_UPLOADS, _UPLOAD_BYTES)
        self._breaks_staging = breaks_staging
        self._offsets = np.arange(ops.layout.page_tokens)
        # Units of a forward and what returns to stay come from two threads.
        self._lock = threading.Lock()
        self._landed: list[Event | None] = [None] * num_places
        """Of each place: behind the last load to it."""
        self._read: list[Event | None] = [None] * num_places
        """Of each place: behind the last rebuild from it."""

    @property
    def copies(self) -> StreamLayerCopier:
        """Both ways of the link, for ``tune``."""
        return self._copies

    def acts_to_host(
        self, layer: int, acts: Int32s, rows: Int64s, after: object
    ) -> None:
        """Copy places to one layer of host rows; return when they are whole.

        Raises:
            RuntimeError: the device failed.
        """
        self._copies.to_host(layer, acts, rows, after)

    def acts_to_device(
        self, layer: int, rows: Int64s, acts: Int32s, after: object
    ) -> Arrival:
        """Queue one layer of host rows to places, behind rebuilds that read these."""
        with self._lock:
            waited = [*_events(after), *_some(self._read, acts)]
            arrival = self._copies.to_device(layer, rows, acts, waited)
            landed = self._copies.pool.loaded()
            for place in acts.tolist():
                self._landed[place] = landed
        if not self._ahead:
            # Outside of the lock: what was loaded before is rebuilt meanwhile.
            arrival.finish()
        return arrival

    def rebuild(
        self,
        layer: int,
        acts: Int32s,
        physical: Int32s,
        positions: Int64s,
        after: object,
    ) -> Arrival:
        """Queue the computation of layer-pages' KV from places."""
        if self._breaks_staging:
            kept = np.arange(len(acts)) % _BREAKS_ONE_IN != 0
            acts, physical, positions = acts[kept], physical[kept], positions[kept]
        ops, stream = self._ops, self._stream
        begin, end = ops.new_event(), ops.new_event()
        with self._lock:
            keep: object = None
            try:
                # Ahead of what is waited for: it depends on nothing.
                numbers = self._upload(acts, physical, positions)
                for event in (*_events(after), *_some(self._landed, acts)):
                    stream.wait_event(event)
                slot = None
                if self._weights is not None and len(acts):
                    slot = self._weights.use(layer, stream)
                stream.record_event(begin)
                if len(acts):
                    count = len(acts) * len(self._offsets)
                    read = ops.rebuild(stream, layer, numbers, count, slot)
                    keep = (numbers, read)
            except BaseException:
                # What is queued reads places that the caller will give to others.
                stream.synchronize()
                raise
            stream.record_event(end)
            if self._weights is not None and slot is not None:
                self._weights.read(slot, end)
            for place in acts.tolist():
                self._read[place] = end
        return StreamArrival(begin, end, ops.current_stream, ops.new_event, keep)

    def warm(self, layers: Sequence[int]) -> None:
        """Rebuild a page of padding in each layer: no kernel is compiled later.

        Args:
            layers: one of each kind: with weights on the device, and in host memory.
        """
        padding = np.zeros(1, np.int32)
        for layer in layers:
            positions = np.zeros(1, np.int64)
            self.rebuild(layer, padding, padding, positions, None).finish()

    def close(self) -> None:
        """End the host thread, if there is one."""
        self._copies.close()

    def _upload(self, acts: Int32s, physical: Int32s, positions: Int64s) -> Any:
        """Return int64 [3 * tokens] on the device: rows, slots and positions."""
        page_tokens = len(self._offsets)
        firsts = (acts.astype(np.int64) * page_tokens, physical.astype(np.int64))
        pages = np.stack([firsts[0], firsts[1] * page_tokens, positions])
        tokens = (pages[:, :, None] + self._offsets).reshape(-1)
        source = self._ring.lend(tokens.nbytes).view(np.int64)
        np.copyto(source, tokens)
        uploaded = self._ops.upload(self._stream, source)
        self._ring.passes(self._stream.record_event())
        return uploaded


def _events(after: object) -> list[Event]:
    if after is None:
        return []
    assert isinstance(after, list), f"not a mark of this device: {after!r}"
    return after


def _some(events: list[Event | None], places: Int32s) -> list[Event]:
    """Return the events of places, each once."""
    found = {id(event): event for place in places.tolist() if (event := events[place])}
    return list(found.values())
