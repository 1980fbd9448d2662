"""The device as the tiers below see it, where pages may lack tokens.

They go on to know pages. A load copies the tokens of a page that have a row; an
offload reads pages that lack nothing, and refuses any other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sgl_tiered_kernels import page_copy

from sgl_tiered.core.layout import PageLayout
from sgl_tiered.sparse.rows import RowBinding

__all__ = ["SparseDevicePool"]

Bytes = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]


class SparseDevicePool:
    """A ``DevicePool`` over a `SparsePool`; work is done when a call returns.

    Args:
        pool: on a CPU.
        layout: shape of a page.
    """

    def __init__(self, pool: Any, layout: PageLayout) -> None:
        self._binding: RowBinding = pool.binding
        self._layout = layout
        # The buffers of all layers are the same two.
        self._parts = [_as_rows(pool.k_buffer[0]), _as_rows(pool.v_buffer[0])]
        page_copy.prepare()

    @property
    def layout(self) -> PageLayout:
        """Shape of one page."""
        return self._layout

    @property
    def waiter_copies(self) -> bool:
        """Copies and forward share the cores."""
        return True

    def mark(self) -> object:
        """Return nothing to wait for: the CPU's forward ends before its results."""
        return None

    def load_bytes(self, device_pages: Int64s) -> Int64s:
        """Return int64 [n], the bytes that a load of each page copies."""
        lacking = self._binding.dropped[device_pages].astype(np.int64)
        kept: Int64s = (
            (self._binding.page_rows - lacking) * 2 * self._layout.token_bytes
        )
        return kept

    def load_layer(
        self,
        layer: int,
        region: Bytes,
        rows: Int64s,
        device_pages: Int64s,
        *,
        after: object = None,
        by_waiter: bool = False,
    ) -> None:
        """Copy what is kept of one layer of pages from rows of ``region``."""
        del after
        self._copy(layer, region, rows, device_pages, is_up=True, by_team=by_waiter)

    def store_pages(
        self, region: Bytes, rows: Int64s, device_pages: Int64s, after: object
    ) -> None:
        """Copy all layers of pages to rows of ``region``.

        Raises:
            ValueError: a page lacks tokens, so that its bytes are not all here.
        """
        del after
        if self._binding.dropped[device_pages].any():
            raise ValueError("a sparse page cannot be stored as a whole one")
        for layer in range(self._layout.num_layers):
            self._copy(layer, region, rows, device_pages, is_up=False, by_team=False)

    def _copy(
        self,
        layer: int,
        region: Bytes,
        rows: Int64s,
        device_pages: Int64s,
        *,
        is_up: bool,
        by_team: bool,
    ) -> None:
        layout, token_bytes = self._layout, self._layout.token_bytes
        slots = self._binding.slots(device_pages)
        places = self._binding.table[layer, slots].reshape(len(rows), -1)
        pages, tokens = np.nonzero(places >= 0)
        there = places[pages, tokens].astype(np.int64)
        offsets = (layout.key_offset(layer), layout.value_offset(layer))
        row_bytes = region.shape[1]
        for part, offset in zip(self._parts, offsets, strict=True):
            if row_bytes % token_bytes == 0 and region.flags.c_contiguous:
                # A region of whole tokens, and so is what lies before a layer's part.
                flat = region.reshape(-1, token_bytes)
                here = rows[pages] * (row_bytes // token_bytes)
                here = here + offset // token_bytes + tokens
                _copy_rows(part, there, flat, here, 0, token_bytes, is_up, by_team)
                continue
            for token in range(layout.page_tokens):
                mine = tokens == token
                start = offset + token * token_bytes
                here = rows[pages[mine]]
                _copy_rows(
                    part, there[mine], region, here, start, token_bytes, is_up, by_team
                )


def _copy_rows(
    device: Bytes,
    device_rows: Int64s,
    memory: Bytes,
    memory_rows: Int64s,
    offset: int,
    num_bytes: int,
    is_up: bool,
    by_team: bool,
) -> None:
    """Copy rows between the device and memory, where each begins at ``offset``."""
    if is_up:
        page_copy.copy_rows(
            device,
            device_rows,
            0,
            memory,
            memory_rows,
            offset,
            num_bytes,
            by_team=by_team,
        )
    else:
        page_copy.copy_rows(
            memory, memory_rows, offset, device, device_rows, 0, num_bytes
        )


def _as_rows(buffer: torch.Tensor) -> Bytes:
    rows: Bytes = buffer.view(len(buffer), -1).view(torch.uint8).numpy()
    return rows
