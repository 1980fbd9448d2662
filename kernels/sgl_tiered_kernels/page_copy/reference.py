"""The page copies in plain numpy: what every other form must equal byte for byte."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["copy_layer", "copy_layer_twice", "copy_rows", "gather_layer"]

_Bytes = npt.NDArray[np.uint8]
_Rows = npt.NDArray[np.int64]


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
    for to, frm in zip(dst_rows.tolist(), src_rows.tolist(), strict=True):
        block = src[frm, src_offset : src_offset + nbytes]
        dst[to, dst_offset : dst_offset + nbytes] = block


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
    copy_rows(k_dst, dst_rows, 0, src, src_rows, k_offset, nbytes)
    copy_rows(v_dst, dst_rows, 0, src, src_rows, v_offset, nbytes)


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
    copy_layer(k_dst, v_dst, dst_rows, src, src_rows, k_offset, v_offset, nbytes)
    twice = also_rows >= 0
    rows, from_rows = also_rows[twice], src_rows[twice]
    copy_layer(k_also, v_also, rows, src, from_rows, k_offset, v_offset, nbytes)


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
    copy_rows(dst, dst_rows, k_offset, k_src, src_rows, 0, nbytes)
    copy_rows(dst, dst_rows, v_offset, v_src, src_rows, 0, nbytes)
