"""Rows that the attention of a forward reads, filled by the loads of its batch.

On a CPU the thread that runs the model copies a layer of the loads to the pool, and the
layer's attention then gathers its requests' keys and values from there, one behind the
other. A page that is copied to both places at once is read once, and its copy in the
pool, which only later forwards read, need not pass through the processor's cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from sgl_tiered_kernels.paged_attention import Gathered, RequestRows, padded_length

__all__ = ["ReadRows", "rows_needed"]

Bools = npt.NDArray[np.bool_]
Int64s = npt.NDArray[np.int64]


def rows_needed(requests: Sequence[RequestRows], page_tokens: int) -> int:
    """Return how many rows of a page the requests of a forward take."""
    return sum(_num_rows(request, page_tokens) for request in requests)


class ReadRows:
    """The rows of one forward, a page each.

    Args:
        room: ``[2, num_rows * page_tokens, num_kv_heads, head_dim]``, keys first;
            a request that finds no room has no rows.
        requests: of the forward, in the order in which they are attended.
        page_tokens: tokens in a page.
        num_pages: of the pool.

    Attributes:
        keys, values: uint8 [num_rows, bytes of a page's keys], ``room`` as rows.
    """

    def __init__(
        self,
        room: torch.Tensor,
        requests: Sequence[RequestRows],
        page_tokens: int,
        num_pages: int,
    ) -> None:
        self._room = room
        self._page_tokens = page_tokens
        num_rows = room.shape[1] // page_tokens
        self.keys, self.values = room.view(torch.uint8).view(2, num_rows, -1).numpy()
        self._row_of: Int64s = np.full(num_pages, -1, np.int64)
        # First row and tokens of each request; None for one without rows.
        self._places: list[tuple[int, int] | None] = []
        # Which rows hold pages of which layer.
        self._filled: Bools = np.zeros(num_rows, np.bool_)
        self._layer = -1
        # What there was of a request before, by its number and its rows: layers are
        # mostly alike.
        self._gathered: dict[tuple[int, bytes], Gathered] = {}
        row = 0
        for request in requests:
            if row + _num_rows(request, page_tokens) > num_rows:
                self._places.append(None)
                continue
            self._add(row, request)
            self._places.append((row, request.slots.numel()))
            row += _num_rows(request, page_tokens)

    def _add(self, row: int, request: RequestRows) -> None:
        """Give rows from ``row`` on to the pages of a request's prefix."""
        size = self._page_tokens
        num_pages = (request.slots.numel() - request.num_queries) // size
        slots = request.slots[: num_pages * size].view(num_pages, size).numpy()
        pages = slots[:, 0] // size
        is_page = (slots == pages[:, None] * size + np.arange(size)).all(axis=1)
        # A page that several requests share is filled for the first of them.
        chosen = np.flatnonzero(is_page & (self._row_of[pages] < 0))
        self._row_of[pages[chosen]] = row + chosen

    def of_pages(self, device_pages: Int64s) -> Int64s:
        """Return the rows of pages of the pool; -1 for those without one."""
        rows: Int64s = self._row_of[device_pages]
        return rows

    def fill(self, layer: int, rows: Int64s) -> None:
        """Note that rows (-1 for none) hold their pages of a layer."""
        if layer != self._layer:
            self._layer = layer
            self._filled[:] = False
        self._filled[rows[rows >= 0]] = True

    def gathered(self, layer: int, index: int) -> Gathered | None:
        """Return what is there of a layer of a request; None for nothing.

        Args:
            layer: counted from the first of the pool.
            index: of the request.
        """
        place = self._places[index]
        if layer != self._layer or place is None:
            return None
        row, kv_len = place
        filled = self._filled[row : row - (-kv_len // self._page_tokens)]
        if not filled.any():
            return None
        key = (index, filled.tobytes())
        if key not in self._gathered:
            ends = np.flatnonzero(np.diff(filled, prepend=True, append=True))
            tokens = np.minimum(ends * self._page_tokens, kv_len).tolist()
            begin = row * self._page_tokens
            pair = self._room[:, begin : begin + padded_length(kv_len)]
            self._gathered[key] = Gathered(
                pair, list(zip(tokens[::2], tokens[1::2], strict=True))
            )
        return self._gathered[key]


def _num_rows(request: RequestRows, page_tokens: int) -> int:
    return -(-padded_length(request.slots.numel()) // page_tokens)
