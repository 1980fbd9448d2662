"""The page copies compiled by numba: one memcpy per row, and no GIL.

Bounds are the caller's: the public functions of the package check them.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba.core import cgutils, types
from numba.extending import intrinsic

__all__ = [
    "copy_layer",
    "copy_layer_twice",
    "copy_pages_twice",
    "copy_rows",
    "gather_layer",
    "memcpy",
]

_Bytes = npt.NDArray[np.uint8]
_Rows = npt.NDArray[np.int64]

_LINE = 64
"""Bytes of a cache line."""


@intrinsic
def memcpy(typingctx: Any, to: Any, frm: Any, nbytes: Any) -> Any:
    """Call memcpy on two addresses; libc's copy beats a compiled word loop."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = cgutils.voidptr_t
        to_pointer = builder.inttoptr(args[0], pointer)
        from_pointer = builder.inttoptr(args[1], pointer)
        cgutils.raw_memcpy(builder, to_pointer, from_pointer, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


@intrinsic
def _copy_line(typingctx: Any, to: Any, also: Any, frm: Any) -> Any:
    """Copy a line to two aligned addresses, to the first past the cache."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        from llvmlite import ir  # type: ignore[import-untyped]

        pointer = ir.VectorType(ir.IntType(64), _LINE // 8).as_pointer()
        to_line, also_line, from_line = (builder.inttoptr(a, pointer) for a in args)
        line = builder.load(from_line, align=1)
        store = builder.store(line, to_line, align=_LINE)
        one = ir.Constant(ir.IntType(32), 1)
        store.set_metadata("nontemporal", builder.module.add_metadata([one]))
        builder.store(line, also_line, align=_LINE)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


@intrinsic
def _end_stores(typingctx: Any) -> Any:
    """Let what this thread stored past the cache be seen before what it stores next."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@numba.njit(nogil=True, cache=True)
def copy_pages_twice(
    to: tuple[int, int],
    to_bytes: tuple[int, int],
    to_rows: _Rows,
    also: tuple[int, int],
    also_bytes: tuple[int, int],
    also_rows: _Rows,
    frm: tuple[int, int],
    from_bytes: int,
    from_rows: _Rows,
    nbytes: int,
    begin: int,
    end: int,
) -> None:
    """Copy keys and values of pages ``begin`` to ``end`` of the lists to two places.

    ``to``, ``also`` and ``frm`` are addresses of keys and of values, ``_bytes`` those
    of a row there. The second place is read next, so it is written through the cache.
    The first is written past it, where all is whole lines: through it each line would
    be read before it is overwritten.
    """
    odd = nbytes
    for part in range(2):
        odd |= to[part] | to_bytes[part] | also[part] | also_bytes[part]
    for i in range(begin, end):
        for part in range(2):
            source = frm[part] + from_rows[i] * from_bytes
            target = to[part] + to_rows[i] * to_bytes[part]
            read = also[part] + also_rows[i] * also_bytes[part]
            if also_rows[i] < 0:
                memcpy(target, source, nbytes)
            elif odd % _LINE:
                memcpy(target, source, nbytes)
                memcpy(read, source, nbytes)
            else:
                for at in range(0, nbytes, _LINE):
                    _copy_line(target + at, read + at, source + at)
    _end_stores()


@numba.njit(nogil=True, cache=True)
def copy_rows(
    dst: _Bytes,
    dst_rows: _Rows,
    dst_offset: int,
    src: _Bytes,
    src_rows: _Rows,
    src_offset: int,
    nbytes: int,
) -> None:
    """Copy ``nbytes`` from each source row to the destination row beside it."""
    to = dst.ctypes.data + dst_offset
    frm = src.ctypes.data + src_offset
    for i in range(dst_rows.shape[0]):
        memcpy(
            to + dst_rows[i] * dst.shape[1], frm + src_rows[i] * src.shape[1], nbytes
        )


@numba.njit(nogil=True, cache=True)
def copy_layer(
    k_dst: _Bytes,
    v_dst: _Bytes,
    dst_rows: _Rows,
    src: _Bytes,
    src_rows: _Rows,
    k_offset: int,
    v_offset: int,
    nbytes: int,
) -> None:
    """Copy one layer's keys and values out of host pages."""
    for i in range(dst_rows.shape[0]):
        frm = src.ctypes.data + src_rows[i] * src.shape[1]
        to = dst_rows[i]
        memcpy(k_dst.ctypes.data + to * k_dst.shape[1], frm + k_offset, nbytes)
        memcpy(v_dst.ctypes.data + to * v_dst.shape[1], frm + v_offset, nbytes)


@numba.njit(nogil=True, cache=True)
def copy_layer_twice(
    k_dst: _Bytes,
    v_dst: _Bytes,
    dst_rows: _Rows,
    k_also: _Bytes,
    v_also: _Bytes,
    also_rows: _Rows,
    src: _Bytes,
    src_rows: _Rows,
    k_offset: int,
    v_offset: int,
    nbytes: int,
) -> None:
    """Copy one layer's keys and values out of host pages to two places."""
    copy_pages_twice(
        (k_dst.ctypes.data, v_dst.ctypes.data),
        (k_dst.shape[1], v_dst.shape[1]),
        dst_rows,
        (k_also.ctypes.data, v_also.ctypes.data),
        (k_also.shape[1], v_also.shape[1]),
        also_rows,
        (src.ctypes.data + k_offset, src.ctypes.data + v_offset),
        src.shape[1],
        src_rows,
        nbytes,
        0,
        dst_rows.shape[0],
    )


@numba.njit(nogil=True, cache=True)
def gather_layer(
    dst: _Bytes,
    dst_rows: _Rows,
    k_offset: int,
    v_offset: int,
    k_src: _Bytes,
    v_src: _Bytes,
    src_rows: _Rows,
    nbytes: int,
) -> None:
    """Copy one layer's keys and values into host pages."""
    for i in range(dst_rows.shape[0]):
        to = dst.ctypes.data + dst_rows[i] * dst.shape[1]
        frm = src_rows[i]
        memcpy(to + k_offset, k_src.ctypes.data + frm * k_src.shape[1], nbytes)
        memcpy(to + v_offset, v_src.ctypes.data + frm * v_src.shape[1], nbytes)
