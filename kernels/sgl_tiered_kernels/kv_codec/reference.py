"""The encodings in plain numpy and float32: what every other form must equal.

Numbers are float32 here; `rows_as_float` and `float_as_rows` come from and go to the
element types of a pool. README.md has the formulas.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.encoded import EncodedLayout

__all__ = [
    "NO_NUMBER",
    "decode_layer",
    "decode_tokens",
    "encode_layer",
    "float_as_rows",
    "pack",
    "rows_as_float",
    "scale_of",
    "unpack",
]

NO_NUMBER = 255
"""Code of a scale whose group holds what is no number, or is too large."""
_F = np.float32
_LARGEST_FP8 = _F(448)
_FP8 = np.array(
    [
        (m / 8 * 2.0**-6) if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)
        for e in range(16)
        for m in range(8)
    ][:-1],
    np.float32,
)
"""The positive numbers of e4m3 by their code, 0 to 126; 127 is no number."""
_PLANES = {256: (8,), 16: (4,), 11: (4, 2, 1), 8: (2, 1)}
"""Bits of a code by planes, the lowest first."""
_HALF_MAX = _F(65504)

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]


def rows_as_float(rows: npt.NDArray[Any]) -> Floats:
    """Return rows as float32; uint16 stands for bfloat16."""
    if rows.dtype == np.uint16:
        return (rows.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return rows.astype(np.float32)


def float_as_rows(values: Floats, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Round float32 to the nearest of a type, ties to even; no number becomes one."""
    if np.dtype(dtype) == np.uint16:
        bits = values.view(np.uint32)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
        return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)
    if np.dtype(dtype) == np.float16:
        return values.clip(-_HALF_MAX, _HALF_MAX).astype(np.float16)
    return values


def scale_of(code: npt.NDArray[np.uint8]) -> Floats:
    """Return the scale of a code: 5 bits of exponent, 3 of fraction."""
    exponent = code.astype(np.int64) >> 3
    scale = np.ldexp(1 + (code & 7) / 8, exponent - 20).astype(np.float32)
    return np.where(code == NO_NUMBER, _F(np.nan), scale)


def _code_of(need: Floats, bad: npt.NDArray[np.bool_]) -> Bytes:
    """Return the code of the smallest scale that is at least ``need``."""
    codes = np.arange(NO_NUMBER)
    code = np.searchsorted(scale_of(codes.astype(np.uint8)), need)
    return np.where(bad, NO_NUMBER, code).astype(np.uint8)


def _quantise(
    values: Floats, axis: int, levels: int, *, is_fp8: bool
) -> tuple[Bytes, Bytes, npt.NDArray[np.int8]]:
    """Return codes like ``values``, and scales and zeros with ``axis`` of length 1."""
    low = values.min(axis, keepdims=True)
    high = values.max(axis, keepdims=True)
    bad = np.asarray(~np.isfinite(values).all(axis, keepdims=True))
    with np.errstate(invalid="ignore", over="ignore"):
        if is_fp8:
            need = np.maximum(np.abs(low), np.abs(high)) * _F(1 / 448)
        else:
            need = (high - low) * _F(1 / (levels - 1))
            need = np.maximum(need, low * _F(1 / 127))
            need = np.maximum(need, low * _F(-1 / 128))
        scale = _code_of(need, bad)
        bad = scale == NO_NUMBER
        inverse = np.where(bad, _F(0), _F(1) / scale_of(scale))
        scaled = np.where(bad, _F(0), values * inverse)
        if is_fp8:
            zero = np.zeros(low.shape, np.int8)
            return _as_fp8(scaled), scale, zero
        zero = np.where(bad, _F(0), low * inverse)
    zero = np.rint(zero).clip(-128, 127).astype(np.float32)
    codes = np.rint((scaled - zero).clip(0, levels - 1)).astype(np.uint8)
    return codes, scale, zero.astype(np.int8)


def _as_fp8(values: Floats) -> Bytes:
    """Return the nearest e4m3, of two that are as near the even code."""
    size = np.abs(values).clip(0, _LARGEST_FP8)
    above = np.searchsorted(_FP8, size).clip(1, len(_FP8) - 1)
    below = above - 1
    to_above, to_below = _FP8[above] - size, size - _FP8[below]
    is_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    code = np.where(is_above, above, below)
    signed: Bytes = (code + 128 * np.signbit(values)).astype(np.uint8)
    return signed


def _dequantise(
    codes: Bytes, scale: Bytes, zero: npt.NDArray[np.int8], *, is_fp8: bool
) -> Floats:
    if is_fp8:
        value = np.append(_FP8, _F(np.nan))[codes & 127]
        return np.where(codes > 127, -value, value) * scale_of(scale)
    return (zero.astype(np.float32) + codes.astype(np.float32)) * scale_of(scale)


def pack(codes: Bytes, levels: int) -> Bytes:
    """Write rows of codes as bytes.

    Args:
        codes: uint8 [rows, width], width a multiple of 16.
        levels: steps of a code.

    Returns:
        uint8 [rows, bytes]. Code ``i`` of a plane of ``w`` bits is in byte
        ``i % n`` from bit ``i // n * w`` on, where the plane has ``n`` bytes.
    """
    if levels == 11:
        half = codes.shape[1] // 2
        codes = codes[:, :half] * np.uint8(11) + codes[:, half:]
    planes, shift = [], 0
    for width in _PLANES[levels]:
        part = (codes >> shift) & (2**width - 1)
        per_byte = 8 // width
        parts = part.reshape(len(codes), per_byte, -1)
        shifts = (np.arange(per_byte) * width)[None, :, None]
        planes.append((parts << shifts).sum(1).astype(np.uint8))
        shift += width
    return np.concatenate(planes, axis=1)


def unpack(data: Bytes, levels: int) -> Bytes:
    """Read what ``pack`` wrote."""
    total = sum(_PLANES[levels])
    num_codes = data.shape[1] * 8 // total
    codes = np.zeros((len(data), num_codes), np.uint8)
    begin = shift = 0
    for width in _PLANES[levels]:
        num_bytes = num_codes * width // 8
        part = data[:, begin : begin + num_bytes]
        segments = [(part >> (i * width)) & (2**width - 1) for i in range(8 // width)]
        codes |= (np.concatenate(segments, axis=1) << shift).astype(np.uint8)
        begin, shift = begin + num_bytes, shift + width
    if levels == 11:
        codes = np.concatenate([codes // 11, codes % 11], axis=1)
    return codes


def encode_layer(
    layout: EncodedLayout,
    layer: int,
    region: Bytes,
    rows: Int64s,
    keys: npt.NDArray[Any],
    values: npt.NDArray[Any],
    pages: Int64s,
) -> None:
    """Encode one layer of pages into rows of ``region``."""
    tokens, width, padded = layout.page_tokens, layout.width, layout.padded_width
    is_fp8 = not layout.has_zeros
    for row, page in zip(rows.tolist(), pages.tolist(), strict=True):
        slots = slice(page * tokens, (page + 1) * tokens)
        both = []
        for source, levels, axis, shape in (
            (keys, layout.key_levels, 1, (-1, layout.key_group, width)),
            (values, layout.value_levels, 2, (tokens, -1, layout.value_group)),
        ):
            floats = rows_as_float(source[slots].reshape(tokens, width))
            codes, scale, zero = _quantise(
                floats.reshape(shape), axis, levels, is_fp8=is_fp8
            )
            wide = np.zeros((tokens, padded), np.uint8)
            wide[:, :width] = codes.reshape(tokens, width)
            both += [pack(wide, levels).ravel(), scale.ravel()]
            both += [zero.ravel().view(np.uint8)] if layout.has_zeros else []
        begin = layout.key_offset(layer)
        region[row, begin : begin + layout.layer_page_bytes] = np.concatenate(both)


def decode_page(
    layout: EncodedLayout, layer: int, region: Bytes, row: int
) -> tuple[Floats, Floats]:
    """Return keys and values of a page, float32 [page_tokens, width] each."""
    tokens, width = layout.page_tokens, layout.width
    found = []
    for begin, levels, row_bytes, num_scales, group in (
        (
            layout.key_offset(layer),
            layout.key_levels,
            layout.key_row_bytes,
            layout.num_key_scales,
            (-1, layout.key_group, width),
        ),
        (
            layout.value_offset(layer),
            layout.value_levels,
            layout.value_row_bytes,
            layout.num_value_scales,
            (tokens, -1, layout.value_group),
        ),
    ):
        data = region[row, begin:]
        end = tokens * row_bytes
        codes = unpack(data[:end].reshape(tokens, row_bytes), levels)[:, :width]
        grouped = codes.reshape(group)
        ones = (len(grouped), 1, width) if group[0] == -1 else (tokens, -1, 1)
        scale = data[end : end + num_scales].reshape(ones)
        zero = np.zeros(scale.shape, np.int8)
        if layout.has_zeros:
            raw = data[end + num_scales : end + 2 * num_scales]
            zero = raw.view(np.int8).reshape(ones)
        floats = _dequantise(grouped, scale, zero, is_fp8=not layout.has_zeros)
        found.append(floats.reshape(tokens, width))
    return found[0], found[1]


def decode_layer(
    layout: EncodedLayout,
    layer: int,
    keys: npt.NDArray[Any],
    values: npt.NDArray[Any],
    pages: Int64s,
    region: Bytes,
    rows: Int64s,
) -> None:
    """Decode one layer of whole pages from rows of ``region``."""
    tokens = np.arange(layout.page_tokens)
    decode_tokens(
        layout,
        layer,
        keys,
        values,
        (pages[:, None] * layout.page_tokens + tokens).ravel(),
        region,
        rows.repeat(layout.page_tokens),
        np.tile(tokens, len(rows)),
    )


def decode_tokens(
    layout: EncodedLayout,
    layer: int,
    keys: npt.NDArray[Any],
    values: npt.NDArray[Any],
    slots: Int64s,
    region: Bytes,
    rows: Int64s,
    tokens: Int64s,
) -> None:
    """Decode single tokens of pages."""
    for slot, row, token in zip(slots, rows, tokens, strict=True):
        for target, floats in zip(
            (keys, values), decode_page(layout, layer, region, int(row)), strict=True
        ):
            numbers = float_as_rows(floats[int(token)], target.dtype)
            target[int(slot)] = numbers.reshape(target.shape[1:])
