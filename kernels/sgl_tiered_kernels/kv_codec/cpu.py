"""The encodings compiled by numba: one thread, vector instructions, and no GIL.

Bounds are the caller's: the public functions of the package check them. A page is
worked on row by row in scratch memory that stays in the first cache. Codes, scales and
zeros are those of the reference, bit by bit.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from sgl_tiered.core.encoded import EncodedLayout
from sgl_tiered_kernels.kv_codec.bits import (
    as_float,
    as_ordered,
    from_bfloat16,
    from_float16,
    from_fp8,
    from_ordered,
    nearest_code,
    nearest_int,
    raw_bits,
    to_bfloat16,
    to_float16,
    to_fp8,
)

__all__ = ["decode_layer", "decode_tokens", "encode_layer"]

_Array = npt.NDArray[Any]
_Bytes = npt.NDArray[np.uint8]
_Rows = npt.NDArray[np.int64]

_FP8_LEVELS = 0
_BFLOAT16, _FLOAT16, _FLOAT32 = 0, 1, 2
_F0, _F1 = np.float32(0), np.float32(1)
_TO_127, _TO_128 = np.float32(1 / 127), np.float32(-1 / 128)
_TO_448 = np.float32(1 / 448)
_LOWEST, _HIGHEST = np.float32(-128), np.float32(127)
_INFINITE = 0x7F800000
_LEAST_SCALE = 107 << 3
"""The code of a scale is its exponent and three bits of its fraction, from here on."""


@numba.njit(nogil=True, cache=True, inline="always")
def _scale_of(code: int) -> Any:
    if code == 255:
        return np.float32(np.nan)
    return as_float(np.int32((code + _LEAST_SCALE) << 20))


@numba.njit(nogil=True, cache=True)
def _code_of(need: Any) -> int:
    """Return the code of the smallest scale that is at least ``need``, 255 for none."""
    bits = int(raw_bits(need))
    code = ((bits + 0xFFFFF) >> 20) - _LEAST_SCALE
    return min(max(code, 0), 255)


@numba.njit(nogil=True, cache=True)
def _plan_group(low_bits: int, high_bits: int, steps: int) -> Any:
    """Return a group's scale code, the scale's inverse, and its zero."""
    # Ordered as integers; what is no number lies outside of the infinities.
    if high_bits >= _INFINITE or low_bits <= -_INFINITE - 1:
        return 255, _F0, _F0
    low, high = from_ordered(np.int32(low_bits)), from_ordered(np.int32(high_bits))
    if steps == _FP8_LEVELS:
        need = max(abs(low), abs(high)) * _TO_448
    else:
        need = (high - low) * np.float32(1 / (steps - 1))
        need = max(need, low * _TO_127)
        need = max(need, low * _TO_128)
    code = _code_of(need)
    if code == 255:
        return 255, _F0, _F0
    inverse = _F1 / _scale_of(code)
    if steps == _FP8_LEVELS:
        return code, inverse, _F0
    zero = min(max(nearest_int(low * inverse), _LOWEST), _HIGHEST)
    return code, inverse, zero


@numba.njit(nogil=True, cache=True)
def _load(out: Any, source: _Array, slot: int, kind: int) -> None:
    """Read a token's row as float32."""
    row = source[slot]
    if kind == _BFLOAT16:
        for i in range(row.shape[0]):
            out[i] = from_bfloat16(np.uint16(row[i]))
    elif kind == _FLOAT16:
        for i in range(row.shape[0]):
            out[i] = from_float16(np.uint16(row[i]))
    else:
        for i in range(row.shape[0]):
            out[i] = row[i]


@numba.njit(nogil=True, cache=True)
def _codes_of(codes: _Bytes, numbers: Any, inverse: Any, zero: Any, steps: int) -> None:
    """Turn a row of numbers into codes."""
    if steps == _FP8_LEVELS:
        for i in range(numbers.shape[0]):
            # A group that holds no numbers has no inverse either.
            scaled = numbers[i] * inverse[i]
            codes[i] = to_fp8(scaled if inverse[i] > _F0 else _F0)
        return
    top = np.float32(steps - 1)
    for i in range(numbers.shape[0]):
        scaled = numbers[i] * inverse[i] - zero[i]
        scaled = scaled if scaled > _F0 else _F0
        codes[i] = nearest_code(scaled if scaled < top else top)


@numba.njit(nogil=True, cache=True)
def _pack(to: _Bytes, codes: _Bytes, steps: int) -> None:
    """Write a row of codes; see the reference for where each bit goes.

    Everything is a slice indexed from 0 on: only then numba leaves out the question
    whether an index is negative, and LLVM uses vectors.
    """
    width = codes.shape[0]
    if steps in (_FP8_LEVELS, 256):
        for i in range(width):
            to[i] = codes[i]
        return
    if steps == 11:
        width //= 2
        firsts, seconds = codes[:width], codes[width:]
        for i in range(width):
            firsts[i] = firsts[i] * 11 + seconds[i]
    shift = 0
    if steps != 8:
        half = width // 2
        low, high = codes[:half], codes[half:width]
        for i in range(half):
            to[i] = (low[i] & 15) | ((high[i] & 15) << 4)
        to, shift = to[half:], 4
    if steps == 16:
        return
    quarter = width // 4
    one, two = codes[:quarter], codes[quarter : 2 * quarter]
    three, four = codes[2 * quarter : 3 * quarter], codes[3 * quarter : width]
    for i in range(quarter):
        to[i] = (
            ((one[i] >> shift) & 3)
            | (((two[i] >> shift) & 3) << 2)
            | (((three[i] >> shift) & 3) << 4)
            | (((four[i] >> shift) & 3) << 6)
        )
    to, shift = to[quarter:], shift + 2
    eighth = width // 8
    for i in range(eighth):
        to[i] = 0
    for part in range(8):
        source = codes[part * eighth : (part + 1) * eighth]
        for i in range(eighth):
            to[i] |= ((source[i] >> shift) & 1) << part


@numba.njit(nogil=True, cache=True)
def _unpack(codes: _Bytes, data: _Bytes, steps: int) -> None:
    """Read a row of codes."""
    width = codes.shape[0]
    if steps in (_FP8_LEVELS, 256):
        for i in range(width):
            codes[i] = data[i]
        return
    if steps == 11:
        width //= 2
    shift = 0
    if steps != 8:
        half = width // 2
        low, high = codes[:half], codes[half:width]
        for i in range(half):
            low[i] = data[i] & 15
            high[i] = data[i] >> 4
        data, shift = data[half:], 4
    if steps == 16:
        return
    quarter = width // 4
    for part in range(4):
        to = codes[part * quarter : (part + 1) * quarter]
        if shift:
            for i in range(quarter):
                to[i] |= ((data[i] >> (2 * part)) & 3) << 4
        else:
            for i in range(quarter):
                to[i] = (data[i] >> (2 * part)) & 3
    data, shift = data[quarter:], shift + 2
    eighth = width // 8
    for part in range(8):
        to = codes[part * eighth : (part + 1) * eighth]
        for i in range(eighth):
            to[i] |= ((data[i] >> part) & 1) << shift
    if steps == 11:
        firsts, seconds = codes[:width], codes[width:]
        for i in range(width):
            pair = firsts[i]
            # The same as a division by 11 up to 120.
            first = (pair * 187) >> 11
            firsts[i] = first
            seconds[i] = pair - first * 11


@numba.njit(nogil=True, cache=True)
def _store(
    target: _Array,
    slot: int,
    codes: _Bytes,
    scale: Any,
    zero: Any,
    steps: int,
    kind: int,
) -> None:
    """Write a row of codes as a token's row of numbers."""
    row = target[slot]
    if steps == _FP8_LEVELS:
        for i in range(row.shape[0]):
            number = from_fp8(codes[i]) * scale[i]
            if kind == _BFLOAT16:
                row[i] = to_bfloat16(number)
            elif kind == _FLOAT16:
                row[i] = to_float16(number)
            else:
                row[i] = number
    elif kind == _BFLOAT16:
        for i in range(row.shape[0]):
            row[i] = to_bfloat16((zero[i] + np.float32(codes[i])) * scale[i])
    elif kind == _FLOAT16:
        for i in range(row.shape[0]):
            row[i] = to_float16((zero[i] + np.float32(codes[i])) * scale[i])
    else:
        for i in range(row.shape[0]):
            row[i] = (zero[i] + np.float32(codes[i])) * scale[i]


@numba.njit(nogil=True, cache=True)
def _encode(
    region: _Bytes,
    rows: _Rows,
    begin: int,
    keys: _Array,
    values: _Array,
    pages: _Rows,
    tokens: int,
    padded: int,
    key_steps: int,
    value_steps: int,
    key_group: int,
    value_group: int,
    key_row_bytes: int,
    value_row_bytes: int,
    kind: int,
) -> None:
    width = keys.shape[1]
    numbers = np.empty((tokens, width), np.float32)
    low, high = np.empty(width, np.int32), np.empty(width, np.int32)
    inverse, zero = np.empty(width, np.float32), np.empty(width, np.float32)
    codes = np.zeros(padded, np.uint8)
    num_groups = width // value_group
    for n in range(rows.shape[0]):
        data = region[rows[n]]
        first = pages[n] * tokens
        at = begin + tokens * key_row_bytes
        zeros_at = at + tokens // key_group * width
        for start in range(0, tokens, key_group):
            for t in range(start, start + key_group):
                _load(numbers[t], keys, first + t, kind)
                one = numbers[t]
                if t == start:
                    for i in range(width):
                        low[i] = high[i] = as_ordered(one[i])
                else:
                    for i in range(width):
                        order = as_ordered(one[i])
                        low[i] = min(low[i], order)
                        high[i] = max(high[i], order)
            for i in range(width):
                code, inverse[i], zero[i] = _plan_group(low[i], high[i], key_steps)
                data[at + i] = code
                if key_steps != _FP8_LEVELS:
                    data[zeros_at + i] = np.uint8(np.int64(zero[i]) & 255)
            at += width
            zeros_at += width
            for t in range(start, start + key_group):
                _codes_of(codes, numbers[t], inverse, zero, key_steps)
                row_at = begin + t * key_row_bytes
                _pack(data[row_at : row_at + key_row_bytes], codes, key_steps)
                codes[width:] = 0
        has_zeros = 0 if key_steps == _FP8_LEVELS else 1
        scales = tokens // key_group * width
        value_begin = begin + tokens * key_row_bytes + scales * (1 + has_zeros)
        at = value_begin + tokens * value_row_bytes
        one = numbers[0]
        for t in range(tokens):
            _load(one, values, first + t, kind)
            for g in range(num_groups):
                group = one[g * value_group : (g + 1) * value_group]
                least = most = as_ordered(group[0])
                for i in range(value_group):
                    order = as_ordered(group[i])
                    least = min(least, order)
                    most = max(most, order)
                code, back, nought = _plan_group(least, most, value_steps)
                inverse[g * value_group : (g + 1) * value_group] = back
                zero[g * value_group : (g + 1) * value_group] = nought
                data[at + t * num_groups + g] = code
                if value_steps != _FP8_LEVELS:
                    to = at + (tokens + t) * num_groups + g
                    data[to] = np.uint8(np.int64(nought) & 255)
            _codes_of(codes, one, inverse, zero, value_steps)
            row_at = value_begin + t * value_row_bytes
            _pack(data[row_at : row_at + value_row_bytes], codes, value_steps)
            codes[width:] = 0


@numba.njit(nogil=True, cache=True)
def _decode(
    keys: _Array,
    values: _Array,
    slots: _Rows,
    region: _Bytes,
    rows: _Rows,
    token_of: _Rows,
    begin: int,
    tokens: int,
    padded: int,
    key_steps: int,
    value_steps: int,
    key_group: int,
    value_group: int,
    key_row_bytes: int,
    value_row_bytes: int,
    kind: int,
    per_row: int,
) -> None:
    """Decode tokens; of whole pages, ``per_row`` of them, where that is not 0."""
    width = keys.shape[1]
    scale, zero = np.zeros(width, np.float32), np.zeros(width, np.float32)
    value_scale, value_zero = np.zeros(width, np.float32), np.zeros(width, np.float32)
    codes = np.zeros(padded, np.uint8)
    scales_of = np.empty(256, np.float32)
    for code in range(256):
        scales_of[code] = _scale_of(code)
    num_groups = width // value_group
    num_scales = tokens // key_group * width
    has_zeros = 0 if key_steps == _FP8_LEVELS else 1
    scales_at = begin + tokens * key_row_bytes
    value_begin = scales_at + num_scales * (1 + has_zeros)
    value_scales_at = value_begin + tokens * value_row_bytes
    last_row: Any = -1
    last_group: Any = -1
    total = rows.shape[0] * per_row if per_row else slots.shape[0]
    for n in range(total):
        if per_row:
            page = n // per_row
            t = n - page * per_row
            row, slot = rows[page], slots[page] * per_row + t
        else:
            t, row, slot = token_of[n], rows[n], slots[n]
        data = region[row]
        group = t // key_group
        if row != last_row or group != last_group:
            last_row, last_group = row, group
            at = scales_at + group * width
            raw = data[at : at + width]
            for i in range(width):
                scale[i] = scales_of[raw[i]]
            if has_zeros:
                raw = data[at + num_scales : at + num_scales + width]
                for i in range(width):
                    zero[i] = np.float32(np.int8(raw[i]))
        row_at = begin + t * key_row_bytes
        _unpack(codes, data[row_at : row_at + key_row_bytes], key_steps)
        _store(keys, slot, codes, scale, zero, key_steps, kind)
        at = value_scales_at + t * num_groups
        for g in range(num_groups):
            one, nought = scales_of[data[at + g]], _F0
            if has_zeros:
                nought = np.float32(np.int8(data[at + tokens * num_groups + g]))
            same_scale = value_scale[g * value_group : (g + 1) * value_group]
            same_zero = value_zero[g * value_group : (g + 1) * value_group]
            for i in range(value_group):
                same_scale[i] = one
                same_zero[i] = nought
        row_at = value_begin + t * value_row_bytes
        _unpack(codes, data[row_at : row_at + value_row_bytes], value_steps)
        _store(values, slot, codes, value_scale, value_zero, value_steps, kind)


def encode_layer(
    layout: EncodedLayout,
    layer: int,
    region: _Bytes,
    rows: _Rows,
    keys: _Array,
    values: _Array,
    pages: _Rows,
) -> None:
    """Encode one layer of pages into rows of ``region``."""
    keys, values, kind = _as_rows(keys), _as_rows(values), _kind(keys)
    begin = layout.key_offset(layer)
    _encode(region, rows, begin, keys, values, pages, *_shape(layout), kind)


def decode_layer(
    layout: EncodedLayout,
    layer: int,
    keys: _Array,
    values: _Array,
    pages: _Rows,
    region: _Bytes,
    rows: _Rows,
) -> None:
    """Decode one layer of whole pages from rows of ``region``."""
    keys, values, kind = _as_rows(keys), _as_rows(values), _kind(keys)
    begin, tokens = layout.key_offset(layer), layout.page_tokens
    shape = _shape(layout)
    _decode(keys, values, pages, region, rows, rows, begin, *shape, kind, tokens)


def decode_tokens(
    layout: EncodedLayout,
    layer: int,
    keys: _Array,
    values: _Array,
    slots: _Rows,
    region: _Bytes,
    rows: _Rows,
    tokens: _Rows,
) -> None:
    """Decode single tokens of pages."""
    keys, values, kind = _as_rows(keys), _as_rows(values), _kind(keys)
    begin, shape = layout.key_offset(layer), _shape(layout)
    _decode(keys, values, slots, region, rows, tokens, begin, *shape, kind, 0)


def _shape(layout: EncodedLayout) -> tuple[int, ...]:
    key_steps, value_steps = layout.key_levels, layout.value_levels
    if not layout.has_zeros:
        key_steps = value_steps = _FP8_LEVELS
    return (
        layout.page_tokens,
        layout.padded_width,
        key_steps,
        value_steps,
        layout.key_group,
        layout.value_group,
        layout.key_row_bytes,
        layout.value_row_bytes,
    )


def _kind(rows: _Array) -> int:
    return {"uint16": _BFLOAT16, "float16": _FLOAT16, "float32": _FLOAT32}[
        rows.dtype.name
    ]


def _as_rows(rows: _Array) -> _Array:
    """Return rows as numba takes them: 2-D, and float16 as its bits."""
    flat = rows.reshape(len(rows), -1)
    return flat.view(np.uint16) if flat.dtype == np.float16 else flat
