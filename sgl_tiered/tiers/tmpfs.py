"""An unnamed file in a memory file system: how the CXL tier's mapping is emulated."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sgl_tiered.errors import ConfigError
from sgl_tiered.tiers.pinning import Pinning, Register

__all__ = ["TmpfsRegion"]

_SETTING = "--tiered-cxl"
_KINDS = ("tmpfs", "ramfs", "hugetlbfs")


class TmpfsRegion:
    """A ``Region`` in a shared mapping of a file without a name; nothing is left over.

    Args:
        num_rows, row_bytes: shape of ``array``.
        folder: on tmpfs, e.g. ``/dev/shm``, or on hugetlbfs.
        register: pins the region for a device, in parts.

    Raises:
        ConfigError: the folder is elsewhere, or has too little room.
    """

    def __init__(
        self,
        num_rows: int,
        row_bytes: int,
        folder: Path,
        *,
        register: Register | None = None,
    ) -> None:
        num_bytes = num_rows * row_bytes
        _check_folder(folder)
        # A file on hugetlbfs consists of whole huge pages.
        unit = os.statvfs(folder).f_bsize
        length = -(-num_bytes // unit) * unit
        try:
            descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                # Takes the memory now, which also faults it in; writing to a page
                # that tmpfs has no room for would end the process.
                os.posix_fallocate(descriptor, 0, length)
                mapping = mmap.mmap(descriptor, length)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise ConfigError(
                _SETTING,
                f"{folder} does not give {length / 2**30:.2f} GiB ({error.strerror})",
                "ask for less, or enlarge it (mount -o remount,size=...)",
            ) from None
        self.array: npt.NDArray[np.uint8] = np.frombuffer(
            mapping, np.uint8, count=num_bytes
        ).reshape(num_rows, row_bytes)
        self.pinning: Pinning | None = None
        if register is not None:
            address = self.array.ctypes.data
            self.pinning = Pinning(register, address, num_rows, row_bytes)

    def close(self) -> None:
        """Unpin; may be called twice. The memory goes with the last view of it."""
        if self.pinning is not None:
            self.pinning.close()


def _check_folder(folder: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> None:
    """Raise ConfigError unless the folder exists and lies in memory."""
    try:
        device = folder.stat().st_dev
    except OSError as error:
        raise ConfigError(
            _SETTING,
            f"{folder} cannot be used ({error.strerror})",
            "give a folder on tmpfs such as /dev/shm",
        ) from None
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in mountinfo.read_text().splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted and after.split()[0] in _KINDS:
            return
    raise ConfigError(
        _SETTING,
        f"{folder} is not in memory ({', '.join(_KINDS)})",
        "give a folder such as /dev/shm; for a disk there is --tiered-disk-path",
    )
