"""Mapped slabs: preadv and pwritev as copies from and to a mapping of the file.

This is how vLLM was given a disk tier in the Berkeley report. It goes through the page
cache, which the server's own host tier makes redundant, so it is an option and no
default: for file systems in memory, and for comparisons.

A page of a mapping that cannot be read (I/O error, file cut) kills the process with
SIGBUS when it is touched. So nobody here touches one: the kernel copies, by
``process_vm_readv`` on this very process, and returns EFAULT instead.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Sequence

import numpy as np

from sgl_tiered.tiers.disk_io import SystemCalls

__all__ = ["MappedCalls", "why_not_mapped"]


class _Piece(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("base", ctypes.c_void_p), ("len", ctypes.c_size_t))


def _libc_call(name: str) -> ctypes._NamedFuncPointer | None:
    try:
        call = getattr(ctypes.CDLL(None, use_errno=True), name)
    except AttributeError:
        return None
    pieces = ctypes.POINTER(_Piece)
    size = ctypes.c_ulong
    call.argtypes = [ctypes.c_int, pieces, size, pieces, size, size]
    call.restype = ctypes.c_ssize_t
    return call  # type: ignore[no-any-return]


def why_not_mapped() -> str:
    """Return why mapped slabs cannot be used here; empty if they can."""
    read = _libc_call("process_vm_readv")
    if read is None:
        return "the C library has no process_vm_readv"
    source, target = np.arange(8, dtype=np.uint8), np.zeros(8, np.uint8)
    try:
        count = _copy(read, [target.data], source.ctypes.data, 8)
    except OSError as error:
        return f"process_vm_readv is refused here ({error.strerror})"
    return "" if count == 8 and (source == target).all() else "it copies wrongly"


class MappedCalls(SystemCalls):
    """System calls of which the two that move payload go through mappings.

    Args:
        calls: does everything else.
    """

    def __init__(self, calls: SystemCalls) -> None:
        self._calls = calls
        self._read = _libc_call("process_vm_readv")
        self._write = _libc_call("process_vm_writev")
        self._lock = threading.Lock()
        # Descriptor -> mapping, inode and address.
        self._mappings: dict[int, tuple[mmap.mmap, int, int]] = {}
        # Never unmapped while the tier is open: another thread may be copying.
        self._replaced: list[mmap.mmap] = []

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        """Open a file."""
        return self._calls.open(path, flags, mode)

    def fallocate(self, fd: int, offset: int, num_bytes: int) -> None:
        """Set space aside."""
        self._calls.fallocate(fd, offset, num_bytes)

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """Copy out of the mapping; 0 behind the end of the file."""
        size = os.fstat(fd).st_size
        wanted = min(sum(len(view) for view in views), size - offset)
        if wanted <= 0:
            return 0
        return _copy(self._read, views, self._address(fd, size) + offset, wanted)

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """Copy into the mapping; the file has to be long enough."""
        size = os.fstat(fd).st_size
        wanted = sum(len(view) for view in views)
        if offset + wanted > size:
            raise OSError(errno.EIO, "the slab is shorter than it should be")
        return _copy(self._write, views, self._address(fd, size) + offset, wanted)

    def close(self) -> None:
        """Drop the mappings; may be called twice."""
        with self._lock:
            self._mappings.clear()
            self._replaced.clear()
        self._calls.close()

    def _address(self, fd: int, size: int) -> int:
        """Return where the file is mapped; a file that has grown is mapped again."""
        inode = os.fstat(fd).st_ino
        with self._lock:
            mapping, mapped_inode, address = self._mappings.get(fd, (None, 0, 0))
            if mapping is None or mapped_inode != inode or len(mapping) < size:
                if mapping is not None:
                    self._replaced.append(mapping)
                mapping = mmap.mmap(fd, size)
                address = np.frombuffer(mapping, np.uint8).ctypes.data
                self._mappings[fd] = (mapping, inode, address)
            return address


def _copy(
    call: ctypes._NamedFuncPointer | None,
    views: Sequence[memoryview],
    address: int,
    num_bytes: int,
) -> int:
    """Let the kernel copy between the views and ``address``; return the bytes."""
    assert call is not None
    pieces = (_Piece * len(views))()
    left = num_bytes
    for piece, view in zip(pieces, views, strict=True):
        piece.base = np.frombuffer(view, np.uint8).ctypes.data
        piece.len = min(len(view), left)
        left -= piece.len
    other = _Piece(address, num_bytes)
    count = call(os.getpid(), pieces, len(views), ctypes.byref(other), 1, 0)
    if count < 0:
        code = ctypes.get_errno()
        # EFAULT: the page behind the address could not be brought in.
        code = errno.EIO if code == errno.EFAULT else code
        raise OSError(code, os.strerror(code))
    return int(count)
