"""SGLang's KV pool as encoded pages: written in fewer bits on offload, back on load.

Takes the place of `CpuDevicePool` where the tiers keep KV encoded. Everything below it
(tiers, pipelines, table, planner) sees pages of the encoding's bytes and moves those,
and what it costs to decode is part of what a load is measured to cost. A page is
encoded while it is copied out of the pool and decoded while it is copied in, without a
copy between, by the kernel ``kv_codec``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sgl_tiered_kernels import kv_codec

from sgl_tiered.core.encoded import EncodedLayout, encoded_layout
from sgl_tiered.core.ids import Encoding
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.engines.device.encoding_errors import EncodingErrors, Page
from sgl_tiered.errors import ConfigError, EngineCompatibilityError

__all__ = [
    "LEAST_PAGE_TOKENS",
    "EncodedCpuPool",
    "as_numbers",
    "encoded_pool_layout",
]

LEAST_PAGE_TOKENS = 16
"""Below, the scales of a key's channels take as much room as the numbers."""
_FLAG = "--tiered-encoding"

Bytes = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]


def encoded_pool_layout(
    pool: Any, layout: PageLayout, encoding: Encoding
) -> EncodedLayout:
    """Return the layout of pages of SGLang's pool in an encoding.

    Args:
        pool: an MHA pool, as ``page_layout`` has looked it over.
        layout: as the device has it.
        encoding: FP8, INT8 or INT4.

    Raises:
        EngineCompatibilityError: the pool's device or element type has no such form.
        ConfigError: the pages are too small.
    """
    buffer = pool.k_buffer[0]
    if buffer.device.type != "cpu":
        raise EngineCompatibilityError(
            f"{_FLAG} {encoding.label} is joined to SGLang on the CPU platform only, "
            f"not on {buffer.device.type!r} yet; leave the flag out there."
        )
    if buffer.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise EngineCompatibilityError(
            f"{_FLAG} {encoding.label} does not know KV of type {buffer.dtype}; leave "
            "the flag out."
        )
    if layout.page_tokens < LEAST_PAGE_TOKENS:
        raise ConfigError(
            _FLAG,
            f"{encoding.label} gains nothing with pages of {layout.page_tokens} tokens",
            f"give --page-size {LEAST_PAGE_TOKENS} or more; 64 is best",
        )
    return encoded_layout(layout, encoding, buffer.shape[1], buffer.shape[2])


class EncodedCpuPool:
    """The device pool of the CPU platform, over tiers of encoded pages.

    Args:
        pool: SGLang's.
        layout: of its pages below the device.
    """

    def __init__(self, pool: Any, layout: EncodedLayout) -> None:
        self._layout = layout
        self._keys = [as_numbers(buffer) for buffer in pool.k_buffer]
        self._values = [as_numbers(buffer) for buffer in pool.v_buffer]
        self.errors = EncodingErrors(layout)
        kv_codec.prepare(self._keys[0].dtype)

    @property
    def layout(self) -> PageLayout:
        """Shape of one page below the device."""
        return self._layout

    def mark(self) -> object:
        """Return nothing to wait for: the CPU's forward ends before its results."""
        return None

    @property
    def waiter_copies(self) -> bool:
        """Decoding and forward share the cores."""
        return True

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
        """Decode one layer of pages from rows of ``region`` into the pool."""
        del after, by_waiter
        kv_codec.decode_layer(
            self._layout,
            layer,
            self._keys[layer],
            self._values[layer],
            device_pages,
            region,
            rows,
        )

    def store_pages(
        self, region: Bytes, rows: Int64s, device_pages: Int64s, after: object
    ) -> None:
        """Encode all layers of pages of the pool into rows of ``region``."""
        del after
        for layer in range(self._layout.num_layers):
            kv_codec.encode_layer(
                self._layout,
                layer,
                region,
                rows,
                self._keys[layer],
                self._values[layer],
                device_pages,
            )
        self.errors.sample(
            region, rows, lambda n, layer: self._page(device_pages[n], layer)
        )

    def _page(self, page: int, layer: int) -> Page:
        """Return keys and values of one page in one layer, as they are here."""
        tokens = self._layout.page_tokens
        slots = slice(page * tokens, (page + 1) * tokens)
        return self._keys[layer][slots], self._values[layer][slots]


def as_numbers(buffer: torch.Tensor) -> npt.NDArray[Any]:
    """Return token rows [rows, heads, dim] as the kernel takes them: no copy.

    bfloat16 comes as its bits, in uint16.
    """
    if buffer.dtype == torch.bfloat16:
        bits: npt.NDArray[Any] = buffer.view(torch.int16).numpy().view(np.uint16)
        return bits
    rows: npt.NDArray[Any] = buffer.numpy()
    return rows
