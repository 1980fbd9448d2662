"""A region of anonymous memory, page aligned and pinned where a device asks for it.

Pre-faulting: the first touch of fresh 4 KiB pages runs at about 1.8 GB/s, a tenth of
a warm copy, and would be paid inside offloads. So the region asks for huge pages, and
a background thread populates it step by step (``MADV_POPULATE_WRITE``, Linux 5.14+, the
interpreter lock released). Pinning populates it anyway. Where neither is to be had, the
pages come lazily.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sgl_tiered.errors import ConfigError
from sgl_tiered.tiers.numa_calls import prefer_node
from sgl_tiered.tiers.pinning import Pinning, Register

__all__ = [
    "MemoryRegion",
    "Register",
    "aligned_buffer",
    "available_memory_bytes",
    "check_available",
    "populate",
]

MADV_POPULATE_WRITE = 23
PREFAULT_STEP_BYTES = 16 << 20
"""About 9 ms of first touch: how long a close may wait for the thread."""


class MemoryRegion:
    """Rows of memory for pages: uint8 [num_rows, row_bytes], page aligned, zeroed.

    The mapping lives as long as any view of ``array`` does; ``close`` unpins it and
    stops the pre-faulting.

    Args:
        num_rows, row_bytes: shape of ``array``.
        register: pins it for a device, in parts.
        in_steps: return when the first part is pinned; ``pinning`` tells of more.
            Else rows are ready, all of them, when the constructor returns.
        node: of NUMA, where the pages are to lie if they fit.
        part_bytes: of a part that is pinned; see ``Pinning``.

    Attributes:
        array: the rows.
        pinning: which of them may be used; None for all.

    Raises:
        ConfigError: the machine does not give so much, or does not pin it.
    """

    def __init__(
        self,
        num_rows: int,
        row_bytes: int,
        *,
        register: Register | None = None,
        in_steps: bool = False,
        node: int | None = None,
        part_bytes: int | None = None,
    ) -> None:
        num_bytes = num_rows * row_bytes
        try:
            mapping = mmap.mmap(
                -1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except OSError as error:
            raise ConfigError(
                "memory of a tier",
                f"{num_bytes / 2**30:.2f} GiB cannot be mapped ({error.strerror})",
                "give smaller sizes, or raise the limit of the process (ulimit -v)",
            ) from None
        # Refused by kernels without huge pages; the region works all the same.
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(mapping, np.uint8).reshape(
            num_rows, row_bytes
        )
        self._address = self.array.ctypes.data
        self._num_bytes = num_bytes
        self._stop = threading.Event()
        self.pinning: Pinning | None = None
        self._prefault: threading.Thread | None = None
        if node is not None:
            prefer_node(self._address, num_bytes, node)
        if register is not None:
            self.pinning = Pinning(
                register,
                self._address,
                num_rows,
                row_bytes,
                in_steps=in_steps,
                part_bytes=part_bytes,
            )
        if self.pinning is None or self.pinning.is_refused:
            self._prefault = threading.Thread(
                target=self._populate, name="tiered-prefault", daemon=True
            )
            self._prefault.start()

    def close(self) -> None:
        """Stop pre-faulting and unpin; may be called twice."""
        self._stop.set()
        if self._prefault is not None:
            self._prefault.join()
            self._prefault = None
        if self.pinning is not None:
            self.pinning.close()

    def _populate(self) -> None:
        # A kernel that cannot do it leaves the pages to come lazily.
        populate(self._address, self._num_bytes, self._stop.is_set)


def populate(
    address: int, num_bytes: int, stop: Callable[[], bool] = lambda: False
) -> int:
    """Fault pages in for writing, step by step, without the interpreter lock.

    Args:
        address: page aligned.
        num_bytes: of the range.
        stop: asked before each step; True ends it.

    Returns:
        0, or the errno of the step that failed (EINVAL on Linux before 5.14).
    """
    # ctypes and not mmap.madvise: the latter holds the interpreter lock.
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for offset in range(0, num_bytes, PREFAULT_STEP_BYTES):
        step = min(PREFAULT_STEP_BYTES, num_bytes - offset)
        if stop():
            break
        if madvise(address + offset, step, MADV_POPULATE_WRITE) != 0:
            return ctypes.get_errno()
    return 0


def aligned_buffer(num_rows: int, row_bytes: int) -> npt.NDArray[np.uint8]:
    """Return a zeroed, page-aligned uint8 array [num_rows, row_bytes] of its own."""
    mapping = mmap.mmap(-1, max(1, num_rows * row_bytes))
    array = np.frombuffer(mapping, np.uint8, count=num_rows * row_bytes)
    return array.reshape(num_rows, row_bytes)


def available_memory_bytes() -> int | None:
    """Return what this process may still allocate, or None where nobody says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    available = int(fields["MemAvailable"].split()[0]) << 10
    group = _group_available_bytes()
    return available if group is None else min(available, group)


def check_available(setting: str, num_bytes: int) -> None:
    """Raise ConfigError where ``num_bytes`` is more than the machine has left."""
    available = available_memory_bytes()
    if available is not None and num_bytes > available:
        raise ConfigError(
            setting,
            f"{num_bytes / 2**30:.2f} GiB asked for, {available / 2**30:.2f} GiB of "
            f"memory available",
            "ask for less",
        )


def _group_available_bytes() -> int | None:
    """Return what the control group (v2) still allows, or None without a limit."""
    try:
        name = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
        group = Path("/sys/fs/cgroup") / name.lstrip("/")
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((group / "memory.current").read_text())
        stat = (group / "memory.stat").read_text().splitlines()
        # Cached file pages count as used and are given up on demand.
        cached = sum(
            int(line.split()[1]) for line in stat if line.startswith("inactive_file ")
        )
        return max(0, int(limit) - used + cached)
    except (OSError, ValueError, IndexError):
        return None
