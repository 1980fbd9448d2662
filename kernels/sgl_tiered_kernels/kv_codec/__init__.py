"""Keys and values of whole pages in 8 bits a number or fewer, and back.

All arrays are host memory and C-contiguous. A pool's rows are ``[slots, kv_heads,
head_dim]``, one array for keys and one for values, slot ``page * page_tokens + token``:
float32, float16, or bfloat16 given as its bits in uint16, which numpy has no name for.
Encoded pages are rows of a uint8 region, laid out by `sgl_tiered.core.encoded`.

One call runs without the GIL from its first byte to its last, on the calling thread
alone. With numba it compiles once per machine (``prepare`` does it ahead; the result
is cached on disk); without numba the slow reference runs.

A number comes back changed by half a step at most (README.md). A group that holds an
infinity or what is no number, or whose numbers are beyond 4e5, comes back as NaN, all
of it: what was no number never becomes one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.encoded import EncodedLayout, encoded_layout
from sgl_tiered.core.ids import Encoding
from sgl_tiered.core.layout import PageLayout
from sgl_tiered_kernels.kv_codec.backend import backend_name, load_backend

__all__ = ["backend_name", "decode_layer", "decode_tokens", "encode_layer", "prepare"]

_Bytes = npt.NDArray[np.uint8]
_Rows = npt.NDArray[np.int64]
_ITEM_TYPES = ("uint16", "float16", "float32")


def prepare(item_type: npt.DTypeLike = np.uint16) -> str:
    """Compile what is not compiled yet for a type; return ``backend_name()``."""
    kind = np.dtype(item_type)
    raw = PageLayout(1, 16, 16 * kind.itemsize)
    layout = encoded_layout(raw, Encoding.INT4, 1, 16)
    keys = np.zeros((16, 1, 16), kind)
    region = np.zeros((1, layout.page_bytes), np.uint8)
    rows = np.zeros(1, np.int64)
    encode_layer(layout, 0, region, rows, keys, keys, rows)
    decode_layer(layout, 0, keys, keys.copy(), rows, region, rows)
    decode_tokens(layout, 0, keys, keys.copy(), rows, region, rows, rows)
    return backend_name()


def encode_layer(
    layout: EncodedLayout,
    layer: int,
    region: _Bytes,
    rows: npt.ArrayLike,
    keys: npt.NDArray[Any],
    values: npt.NDArray[Any],
    pages: npt.ArrayLike,
) -> None:
    """Encode one layer of pages of a pool into rows of a region.

    Args:
        layout: of a page.
        layer: which; it says where in a row the bytes go.
        region: uint8 ``[num_rows, >= layout.page_bytes]``; ``layer_page_bytes`` of
            each row are written.
        rows: int ``[n]``, the rows, each at most once.
        keys: ``[slots, kv_heads, head_dim]``, read only.
        values: the same for the values.
        pages: int ``[n]``, the pages of the pool.

    Raises:
        ValueError: if something does not fit or lies outside; nothing is written.
    """
    _check_layer(layout, layer, region)
    num_pages = _check_pool(layout, keys, values) // layout.page_tokens
    to_rows = _as_numbers("rows", rows, len(region))
    from_pages = _as_numbers("pages", pages, num_pages)
    _check_lengths({"rows": to_rows, "pages": from_pages})
    load_backend().encode_layer(
        layout, layer, region, to_rows, keys, values, from_pages
    )


def decode_layer(
    layout: EncodedLayout,
    layer: int,
    keys: npt.NDArray[Any],
    values: npt.NDArray[Any],
    pages: npt.ArrayLike,
    region: _Bytes,
    rows: npt.ArrayLike,
) -> None:
    """Decode one layer of pages from rows of a region into a pool.

    Args:
        layout: of a page.
        layer: which.
        keys: ``[slots, kv_heads, head_dim]``, written.
        values: the same for the values.
        pages: int ``[n]``, the pages of the pool, each at most once.
        region: uint8 ``[num_rows, >= layout.page_bytes]``.
        rows: int ``[n]``, the rows.

    Raises:
        ValueError: if something does not fit or lies outside; nothing is written.
    """
    _check_layer(layout, layer, region)
    num_pages = _check_pool(layout, keys, values) // layout.page_tokens
    to_pages = _as_numbers("pages", pages, num_pages)
    from_rows = _as_numbers("rows", rows, len(region))
    _check_lengths({"pages": to_pages, "rows": from_rows})
    load_backend().decode_layer(
        layout, layer, keys, values, to_pages, region, from_rows
    )


def decode_tokens(
    layout: EncodedLayout,
    layer: int,
    keys: npt.NDArray[Any],
    values: npt.NDArray[Any],
    slots: npt.ArrayLike,
    region: _Bytes,
    rows: npt.ArrayLike,
    tokens: npt.ArrayLike,
) -> None:
    """Decode single tokens of encoded pages, as a sparse load keeps them.

    Tokens of one page are best next to each other: the scales of its keys are then
    read once.

    Args:
        layout: of a page.
        layer: which.
        keys: ``[slots, kv_heads, head_dim]``, written. A pool of single tokens need
            not be a whole number of pages.
        values: the same for the values.
        slots: int ``[n]``, where each token goes, each at most once.
        region: uint8 ``[num_rows, >= layout.page_bytes]``.
        rows: int ``[n]``, the row of each token's page.
        tokens: int ``[n]`` (int8 is enough), which token of that page.

    Raises:
        ValueError: if something does not fit or lies outside; nothing is written.
    """
    _check_layer(layout, layer, region)
    num_slots = _check_pool(layout, keys, values)
    to_slots = _as_numbers("slots", slots, num_slots)
    from_rows = _as_numbers("rows", rows, len(region))
    which = _as_numbers("tokens", tokens, layout.page_tokens)
    _check_lengths({"slots": to_slots, "rows": from_rows, "tokens": which})
    load_backend().decode_tokens(
        layout, layer, keys, values, to_slots, region, from_rows, which
    )


def _check_layer(layout: EncodedLayout, layer: int, region: _Bytes) -> None:
    if not 0 <= layer < layout.num_layers:
        raise ValueError(f"layer {layer} is none of {layout.num_layers}")
    if region.ndim != 2 or not region.flags.c_contiguous or region.dtype != np.uint8:
        raise ValueError("region must be a 2-D C-contiguous array of uint8")
    if region.shape[1] < layout.page_bytes:
        raise ValueError(
            f"a row of region has {region.shape[1]} bytes, and a page "
            f"{layout.page_bytes}"
        )


def _check_pool(
    layout: EncodedLayout, keys: npt.NDArray[Any], values: npt.NDArray[Any]
) -> int:
    for name, pool in (("keys", keys), ("values", values)):
        if pool.dtype.name not in _ITEM_TYPES:
            raise ValueError(f"{name} must be of {', '.join(_ITEM_TYPES)}")
        if pool.ndim != 3 or not pool.flags.c_contiguous:
            raise ValueError(f"{name} must be a 3-D C-contiguous array")
        if pool.shape[1:] != (layout.kv_heads, layout.head_dim):
            raise ValueError(
                f"{name} has {pool.shape[1]} heads of {pool.shape[2]}, and the layout "
                f"{layout.kv_heads} of {layout.head_dim}"
            )
    if keys.shape != values.shape or keys.dtype != values.dtype:
        raise ValueError("keys and values differ in shape or type")
    return len(keys)


def _as_numbers(name: str, numbers: npt.ArrayLike, end: int) -> _Rows:
    array = np.asarray(numbers)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{name} must be a 1-D array of whole numbers")
    if array.size and not 0 <= array.min() <= array.max() < end:
        raise ValueError(f"{name} holds a number that is not below {end}")
    return np.ascontiguousarray(array, dtype=np.int64)


def _check_lengths(arrays: dict[str, _Rows]) -> None:
    if len({len(array) for array in arrays.values()}) > 1:
        sizes = ", ".join(f"{name} {len(array)}" for name, array in arrays.items())
        raise ValueError(f"lengths differ: {sizes}")
