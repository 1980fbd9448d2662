"""Between processes of one machine and one user: the kernel copies, for tests.

It behaves as a network does where that matters: a stopped peer makes no progress, a
dead one is gone, and memory outside the registered regions is out of reach (that is
``BatchedTransport``'s work; the kernel here would allow it). Peers may also be threads
of one process. Needs ``process_vm_readv``, which a sandbox may forbid.

The kernel would write to any process of this user. So an address says where in its
process a token lies, and nothing is copied from or to a process that does not have it
there: one that an address names by mistake, or to do harm, is left alone.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.clock import Clock
from sgl_tiered.errors import TransportUnavailableError
from sgl_tiered.transport.base import PeerAddress, TransferStatus
from sgl_tiered.transport.batched import (
    DEFAULT_GRACE_S,
    DEFAULT_TIMEOUT_S,
    BatchedTransport,
)
from sgl_tiered.transport.process import Process

__all__ = ["LoopbackLibrary", "open_loopback"]

Int64s = npt.NDArray[np.int64]

_KIND = "loopback"
_MAX_IN_FLIGHT = 256
_ADDRESS_BYTES = 8
_TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class _Link:
    """A process of this machine.

    Attributes:
        process: it.
        where: the address of its token, in its memory.
        token: that.
    """

    process: Process
    where: int
    token: bytes


class LoopbackLibrary:
    """Copies when a ticket is checked, between two processes or within one."""

    kind = _KIND
    max_in_flight = _MAX_IN_FLIGHT

    def __init__(self) -> None:
        self._token = np.frombuffer(secrets.token_bytes(_TOKEN_BYTES), np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        self._calls = {True: libc.process_vm_writev, False: libc.process_vm_readv}
        for call in self._calls.values():
            call.restype = ctypes.c_ssize_t
            call.argtypes = [
                ctypes.c_int,
                ctypes.POINTER(_Range),
                ctypes.c_ulong,
                ctypes.POINTER(_Range),
                ctypes.c_ulong,
                ctypes.c_ulong,
            ]

    def endpoint(self) -> tuple[str, bytes]:
        """Return this process."""
        own = Process.own()
        where = self._token.ctypes.data.to_bytes(_ADDRESS_BYTES, "little")
        return f"{own.pid}:{own.started}", where + self._token.tobytes()

    def register(self, address: int, num_bytes: int) -> None:
        """Nothing to do: the kernel finds all memory of a process."""

    def connect(self, address: PeerAddress) -> _Link:
        """Return the process that an endpoint names, and what shows that it is that."""
        pid, _, started = address.endpoint.partition(":")
        where, token = (
            address.metadata[:_ADDRESS_BYTES],
            address.metadata[_ADDRESS_BYTES:],
        )
        if not (pid.isdecimal() and started.isdecimal()) or len(token) != _TOKEN_BYTES:
            raise ValueError(f"{address.endpoint!r} is not an address of loopback")
        process = Process(int(pid), int(started))
        return _Link(process, int.from_bytes(where, "little"), token)

    def reach(self, link: _Link) -> str:
        """Return why the process is not there."""
        why = self.gone(link)
        if not why and not self._is_itself(link):
            why = f"process {link.process.pid} is not the one that gave this address"
        return why

    def gone(self, link: _Link) -> str:
        """Return whether the process has ended."""
        if link.process.state() in ("", "Z", "X"):
            return f"process {link.process.pid} has ended"
        return ""

    def submit(
        self,
        link: _Link,
        is_push: bool,
        local: Int64s,
        remote: Int64s,
        lengths: Int64s,
    ) -> list[tuple[int, Any]]:
        """Note what is to be copied, a ticket for each piece."""
        rows = zip(local.tolist(), remote.tolist(), lengths.tolist(), strict=True)
        return [(1, (link, is_push, *row)) for row in rows]

    def check(self, ticket: Any) -> TransferStatus:
        """Copy, unless the process is stopped, or it cannot be known now."""
        link, is_push, local, remote, length = ticket
        state = link.process.state()
        if state in ("", "Z", "X"):
            return TransferStatus.FAILED
        if state in ("T", "t", "?"):
            return TransferStatus.RUNNING
        if not self._is_itself(link):
            return TransferStatus.FAILED
        status = self._copy(link.process.pid, is_push, local, remote, length)
        # A dying process still has memory for a moment.
        return TransferStatus.FAILED if self.gone(link) else status

    def disconnect(self, link: _Link) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""

    def _is_itself(self, link: _Link) -> bool:
        """Return whether the token lies where the address says that it does."""
        found = np.zeros(_TOKEN_BYTES, np.uint8)
        status = self._copy(
            link.process.pid, False, found.ctypes.data, link.where, _TOKEN_BYTES
        )
        return status is TransferStatus.DONE and found.tobytes() == link.token

    def _copy(
        self, pid: int, is_push: bool, local: int, remote: int, length: int
    ) -> TransferStatus:
        done = 0
        while done < length:
            here = _Range(local + done, length - done)
            there = _Range(remote + done, length - done)
            moved = self._calls[is_push](
                pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0
            )
            if moved <= 0:
                return TransferStatus.FAILED
            done += moved
        return TransferStatus.DONE


class _Range(ctypes.Structure):
    """struct iovec."""

    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def open_loopback(
    *,
    clock: Clock | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    grace_s: float = DEFAULT_GRACE_S,
) -> BatchedTransport:
    """Return a transport for this machine.

    Raises:
        TransportUnavailableError: the kernel, or a sandbox, forbids such copies.
    """
    library = LoopbackLibrary()
    source, target = np.ones(1, np.uint8), np.zeros(1, np.uint8)
    endpoint, metadata = library.endpoint()
    me = library.connect(PeerAddress(_KIND, endpoint, (), metadata))
    ticket = (me, True, source.ctypes.data, target.ctypes.data, 1)
    if library.check(ticket) is not TransferStatus.DONE:
        code = ctypes.get_errno() or errno.EPERM
        raise TransportUnavailableError(
            f"process_vm_writev does not work here: {os.strerror(code)}"
        )
    return BatchedTransport(library, clock=clock, timeout_s=timeout_s, grace_s=grace_s)
