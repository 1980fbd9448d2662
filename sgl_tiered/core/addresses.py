"""Addresses of blocks in a pool that spans instances: 64 bits each.

From the highest bit down: instance (16 bits), medium (4, a ``TierId``), generation
(12), slot (32). The generation is counted per slot and grows when the slot is freed, so
that an address kept for too long is recognised and refused. It starts again at 0 after
4,096 uses of one slot; and an instance that starts anew has another *incarnation*,
which is not part of an address: messages carry it, and a receiver compares it first.

A list of addresses ("addrList" in MemServe, Table 1) is a uint64 array.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import Int64s, UInt8s, UInt64s

__all__ = [
    "GENERATION_BITS",
    "MAX_GENERATION",
    "MAX_INSTANCE",
    "MAX_SLOT",
    "NEXT_GENERATION",
    "Addresses",
    "generations_of",
    "instances_of",
    "mediums_of",
    "pack",
    "places_of",
    "slots_of",
    "unpack",
]

MAX_INSTANCE = (1 << 16) - 1
MAX_GENERATION = (1 << 12) - 1
MAX_SLOT = (1 << 32) - 1
_MAX_MEDIUM = (1 << 4) - 1

# Shifts of uint64 arrays must be uint64 themselves, or numpy makes floats of them.
_INSTANCE_SHIFT = np.uint64(48)
_MEDIUM_SHIFT = np.uint64(44)
_GENERATION_SHIFT = np.uint64(32)
_MEDIUM_MASK = np.uint64(_MAX_MEDIUM)
_GENERATION_MASK = np.uint64(MAX_GENERATION)
_SLOT_MASK = np.uint64(MAX_SLOT)

NEXT_GENERATION = np.uint64(1 << 32)
"""What an address and that of the slot's next generation differ by, within
``GENERATION_BITS``."""
GENERATION_BITS = np.uint64(MAX_GENERATION << 32)

UInt16s = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True, eq=False)
class Addresses:
    """Addresses taken apart, one element each.

    Attributes:
        instances: uint16 [n].
        mediums: uint8 [n], values of ``TierId``.
        generations: uint16 [n], at most ``MAX_GENERATION``.
        slots: int64 [n], at most ``MAX_SLOT``.
    """

    instances: UInt16s
    mediums: UInt8s
    generations: UInt16s
    slots: Int64s


def pack(
    instance: int, medium: TierId, generations: npt.ArrayLike, slots: npt.ArrayLike
) -> UInt64s:
    """Return addresses of slots in one medium of one instance: uint64 [n].

    Args:
        instance: 0 .. ``MAX_INSTANCE``.
        medium: where the slots are.
        generations: integers [n] or one for all, 0 .. ``MAX_GENERATION``.
        slots: integers [n], 0 .. ``MAX_SLOT``.
    """
    assert 0 <= instance <= MAX_INSTANCE, f"instance {instance} has no 16 bits"
    assert 0 <= medium <= _MAX_MEDIUM, f"medium {medium} has no 4 bits"
    high = np.uint64(instance << 48 | int(medium) << 44)
    packed: UInt64s = np.asarray(slots).astype(np.uint64)
    packed |= np.asarray(generations).astype(np.uint64) << _GENERATION_SHIFT
    packed |= high
    return packed


def unpack(addresses: UInt64s) -> Addresses:
    """Take addresses apart: the inverse of ``pack``."""
    return Addresses(
        instances_of(addresses),
        mediums_of(addresses),
        generations_of(addresses),
        slots_of(addresses),
    )


def instances_of(addresses: UInt64s) -> UInt16s:
    """Return the instance of each address: uint16 [n]."""
    return (addresses >> _INSTANCE_SHIFT).astype(np.uint16)


def mediums_of(addresses: UInt64s) -> UInt8s:
    """Return the medium of each address, a value of ``TierId``: uint8 [n]."""
    return (addresses >> _MEDIUM_SHIFT & _MEDIUM_MASK).astype(np.uint8)


def generations_of(addresses: UInt64s) -> UInt16s:
    """Return the generation of each address: uint16 [n]."""
    return (addresses >> _GENERATION_SHIFT & _GENERATION_MASK).astype(np.uint16)


def places_of(addresses: UInt64s) -> UInt64s:
    """Return ``instance << 4 | medium`` of each address: uint64 [n].

    Equal for all blocks of one medium of one instance, which one comparison tells.
    """
    return addresses >> _MEDIUM_SHIFT


def slots_of(addresses: UInt64s) -> Int64s:
    """Return the slot of each address: int64 [n]."""
    return (addresses & _SLOT_MASK).astype(np.int64)
