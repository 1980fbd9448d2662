"""The device over tiers of encoded pages, of which a load brings some tokens.

An offload encodes whole pages, as without sparse KV (or, where only some tokens of each
are stored, a smaller page of these). A load decodes the kept tokens straight into their
rows. It reads, of each layer of a page, the codes of these tokens, the scales of their
values, and the scales of the keys once for each group of tokens that has any: that is
what it is charged for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from sgl_tiered_kernels import kv_codec

from sgl_tiered.core.encoded import EncodedLayout, kept_bytes
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.engines.device.encoded_pools import as_numbers
from sgl_tiered.engines.device.encoding_errors import EncodingErrors, Page
from sgl_tiered.engines.device.sparse_pool import SparseDevicePool

__all__ = ["EncodedSparsePool"]

Bytes = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]

_BATCH_PAGES = 8
"""Pages whose rows are put together before they are encoded: they stay in the cache."""


class EncodedSparsePool(SparseDevicePool):
    """A `SparseDevicePool` whose tiers hold encoded pages.

    Args:
        pool: on a CPU.
        layout: of an encoded page, or a `KeptLayout` over one.
        whole: of an encoded page of which nothing is left out.
    """

    def __init__(self, pool: Any, layout: PageLayout, whole: EncodedLayout) -> None:
        self._whole = whole
        super().__init__(pool, layout)

    def _open(self, pool: Any) -> None:
        assert isinstance(self._inner, EncodedLayout)
        self._encoded = self._inner
        # The buffers of all layers are the same two.
        self._keys = as_numbers(pool.k_buffer[0])
        self._values = as_numbers(pool.v_buffer[0])
        self.errors = EncodingErrors(self._encoded)
        kv_codec.prepare(self._keys.dtype)

    @property
    def whole_bytes(self) -> int:
        """Bytes of an encoded page of which nothing is left out."""
        return self._whole.page_bytes

    def share_of(self, keep: float) -> float:
        """Return the share of a stored page's bytes that loads of so many tokens take.

        A load is expected to need all scales of the keys.

        Args:
            keep: share of a layer's tokens.
        """
        if self._chosen is not None:
            return 1.0
        layout = self._whole
        tokens = keep * layout.page_tokens * layout.single_token_bytes
        groups = layout.page_tokens // layout.key_group
        return (tokens + groups * layout.shared_bytes) / layout.layer_page_bytes

    def load_bytes(self, device_pages: Int64s) -> Int64s:
        """Return int64 [n], the bytes that a load of each page reads."""
        if self._chosen is not None:
            return np.full(len(device_pages), self._layout.page_bytes, np.int64)
        table = self._binding.table
        has = table[:, self._binding.slots(device_pages)] >= 0
        shape = (len(table), len(device_pages), self._whole.page_tokens)
        return kept_bytes(self._whole, has.reshape(shape))

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
        """Decode tokens of stored pages into the device's rows ``there``."""
        del by_team
        kv_codec.decode_tokens(
            self._encoded,
            layer,
            self._keys,
            self._values,
            there,
            region,
            rows,
            tokens,
        )

    def _store(
        self, region: Bytes, rows: Int64s, places: Callable[[int], Int64s]
    ) -> None:
        """Encode all layers of what lies in the device's rows ``places(layer)``."""
        pages = np.arange(_BATCH_PAGES)
        for layer in range(self._encoded.num_layers):
            of_layer = places(layer)
            for first in range(0, len(rows), _BATCH_PAGES):
                batch = slice(first, first + _BATCH_PAGES)
                keys, values = self._gather(of_layer[batch].reshape(-1))
                count = len(rows[batch])
                kv_codec.encode_layer(
                    self._encoded,
                    layer,
                    region,
                    rows[batch],
                    keys,
                    values,
                    pages[:count],
                )
        self.errors.sample(
            region, rows, lambda n, layer: self._gather(places(layer)[n])
        )

    def _gather(self, there: Int64s) -> Page:
        """Return keys and values of some of the device's rows, next to each other."""
        return self._keys.take(there, axis=0), self._values.take(there, axis=0)
