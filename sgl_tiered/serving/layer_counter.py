"""What lets a model wait for the layers of its batch's loads, one by one."""

from __future__ import annotations

from sgl_tiered.pipelines.base import DevicePool
from sgl_tiered.pipelines.layerwise_load import LoadTicket

__all__ = ["LayerCounter"]


class LayerCounter:
    """What SGLang's KV pool asks before a layer is read: has it arrived?

    Attributes:
        num_layers: of the pool; a forward that replays one whole graph waits for the
            last of them before it begins.
        consumer_index: the batch whose forward began last; -1 for one without loads.
    """

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.consumer_index = -1
        self.latest = -1
        self._tickets: dict[int, LoadTicket] = {}
        self._current: LoadTicket | None = None

    def add(self, ticket: LoadTicket) -> int:
        """Register a batch's loads; return the index that travels with the batch."""
        self.latest += 1
        # A batch is consumed before the next is built, so only the last one matters;
        # one more is kept for a batch that is still on the device.
        self._tickets.pop(self.latest - 2, None)
        self._tickets[self.latest] = ticket
        return self.latest

    def set_consumer(self, index: int) -> None:
        """Name the batch whose forward begins; -1 for one without loads."""
        self.consumer_index = index
        self._current = self._tickets.get(index) if index >= 0 else None

    @property
    def waiter_pool(self) -> DevicePool | None:
        """Where the thread that asks for layers copies them to; None where not."""
        return None if self._current is None else self._current.waiter_pool

    def wait_until(self, layer: int) -> None:
        """Let the model not read ``layer`` before it has arrived.

        On CUDA its stream waits, elsewhere the calling thread does.
        """
        if self._current is not None:
            self._current.wait_layer(layer)
