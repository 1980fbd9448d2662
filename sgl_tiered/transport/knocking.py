"""Whether a process is there, asked without its help: also one that is stopped.

A port of a process takes connections as long as the process lives, and refuses them
afterwards. One connection is kept to each port and looked at: the kernel of a stopped
process keeps it up, answers its keep-alives, and ends it when the process ends. (New
ones each time would fill the queue of a stopped process, which then looks like one
whose machine is silent.) A process of this machine is looked up besides: another one
may have its port by now, or a child may hold it.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from sgl_tiered.transport.endpoints import MAX_PORT, Endpoint
from sgl_tiered.transport.process import Process

__all__ = ["Knocker", "Place", "Reach", "knock"]

_KNOCK_S = 2.0
_KEEP_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""A machine that is silent for 20 s ends the connection."""
_PIECE_BYTES = 4096
_OURS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
"""What keeps this process from asking, and says nothing of another."""


class Reach(Enum):
    """What is known of a process."""

    THERE = 0
    """Or it cannot be asked now: then what it may write to stays held."""
    OVER = 1
    """Its port refuses."""
    SILENT = 2
    ENDED = 3
    """It was one of this machine's, and is no more."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process can be looked for.

    Attributes:
        endpoint: a port that it holds while it lives.
        process: itself, where it is one of this machine's.
    """

    endpoint: Endpoint
    process: Process | None = None


class Knocker:
    """Looks for processes; a first contact waits up to two seconds. One thread."""

    def __init__(self) -> None:
        self._lines: dict[Endpoint, socket.socket] = {}

    def __call__(self, place: Place) -> Reach:
        """Say whether a process is there."""
        process = place.process
        if process is not None and process.has_ended():
            return Reach.ENDED
        reach = self._reach(place.endpoint)
        if process is not None and reach is Reach.SILENT:
            return Reach.THERE
        return reach

    def keep(self, places: Collection[Place]) -> None:
        """Close the connections to all others."""
        wanted = {place.endpoint for place in places}
        for endpoint in self._lines.keys() - wanted:
            self._lines.pop(endpoint).close()

    def _reach(self, endpoint: Endpoint) -> Reach:
        line = self._lines.get(endpoint)
        if line is not None:
            if _is_up(line):
                return Reach.THERE
            self._lines.pop(endpoint).close()
        reach, line = _connect(endpoint)
        if line is not None:
            self._lines[endpoint] = line
        return reach


def knock(endpoint: Endpoint) -> Reach:
    """Ask a port once whether its process is there."""
    reach, line = _connect(endpoint)
    if line is not None:
        line.close()
    return reach


def _connect(endpoint: Endpoint) -> tuple[Reach, socket.socket | None]:
    if not 1 <= endpoint[1] <= MAX_PORT:
        # Nobody listens there; and of 65536 a resolver makes 0, which refuses.
        return Reach.SILENT, None
    try:
        line = socket.create_connection(endpoint, _KNOCK_S)
    except ConnectionRefusedError:
        return Reach.OVER, None
    except OSError as error:
        return Reach.THERE if error.errno in _OURS else Reach.SILENT, None
    except ValueError:
        # No host has such a name: UnicodeError.
        return Reach.SILENT, None
    with contextlib.suppress(OSError):
        for level, name, value in _KEEP_ALIVE:
            line.setsockopt(level, name, value)
    line.setblocking(False)
    return Reach.THERE, line


def _is_up(line: socket.socket) -> bool:
    """Return whether the other side still has its end; what it says is dropped."""
    try:
        while line.recv(_PIECE_BYTES):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
