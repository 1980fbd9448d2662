"""Copies shared among the threads that also run torch's kernels.

torch parallelises with OpenMP (GCC's libgomp), whose idle threads keep their cores busy
for milliseconds, waiting for the next kernel. A copy on further threads fights with
them for the cores; a copy by the same team does not. So the copy goes to libgomp
itself, the very library that torch has loaded, and each thread takes its share.

A team belongs to the thread that forms it: on any other than the one that runs the
model, these functions make a second team, which gains nothing.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba.core import types
from numba.extending import intrinsic

from sgl_tiered_kernels.page_copy.cpu import copy_pages_twice, memcpy

__all__ = ["copy_layer", "copy_layer_twice", "copy_rows", "team_size"]

_Bytes = npt.NDArray[np.uint8]
_Rows = npt.NDArray[np.int64]

_NUM_FIELDS = 10
_NUM_FIELDS_TWICE = 18


@functools.cache
def _libgomp() -> Any:
    """Return torch's libgomp; None where torch is absent or brings another library."""
    try:
        import torch
    except ImportError:
        return None
    package = Path(torch.__file__).parent
    for folder in (package / "lib", package.parent / "torch.libs"):
        for path in sorted(folder.glob("libgomp*")):
            library = ctypes.CDLL(str(path))
            parallel = library.GOMP_parallel
            parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p] + [ctypes.c_uint] * 2
            parallel.restype = None
            return library
    return None


def team_size() -> int:
    """Return how many threads share a copy: torch's number, or 1 without libgomp."""
    if _libgomp() is None:
        return 1
    import torch

    return int(torch.get_num_threads())


def copy_rows(
    dst: _Bytes,
    dst_rows: _Rows,
    dst_offset: int,
    src: _Bytes,
    src_rows: _Rows,
    src_offset: int,
    nbytes: int,
) -> None:
    """Copy like ``cpu.copy_rows``, on ``team_size()`` threads, which must be over 1."""
    library = _libgomp()
    fields = np.array(
        [
            _address(library.omp_get_thread_num),
            _address(library.omp_get_num_threads),
            dst_rows.shape[0],
            dst.ctypes.data + dst_offset,
            dst.shape[1],
            dst_rows.ctypes.data,
            src.ctypes.data + src_offset,
            src.shape[1],
            src_rows.ctypes.data,
            nbytes,
        ],
        dtype=np.int64,
    )
    library.GOMP_parallel(_copy_share.address, fields.ctypes.data, team_size(), 0)


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
    """Copy like ``cpu.copy_layer``, on ``team_size()`` threads."""
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
    """Copy like ``cpu.copy_layer_twice``, on ``team_size()`` threads."""
    library = _libgomp()
    fields = np.array(
        [
            _address(library.omp_get_thread_num),
            _address(library.omp_get_num_threads),
            dst_rows.shape[0],
            *(k_dst.ctypes.data, v_dst.ctypes.data),
            *(k_dst.shape[1], v_dst.shape[1]),
            dst_rows.ctypes.data,
            *(k_also.ctypes.data, v_also.ctypes.data),
            *(k_also.shape[1], v_also.shape[1]),
            also_rows.ctypes.data,
            *(src.ctypes.data + k_offset, src.ctypes.data + v_offset),
            src.shape[1],
            src_rows.ctypes.data,
            nbytes,
        ],
        dtype=np.int64,
    )
    library.GOMP_parallel(_copy_share_twice.address, fields.ctypes.data, team_size(), 0)


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@intrinsic
def _call(typingctx: Any, address: Any) -> Any:
    """Call ``int (*)(void)`` at an address: a constant one would forbid caching."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        from llvmlite import ir  # type: ignore[import-untyped]

        kind = ir.FunctionType(ir.IntType(32), [])
        function = builder.inttoptr(args[0], kind.as_pointer())
        return builder.sext(builder.call(function, []), ir.IntType(64))

    return types.int64(types.int64), generate


@intrinsic
def _rows_at(typingctx: Any, address: Any) -> Any:
    """Turn an address into ``int64 *``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = context.get_value_type(types.CPointer(types.int64))
        return builder.inttoptr(args[0], kind)

    return types.CPointer(types.int64)(types.int64), generate


@numba.cfunc(types.void(types.CPointer(types.int64)), cache=True)
def _copy_share(pointer: Any) -> None:
    """Copy one thread's share of the rows."""
    field = numba.carray(pointer, _NUM_FIELDS)
    thread, num_threads = _call(field[0]), _call(field[1])
    num_rows = field[2]
    to_rows = numba.carray(_rows_at(field[5]), num_rows)
    from_rows = numba.carray(_rows_at(field[8]), num_rows)
    begin = num_rows * thread // num_threads
    end = num_rows * (thread + 1) // num_threads
    for i in range(begin, end):
        memcpy(
            field[3] + to_rows[i] * field[4],
            field[6] + from_rows[i] * field[7],
            field[9],
        )


# Not cached: numba does not see when a function of another file has changed.
@numba.cfunc(types.void(types.CPointer(types.int64)))
def _copy_share_twice(pointer: Any) -> None:
    """Copy one thread's share of the pages to both places."""
    field = numba.carray(pointer, _NUM_FIELDS_TWICE)
    thread, num_threads = _call(field[0]), _call(field[1])
    num_pages = field[2]
    copy_pages_twice(
        (field[3], field[4]),
        (field[5], field[6]),
        numba.carray(_rows_at(field[7]), num_pages),
        (field[8], field[9]),
        (field[10], field[11]),
        numba.carray(_rows_at(field[12]), num_pages),
        (field[13], field[14]),
        field[15],
        numba.carray(_rows_at(field[16]), num_pages),
        field[17],
        num_pages * thread // num_threads,
        num_pages * (thread + 1) // num_threads,
    )
