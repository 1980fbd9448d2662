"""What this room needs of the engine, and what the two tell each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sgl_tiered.errors import TieredError
from sgl_tiered.pipelines.base import Arrival

__all__ = [
    "ActChooser",
    "ActCopier",
    "ActPlan",
    "LayerCopier",
    "LayerReadError",
    "LayerReport",
    "LayerRoom",
    "LayerRoomError",
    "Pace",
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


class ActCopier(Protocol):
    """Copies activations of layer-pages, and computes KV of them again.

    The *act* of a page in a layer is the input of that layer's projection to Q, K, V.
    Places are numbers in the act area of the device, from 1 (0 is padding); rows are
    those of the host region of activations, with a part for each layer.

    Called by worker threads: ``acts_to_host`` by one, the others by two at once, for
    units of a forward and for what returns to stay. All three at the same time.
    ``mark`` is that of the `LayerCopier`.
    """

    def acts_to_host(
        self,
        layer: int,
        acts: npt.NDArray[np.int32],
        rows: npt.NDArray[np.int64],
        after: object,
    ) -> None:
        """Copy from the act area to one layer of host rows; return when they are whole.

        Args:
            layer: which part of each row.
            acts: int32 [n], places.
            rows: int64 [n], of the host region of activations.
            after: ``mark()`` of the work that writes the places.

        Raises:
            Exception: any; what was written to the rows then has no meaning.
        """
        ...

    def acts_to_device(
        self,
        layer: int,
        rows: npt.NDArray[np.int64],
        acts: npt.NDArray[np.int32],
        after: object,
    ) -> Arrival | None:
        """Copy one layer of host rows to the act area; the counterpart of that.

        Returns:
            None if they are whole, or the copy, if it is only queued: then a later
            ``rebuild`` of these places runs behind it by itself.
        """
        ...

    def rebuild(
        self,
        layer: int,
        acts: npt.NDArray[np.int32],
        physical: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int64],
        after: object,
    ) -> Arrival | None:
        """Compute a layer's KV of full pages from their activations.

        Args:
            layer: whose projection.
            acts: int32 [n], places that hold them.
            physical: int32 [n], layer-pages of the device tensor to be written.
            positions: int64 [n], of each page's first token in its request.
            after: ``mark()`` of the work that still reads what was in ``physical``.

        Returns:
            None if the engine may read them now, or the work, if it is only queued; of
            a copier, what is queued later ends later.
        """
        ...


@dataclass(frozen=True, slots=True)
class ActPlan:
    """Sizes of what holds activations.

    Attributes:
        num_act_rows: host rows of activations, numbered from 0. The other pages of the
            binding have rows of KV, from 0 to ``num_pages - num_act_rows - 1``; one of
            them is spare where a logical page is that of padding.
        num_acts: places of the act area, numbered from 1; each holds one layer-page.
        half_acts: of them for each half of the act staging; also the most pages of
            activations that a request is given.
        up_acts: of them for what returns to stay, at least 1.
        act_layer_page_bytes: of one place.

    Beside these, a forward takes two places for each new full page of activations, and
    as many as layers for each new page that is not full at its end.
    """

    num_act_rows: int
    num_acts: int
    half_acts: int
    up_acts: int
    act_layer_page_bytes: int

    def __post_init__(self) -> None:
        if min(self.num_act_rows, self.act_layer_page_bytes) < 1:
            raise ValueError(
                f"{self.num_act_rows} act rows of {self.act_layer_page_bytes} B"
            )
        if min(self.half_acts, self.up_acts) < 1:
            raise ValueError(f"act staging of {self.half_acts} and {self.up_acts}")
        if self.num_acts <= 2 * self.half_acts + self.up_acts:
            raise ValueError(
                f"two halves of {self.half_acts} and {self.up_acts} leave nothing of "
                f"{self.num_acts} places for activations"
            )


ActChooser = Callable[[int, int, int], npt.NDArray[np.bool_]]
"""Which of a request's next pages are to be kept as activations.

Called with the pages of activations and of KV that it has, and how many come; returns
bool [so many]. What lacks room becomes a page of the other kind.
"""


class Pace(Protocol):
    """Of an emulated link: how long copies take that are faster by themselves."""

    def reserve(self, num_bytes: int, *, is_store: bool) -> float:
        """Take the link for ``num_bytes``; return when they will have arrived."""
        ...

    def wait_until(self, end_s: float) -> None:
        """Block until then; returns at once if it is past."""
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
    ``total``: nobody here knows when they come free. So are those without a host row.

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
        stall_s: seconds that the forwards it was in waited for units, room or weights.
        num_passes: forwards it was in.
        num_act_pages: of its pages in its last forward, kept as activations.
        num_kv_pages: the others.
        bytes_saved: of KV that would have crossed the link, up and down, less those of
            the activations that did; below 0 if activations of kept layers went.
        rebuild_s: seconds of rebuilding for the reads of the forwards it was in.
        rebuild_exposed_s: of these, after all that a unit loads had landed.
    """

    layers_retained: int
    num_layers: int
    bytes_streamed: int
    bytes_offloaded: int
    bytes_pulled: int
    stall_s: float
    num_passes: int
    num_act_pages: int = 0
    num_kv_pages: int = 0
    bytes_saved: int = 0
    rebuild_s: float = 0.0
    rebuild_exposed_s: float = 0.0


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
        missing: layer-pages, or places for activations.
        keys: the requests whose KV was to be written there.
    """

    def __init__(self, layer: int, missing: int, keys: tuple[Hashable, ...]) -> None:
        self.layer = layer
        self.missing = missing
        self.keys = keys
        super().__init__(
            f"Layer {layer} lacks {missing} layer-pages, for copies to the host failed."
        )
