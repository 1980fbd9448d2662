"""The encodings between buffers of one device, as Triton programs.

Tensors are contiguous and on one device; the region may be memory that CUDA pinned for
decoding, which reads each byte about once. Encoding reads the scales back that it has
just written, so its region belongs on the device and is copied down as a whole.

Codes, scales and zeros are those of the reference bit by bit: products and sums are not
fused, and one division is rounded as IEEE says.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sgl_tiered.core.encoded import EncodedLayout
from sgl_tiered_kernels.tensors import page_rows

__all__ = ["decode_layer", "decode_tokens", "encode_layer"]

_BLOCK = 256
_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_PLANES = {256: (8,), 16: (4,), 11: (4, 2, 1), 8: (2, 1)}


@triton.jit
def _as_float(bits, KIND: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803
    """Return loaded elements as float32; bfloat16 comes as its bits."""
    if KIND == 0:
        wide = (bits.to(tl.int32) & 0xFFFF) << 16
        return wide.to(tl.float32, bitcast=True)
    return bits.to(tl.float32)


@triton.jit
def _scale_of(code):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    scale = ((code + 856) << 20).to(tl.float32, bitcast=True)
    return tl.where(code == 255, float("nan"), scale)


@triton.jit
def _plan(low, high, bad, LEVELS: tl.constexpr, FP8: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803
    """Return the scale's code, and the zero, of groups."""
    if FP8:
        need = tl.maximum(tl.abs(low), tl.abs(high)) * (1.0 / 448)
    else:
        need = (high - low) * (1.0 / (LEVELS - 1))
        need = tl.maximum(need, low * (1.0 / 127))
        need = tl.maximum(need, low * (-1.0 / 128))
    bits = need.to(tl.int32, bitcast=True)
    # Infinity less would not fit.
    bits = tl.where(bad, 0, bits)
    code = ((bits + 0xFFFFF) >> 20) - 856
    code = tl.minimum(tl.maximum(code, 0), 255)
    code = tl.where(bad, 255, code)
    inverse = tl.div_rn(1.0, _scale_of(tl.minimum(code, 254)))
    zero = tl.where(code == 255, 0.0, low * inverse)
    # Adding this number rounds to an integer, ties to even.
    zero = (zero + 12582912.0) - 12582912.0
    zero = tl.minimum(tl.maximum(zero, -128.0), 127.0)
    return code, zero.to(tl.int32)


@triton.jit
def _key_scales_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN202
    region,  # noqa: ANN001
    row_bytes,  # noqa: ANN001
    rows,  # noqa: ANN001
    scales_at,  # noqa: ANN001
    source,  # noqa: ANN001
    pages,  # noqa: ANN001
    tokens,  # noqa: ANN001
    width,  # noqa: ANN001
    group_tokens,  # noqa: ANN001
    LEVELS: tl.constexpr,  # noqa: N803
    FP8: tl.constexpr,  # noqa: N803
    KIND: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    page, group = tl.program_id(0), tl.program_id(1)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < width
    first = tl.load(pages + page) * tokens + group * group_tokens
    at = source + first * width + channel
    low = tl.full((BLOCK,), float("inf"), tl.float32)
    high = tl.full((BLOCK,), float("-inf"), tl.float32)
    bad = tl.full((BLOCK,), 0, tl.int32)
    for token in range(group_tokens):
        number = _as_float(tl.load(at + token * width, mask=inside, other=0), KIND)
        # No number equals itself less itself but those that are finite.
        finite = (number - number) == 0.0
        bad = tl.where(finite, bad, 1)
        low = tl.where(finite & (number < low), number, low)
        high = tl.where(finite & (number > high), number, high)
    low = tl.where(bad != 0, 0.0, low)
    high = tl.where(bad != 0, 0.0, high)
    code, zero = _plan(low, high, bad != 0, LEVELS, FP8)
    to = region + tl.load(rows + page) * row_bytes + scales_at + group * width + channel
    tl.store(to, code.to(tl.uint8), mask=inside)
    if not FP8:
        num_scales = tokens // group_tokens * width
        tl.store(to + num_scales, (zero & 255).to(tl.uint8), mask=inside)


@triton.jit
def _value_scales_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN202
    region,  # noqa: ANN001
    row_bytes,  # noqa: ANN001
    rows,  # noqa: ANN001
    scales_at,  # noqa: ANN001
    source,  # noqa: ANN001
    pages,  # noqa: ANN001
    tokens,  # noqa: ANN001
    width,  # noqa: ANN001
    group_width,  # noqa: ANN001
    LEVELS: tl.constexpr,  # noqa: N803
    FP8: tl.constexpr,  # noqa: N803
    KIND: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    page, token, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    column = tl.arange(0, BLOCK)
    inside = column < group_width
    slot = tl.load(pages + page) * tokens + token
    at = source + slot * width + group * group_width + column
    number = _as_float(tl.load(at, mask=inside, other=0), KIND)
    finite = ((number - number) == 0.0) | (column >= group_width)
    bad = tl.min(finite.to(tl.int32), axis=0) == 0
    low = tl.min(tl.where(finite & inside, number, float("inf")), axis=0)
    high = tl.max(tl.where(finite & inside, number, float("-inf")), axis=0)
    low = tl.where(bad, 0.0, low)
    high = tl.where(bad, 0.0, high)
    code, zero = _plan(low, high, bad, LEVELS, FP8)
    num_groups = width // group_width
    to = region + tl.load(rows + page) * row_bytes + scales_at
    to += token * num_groups + group
    tl.store(to, code.to(tl.uint8))
    if not FP8:
        tl.store(to + tokens * num_groups, (zero & 255).to(tl.uint8))


@triton.jit
def _codes_at(  # type: ignore[no-untyped-def]  # noqa: ANN202
    source,  # noqa: ANN001
    scales,  # noqa: ANN001
    num_scales,  # noqa: ANN001
    channel,  # noqa: ANN001
    inside,  # noqa: ANN001
    scale_group,  # noqa: ANN001
    LEVELS: tl.constexpr,  # noqa: N803
    FP8: tl.constexpr,  # noqa: N803
    KIND: tl.constexpr,  # noqa: N803
):
    """Return the codes of channels of one token; 0 beyond the last channel."""
    number = _as_float(tl.load(source + channel, mask=inside, other=0), KIND)
    scale_at = scales + channel // scale_group
    code = tl.load(scale_at, mask=inside, other=0).to(tl.int32)
    inverse = tl.div_rn(1.0, _scale_of(tl.minimum(code, 254)))
    number = tl.where(code == 255, 0.0, number)
    scaled = number * inverse
    if FP8:
        bits = scaled.to(tl.int32, bitcast=True)
        size = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
        # 16384 has its last bit where a subnormal e4m3 has it.
        small = (size.to(tl.float32, bitcast=True) + 16384.0).to(
            tl.int32, bitcast=True
        ) - 0x46800000
        found = tl.where(size < 0x3C800000, small, normal)
        found = found | ((bits >> 24) & 128)
    else:
        raw = tl.load(scale_at + num_scales, mask=inside, other=0).to(tl.int32)
        zero = tl.where(raw > 127, raw - 256, raw).to(tl.float32)
        scaled = scaled - zero
        scaled = tl.where(scaled > 0.0, scaled, 0.0)
        scaled = tl.minimum(scaled, LEVELS - 1.0)
        found = (scaled + 8388608.0).to(tl.int32, bitcast=True) & 255
    return tl.where(inside, found, 0)


@triton.jit
def _pack_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN202
    region,  # noqa: ANN001
    row_bytes,  # noqa: ANN001
    rows,  # noqa: ANN001
    codes_at,  # noqa: ANN001
    code_bytes,  # noqa: ANN001
    plane_at,  # noqa: ANN001
    scales_at,  # noqa: ANN001
    num_scales,  # noqa: ANN001
    source,  # noqa: ANN001
    pages,  # noqa: ANN001
    tokens,  # noqa: ANN001
    width,  # noqa: ANN001
    num_codes,  # noqa: ANN001
    token_group,  # noqa: ANN001
    scales_per_group,  # noqa: ANN001
    scale_group,  # noqa: ANN001
    BITS: tl.constexpr,  # noqa: N803
    SHIFT: tl.constexpr,  # noqa: N803
    LEVELS: tl.constexpr,  # noqa: N803
    FP8: tl.constexpr,  # noqa: N803
    KIND: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    page, token = tl.program_id(0), tl.program_id(1)
    byte = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    num_bytes = num_codes * BITS // 8
    is_byte = byte < num_bytes
    row = region + tl.load(rows + page) * row_bytes
    scales = row + scales_at + token // token_group * scales_per_group
    numbers = source + (tl.load(pages + page) * tokens + token) * width
    packed = tl.full((BLOCK,), 0, tl.int32)
    for part in tl.static_range(8 // BITS):
        channel = byte + part * num_bytes
        inside = is_byte & (channel < width)
        code = _codes_at(
            numbers, scales, num_scales, channel, inside, scale_group, LEVELS, FP8, KIND
        )
        if LEVELS == 11:
            other = channel + num_codes
            inside = is_byte & (other < width)
            code = code * 11 + _codes_at(
                numbers,
                scales,
                num_scales,
                other,
                inside,
                scale_group,
                LEVELS,
                FP8,
                KIND,
            )
        packed = packed | (((code >> SHIFT) & ((1 << BITS) - 1)) << (part * BITS))
    to = row + codes_at + token * code_bytes + plane_at + byte
    tl.store(to, packed.to(tl.uint8), mask=is_byte)


@triton.jit
def _plane(data, code, inside, num_codes, BITS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803
    num_bytes = num_codes * BITS // 8
    byte = tl.load(data + code % num_bytes, mask=inside, other=0).to(tl.int32)
    return (byte >> (code // num_bytes * BITS)) & ((1 << BITS) - 1)


@triton.jit
def _decode_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN202
    target,  # noqa: ANN001
    slots,  # noqa: ANN001
    region,  # noqa: ANN001
    row_bytes,  # noqa: ANN001
    rows,  # noqa: ANN001
    tokens,  # noqa: ANN001
    codes_at,  # noqa: ANN001
    code_bytes,  # noqa: ANN001
    scales_at,  # noqa: ANN001
    num_scales,  # noqa: ANN001
    width,  # noqa: ANN001
    padded,  # noqa: ANN001
    token_group,  # noqa: ANN001
    scales_per_group,  # noqa: ANN001
    scale_group,  # noqa: ANN001
    LEVELS: tl.constexpr,  # noqa: N803
    FP8: tl.constexpr,  # noqa: N803
    KIND: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    item = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < width
    token = tl.load(tokens + item)
    row = region + tl.load(rows + item) * row_bytes
    data = row + codes_at + token * code_bytes
    if LEVELS == 256:
        code = tl.load(data + channel, mask=inside, other=0).to(tl.int32)
    elif LEVELS == 16:
        code = _plane(data, channel, inside, padded, 4)
    elif LEVELS == 8:
        code = _plane(data, channel, inside, padded, 2)
        code = code | (_plane(data + padded // 4, channel, inside, padded, 1) << 2)
    else:
        half = padded // 2
        pair_at = channel % half
        pair = _plane(data, pair_at, inside, half, 4)
        pair = pair | (_plane(data + half // 2, pair_at, inside, half, 2) << 4)
        last = data + half // 2 + half // 4
        pair = pair | (_plane(last, pair_at, inside, half, 1) << 6)
        code = tl.where(channel < half, pair // 11, pair % 11)
    scale_at = row + scales_at + token // token_group * scales_per_group
    scale_at += channel // scale_group
    scale = _scale_of(tl.load(scale_at, mask=inside, other=0).to(tl.int32))
    if FP8:
        size = code & 127
        normal = ((size + 960) << 20).to(tl.float32, bitcast=True)
        small = size.to(tl.float32) * 0.001953125
        number = tl.where(size < 8, small, normal)
        number = tl.where(size == 127, float("nan"), number)
        number = tl.where(code > 127, -number, number) * scale
    else:
        raw = tl.load(scale_at + num_scales, mask=inside, other=0).to(tl.int32)
        zero = tl.where(raw > 127, raw - 256, raw)
        number = (zero + code).to(tl.float32) * scale
    to = target + tl.load(slots + item) * width + channel
    if KIND == 0:
        bits = number.to(tl.int32, bitcast=True)
        # As a signed number the sum may be negative; only its bits count.
        half_bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
        half_bits = tl.where(number != number, 0x7FC0, half_bits)
        tl.store(to, half_bits.to(tl.int16), mask=inside)
    elif KIND == 1:
        number = tl.where(number > 65504.0, 65504.0, number)
        number = tl.where(number < -65504.0, -65504.0, number)
        tl.store(to, number.to(tl.float16), mask=inside)
    else:
        tl.store(to, number, mask=inside)


def encode_layer(
    layout: EncodedLayout,
    layer: int,
    region: torch.Tensor,
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
) -> None:
    """Encode one layer of pages of a pool into rows of a region.

    Args:
        layout: of a page.
        layer: which.
        region: uint8 ``[num_rows, >= layout.page_bytes]``.
        rows: int64 ``[n]`` on the device, each at most once.
        keys: ``[slots, kv_heads, head_dim]``, bfloat16, float16 or float32.
        values: the same for the values.
        pages: int64 ``[n]`` on the device.

    Raises:
        ValueError: as for ``decode_tokens``.
    """
    _check(layout, layer, region, keys, values)
    if rows.shape != pages.shape:
        raise ValueError("rows and pages differ in length")
    if not rows.numel():
        return
    n, tokens, width = rows.numel(), layout.page_tokens, layout.width
    for part, source in zip(_parts(layout, layer), (keys, values), strict=True):
        bits = _as_bits(source)
        shared = {
            "LEVELS": part.levels,
            "FP8": not layout.has_zeros,
            "KIND": _KINDS[source.dtype],
            "enable_fp_fusion": False,
        }
        where = (region, region.shape[1], rows)
        if part.is_keys:
            grid = (n, tokens // part.group, triton.cdiv(width, _BLOCK))
            _key_scales_kernel[grid](
                *where,
                part.scales_at,
                bits,
                pages,
                tokens,
                width,
                part.group,
                BLOCK=_BLOCK,
                **shared,
            )
        else:
            _value_scales_kernel[(n, tokens, width // part.group)](
                *where,
                part.scales_at,
                bits,
                pages,
                tokens,
                width,
                part.group,
                BLOCK=triton.next_power_of_2(part.group),
                **shared,
            )
        pairs = part.levels == 11
        num_codes = layout.padded_width // (2 if pairs else 1)
        shift = plane_at = 0
        for plane in _PLANES[part.levels]:
            num_bytes = num_codes * plane // 8
            _pack_kernel[(n, tokens, triton.cdiv(num_bytes, _BLOCK))](
                *where,
                part.codes_at,
                part.code_bytes,
                plane_at,
                part.scales_at,
                part.num_scales,
                bits,
                pages,
                tokens,
                width,
                num_codes,
                *part.scale_steps(width),
                BITS=plane,
                SHIFT=shift,
                BLOCK=_BLOCK,
                **shared,
            )
            shift, plane_at = shift + plane, plane_at + num_bytes


def decode_layer(
    layout: EncodedLayout,
    layer: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    region: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """Decode one layer of whole pages; ``pages`` and ``rows`` are int64 ``[n]``.

    Raises:
        ValueError: as for ``decode_tokens``.
    """
    tokens = torch.arange(layout.page_tokens, device=pages.device)
    slots = page_rows(pages, layout.page_tokens)
    each = rows.repeat_interleave(layout.page_tokens)
    which = tokens.repeat(len(rows))
    decode_tokens(layout, layer, keys, values, slots, region, each, which)


def decode_tokens(
    layout: EncodedLayout,
    layer: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    region: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
) -> None:
    """Decode single tokens of pages.

    Args:
        layout: of a page.
        layer: which.
        keys: ``[slots, kv_heads, head_dim]``, written.
        values: the same for the values.
        slots: int64 ``[n]`` on the device, each at most once.
        region: uint8 ``[num_rows, >= layout.page_bytes]``.
        rows: int64 ``[n]`` on the device, the row of each token's page.
        tokens: whole numbers ``[n]`` on the device, which token of its page.

    Raises:
        ValueError: if shapes or types do not fit. Numbers of slots, rows and tokens
            stay on the device and are the caller's to check.
    """
    _check(layout, layer, region, keys, values)
    if not slots.shape == rows.shape == tokens.shape:
        raise ValueError("slots, rows and tokens differ in length")
    if not slots.numel():
        return
    width = layout.width
    for part, target in zip(_parts(layout, layer), (keys, values), strict=True):
        _decode_kernel[(slots.numel(), triton.cdiv(width, _BLOCK))](
            _as_bits(target),
            slots,
            region,
            region.shape[1],
            rows,
            tokens.to(torch.int64),
            part.codes_at,
            part.code_bytes,
            part.scales_at,
            part.num_scales,
            width,
            layout.padded_width,
            *part.scale_steps(width),
            LEVELS=part.levels,
            FP8=not layout.has_zeros,
            KIND=_KINDS[target.dtype],
            BLOCK=_BLOCK,
            enable_fp_fusion=False,
        )


class _Part:
    """Where the keys, or the values, of a layer are inside a page, in bytes."""

    def __init__(self, layout: EncodedLayout, layer: int, *, is_keys: bool) -> None:
        self.is_keys = is_keys
        if is_keys:
            self.codes_at = layout.key_offset(layer)
            self.levels, self.group = layout.key_levels, layout.key_group
            self.code_bytes = layout.key_row_bytes
            self.num_scales = layout.num_key_scales
        else:
            self.codes_at = layout.value_offset(layer)
            self.levels, self.group = layout.value_levels, layout.value_group
            self.code_bytes = layout.value_row_bytes
            self.num_scales = layout.num_value_scales
        self.scales_at = self.codes_at + layout.page_tokens * self.code_bytes

    def scale_steps(self, width: int) -> tuple[int, int, int]:
        """Return tokens per run of scales, scales of a run, channels per scale."""
        if self.is_keys:
            return self.group, width, 1
        return 1, width // self.group, self.group


def _parts(layout: EncodedLayout, layer: int) -> tuple[_Part, _Part]:
    return _Part(layout, layer, is_keys=True), _Part(layout, layer, is_keys=False)


def _as_bits(rows: torch.Tensor) -> Any:
    return rows.view(torch.int16) if rows.dtype == torch.bfloat16 else rows


def _check(
    layout: EncodedLayout,
    layer: int,
    region: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    if not 0 <= layer < layout.num_layers:
        raise ValueError(f"layer {layer} is none of {layout.num_layers}")
    if (
        region.dtype != torch.uint8
        or region.ndim != 2
        or not region.is_contiguous()
        or region.shape[1] < layout.page_bytes
    ):
        raise ValueError(
            f"region must be contiguous rows of {layout.page_bytes} bytes or more"
        )
    heads = (layout.kv_heads, layout.head_dim)
    for name, rows in (("keys", keys), ("values", values)):
        if rows.dtype not in _KINDS or not rows.is_contiguous():
            raise ValueError(f"{name} must be contiguous, of 16 or 32 bit floats")
        if rows.ndim != 3 or tuple(rows.shape[1:]) != heads:
            raise ValueError(f"{name} must be [slots, {heads[0]}, {heads[1]}]")
    if keys.shape != values.shape or keys.dtype != values.dtype:
        raise ValueError("keys and values differ in shape or type")
