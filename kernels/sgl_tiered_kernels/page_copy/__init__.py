"""Copies of page rows between a host region and the buffers of one layer.

All arrays are host memory, 2-D and C-contiguous, of any dtype; offsets and sizes are
in bytes. One call runs without the GIL from its first byte to its last, on the
calling thread alone (but see ``by_team``). Rows that are written must not overlap rows
that are read.

The compiled form needs numba and compiles once per machine (``prepare`` does it
ahead, about 3 s; the result is cached on disk). Without numba the same functions run
on numpy, slower and holding the GIL; ``backend_name`` says which it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_tiered_kernels.page_copy.backend import (
    backend_name,
    load_backend,
    load_team,
)

__all__ = [
    "backend_name",
    "copy_layer",
    "copy_layer_twice",
    "copy_rows",
    "gather_layer",
    "prepare",
]

_Bytes = npt.NDArray[np.uint8]
_Rows = npt.NDArray[np.int64]


def prepare() -> str:
    """Compile what is not compiled yet and return ``backend_name()``."""
    data = np.zeros((1, 1), np.uint8)
    row = np.zeros(1, np.int64)
    backend = load_backend()
    backend.copy_rows(data, row, 0, data.copy(), row, 0, 1)
    backend.copy_layer(data, data.copy(), row, data.copy(), row, 0, 0, 1)
    places = [data.copy() for _ in range(4)]
    backend.copy_layer_twice(*places[:2], row, *places[2:], row, data, row, 0, 0, 1)
    backend.gather_layer(data, row, 0, 0, data.copy(), data.copy(), row, 1)
    load_team()
    return backend_name()


def copy_rows(
    dst: npt.NDArray[Any],
    dst_rows: npt.ArrayLike,
    dst_offset: int,
    src: npt.NDArray[Any],
    src_rows: npt.ArrayLike,
    src_offset: int,
    nbytes: int,
    *,
    by_team: bool = False,
) -> None:
    """Copy ``nbytes`` from each source row to the destination row beside it.

    Args:
        dst: ``[rows, row]``; written at bytes ``dst_offset`` to ``+ nbytes``.
        dst_rows: ``[n]`` row numbers; if one occurs twice, the last copy stays.
        dst_offset: Bytes from the start of a destination row.
        src: ``[rows, row]``.
        src_rows: ``[n]`` row numbers.
        src_offset: Bytes from the start of a source row.
        nbytes: Bytes per row.
        by_team: Share the copy among the threads that run torch's kernels, where
            that can be done; for the thread that runs the model. The rows of
            ``dst_rows`` must then differ.

    Raises:
        ValueError: if a row, an offset or a size lies outside; nothing is copied.
    """
    to, frm = _as_bytes("dst", dst), _as_bytes("src", src)
    to_rows, from_rows = _as_rows("dst_rows", dst_rows), _as_rows("src_rows", src_rows)
    _check_pairs(to_rows, from_rows)
    _check_blocks(to_rows, nbytes, dst=(to, dst_offset))
    _check_blocks(from_rows, nbytes, src=(frm, src_offset))
    _copies(by_team).copy_rows(
        to, to_rows, dst_offset, frm, from_rows, src_offset, nbytes
    )


def copy_layer(
    k_dst: npt.NDArray[Any],
    v_dst: npt.NDArray[Any],
    dst_rows: npt.ArrayLike,
    src: npt.NDArray[Any],
    src_rows: npt.ArrayLike,
    k_offset: int,
    v_offset: int,
    nbytes: int,
    *,
    by_team: bool = False,
) -> None:
    """Copy one layer's keys and values out of host pages: the load of a layer.

    Args:
        k_dst: ``[pages, page]``, the layer's keys; each row is written from byte 0.
        v_dst: ``[pages, page]``, the layer's values.
        dst_rows: ``[n]`` rows of ``k_dst`` and ``v_dst``.
        src: ``[host_pages, host_page]``, all layers of a page in a row.
        src_rows: ``[n]`` rows of ``src``.
        k_offset: Bytes from the start of a host page to the layer's keys.
        v_offset: The same to its values.
        nbytes: Bytes of one layer's keys (and of its values) in a page.
        by_team: As for ``copy_rows``.

    Raises:
        ValueError: if a row, an offset or a size lies outside; nothing is copied.
    """
    k_to, v_to = _as_bytes("k_dst", k_dst), _as_bytes("v_dst", v_dst)
    frm = _as_bytes("src", src)
    to_rows, from_rows = _as_rows("dst_rows", dst_rows), _as_rows("src_rows", src_rows)
    _check_pairs(to_rows, from_rows)
    _check_blocks(to_rows, nbytes, k_dst=(k_to, 0), v_dst=(v_to, 0))
    _check_blocks(from_rows, nbytes, src=(frm, k_offset, v_offset))
    _copies(by_team).copy_layer(
        k_to, v_to, to_rows, frm, from_rows, k_offset, v_offset, nbytes
    )


def copy_layer_twice(
    k_dst: npt.NDArray[Any],
    v_dst: npt.NDArray[Any],
    dst_rows: npt.ArrayLike,
    k_also: npt.NDArray[Any],
    v_also: npt.NDArray[Any],
    also_rows: npt.ArrayLike,
    src: npt.NDArray[Any],
    src_rows: npt.ArrayLike,
    k_offset: int,
    v_offset: int,
    nbytes: int,
    *,
    by_team: bool = False,
) -> None:
    """Do as ``copy_layer``, and copy to a second place, which is the one read next.

    Each page is read once. What goes to both places is written to the first past the
    processor's cache, where addresses and sizes allow it.

    Args:
        k_dst: as for ``copy_layer``, like all that is not named here.
        v_dst: likewise.
        dst_rows: likewise.
        k_also: ``[rows, page]``, the second place of the keys.
        v_also: ``[rows, page]``, that of the values.
        also_rows: ``[n]`` rows of ``k_also`` and ``v_also``; -1 for pages that go to
            the first place only.
        src: as for ``copy_layer``.
        src_rows: likewise.
        k_offset: likewise.
        v_offset: likewise.
        nbytes: likewise.
        by_team: likewise; the rows of each place must then differ.

    Raises:
        ValueError: if a row, an offset or a size lies outside; nothing is copied.
    """
    k_to, v_to = _as_bytes("k_dst", k_dst), _as_bytes("v_dst", v_dst)
    k_too, v_too = _as_bytes("k_also", k_also), _as_bytes("v_also", v_also)
    frm = _as_bytes("src", src)
    to_rows, from_rows = _as_rows("dst_rows", dst_rows), _as_rows("src_rows", src_rows)
    too_rows = _as_rows("also_rows", also_rows)
    _check_pairs(to_rows, from_rows)
    _check_pairs(too_rows, from_rows)
    _check_blocks(to_rows, nbytes, k_dst=(k_to, 0), v_dst=(v_to, 0))
    too = {"k_also": (k_too, 0), "v_also": (v_too, 0)}
    _check_blocks(too_rows, nbytes, may_lack=True, **too)
    _check_blocks(from_rows, nbytes, src=(frm, k_offset, v_offset))
    places = (k_to, v_to, to_rows, k_too, v_too, too_rows)
    _copies(by_team).copy_layer_twice(
        *places, frm, from_rows, k_offset, v_offset, nbytes
    )


def gather_layer(
    dst: npt.NDArray[Any],
    dst_rows: npt.ArrayLike,
    k_offset: int,
    v_offset: int,
    k_src: npt.NDArray[Any],
    v_src: npt.NDArray[Any],
    src_rows: npt.ArrayLike,
    nbytes: int,
) -> None:
    """Copy one layer's keys and values into host pages: the inverse of copy_layer.

    Args:
        dst: ``[host_pages, host_page]``, all layers of a page in a row.
        dst_rows: ``[n]`` rows of ``dst``.
        k_offset: Bytes from the start of a host page to the layer's keys.
        v_offset: The same to its values; the two blocks must not overlap.
        k_src: ``[pages, page]``, the layer's keys; each row is read from byte 0.
        v_src: ``[pages, page]``, the layer's values.
        src_rows: ``[n]`` rows of ``k_src`` and ``v_src``.
        nbytes: Bytes of one layer's keys (and of its values) in a page.

    Raises:
        ValueError: if a row, an offset or a size lies outside; nothing is copied.
    """
    to = _as_bytes("dst", dst)
    k_frm, v_frm = _as_bytes("k_src", k_src), _as_bytes("v_src", v_src)
    to_rows, from_rows = _as_rows("dst_rows", dst_rows), _as_rows("src_rows", src_rows)
    _check_pairs(to_rows, from_rows)
    _check_blocks(to_rows, nbytes, dst=(to, k_offset, v_offset))
    _check_blocks(from_rows, nbytes, k_src=(k_frm, 0), v_src=(v_frm, 0))
    load_backend().gather_layer(
        to, to_rows, k_offset, v_offset, k_frm, v_frm, from_rows, nbytes
    )


def _copies(by_team: bool) -> Any:
    return (load_team() if by_team else None) or load_backend()


def _as_bytes(name: str, array: npt.NDArray[Any]) -> _Bytes:
    if array.ndim != 2 or not array.flags.c_contiguous:
        raise ValueError(f"{name} must be a 2-D C-contiguous array")
    return array.view(np.uint8)


def _as_rows(name: str, rows: npt.ArrayLike) -> _Rows:
    array = np.asarray(rows)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{name} must be a 1-D array of row numbers")
    return np.ascontiguousarray(array, dtype=np.int64)


def _check_pairs(to_rows: _Rows, from_rows: _Rows) -> None:
    if to_rows.size != from_rows.size:
        raise ValueError(
            f"dst_rows and src_rows differ in length: {to_rows.size}, {from_rows.size}"
        )


def _check_blocks(
    rows: _Rows, nbytes: int, *, may_lack: bool = False, **arrays: Any
) -> None:
    """Check rows, and the offsets of their bytes, of arrays given with them by name.

    ``may_lack`` allows -1 as a row. The least and the greatest row are looked for but
    once: for few pages that takes as long as the copy.
    """
    least, most = (int(rows.min()), int(rows.max())) if rows.size else (0, -1)
    for name, (data, *offsets) in arrays.items():
        num_rows, row_bytes = data.shape
        for offset in offsets:
            if offset < 0 or nbytes < 0 or offset + nbytes > row_bytes:
                raise ValueError(
                    f"bytes {offset} to {offset + nbytes} lie outside a row of {name}, "
                    f"which has {row_bytes}"
                )
        if least < -may_lack or most >= num_rows:
            raise ValueError(
                f"a row number lies outside {name}, which has {num_rows} rows"
            )
