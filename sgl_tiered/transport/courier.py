"""Messages to many ``ControlServer``s, handed to the network without waiting.

For conversations that stand losses by themselves: a message is sent once, nobody knows
whether it has arrived, and one for a server that does not take any (dead, stopped, far
behind) is dropped as soon as ``_MAX_QUEUED`` wait for it. Connections are made at the
first message, and again by themselves whenever they break.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Container
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from sgl_tiered.transport.control import set_limits
from sgl_tiered.transport.keys import KeyPair, is_loopback
from sgl_tiered.transport.messages import Message, MessageSet, Part, Refused, Times

__all__ = ["Courier"]

_LOG = logging.getLogger(__name__)
_MAX_QUEUED = 128
_RECONNECT_MS = 50
_MAX_RECONNECT_MS = 1000
_LIFE_S = 60.0
"""A server that took a message and is busy for longer than that skips it."""


@dataclass(slots=True, eq=False)
class _Line:
    """A connection to one server, and what is wrong with it.

    Attributes:
        is_refused: the server does not admit our key; ZeroMQ never asks it again.
    """

    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    trouble: str = ""
    is_refused: bool = False
    num_sent: int = 0


class Courier:
    """Sends to any number of servers. One thread calls it.

    Args:
        messages: what is spoken, as the servers have it.
        keys: our pair; None only for servers on loopback.
        admitted: public keys of servers that we speak to; None: any, where whoever
            names a server vouches for its key.
    """

    def __init__(
        self,
        messages: MessageSet,
        *,
        keys: KeyPair | None = None,
        admitted: Container[str] | None = (),
    ) -> None:
        self._messages = messages
        self._keys = keys
        self._admitted = admitted
        self._context = zmq.Context()
        # By endpoint and key: a server may come back with another one.
        self._lines: dict[tuple[str, str], _Line] = {}
        self._refusals: dict[str, str] = {}

    def send(self, endpoint: str, server_key: str, message: Message) -> str:
        """Hand over a message; return in one clause why not, else an empty text.

        Args:
            endpoint: the server's.
            server_key: its public key; empty if it has none.
            message: goes out at once, or when there is a connection.
        """
        line: _Line | str | None = self._lines.get((endpoint, server_key))
        if line is None:
            line = self._open(endpoint, server_key)
        if isinstance(line, str):
            return self._refuse(endpoint, line)
        line.num_sent += 1
        data = self._messages.encode(
            line.num_sent, Part.REQUEST, message, Times(_LIFE_S)
        )
        if isinstance(data, Refused):
            return self._refuse(endpoint, data.detail)
        try:
            line.socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return f"{_MAX_QUEUED} messages to {endpoint} wait already"
        return ""

    def keep(self, servers: Collection[tuple[str, str]]) -> None:
        """Let go of the connections to all servers but these: endpoint and key.

        A server that refused our key is asked anew: it may have begun anew meanwhile.
        """
        for server, line in list(self._lines.items()):
            self._look_after(server[0], line)
            if line.is_refused or server not in servers:
                _close(self._lines.pop(server))
        endpoints = {endpoint for endpoint, _ in servers}
        for endpoint in [each for each in self._refusals if each not in endpoints]:
            del self._refusals[endpoint]

    def troubles(self) -> dict[str, str]:
        """Return what is known to be wrong, by endpoint; takes some us per line."""
        found = dict(self._refusals)
        for (endpoint, _), line in self._lines.items():
            self._look_after(endpoint, line)
            if line.trouble:
                found[endpoint] = line.trouble
        return found

    def close(self) -> None:
        """Drop what has not been sent; may be called twice."""
        for line in self._lines.values():
            _close(line)
        self._lines.clear()
        self._context.term()

    def _refuse(self, endpoint: str, reason: str) -> str:
        if self._refusals.get(endpoint) != reason:
            # repr: what others wrote must not look like lines of ours.
            _LOG.warning("a message to %r is not sent: %s", endpoint, reason)
            self._refusals[endpoint] = reason
        return reason

    def _open(self, endpoint: str, server_key: str) -> _Line | str:
        if self._keys is None and server_key:
            return "it wants keys, and this instance has none"
        if self._keys is None and not is_loopback(endpoint):
            return "it is on another machine, and there are no keys"
        if self._keys is not None and not server_key:
            return "it names no key: it is of an older version, or none of the pool's"
        if (
            self._keys is not None
            and self._admitted is not None
            and server_key not in self._admitted
        ):
            return "its key is none of those admitted here"
        try:
            return self._connect(endpoint, server_key)
        except (zmq.ZMQError, OSError) as error:
            # Such as no more open files: it is tried again with the next message.
            return f"no connection can be made: {error}"

    def _connect(self, endpoint: str, server_key: str) -> _Line | str:
        """Make a line; return in one clause why not.

        Raises:
            zmq.ZMQError, OSError: this process has no more of what a socket takes.
        """
        socket = self._context.socket(zmq.DEALER)
        set_limits(socket, endpoint, self._messages.max_bytes)
        socket.sndhwm = _MAX_QUEUED
        socket.reconnect_ivl = _RECONNECT_MS
        socket.reconnect_ivl_max = _MAX_RECONNECT_MS
        if self._keys is not None:
            socket.curve_secretkey = self._keys.secret.encode()
            socket.curve_publickey = self._keys.public.encode()
            try:
                socket.curve_serverkey = server_key.encode()
            except (zmq.ZMQError, ValueError):
                socket.close(linger=0)
                return "what it names as its key is none"
        try:
            monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        except (zmq.ZMQError, OSError):
            socket.close(linger=0)
            raise
        line = _Line(socket, monitor)
        try:
            socket.connect(endpoint)
        except (zmq.ZMQError, ValueError) as error:
            # ValueError: half a surrogate is in it, which no encoder takes.
            _close(line)
            return f"the endpoint cannot be used: {error}"
        self._lines[endpoint, server_key] = line
        self._refusals.pop(endpoint, None)
        return line

    def _look_after(self, endpoint: str, line: _Line) -> None:
        """Read what a server says of our messages: only what it refuses."""
        former = line.trouble
        while line.monitor.poll(0):
            recv_monitor_message(line.monitor)
            line.is_refused = True
            line.trouble = "it does not admit our key"
        while line.socket.poll(0):
            read = self._messages.decode(line.socket.recv(zmq.NOBLOCK))
            if isinstance(read, Refused):
                line.trouble = read.detail
            elif isinstance(read[1], Refused):
                line.trouble = read[1].detail
        if line.trouble != former:
            _LOG.warning("%r does not take our messages: %r", endpoint, line.trouble)


def _close(line: _Line) -> None:
    line.socket.disable_monitor()
    line.monitor.close(linger=0)
    line.socket.close(linger=0)
