"""A medium that fails on purpose: the system calls of a disk tier, with faults in them.

Here the product has to notice: a wrong byte comes from the disk and meets the
checksum, an error is an ``errno``, a full disk refuses its space, a hang is a call that
does not return.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from sgl_tiered.core.layout import ALIGNMENT_BYTES
from sgl_tiered.serving.emulation import Fault
from sgl_tiered.testing.fault_switch import FaultSwitch
from sgl_tiered.tiers.disk_io import SystemCalls
from sgl_tiered.tiers.memory import aligned_buffer

__all__ = ["FaultyCalls"]

_READ = frozenset({"error", "partial", "corrupt", "zero", "hang"})
_WRITE = _READ | {"full"}
_ALLOCATE = frozenset({"error", "hang", "full"})


class FaultyCalls(SystemCalls):
    """System calls struck by the faults of a switch."""

    def __init__(self, switch: FaultSwitch) -> None:
        self._switch = switch

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """Read; fail, end in the middle of a block, bring wrong bytes, or hang."""
        fault = self._strike(_READ, is_store=False)
        if fault is None:
            return super().preadv(fd, views, offset)
        if fault.kind == "error":
            _raise(errno.EIO)
        done = super().preadv(fd, views, offset)
        if fault.kind == "partial":
            # No multiple of a block, as at the end of a file that was cut.
            return max(0, done // 2 // ALIGNMENT_BYTES * ALIGNMENT_BYTES - 1)
        if fault.kind in ("corrupt", "zero"):
            self._damage(fault.kind, views[self._switch.draw(len(views))])
        return done

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """Write; fail at once or half done, write wrong bytes, find no room, hang."""
        fault = self._strike(_WRITE, is_store=True)
        if fault is None or fault.kind == "hang":
            return super().pwritev(fd, views, offset)
        if fault.kind == "partial":
            super().pwritev(fd, views[: len(views) // 2 or 1], offset)
            _raise(errno.EIO)
        if fault.kind in ("error", "full"):
            _raise(errno.ENOSPC if fault.kind == "full" else errno.EIO)
        num_bytes = sum(len(view) for view in views)
        copy = aligned_buffer(1, num_bytes).reshape(-1)
        copy[:] = np.frombuffer(b"".join(views), np.uint8)
        self._damage(fault.kind, copy.data)
        return super().pwritev(fd, [copy.data], offset)

    def fallocate(self, fd: int, offset: int, num_bytes: int) -> None:
        """Set space aside; fail, find no room after a part of it, or hang."""
        fault = self._strike(_ALLOCATE, is_store=True)
        if fault is not None and fault.kind == "error":
            _raise(errno.EIO)
        if fault is not None and fault.kind == "full":
            # A full disk leaves what it could give; the caller has to take it back.
            os.ftruncate(fd, offset + num_bytes // 2)
            _raise(errno.ENOSPC)
        super().fallocate(fd, offset, num_bytes)

    def _strike(self, kinds: frozenset[str], *, is_store: bool) -> Fault | None:
        fault = self._switch.strike(kinds, is_store=is_store)
        if fault is not None and fault.kind == "hang":
            self._switch.hold(fault)
        return fault

    def _damage(self, kind: str, view: memoryview) -> None:
        if kind == "zero":
            view[:] = bytes(len(view))
        else:
            position = self._switch.draw(len(view))
            view[position] ^= 1 << self._switch.draw(8)


def _raise(number: int) -> NoReturn:
    raise OSError(number, os.strerror(number))
