"""Reads and writes of runs of slots, and the operating system calls they stand on.

Slots that are neighbours on disk are moved in one vectored I/O, whatever rows of the
buffer they belong to. Errors leave as ``OSError``; ``DiskTier`` turns them into values.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.layout import ALIGNMENT_BYTES

__all__ = [
    "Extent",
    "SystemCalls",
    "explained",
    "plan_extents",
    "read_extent",
    "read_through",
    "write_extent",
]

MIN_SPLIT_BYTES = 256 << 10
"""Below this an I/O is dominated by its latency (154 us), so a run is not split."""
MAX_VIEWS = 1024
"""IOV_MAX of Linux."""


_ADVICE = {
    errno.EMFILE: "raise the limit of the process (ulimit -n)",
    errno.ENFILE: "raise the limit of the machine (fs.file-max)",
    errno.ENOSPC: "there is no room, or no inode, left (df, df -i)",
    errno.EDQUOT: "see to the user's quota",
}


def explained(error: OSError) -> str:
    """Return what an error of the operating system says, and what to do about it."""
    what = error.strerror or str(error)
    advice = _ADVICE.get(error.errno or 0)
    return f"{what}: {advice}" if advice else what


class SystemCalls:
    """The calls that can fail; tests put failures in by overriding them."""

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        """Open a file and return its descriptor."""
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """Read into the views; return the bytes read."""
        return os.preadv(fd, views, offset)

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """Write the views; return the bytes written."""
        return os.pwritev(fd, views, offset)

    def fallocate(self, fd: int, offset: int, num_bytes: int) -> None:
        """Set space aside; afterwards a write there cannot run out of space."""
        os.posix_fallocate(fd, offset, num_bytes)

    def close(self) -> None:
        """Release what the calls themselves hold: here nothing."""


@dataclass(frozen=True, slots=True)
class Extent:
    """One I/O: consecutive slots of one slab.

    Attributes:
        slab: number of the slab.
        offset: first byte in the slab.
        positions: indices into the arrays of the ``TierIO``, in slot order.
    """

    slab: int
    offset: int
    positions: list[int]


def plan_extents(
    addresses: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    slots_per_slab: int,
    slot_bytes: int,
    max_io_bytes: int,
    num_threads: int,
) -> list[Extent]:
    """Group the slots at ``addresses[positions]`` into I/Os.

    Runs are cut at ``max_io_bytes``, and finer for small batches, so that every thread
    gets a share; never below ``MIN_SPLIT_BYTES``.
    """
    if len(positions) == 0:
        return []
    share = -(-len(positions) // num_threads)
    at_least = -(-MIN_SPLIT_BYTES // slot_bytes)
    max_pages = max(1, min(max_io_bytes // slot_bytes, max(share, at_least), MAX_VIEWS))
    order = positions[np.argsort(addresses[positions], kind="stable")]
    slots = addresses[order]
    slabs = slots // slots_per_slab
    breaks = np.flatnonzero((np.diff(slots) != 1) | (np.diff(slabs) != 0)) + 1
    bounds = [0, *breaks.tolist(), len(slots)]
    extents = []
    for begin, end in itertools.pairwise(bounds):
        for start in range(begin, end, max_pages):
            slab = int(slabs[start])
            offset = (int(slots[start]) - slab * slots_per_slab) * slot_bytes
            chosen = order[start : min(start + max_pages, end)].tolist()
            extents.append(Extent(slab, offset, chosen))
    return extents


def read_extent(
    calls: SystemCalls, fd: int, views: list[memoryview], offset: int
) -> int:
    """Fill the views from ``offset`` on; return the bytes read, fewer at file end."""
    wanted = sum(len(view) for view in views)
    done = 0
    while done < wanted:
        count = calls.preadv(fd, _after(views, done), offset + done)
        done += count
        # After an odd count O_DIRECT could not go on, and only a cut file gives one.
        if count == 0 or done % ALIGNMENT_BYTES:
            break
    return done


def read_through(
    calls: SystemCalls,
    fd: int,
    bounce: memoryview,
    views: list[memoryview],
    offset: int,
) -> int:
    """Do as ``read_extent``, by way of a small buffer that stays in the cache."""
    wanted = sum(len(view) for view in views)
    done = 0
    while done < wanted:
        part = bounce[: wanted - done]
        count = read_extent(calls, fd, [part], offset + done)
        copied = 0
        for view in _after(views, done):
            piece = part[copied : min(copied + len(view), count)]
            if not len(piece):
                break
            # numpy lets other threads run meanwhile; a slice assignment does not.
            np.copyto(
                np.frombuffer(view, np.uint8, len(piece)),
                np.frombuffer(piece, np.uint8),
            )
            copied += len(piece)
        done += count
        if count < len(part):
            break
    return done


def write_extent(
    calls: SystemCalls, fd: int, views: list[memoryview], offset: int
) -> None:
    """Write all views from ``offset`` on, or raise OSError."""
    wanted = sum(len(view) for view in views)
    done = 0
    while done < wanted:
        count = calls.pwritev(fd, _after(views, done), offset + done)
        if count <= 0:
            # Not allowed for more than no bytes; asking again might never end.
            raise OSError(errno.EIO, "the disk takes no more bytes of a write")
        done += count


def _after(views: list[memoryview], skip: int) -> list[memoryview]:
    """Return the views without their first ``skip`` bytes."""
    if skip == 0:
        return views
    rest = []
    for view in views:
        if skip < len(view):
            rest.append(view[skip:])
        skip = max(0, skip - len(view))
    return rest
