"""Weights that lie in host memory, brought to the device for rebuilds, layer by layer.

A rebuild of a layer needs the K and V part of its fused projection. Where the engine
keeps that in host memory, it is copied ahead into one of two slots, on a stream of its
own, as soon as a rebuild of the layer is queued: that of layer i + 1 comes under the
rebuild and the forward of layer i (HybridServe, Fig. 7). The forward of the layer takes
the same bytes out of the slot, where they are there (``lend``), so that they cross the
link once.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Protocol

from sgl_tiered.pipelines.streams import Event, Stream

__all__ = ["NUM_SLOTS", "WeightOps", "WeightSlots"]

NUM_SLOTS = 2
"""One layer is computed while the next one comes."""


class WeightOps(Protocol):
    """What a device offers for weights; slots are numbered from 0."""

    def new_stream(self, *, urgent: bool) -> Stream:
        """Return a stream; an urgent one's kernels go first."""
        ...

    def current_stream(self) -> Stream:
        """Return the calling thread's stream."""
        ...

    def bring_weights(self, stream: Stream, layer: int, slot: int) -> int:
        """Queue the copy of what a layer has in host memory; return its bytes."""
        ...


class WeightSlots:
    """Which layers' weights are on the device, or on their way.

    ``use`` and ``read`` are called under one lock of the caller's; ``lend``,
    ``take_back`` and ``forget`` on the engine's thread, which waits for nobody here.

    Args:
        ops: the device.
        away: layers whose weights are in host memory.

    Attributes:
        num_bytes: that were brought.
    """

    def __init__(self, ops: WeightOps, away: Collection[int]) -> None:
        self._ops = ops
        self._away = frozenset(away)
        self._stream = ops.new_stream(urgent=False)
        self._lock = threading.Lock()
        self._layers: list[int | None] = [None] * NUM_SLOTS
        self._landed: list[Event | None] = [None] * NUM_SLOTS
        """Of each slot: behind the copy that fills it."""
        self._readers: list[list[Event]] = [[] for _ in range(NUM_SLOTS)]
        """Of each slot: behind what reads it."""
        self._turns = [0] * NUM_SLOTS
        self._turn = 0
        self._lent: int | None = None
        self.num_bytes = 0

    def use(self, layer: int, stream: Stream) -> int | None:
        """Order a stream behind a layer's weights; ``read`` has to follow.

        Returns:
            Their slot; None where they are on the device anyway.

        Raises:
            RuntimeError: the copy could not be queued.
        """
        if layer not in self._away:
            return None
        with self._lock:
            slot = self._slot_of(layer)
            if slot is None:
                slot = self._bring(layer)
            self._turn += 1
            self._turns[slot] = self._turn
            stream.wait_event(self._landed[slot])
            return slot

    def read(self, slot: int, event: Event) -> None:
        """Note the end of what was queued to read a slot."""
        with self._lock:
            self._readers[slot].append(event)

    def lend(self, layer: int) -> int | None:
        """Let the forward of a layer read its slot, until ``take_back``.

        The calling thread's stream waits for the copy.

        Returns:
            The slot; None where it has none, and the engine copies for itself.
        """
        self.take_back()
        with self._lock:
            slot = self._slot_of(layer)
            if slot is not None:
                self._lent = slot
                self._ops.current_stream().wait_event(self._landed[slot])
            return slot

    def take_back(self) -> None:
        """Note that all is queued which reads what was lent; nothing if nothing was."""
        with self._lock:
            if self._lent is None:
                return
            event = self._ops.current_stream().record_event()
            self._readers[self._lent].append(event)
            self._lent = None

    def forget(self) -> None:
        """Bring everything anew: weights may be others in another forward."""
        self.take_back()
        with self._lock:
            self._layers = [None] * NUM_SLOTS

    def _slot_of(self, layer: int) -> int | None:
        return self._layers.index(layer) if layer in self._layers else None

    def _bring(self, layer: int) -> int:
        """Queue a layer's copy to the slot that was used longest ago; return it."""
        # What the forward reads has no event yet that could be waited for.
        open_slots = [n for n in range(NUM_SLOTS) if n != self._lent]
        slot = min(open_slots, key=lambda n: self._turns[n])
        self._layers[slot] = None
        for event in self._readers[slot]:
            self._stream.wait_event(event)
        self.num_bytes += self._ops.bring_weights(self._stream, layer, slot)
        self._landed[slot] = self._stream.record_event()
        self._readers[slot] = []
        self._layers[slot] = layer
        return slot
