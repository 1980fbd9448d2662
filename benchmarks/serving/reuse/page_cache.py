"""Makes a store on disk cold, and looks whether it is.

``posix_fadvise(DONTNEED)`` drops the clean pages of a file from the kernel's page
cache; dirty ones are written first. ``mincore`` then says what is still in memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

__all__ = ["Residence", "drop_page_cache", "residence"]


@dataclass(frozen=True, slots=True)
class Residence:
    """How much of a store is in the kernel's page cache, in pages of memory."""

    resident: int
    total: int

    @property
    def fraction(self) -> float:
        """Share that is resident; 0 for an empty store."""
        return self.resident / self.total if self.total else 0.0


def drop_page_cache(folder: Path) -> None:
    """Write out and drop every file below ``folder`` from the page cache."""
    for path in _files(folder):
        descriptor = _open(path)
        if descriptor is None:
            continue
        try:
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def residence(folder: Path) -> Residence:
    """Count the pages of all files below ``folder`` that are in memory.

    Raises:
        OSError: the system refused to say.
    """
    resident = total = 0
    for path in _files(folder):
        descriptor = _open(path)
        if descriptor is None:
            continue
        try:
            size = os.fstat(descriptor).st_size
            if size:
                flags = _resident_pages(descriptor, size)
                resident += int(np.count_nonzero(flags & 1))
                total += flags.size
        finally:
            os.close(descriptor)
    return Residence(resident, total)


def _resident_pages(descriptor: int, size_bytes: int) -> np.ndarray:
    """Return one byte per page; its lowest bit says whether the page is resident."""
    flags = np.zeros(-(-size_bytes // mmap.PAGESIZE), np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    # A private mapping: it is writable for Python's sake and reads nothing by itself.
    with mmap.mmap(descriptor, size_bytes, mmap.MAP_PRIVATE) as mapping:
        anchor = ctypes.c_char.from_buffer(mapping)
        failed = libc.mincore(
            ctypes.c_void_p(ctypes.addressof(anchor)),
            ctypes.c_size_t(size_bytes),
            flags.ctypes.data_as(ctypes.c_void_p),
        )
        # The mapping cannot be closed while something points into it.
        del anchor
    if failed:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return flags


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            yield path


def _open(path: Path) -> int | None:
    """Open a file of a live store; it may be gone since it was listed."""
    try:
        return os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
