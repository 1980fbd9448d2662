"""Which rows of a forward are kept as activations, on a device that is not waited for.

All arithmetic is on lists that the host has anyway; what the device needs of it is
uploaded, and queued there ahead of the capture that reads it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from sgl_tiered.engines.device.indices import fill_slots, page_starts

__all__ = ["DeviceRows"]

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


class DeviceRows:
    """The tokens that a forward writes, page by page.

    Args:
        pages: int64 [num_pages], logical, each once.
        index: int64 [num_rows], each token's page among these.
        offsets: int32 [num_rows], where in it.
        page_tokens: tokens in one page.
        upload: brings int32 numbers to the device, in the order of the calling thread's
            stream.
    """

    def __init__(
        self,
        pages: Int64s,
        index: Int64s,
        offsets: Int32s,
        page_tokens: int,
        upload: Callable[[Int32s], torch.Tensor],
    ) -> None:
        self.pages = pages
        self._index, self._offsets = index, offsets
        self._page_tokens = page_tokens
        self._upload = upload
        # Of the pages that were captured last: alike in all layers of most forwards.
        self._here: npt.NDArray[np.bool_] | None = None
        self._on_device: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def __len__(self) -> int:
        return len(self._index)

    def of_layer(self, places: Int32s) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return which rows of the forward go to which rows of the act area.

        Args:
            places: int32 [num_pages], of each page in the area, -1 for none.

        Returns:
            int64 [n] each, on the device; None if none goes anywhere.
        """
        here = places >= 0
        if not here.any():
            return None
        if self._here is None or not np.array_equal(here, self._here):
            source = np.flatnonzero(here[self._index])
            # Numbers among the pages that are captured.
            number = np.cumsum(here) - 1
            lists = (source, number[self._index[source]], self._offsets[source])
            rows, positions, offsets = (
                self._upload(one.astype(np.int32)) for one in lists
            )
            self._here = here
            self._on_device = (rows.to(torch.int64), positions, offsets)
        assert self._on_device is not None
        rows, positions, offsets = self._on_device
        starts = self._upload(page_starts(places[here], self._page_tokens))
        target = torch.empty_like(positions)
        fill_slots(target, starts, positions, offsets)
        return rows, target.to(torch.int64)
