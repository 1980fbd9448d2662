"""Memory of a device-DAX node such as ``/dev/dax0.0``: CXL memory in the mode devdax.

The device is mapped, shared, in units of its alignment (2 MiB as a rule); reading or
writing it as a file fails, so nothing here does. Its range is locked while it is used:
two servers on the same bytes would serve each other's pages. The lock holds on this
machine; where several machines share a device, give each a range of its own.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sgl_tiered.errors import ConfigError
from sgl_tiered.tiers.memory import populate
from sgl_tiered.tiers.numa import SYSFS
from sgl_tiered.tiers.pinning import Pinning, Register

__all__ = ["DaxDevice", "DaxRegion", "dax_device", "dax_devices"]

_SETTING = "--tiered-cxl"
_NAME = re.compile(r"dax\d+\.\d+")
_SYSTEM_RAM_DRIVER = "kmem"
_FLOCK = "hhqqi4x"
"""struct flock on 64-bit Linux: type, whence, start, length, process."""


@dataclass(frozen=True, slots=True)
class DaxDevice:
    """One device-DAX instance, as sysfs describes it.

    Attributes:
        name: e.g. ``dax0.0``; its node is ``/dev/dax0.0``.
        size_bytes: of the device.
        align_bytes: unit of offsets and lengths of a mapping.
        target_node: NUMA node that its memory has in the mode system-ram; None where
            the kernel does not say.
        is_system_ram: its memory is in use as that node, not through the device.
    """

    name: str
    size_bytes: int
    align_bytes: int
    target_node: int | None
    is_system_ram: bool

    @property
    def path(self) -> Path:
        """The device's node."""
        return Path("/dev") / self.name


def dax_devices(sysfs: Path = SYSFS) -> list[DaxDevice]:
    """Return all instances, by name."""
    folders = (sysfs / "bus/dax/devices").glob("dax*")
    names = sorted(item.name for item in folders if _NAME.fullmatch(item.name))
    return [_read(name, sysfs) for name in names]


def dax_device(path: Path, sysfs: Path = SYSFS) -> DaxDevice:
    """Return the instance behind a path.

    Raises:
        ConfigError: there is none, or its memory is in use as a NUMA node.
    """
    if not (sysfs / "bus/dax/devices" / path.name).exists():
        raise ConfigError(
            _SETTING,
            f"{path} is not a device-DAX node of this machine",
            "sgl-tiered doctor lists them; daxctl list shows their state",
        )
    device = _read(path.name, sysfs)
    if device.is_system_ram:
        raise ConfigError(
            _SETTING,
            f"{path} is in use as system memory",
            f"give node:{device.target_node} instead",
        )
    return device


class DaxRegion:
    """A ``Region`` in a device. What a former user left in it is not erased.

    Args:
        num_rows, row_bytes: shape of ``array``.
        path: of the device's node.
        offset_bytes: where the region begins in the device.
        register: pins the region for a device, in parts.
        sysfs: for tests.

    Raises:
        ConfigError: the device is not there, too small, in use, or not permitted, or
            the offset does not fit its alignment.
    """

    def __init__(
        self,
        num_rows: int,
        row_bytes: int,
        path: Path,
        *,
        offset_bytes: int = 0,
        register: Register | None = None,
        sysfs: Path = SYSFS,
    ) -> None:
        self.device = dax_device(path, sysfs)
        length = _mapped_bytes(self.device, num_rows * row_bytes, offset_bytes)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                _SETTING,
                f"{path} cannot be opened ({error.strerror})",
                "give this user the right to read and write it",
            ) from None
        self._unlock = _lock(descriptor, path, offset_bytes, length)
        try:
            mapping = mmap.mmap(descriptor, length, offset=offset_bytes)
        except OSError as error:
            self._unlock()
            raise ConfigError(
                _SETTING,
                f"{path} cannot be mapped ({error.strerror})",
                "check its state with daxctl list",
            ) from None
        self.array: npt.NDArray[np.uint8] = np.frombuffer(
            mapping, np.uint8, count=num_rows * row_bytes
        ).reshape(num_rows, row_bytes)
        address = self.array.ctypes.data
        if populate(address, length) != 0:
            # Before Linux 5.14, or a kernel that does not populate devices.
            np.frombuffer(mapping, np.uint8)[:: self.device.align_bytes] = 0
        self.pinning: Pinning | None = None
        if register is not None:
            self.pinning = Pinning(register, address, num_rows, row_bytes)

    def close(self) -> None:
        """Unpin and unlock; may be called twice."""
        if self.pinning is not None:
            self.pinning.close()
        self._unlock()


def _mapped_bytes(device: DaxDevice, num_bytes: int, offset_bytes: int) -> int:
    """Return the length to map: whole units, within the device."""
    unit = device.align_bytes
    if offset_bytes % unit:
        raise ConfigError(
            _SETTING,
            f"the offset {offset_bytes} is not a multiple of {unit} bytes, the "
            f"alignment of {device.path}",
            "give one that is",
        )
    length = -(-num_bytes // unit) * unit
    if offset_bytes + length > device.size_bytes:
        left = max(0, device.size_bytes - offset_bytes)
        raise ConfigError(
            _SETTING + "-size",
            f"{num_bytes / 2**30:.2f} GiB asked for, {left / 2**30:.2f} GiB of "
            f"{device.path} left after the offset",
            "ask for less",
        )
    return length


def _lock(
    descriptor: int, path: Path, start: int, num_bytes: int
) -> Callable[[], None]:
    """Lock a range for as long as ``descriptor`` is open; return what undoes both.

    A lock of the open file (F_OFD_SETLK) and not of the process: that one would be
    lost as soon as anything in the process closes the same device.
    """

    def request(kind: int) -> bytes:
        return struct.pack(_FLOCK, kind, os.SEEK_SET, start, num_bytes, 0)

    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request(fcntl.F_WRLCK))
    except OSError as error:
        os.close(descriptor)
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise ConfigError(
            _SETTING,
            f"these bytes of {path} are in use by another server",
            f"stop it, or give each a range of its own ({path}@OFFSET and a size)",
        ) from None
    is_open = [True]

    def unlock() -> None:
        if is_open.pop() if is_open else False:
            # By hand: the mapping keeps a descriptor of the same open file.
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request(fcntl.F_UNLCK))
            os.close(descriptor)

    return unlock


def _read(name: str, sysfs: Path) -> DaxDevice:
    folder = sysfs / "bus/dax/devices" / name
    driver = folder / "driver"
    target = _number(folder / "target_node")
    return DaxDevice(
        name=name,
        size_bytes=_number(folder / "size") or 0,
        align_bytes=_number(folder / "align") or 2 << 20,
        target_node=None if target is None or target < 0 else target,
        is_system_ram=driver.exists() and driver.resolve().name == _SYSTEM_RAM_DRIVER,
    )


def _number(path: Path) -> int | None:
    try:
        # Base 0: some of these files are written in hexadecimal.
        return int(path.read_text(), 0)
    except (OSError, ValueError):
        return None
