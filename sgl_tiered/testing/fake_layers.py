"""A ``LayerCopier`` of numpy arrays: one number per token, and copies that may fail."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

__all__ = ["FakeLayerCopier"]

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

_SPOILT = -1


class FakeLayerCopier:
    """Device tensor and host region in which a token's KV in a layer is one number.

    Attributes:
        device: int64 [num_physical, page_tokens].
        host: int64 [num_pages, num_layers, page_tokens].
        fails: asked before each copy with ``"up"`` or ``"down"``; if it says so, the
            target is spoilt and the copy raises.
        gate: copies wait for it; set at first.
        waiter_copies: whether the waiting thread copies.
        copies: ("up" or "down", layer, number of pages) of each copy that ended well.
    """

    def __init__(
        self, num_layers: int, num_pages: int, num_physical: int, page_tokens: int
    ) -> None:
        self.device: Int64s = np.full((num_physical, page_tokens), _SPOILT, np.int64)
        shape = (num_pages, num_layers, page_tokens)
        self.host: Int64s = np.full(shape, _SPOILT, np.int64)
        self.fails: Callable[[str], bool] = lambda _direction: False
        self.gate = threading.Event()
        self.gate.set()
        self.waiter_copies = False
        self.copies: list[tuple[str, int, int]] = []

    def mark(self) -> object:
        """Return nothing to wait for."""
        return None

    def to_host(
        self, layer: int, physical: Int32s, rows: Int64s, after: object
    ) -> None:
        """Copy layer-pages to one layer of host rows."""
        del after
        self.gate.wait()
        if self.fails("down"):
            self.host[rows, layer] = _SPOILT
            raise OSError("a copy to the host failed, as asked for")
        self.host[rows, layer] = self.device[physical]
        self.copies.append(("down", layer, len(rows)))

    def to_device(
        self, layer: int, rows: Int64s, physical: Int32s, after: object
    ) -> None:
        """Copy one layer of host rows to layer-pages."""
        del after
        self.gate.wait()
        if self.fails("up"):
            self.device[physical] = _SPOILT
            raise OSError("a copy to the device failed, as asked for")
        self.device[physical] = self.host[rows, layer]
        self.copies.append(("up", layer, len(rows)))
