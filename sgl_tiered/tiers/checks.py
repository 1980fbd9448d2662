"""Checks on a ``TierIO``, and the checksum of a page, shared by all tiers.

A wrong address is a defect of the caller, not a state of the medium: it raises.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import xxhash

from sgl_tiered.core.plans import PageRecords
from sgl_tiered.tiers.base import TierIO

__all__ = ["check_io", "checksum", "expected_checksums"]

checksum: Callable[..., int] = xxhash.xxh3_64_intdigest
"""xxh3-64 of a bytes-like object."""


def check_io(io: TierIO, num_slots: int, slot_bytes: int) -> None:
    """Raise ValueError unless all addresses, rows and shapes of ``io`` are in range."""
    addresses, buffer, rows = io.addresses, io.buffer, io.rows
    if addresses.ndim != 1 or addresses.shape != rows.shape:
        raise ValueError(
            f"addresses {addresses.shape} and rows {rows.shape} must be one "
            f"dimension of equal length"
        )
    if buffer.ndim != 2 or buffer.dtype != np.uint8 or not buffer.flags.c_contiguous:
        raise ValueError("the buffer must be a C-contiguous uint8 array of rows")
    if buffer.shape[1] < slot_bytes:
        raise ValueError(f"rows of {buffer.shape[1]} B cannot hold {slot_bytes} B")
    if len(addresses) == 0:
        return
    if addresses.min() < 0 or addresses.max() >= num_slots:
        raise ValueError(
            f"addresses {addresses.min()}..{addresses.max()} are outside "
            f"0..{num_slots - 1}"
        )
    if rows.min() < 0 or rows.max() >= buffer.shape[0]:
        raise ValueError(
            f"rows {rows.min()}..{rows.max()} are outside 0..{buffer.shape[0] - 1}"
        )
    if io.records is not None and len(io.records.checksums) != len(addresses):
        raise ValueError(
            f"{len(io.records.checksums)} records for {len(addresses)} addresses"
        )


def expected_checksums(
    checksums: npt.NDArray[np.uint64], addresses: npt.NDArray[np.int64]
) -> PageRecords:
    """Return records for a load of which only the checksums are known.

    Keys, parents and tokens have no rows: a load compares bytes, by their checksum.
    """
    return PageRecords(
        namespaces=np.zeros((0, 16), np.uint8),
        keys=np.zeros((0, 16), np.uint8),
        parents=np.zeros((0, 16), np.uint8),
        tokens=np.zeros((0, 0), np.int32),
        checksums=checksums,
        addresses=addresses,
    )
