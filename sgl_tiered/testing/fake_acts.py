"""An ``ActCopier`` of numpy arrays, whose KV is an exact function of activations.

A token's activations in a layer are one number; its KV is ``act * 2 + position`` for K
and ``act * 3 + layer`` for V, here in one number: a wrong row, place, position or layer
gives other KV.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from sgl_tiered.testing.fake_layers import FakeLayerCopier

__all__ = ["FakeActCopier", "kv_of"]

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

_SPOILT = -1
_K = 1_000_003
"""K and V in one number: more than any K."""


def kv_of(acts: Int64s, positions: Int64s, layer: int) -> Int64s:
    """Return the KV of tokens, int64 of the same shape."""
    kv: Int64s = (acts * 2 + positions) + _K * (acts * 3 + layer)
    return kv


class FakeActCopier:
    """Act area and host rows; KV goes to the device of a `FakeLayerCopier`.

    Args:
        layers: of the same pool; its ``fails`` and ``gate`` are asked here too,
            ``fails`` with "acts up", "acts down" or "rebuild".
        num_layers: of the model.
        num_act_rows: host rows.
        num_acts: places, besides that of padding.

    Attributes:
        area: int64 [num_acts + 1, page_tokens].
        host: int64 [num_act_rows, num_layers, page_tokens].
        num_rebuilt: pages of which KV was computed.
        held: a rebuild waits for it; set at first.
    """

    def __init__(
        self, layers: FakeLayerCopier, num_layers: int, num_act_rows: int, num_acts: int
    ) -> None:
        self._layers = layers
        self._tokens = layers.device.shape[1]
        self.area: Int64s = np.full((num_acts + 1, self._tokens), _SPOILT, np.int64)
        shape = (num_act_rows, num_layers, self._tokens)
        self.host: Int64s = np.full(shape, _SPOILT, np.int64)
        self.num_rebuilt = 0
        self.held = threading.Event()
        self.held.set()

    def acts_to_host(
        self, layer: int, acts: Int32s, rows: Int64s, after: object
    ) -> None:
        """Copy from the act area to one layer of host rows."""
        del after
        self._layers.gate.wait()
        if self._layers.fails("acts down"):
            self.host[rows, layer] = _SPOILT
            raise OSError("activations did not go to the host, as asked for")
        self.host[rows, layer] = self.area[acts]
        self._layers.copies.append(("acts down", layer, len(rows)))

    def acts_to_device(
        self, layer: int, rows: Int64s, acts: Int32s, after: object
    ) -> None:
        """Copy one layer of host rows to the act area."""
        del after
        self._layers.gate.wait()
        if self._layers.fails("acts up"):
            self.area[acts] = _SPOILT
            raise OSError("activations did not come from the host, as asked for")
        self.area[acts] = self.host[rows, layer]
        self._layers.copies.append(("acts up", layer, len(rows)))

    def rebuild(
        self,
        layer: int,
        acts: Int32s,
        physical: Int32s,
        positions: Int64s,
        after: object,
    ) -> None:
        """Compute KV of pages."""
        del after
        self.held.wait()
        if self._layers.fails("rebuild"):
            self._layers.device[physical] = _SPOILT
            raise OSError("KV was not computed, as asked for")
        tokens = positions[:, None] + np.arange(self._tokens)
        self._layers.device[physical] = kv_of(self.area[acts], tokens, layer)
        self.num_rebuilt += len(acts)
