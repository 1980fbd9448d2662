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

__all__ = ["copy_layer", "copy_rows", "gather_layer", "memcpy"]

_Bytes = npt.NDArray[np.uint8]
_Rows = npt.NDArray[np.int64]


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
