"""Many copies of equal size by the device's copy engines, handed over in one call.

``cuMemcpyBatchAsync`` (CUDA 12.8 and later, found through cuda-python) takes arrays of
addresses, so that a layer of a thousand pages costs one call and not two thousand.
Where it is missing, each copy is a call of its own. The copy engines leave the cores of
the device to the forward; how fast they are for small pieces is measured, not assumed.

Addresses are the caller's to check: device memory, or host memory that CUDA pinned;
pageable memory for ``unbatched`` engines only.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "CopyEngines",
    "batch_function",
    "common_alignment",
    "copy_function",
    "device_attribute",
    "part_addresses",
    "row_addresses",
]

logger = logging.getLogger(__name__)

UInt64s = npt.NDArray[np.uint64]
Int64s = npt.NDArray[np.int64]
BatchFunction = Callable[..., int]
CopyFunction = Callable[[int, int, int, int], int]

_BATCH_SINCE = 12080
"""Version of the call's form that we use: it has the index of the failed copy."""
_SOURCE_IN_STREAM_ORDER = 1
_SOURCE_AT_ANY_TIME = 3
"""The source may be read before what was queued earlier: only for bytes that are
complete when the call is made."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("source_order", ctypes.c_uint),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class CopyEngines:
    """Queues copies on a stream; nothing has been copied when a call returns.

    The calling thread must have used the stream before (an event recorded on it is
    enough), for that makes the device's context current on the thread.

    Args:
        batch: ``cuMemcpyBatchAsync``, or None where there is none.
        one: copies (to, from, num_bytes, stream), for devices without ``batch``.
    """

    def __init__(self, batch: BatchFunction | None, one: CopyFunction) -> None:
        self._batch = batch
        self._one = one

    @property
    def batched(self) -> bool:
        """Whether a call takes all copies at once."""
        return self._batch is not None

    def unbatched(self) -> CopyEngines:
        """Return such ones that call once a copy, and take pageable memory as well."""
        return CopyEngines(None, self._one)

    def submit(
        self,
        to: UInt64s,
        frm: UInt64s,
        num_bytes: int,
        stream: int,
        *,
        source_complete: bool,
    ) -> None:
        """Queue ``num_bytes`` from each address to the one beside it.

        Args:
            to: uint64 [n], no two of the blocks overlapping.
            frm: uint64 [n].
            num_bytes: of each copy.
            stream: handle of the stream, which must not be the default one.
            source_complete: nothing queued so far writes to the sources.

        Raises:
            ValueError: the arrays differ in length.
            RuntimeError: the device refused; then some copies may be queued.
        """
        if len(to) != len(frm):
            raise ValueError(f"{len(to)} targets and {len(frm)} sources")
        if not len(to) or not num_bytes:
            return
        if self._batch is None:
            for target, source in zip(to.tolist(), frm.tolist(), strict=True):
                _check(self._one(target, source, num_bytes, stream), "a copy")
            return
        targets, sources = (np.ascontiguousarray(side, np.uint64) for side in (to, frm))
        sizes = np.full(len(targets), num_bytes, np.uint64)
        order = _SOURCE_AT_ANY_TIME if source_complete else _SOURCE_IN_STREAM_ORDER
        attributes = _Attributes(source_order=order)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        status = self._batch(
            targets.ctypes.data,
            sources.ctypes.data,
            sizes.ctypes.data,
            len(targets),
            ctypes.addressof(attributes),
            ctypes.addressof(first),
            1,
            ctypes.addressof(failed),
            stream,
        )
        _check(status, f"copy {failed.value} of {len(targets)}")


def batch_function() -> BatchFunction | None:
    """Look ``cuMemcpyBatchAsync`` up; None (and a log line) where there is none."""
    try:
        driver: Any = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        logger.info("sgl-tiered: without cuda-python each copy is a call of its own")
        return None
    found = driver.cuGetProcAddress(b"cuMemcpyBatchAsync", _BATCH_SINCE, 0)
    if int(found[0]) != 0 or not int(found[1]):
        logger.info("sgl-tiered: this CUDA driver cannot batch copies (%s)", found[0])
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    form = ctypes.CFUNCTYPE(
        ctypes.c_int,
        pointer,
        pointer,
        pointer,
        size,
        pointer,
        pointer,
        size,
        pointer,
        pointer,
    )
    return form(int(found[1]))


def copy_function() -> CopyFunction:
    """Return ``cuMemcpyAsync`` of the driver: (to, from, num_bytes, stream) -> status.

    Raises:
        OSError: this machine has no CUDA driver.
    """
    copy = ctypes.CDLL("libcuda.so.1").cuMemcpyAsync
    copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    copy.restype = ctypes.c_int
    function: CopyFunction = copy
    return function


def device_attribute(number: int, ordinal: int) -> int:
    """Return an attribute of a device, by its number in the driver's ``cuda.h``.

    Args:
        number: ``CU_DEVICE_ATTRIBUTE_*``.
        ordinal: of the device, as torch counts.

    Raises:
        OSError: this machine has no CUDA driver.
        RuntimeError: the driver is not initialised, or knows no such attribute.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    handle, value = ctypes.c_int(0), ctypes.c_int(0)
    _check(driver.cuDeviceGet(ctypes.byref(handle), ordinal), f"device {ordinal}")
    status = driver.cuDeviceGetAttribute(ctypes.byref(value), number, handle)
    _check(status, f"attribute {number}")
    return value.value


def common_alignment(addresses: Iterable[int]) -> int:
    """Return the largest power of two up to 16 that divides all addresses."""
    return math.gcd(16, *addresses)


def row_addresses(base: int, row_bytes: int, rows: Int64s, offset: int = 0) -> UInt64s:
    """Return uint64 [n]: the address of byte ``offset`` of each row."""
    first = np.uint64(base + offset)
    return rows.astype(np.uint64) * np.uint64(row_bytes) + first


def part_addresses(
    keys: int,
    values: int,
    pages: Int64s,
    memory: int,
    row_bytes: int,
    rows: Int64s,
    first_byte: int,
    part_bytes: int,
) -> tuple[UInt64s, UInt64s]:
    """Return (device, memory) addresses of one layer's keys, then of its values.

    Args:
        keys: address of the layer's keys, pages of ``part_bytes`` in a row.
        values: the same of its values.
        pages: int64 [n] device pages.
        memory: address of rows of whole pages.
        row_bytes: from one row to the next.
        rows: int64 [n].
        first_byte: of the layer's keys in a row; its values follow them.
        part_bytes: bytes of one layer's keys (and of its values) in a page.
    """
    device = np.concatenate(
        [row_addresses(base, part_bytes, pages) for base in (keys, values)]
    )
    offsets = (first_byte, first_byte + part_bytes)
    host = np.concatenate(
        [row_addresses(memory, row_bytes, rows, offset) for offset in offsets]
    )
    return device, host


def _check(status: int, what: str) -> None:
    if status != 0:
        raise RuntimeError(f"{what} was refused: CUDA error {status}")
