"""The device as the tiers below see it, where pages may lack tokens.

They go on to know pages. A load copies the tokens of a page that have a row; an
offload reads pages that lack nothing, and refuses any other. Where the tiers hold only
some tokens of each page (`KeptLayout`), it is told which before a page goes down
(``choose``), and a load takes just these up again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sgl_tiered_kernels import page_copy

from sgl_tiered.core.ids import Encoding
from sgl_tiered.core.kept import KeptLayout
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.sparse.rows import RowBinding

__all__ = ["SparseDevicePool"]

Bools = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]


class SparseDevicePool:
    """A ``DevicePool`` over a `SparsePool`; work is done when a call returns.

    Args:
        pool: on a CPU.
        layout: shape of a page below the device.
    """

    def __init__(self, pool: Any, layout: PageLayout) -> None:
        self._binding: RowBinding = pool.binding
        self._layout = layout
        self._chosen: Bools | None = None
        # What a row of a region holds: the page, or a smaller one of its kept tokens.
        self._inner = layout
        if isinstance(layout, KeptLayout):
            self._inner = layout.inner
            self._chosen = np.zeros(self._binding.table.shape, np.bool_)
        self._open(pool)

    def _open(self, pool: Any) -> None:
        # The buffers of all layers are the same two.
        self._parts = [_as_rows(pool.k_buffer[0]), _as_rows(pool.v_buffer[0])]
        page_copy.prepare()

    @property
    def layout(self) -> PageLayout:
        """Shape of one page."""
        return self._layout

    @property
    def stored_tokens(self) -> int:
        """Tokens of a page that the tiers hold of each layer."""
        return self._inner.page_tokens

    @property
    def whole_bytes(self) -> int:
        """Bytes of a page of which nothing is left out, written as the tiers write."""
        return self._binding.page_rows * 2 * self._layout.token_bytes

    @property
    def written_as(self) -> Encoding:
        """How the tokens that the tiers hold are written."""
        return self._inner.encoding

    @property
    def waiter_copies(self) -> bool:
        """Copies and forward share the cores."""
        return True

    def mark(self) -> object:
        """Return nothing to wait for: the CPU's forward ends before its results."""
        return None

    def share_of(self, keep: float) -> float:
        """Return the share of a stored page's bytes that loads of so many tokens take.

        Args:
            keep: share of a layer's tokens.
        """
        return 1.0 if self._chosen is not None else keep

    def load_bytes(self, device_pages: Int64s) -> Int64s:
        """Return int64 [n], the bytes that a load of each page copies."""
        lacking = self._binding.dropped[device_pages].astype(np.int64)
        kept: Int64s = (
            (self._binding.page_rows - lacking) * 2 * self._layout.token_bytes
        )
        return kept

    def choose(self, device_pages: Int64s, kept: Bools) -> None:
        """Say what is stored of pages; it holds until they are stored.

        Args:
            device_pages: int64 [n].
            kept: bool [num_layers, n * page_tokens], ``stored_tokens`` of each page in
                each layer.
        """
        assert self._chosen is not None, "pages are stored whole"
        self._chosen[:, self._binding.slots(device_pages)] = kept

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
        """Bring what is kept of one layer of pages from rows of ``region``.

        Raises:
            ValueError: a page has a row for a token that was not stored.
        """
        del after
        slots = self._binding.slots(device_pages)
        places = self._binding.table[layer, slots].reshape(len(rows), -1)
        has = places >= 0
        pages, found = np.nonzero(has)
        tokens: Int64s = found.astype(np.int64)
        if self._chosen is not None:
            if (has.sum(axis=1) != self.stored_tokens).any():
                raise ValueError("a page has rows for other tokens than were stored")
            # Of a page's kept tokens, the first is the stored page's first.
            tokens = np.tile(np.arange(self.stored_tokens, dtype=np.int64), len(rows))
        there = places[has].astype(np.int64)
        self._bring(layer, region, rows[pages], tokens, there, by_team=by_waiter)

    def store_pages(
        self, region: Bytes, rows: Int64s, device_pages: Int64s, after: object
    ) -> None:
        """Store all layers of pages, or what was chosen of them, in ``region``.

        Raises:
            ValueError: a page lacks tokens, so that its bytes are not all here; or
                another number of tokens was chosen than are stored.
        """
        del after
        if self._binding.dropped[device_pages].any():
            raise ValueError("a sparse page cannot be stored as a whole one")
        slots = self._binding.slots(device_pages)

        def places(layer: int) -> Int64s:
            """Return int64 [n, stored_tokens], the device's rows of what is stored."""
            wanted = slots
            if self._chosen is not None:
                chosen = self._chosen[layer, slots]
                counts = chosen.reshape(len(rows), -1).sum(axis=1)
                if (counts != self.stored_tokens).any():
                    raise ValueError("it was not said what to store of a page")
                wanted = slots[chosen]
            found: Int64s = self._binding.table[layer, wanted].astype(np.int64)
            return found.reshape(len(rows), -1)

        self._store(region, rows, places)

    def _store(
        self, region: Bytes, rows: Int64s, places: Callable[[int], Int64s]
    ) -> None:
        """Write all layers of what lies in the device's rows ``places(layer)``."""
        count = self.stored_tokens
        tokens = np.tile(np.arange(count, dtype=np.int64), len(rows))
        for layer in range(self._layout.num_layers):
            there = places(layer).reshape(-1)
            self._copy(layer, region, rows.repeat(count), tokens, there, is_up=False)

    def _bring(
        self,
        layer: int,
        region: Bytes,
        rows: Int64s,
        tokens: Int64s,
        there: Int64s,
        *,
        by_team: bool,
    ) -> None:
        """Bring tokens of stored pages, one a row, to the device's rows ``there``."""
        self._copy(layer, region, rows, tokens, there, is_up=True, by_team=by_team)

    def _copy(
        self,
        layer: int,
        region: Bytes,
        rows: Int64s,
        tokens: Int64s,
        there: Int64s,
        *,
        is_up: bool,
        by_team: bool = False,
    ) -> None:
        inner, token_bytes = self._inner, self._inner.token_bytes
        offsets = (inner.key_offset(layer), inner.value_offset(layer))
        row_bytes = region.shape[1]
        for part, offset in zip(self._parts, offsets, strict=True):
            if row_bytes % token_bytes == 0 and region.flags.c_contiguous:
                # A region of whole tokens, and so is what lies before a layer's part.
                flat = region.reshape(-1, token_bytes)
                here = rows * (row_bytes // token_bytes)
                here = here + offset // token_bytes + tokens
                _copy_rows(part, there, flat, here, 0, token_bytes, is_up, by_team)
                continue
            for token in range(inner.page_tokens):
                mine = tokens == token
                start = offset + token * token_bytes
                _copy_rows(
                    part,
                    there[mine],
                    region,
                    rows[mine],
                    start,
                    token_bytes,
                    is_up,
                    by_team,
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
