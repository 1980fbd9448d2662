"""Where the activations of pages lie that a transfer reads or writes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["ActTransfers"]

Bools = npt.NDArray[np.bool_]
Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]


class ActTransfers:
    """Where the activations of pages lie that a transfer reads or writes.

    Args:
        num_layers, num_pages: of the pool, that of padding included.
        num_kv_rows: of the host region; a pool is probed before any page has one.

    Attributes:
        is_act: bool [num_pages], whether activations are moved and not KV.
        places: int32 [num_layers, num_pages], in the act area, or -1 for the host row.
        rows: int64 [num_pages], of the host region of what is moved.
    """

    def __init__(self, num_layers: int, num_pages: int, num_kv_rows: int) -> None:
        self.is_act: Bools = np.zeros(num_pages, np.bool_)
        self.places: Int32s = np.full((num_layers, num_pages), -1, np.int32)
        self.rows: Int64s = np.arange(num_pages) % num_kv_rows

    def note(
        self, pages: Int64s, is_act: Bools | None, places: Int32s, rows: Int64s
    ) -> None:
        """Note the places and rows that pages have now."""
        self.is_act[pages] = False if is_act is None else is_act
        self.places[:, pages] = places[:, pages]
        self.rows[pages] = rows[pages]
