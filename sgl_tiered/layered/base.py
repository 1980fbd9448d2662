"""What this room needs of the engine, and what the two tell each other."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sgl_tiered.errors import TieredError
from sgl_tiered.pipelines.base import Arrival

__all__ = [
    "LayerCopier",
    "LayerReadError",
    "LayerReport",
    "LayerRoom",
    "LayerRoomError",
    "PassPlan",
    "PassRequest",
    "SwapGuard",
]


class LayerCopier(Protocol):
    """Copies layer-pages between the device tensor and the rows of the host region.

    Called by worker threads: ``to_host`` by one; ``to_device`` by two at once, units of
    a forward and what returns to stay, and where ``waiter_copies`` by the engine's too.
    """

    @property
    def waiter_copies(self) -> bool:
        """Whether the engine's thread copies what it would have to wait for.

        True where the cores that copy are those that compute.
        """
        ...

    def mark(self) -> object:
        """Return a token for all work that the engine has queued so far.

        Called on the engine's thread; copies given it start after that work.
        """
        ...

    def to_host(
        self,
        layer: int,
        physical: npt.NDArray[np.int32],
        rows: npt.NDArray[np.int64],
        after: object,
    ) -> None:
        """Copy layer-pages to one layer of host rows; return when they are whole.

        Args:
            layer: which part of each row.
            physical: int32 [n], numbers in the device tensor.
            rows: int64 [n], of the host region: logical pages.
            after: ``mark()`` of the work that writes the layer-pages.

        Raises:
            Exception: any; what was written to the rows then has no meaning.
        """
        ...

    def to_device(
        self,
        layer: int,
        rows: npt.NDArray[np.int64],
        physical: npt.NDArray[np.int32],
        after: object,
    ) -> Arrival | None:
        """Copy one layer of host rows to layer-pages; the counterpart of ``to_host``.

        Args:
            layer: which part of each row.
            rows: int64 [n].
            physical: int32 [n].
            after: ``mark()`` of the work that still reads what was there.

        Returns:
            None if the engine may read them now, or the copy, if it is only queued.
        """
        ...


class SwapGuard(Protocol):
    """Asked before every sub-unit of a swap: may it go, beside the collectives?"""

    def wait(self, stop: threading.Event) -> bool:
        """Block until a sub-unit may go; False if ``stop`` was set."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PassRequest:
    """A request that the next forward computes tokens of.

    Attributes:
        key: names it until ``finished``.
        pages: int64 [n], its logical pages in order, those to be written included:
            ``ceil((num_context + num_new) / page_tokens)``.
        num_context: tokens that have KV already, a cached prefix included.
        num_new: tokens whose KV this forward writes.
        retained: bool [num_layers], the layers to be kept on the device; None for as
            before, and for a request not seen before: all.
        is_lost: nobody will use what is computed for it. It takes no room, reads what
            padding has written, and writes where padding does; its KV stays as it is.
    """

    key: Hashable
    pages: npt.NDArray[np.int64]
    num_context: int
    num_new: int
    retained: npt.NDArray[np.bool_] | None = None
    is_lost: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class PassPlan:
    """How a forward is to run.

    Attributes:
        refused: positions of requests for which there is no room; if there are any,
            nothing has begun.
        groups: first and last + 1 position of the requests whose attention is computed
            together, in order.
        indptr: int64 [num_requests + 1], where each request's pages begin in the
            tables of the layers.
        num_units: copies that will be staged.
    """

    refused: tuple[int, ...]
    groups: tuple[tuple[int, int], ...]
    indptr: npt.NDArray[np.int64]
    num_units: int


@dataclass(frozen=True, slots=True)
class LayerRoom:
    """Physical layer-pages; free and spare ones can be had without waiting.

    Those of pages that somebody else reads (``LayerManager.pin``) are in none but
    ``total``: nobody here knows when they come free.

    Attributes:
        free: can be taken now.
        spare: copies that no request wants kept, and valid on host: dropped at will.
        landing: leave the device when their copy to the host has landed.
        cached: full pages' that no request wants kept, not on host: can be pushed.
        total: all but the staging ones.
    """

    free: int
    spare: int
    landing: int
    cached: int
    total: int


@dataclass(frozen=True, slots=True)
class LayerReport:
    """What became of one request's layers.

    Attributes:
        layers_retained: fewest that were wanted on the device, over its life.
        num_layers: of the model.
        bytes_streamed: through staging, for its reads. A page staged once for two
            requests counts for both.
        bytes_offloaded: device to host, landed, by its own writes and ``release``.
        bytes_pulled: host to device, to stay there.
        stall_s: seconds that the forwards it was in waited for units or for room.
        num_passes: forwards it was in.
    """

    layers_retained: int
    num_layers: int
    bytes_streamed: int
    bytes_offloaded: int
    bytes_pulled: int
    stall_s: float
    num_passes: int


class LayerReadError(TieredError, RuntimeError):
    """A layer of host pages could not be staged: the forward cannot go on.

    Attributes:
        layer: which.
        keys: the requests that read what was not copied, as far as that is known; their
            KV on the host is unharmed.
    """

    def __init__(self, layer: int, keys: tuple[Hashable, ...], reason: str) -> None:
        self.layer = layer
        self.keys = keys
        super().__init__(
            f"Layer {layer} of {len(keys)} requests was not read: {reason}."
        )


class LayerRoomError(TieredError, RuntimeError):
    """A layer has no room to be written: copies to the host failed during the forward.

    Attributes:
        layer: which.
        missing: layer-pages.
        keys: the requests whose KV was to be written there.
    """

    def __init__(self, layer: int, missing: int, keys: tuple[Hashable, ...]) -> None:
        self.layer = layer
        self.missing = missing
        self.keys = keys
        super().__init__(
            f"Layer {layer} lacks {missing} layer-pages, for copies to the host failed."
        )
