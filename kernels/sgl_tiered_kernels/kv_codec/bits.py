"""Conversions of single numbers that LLVM turns into a few vector instructions.

numba has no bfloat16, computes every integer in 64 bits and cannot look at a float's
bits; these functions do, in the width that is meant. For code compiled by numba only.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic

__all__ = [
    "as_float",
    "as_ordered",
    "from_bfloat16",
    "from_float16",
    "from_fp8",
    "from_ordered",
    "nearest_code",
    "nearest_int",
    "raw_bits",
    "to_bfloat16",
    "to_float16",
    "to_fp8",
]

_I32, _I16, _I8 = ir.IntType(32), ir.IntType(16), ir.IntType(8)
_F32 = ir.FloatType()
_SIGN, _REST = 0x80000000, 0x7FFFFFFF


def _word(value: int) -> Any:
    return ir.Constant(_I32, value)


def _rint(builder: Any, value: Any) -> Any:
    kind = ir.FunctionType(_F32, [_F32])
    module = builder.module
    name = "llvm.rint.f32"
    function = module.globals.get(name) or ir.Function(module, kind, name)
    return builder.call(function, [value])


@intrinsic
def raw_bits(typingctx: Any, value: Any) -> Any:
    """Return the bits of a float32 as int32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _I32)

    return types.int32(types.float32), generate


@intrinsic
def as_float(typingctx: Any, bits: Any) -> Any:
    """Return the float32 with these bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _F32)

    return types.float32(types.int32), generate


@intrinsic
def as_ordered(typingctx: Any, value: Any) -> Any:
    """Return an int32 that is ordered as the floats are, what is no number outermost.

    Minima of integers are taken by vector instructions; those of floats are not, since
    the order of what is no number matters.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], _I32)
        mask = builder.and_(builder.ashr(bits, _word(31)), _word(_REST))
        return builder.xor(bits, mask)

    return types.int32(types.float32), generate


@intrinsic
def from_ordered(typingctx: Any, order: Any) -> Any:
    """Return the float32 of ``as_ordered``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        mask = builder.and_(builder.ashr(args[0], _word(31)), _word(_REST))
        return builder.bitcast(builder.xor(args[0], mask), _F32)

    return types.float32(types.int32), generate


@intrinsic
def from_bfloat16(typingctx: Any, half: Any) -> Any:
    """Return the float32 of a bfloat16's bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = builder.shl(builder.zext(args[0], _I32), _word(16))
        return builder.bitcast(wide, _F32)

    return types.float32(types.uint16), generate


@intrinsic
def to_bfloat16(typingctx: Any, value: Any) -> Any:
    """Return the bits of the nearest bfloat16, ties to even; 0x7fc0 for no number."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], _I32)
        odd = builder.and_(builder.lshr(bits, _word(16)), _word(1))
        sum_ = builder.add(builder.add(bits, _word(0x7FFF)), odd)
        half = builder.lshr(sum_, _word(16))
        is_nan = builder.fcmp_unordered("uno", args[0], args[0])
        half = builder.select(is_nan, _word(0x7FC0), half)
        return builder.trunc(half, _I16)

    return types.uint16(types.float32), generate


@intrinsic
def from_float16(typingctx: Any, half: Any) -> Any:
    """Return the float32 of a float16's bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # Shifted into place a float16 is 2 ** 112 too small, subnormal ones included.
        wide = builder.zext(args[0], _I32)
        rest = builder.shl(builder.and_(wide, _word(0x7FFF)), _word(13))
        scaled = builder.fmul(builder.bitcast(rest, _F32), ir.Constant(_F32, 2.0**112))
        size = builder.bitcast(scaled, _I32)
        # An exponent of ones stays one.
        is_special = builder.icmp_unsigned(">=", rest, _word(0x7C00 << 13))
        special = builder.or_(rest, _word(0x7F800000))
        size = builder.select(is_special, special, size)
        sign = builder.shl(builder.and_(wide, _word(0x8000)), _word(16))
        return builder.bitcast(builder.or_(size, sign), _F32)

    return types.float32(types.uint16), generate


@intrinsic
def to_float16(typingctx: Any, value: Any) -> Any:
    """Return the bits of the nearest float16, ties to even, none of them infinite."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], _I32)
        size = builder.and_(bits, _word(_REST))
        # 65504 and more stay below infinity.
        largest = _word(0x477FE000)
        size = builder.select(builder.icmp_unsigned(">", size, largest), largest, size)
        # Normal: drop 13 bits, ties to even, and move the exponent.
        odd = builder.and_(builder.lshr(size, _word(13)), _word(1))
        moved = builder.add(size, _word((0xFFF - (112 << 23)) & 0xFFFFFFFF))
        normal = builder.lshr(builder.add(moved, odd), _word(13))
        # Subnormal: adding a half puts the rounded bits at the end of the fraction.
        half = ir.Constant(_F32, 0.5)
        added = builder.fadd(builder.bitcast(size, _F32), half)
        small = builder.sub(builder.bitcast(added, _I32), _word(0x3F000000))
        is_small = builder.icmp_unsigned("<", size, _word(0x38800000))
        found = builder.select(is_small, small, normal)
        sign = builder.lshr(builder.and_(bits, _word(_SIGN)), _word(16))
        found = builder.or_(found, sign)
        is_nan = builder.fcmp_unordered("uno", args[0], args[0])
        found = builder.select(is_nan, _word(0x7E00), found)
        return builder.trunc(found, _I16)

    return types.uint16(types.float32), generate


@intrinsic
def nearest_code(typingctx: Any, value: Any) -> Any:
    """Return the uint8 nearest to a float32 from 0 to 255, ties to even."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.trunc(builder.fptosi(_rint(builder, args[0]), _I32), _I8)

    return types.uint8(types.float32), generate


@intrinsic
def nearest_int(typingctx: Any, value: Any) -> Any:
    """Return the float32 of the nearest integer, ties to even."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _rint(builder, args[0])

    return types.float32(types.float32), generate


@intrinsic
def to_fp8(typingctx: Any, value: Any) -> Any:
    """Return the bits of the nearest e4m3, ties to even; none beyond 448."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], _I32)
        size = builder.and_(bits, _word(_REST))
        largest = _word(0x43E00000)
        size = builder.select(builder.icmp_unsigned(">", size, largest), largest, size)
        odd = builder.and_(builder.lshr(size, _word(20)), _word(1))
        moved = builder.add(size, _word((0x7FFFF - (120 << 23)) & 0xFFFFFFFF))
        normal = builder.lshr(builder.add(moved, odd), _word(20))
        # 16384 has its last bit where a subnormal e4m3 has it.
        magic = ir.Constant(_F32, 16384.0)
        added = builder.fadd(builder.bitcast(size, _F32), magic)
        small = builder.sub(builder.bitcast(added, _I32), _word(0x46800000))
        is_small = builder.icmp_unsigned("<", size, _word(0x3C800000))
        found = builder.select(is_small, small, normal)
        sign = builder.lshr(builder.and_(bits, _word(_SIGN)), _word(24))
        return builder.trunc(builder.or_(found, sign), _I8)

    return types.uint8(types.float32), generate


@intrinsic
def from_fp8(typingctx: Any, code: Any) -> Any:
    """Return the float32 of an e4m3's bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = builder.zext(args[0], _I32)
        size = builder.and_(wide, _word(127))
        normal = builder.shl(builder.add(size, _word(120 << 3)), _word(20))
        scaled = builder.fmul(builder.uitofp(size, _F32), ir.Constant(_F32, 2.0**-9))
        small = builder.bitcast(scaled, _I32)
        is_small = builder.icmp_unsigned("<", size, _word(8))
        bits = builder.select(is_small, small, normal)
        is_nan = builder.icmp_unsigned("==", size, _word(127))
        bits = builder.select(is_nan, _word(0x7FC00000), bits)
        sign = builder.shl(builder.and_(wide, _word(128)), _word(24))
        return builder.bitcast(builder.or_(bits, sign), _F32)

    return types.float32(types.uint8), generate
