"""Facts about a disk and the kernel's I/O, found by trying and not by asking.

A file system may accept ``O_DIRECT`` at open and refuse the first write, so the probe
writes, reads back and compares one block in a temporary file that it removes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DiskFacts", "IoUringFacts", "disk_facts", "io_uring_facts"]

_BLOCK_BYTES = 4096
_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})
_IO_URING_SETUP = 425
"""System call number, the same on every architecture that Linux has added since 5.1."""
_IO_URING_PARAMS_BYTES = 120


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """What a folder offers to a disk tier.

    Attributes:
        path: as given.
        probed_path: the nearest folder above that exists, where it was tried.
        file_system: its type, e.g. ext4.
        total_bytes, free_bytes: of the file system, for this user.
        is_memory: it is kept in main memory (tmpfs), so it is no tier below the host.
        writable: a file can be made there; if not, the fields below are False.
        direct_io: O_DIRECT works, so that the page cache does not hold pages twice.
        fallocate: room can be set aside at start, so that it cannot run out later.
        detail: why something does not work, empty if all does.
    """

    path: str
    probed_path: str
    file_system: str
    total_bytes: int
    free_bytes: int
    is_memory: bool
    writable: bool
    direct_io: bool
    fallocate: bool
    detail: str


@dataclass(frozen=True, slots=True)
class IoUringFacts:
    """Whether io_uring can be used, and why not, in one clause."""

    usable: bool
    detail: str


def disk_facts(path: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> DiskFacts:
    """Try a folder, or the nearest one above it that exists. Writes one 4 KiB block."""
    folder = path.expanduser().absolute()
    while not folder.is_dir():
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    file_system = _file_system(folder.resolve(), mountinfo)
    problems: list[str] = []
    writable = direct = reserved = False
    try:
        descriptor, name = tempfile.mkstemp(prefix=".sgl-tiered-probe-", dir=folder)
    except OSError as error:
        problems.append(f"no file can be made there ({error.strerror})")
    else:
        os.close(descriptor)
        try:
            writable = True
            reserved = _works("fallocate", problems, lambda: _fallocate(name))
            direct = _works("O_DIRECT", problems, lambda: _write_direct(name))
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
    return DiskFacts(
        path=str(path),
        probed_path=str(folder),
        file_system=file_system,
        total_bytes=usage.total,
        free_bytes=usage.free,
        is_memory=file_system in _MEMORY_FILE_SYSTEMS,
        writable=writable,
        direct_io=direct,
        fallocate=reserved,
        detail="; ".join(problems),
    )


def io_uring_facts(setup: Callable[[], int] | None = None) -> IoUringFacts:
    """Make a ring of one entry and close it again.

    Args:
        setup: returns 0 or an errno; for tests. None makes a real ring.
    """
    code = (setup or _setup_ring)()
    details = {
        0: "a ring can be made",
        errno.ENOSYS: "this kernel has no io_uring, or a sandbox hides it (ENOSYS)",
        errno.EPERM: "forbidden here, by kernel.io_uring_disabled or seccomp (EPERM)",
    }
    return IoUringFacts(code == 0, details.get(code) or os.strerror(code))


def _works(name: str, problems: list[str], attempt: Callable[[], None]) -> bool:
    try:
        attempt()
    except OSError as error:
        problems.append(f"{name} does not work ({error.strerror})")
        return False
    return True


def _fallocate(name: str) -> None:
    """Set one block aside by the system call itself.

    ``os.posix_fallocate`` would write zeros where the file system cannot do it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    offset_type = ctypes.c_int64
    descriptor = os.open(name, os.O_RDWR)
    try:
        call = libc.fallocate64
        call.argtypes = [ctypes.c_int, ctypes.c_int, offset_type, offset_type]
        if call(descriptor, 0, 0, _BLOCK_BYTES) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    finally:
        os.close(descriptor)


def _write_direct(name: str) -> None:
    """Write one block past the page cache and read it back."""
    pattern = bytes(range(256)) * (_BLOCK_BYTES // 256)
    descriptor = os.open(name, os.O_RDWR | os.O_DIRECT)
    try:
        # An anonymous mapping is page aligned, as O_DIRECT wants its buffers.
        with mmap.mmap(-1, _BLOCK_BYTES) as block:
            block[:] = pattern
            os.pwrite(descriptor, block, 0)
            block[:] = bytes(_BLOCK_BYTES)
            os.preadv(descriptor, [block], 0)
            if block[:] != pattern:
                raise OSError(errno.EIO, "what was read is not what was written")
    finally:
        os.close(descriptor)


def _file_system(folder: Path, mountinfo: Path) -> str:
    """Return the type of the file system that holds a folder, or ``unknown``."""
    best, kind = Path(), "unknown"
    for line in mountinfo.read_text().splitlines():
        before, _, after = line.partition(" - ")
        # Spaces in a mount point are written as \040.
        mount = Path(before.split()[4].replace("\\040", " "))
        # A later mount on the same point hides an earlier one.
        if folder.is_relative_to(mount) and len(mount.parts) >= len(best.parts):
            best, kind = mount, after.split()[0]
    return kind


def _setup_ring() -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    params = ctypes.create_string_buffer(_IO_URING_PARAMS_BYTES)
    descriptor = libc.syscall(
        ctypes.c_long(_IO_URING_SETUP), ctypes.c_uint(1), ctypes.byref(params)
    )
    if descriptor < 0:
        return ctypes.get_errno()
    os.close(descriptor)
    return 0
