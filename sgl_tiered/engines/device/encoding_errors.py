"""What an encoding changes in the KV that is served, layer by layer, by a sample.

One page in so many is decoded again right after it was encoded, on the thread of the
offload, and compared with what the device holds. Nobody waits for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from sgl_tiered_kernels import kv_codec
from sgl_tiered_kernels.kv_codec.reference import rows_as_float

from sgl_tiered.core.encoded import EncodedLayout

__all__ = ["SAMPLE_EVERY", "EncodingErrors", "Page"]

SAMPLE_EVERY = 64
"""One page in so many is decoded again; decoding takes about as long as encoding."""
_DIGITS = 5

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]
Page = tuple[npt.NDArray[Any], npt.NDArray[Any]]
"""Keys and values of a page in a layer, [page_tokens, kv_heads, head_dim] each, in the
pool's numbers; bfloat16 as its bits."""


class EncodingErrors:
    """Mean relative errors of keys and of values by layer.

    The error of a page in a layer is the root mean square of what changes, over that
    of the numbers. ``sample`` is called by one thread; any may call ``stats``.

    Args:
        layout: of encoded pages.
    """

    def __init__(self, layout: EncodedLayout) -> None:
        self._layout = layout
        self._num_seen = 0
        # Replaced as a whole, so that readers never see half of an update.
        self._found: tuple[int, Floats] = (0, np.zeros((2, layout.num_layers)))

    def sample(
        self, region: Bytes, rows: Int64s, page: Callable[[int, int], Page]
    ) -> None:
        """Compare at most one of the pages that were just encoded.

        Args:
            region: uint8 [num_rows, >= page_bytes].
            rows: int64 [n], where the encoded pages are.
            page: returns the n-th of them as it is on the device, in a layer.
        """
        first, self._num_seen = self._num_seen, self._num_seen + len(rows)
        due = -first % SAMPLE_EVERY
        if due >= len(rows):
            return
        errors = np.zeros((2, self._layout.num_layers))
        row, zero = rows[due : due + 1], np.zeros(1, np.int64)
        for layer in range(self._layout.num_layers):
            parts = page(due, layer)
            keys, values = (np.empty_like(part) for part in parts)
            kv_codec.decode_layer(self._layout, layer, keys, values, zero, region, row)
            for kind, (was, now) in enumerate(zip(parts, (keys, values), strict=True)):
                errors[kind, layer] = _relative(was, now)
        # A page with what is no number says nothing of the others.
        if np.isfinite(errors).all():
            count, sums = self._found
            self._found = (count + 1, sums + errors)

    def stats(self) -> dict[str, Any]:
        """Return a JSON-able picture; no lists before the first page."""
        count, sums = self._found
        if not count:
            return {"pages_sampled": 0}
        keys, values = np.round(sums / count, _DIGITS).tolist()
        return {
            "pages_sampled": count,
            "keys_by_layer": keys,
            "values_by_layer": values,
        }


def _relative(was: npt.NDArray[Any], now: npt.NDArray[Any]) -> float:
    """Return the root mean square of a change over that of the numbers; 0 for zeros."""
    before = rows_as_float(was).astype(np.float64)
    change = rows_as_float(now) - before
    size = float(np.square(before).sum())
    return float(np.sqrt(np.square(change).sum() / size)) if size else 0.0
