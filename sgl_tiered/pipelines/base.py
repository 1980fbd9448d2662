"""What the pipelines need of the engine's device memory.

The engine room implements it for its pools; the pipelines know neither tensors nor
streams. ``device_pages`` are page numbers of the device pool (slot // page_tokens);
a pool that hands out ``QueuedPages`` gets them back in place of an array.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.layout import PageLayout

__all__ = ["Arrival", "DevicePool"]


class Arrival(Protocol):
    """One copy to the device that is queued, and may still run."""

    def order(self) -> None:
        """Make what the calling thread queues on the device wait. Never blocks."""
        ...

    def finish(self) -> float:
        """Block until the copy has ended and return its seconds on the device.

        Raises:
            RuntimeError: the copy failed.
        """
        ...

    def stall_s(self) -> float:
        """Return how long the engine's work stood still for it, as far as known."""
        ...


class DevicePool(Protocol):
    """The device's KV pool, as seen by a transfer thread."""

    @property
    def layout(self) -> PageLayout:
        """Shape of one page."""
        ...

    def mark(self) -> object:
        """Return a token for all work that the engine has queued so far.

        Called on the engine's thread; loads and stores that are given it start after
        that work.
        """
        ...

    @property
    def waiter_copies(self) -> bool:
        """Whether the engine's thread copies a layer that it would have to wait for.

        True where the cores that copy are those that compute: then a copy beside the
        forward slows it by more than the copy takes by itself.
        """
        ...

    def load_layer(
        self,
        layer: int,
        region: npt.NDArray[np.uint8],
        rows: npt.NDArray[np.int64],
        device_pages: npt.NDArray[np.int64],
        *,
        after: object = None,
        by_waiter: bool = False,
    ) -> Arrival | None:
        """Copy one layer of pages from rows of ``region`` to the device.

        Args:
            layer: which.
            region: uint8 [num_rows, >= page_bytes].
            rows: int64 [n], where the pages are; like ``region``, not to be changed
                before the copy has ended.
            device_pages: int64 [n], where they go, each at most once.
            after: ``mark()`` of the work that may still use these pages.
            by_waiter: called on the engine's thread, which has nothing else to do.

        Returns:
            None if the engine may read the layer now, or the copy, if it is only
            queued. Copies of a pool end in the order of the calls.
        """
        ...

    def store_pages(
        self,
        region: npt.NDArray[np.uint8],
        rows: npt.NDArray[np.int64],
        device_pages: npt.NDArray[np.int64],
        after: object,
    ) -> None:
        """Copy all layers of pages from the device to rows of ``region``.

        Starts after the work marked by ``after``; returns when the rows are whole.
        """
        ...
