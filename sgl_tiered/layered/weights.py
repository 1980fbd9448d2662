"""Emulated: each layer's weights cross the link before the layer is computed.

On a device that holds a model's KV but not its weights they are streamed, layer by
layer, over the link that KV uses too. Here nothing is copied; the link is taken for as
long. Double buffered: layer i + 1 comes while layer i is computed.
"""

from __future__ import annotations

import threading

from sgl_tiered.layered.base import Pace
from sgl_tiered.pipelines.worker import Worker

__all__ = ["WeightStream"]

PIECE_BYTES = 4 << 20
"""Between two of them others have the link, as between sub-units of KV."""


class WeightStream:
    """Weights of the layers of one forward after the other.

    Under a forward's last layer those of the next one's first layer come, as they are
    the same in each.

    Args:
        pace: of the emulated link.
        layer_bytes: of the weights of one layer.
    """

    def __init__(self, pace: Pace, layer_bytes: int) -> None:
        self._pace = pace
        self._layer_bytes = layer_bytes
        self._changed = threading.Condition()
        # Layers are counted on from forward to forward; those below base are not
        # wanted any more.
        self._base = 0
        self._num_layers = 0
        self._num_started = 0
        self._num_here = 0
        self._worker: Worker[int] = Worker(
            "layers-weights", self._bring, lambda _job, _error: self._give_up()
        )

    @property
    def num_here(self) -> int:
        """Layers of this forward, or of the next one, whose weights are here."""
        return max(self._num_here - self._base, 0)

    @property
    def num_started(self) -> int:
        """Layers of this forward, or of the next one, that are here or on their way."""
        return self._num_started - self._base

    def begin(self, num_layers: int) -> None:
        """Begin a forward: the weights of its first layer are on their way."""
        self.end()
        with self._changed:
            self._num_layers = num_layers
        self._start_until(1)

    def wait(self, layer: int) -> None:
        """Block until a layer's weights are here; then those of the next one start.

        Returns at once where no forward is under way.
        """
        self._start_until(layer + 1)
        with self._changed:
            self._changed.wait_for(
                lambda: self.num_here > layer or layer >= self._num_layers
            )
        self._start_until(layer + 2)

    def end(self) -> None:
        """End the forward; what is under way goes on if the next one can use it."""
        with self._changed:
            if self._num_layers:
                reached = self._base + self._num_layers
                has_wrapped = self._num_started > reached
                self._base = reached if has_wrapped else self._num_started
            self._num_layers = 0
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """End the thread."""
        self._give_up()
        self._worker.close(timeout_s)

    def _give_up(self) -> None:
        with self._changed:
            self._base, self._num_layers = self._num_started, 0
            self._changed.notify_all()

    def _start_until(self, stop: int) -> None:
        with self._changed:
            # One more than there are: the next forward's first.
            last = self._num_layers + 1 if self._num_layers else 0
            end = self._base + min(stop, last)
            jobs = range(self._num_started, end)
            self._num_started = max(self._num_started, end)
        for job in jobs:
            if not self._worker.try_put(job):
                self._give_up()

    def _bring(self, number: int) -> None:
        for begin in range(0, self._layer_bytes, PIECE_BYTES):
            if number < self._base:
                return
            num_bytes = min(PIECE_BYTES, self._layer_bytes - begin)
            self._pace.wait_until(self._pace.reserve(num_bytes, is_store=False))
        with self._changed:
            self._num_here = number + 1
            self._changed.notify_all()
