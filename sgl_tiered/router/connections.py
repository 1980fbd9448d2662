"""Connections of clients: how many, and how long one may bring or take nothing.

A ``Door`` stands between the listening socket and the protocol of the HTTP server. A
connection is *waiting* while no request of its is being served: it has sent nothing
yet, half a request's headers, or nothing since its last answer. At the bound the one
that has waited longest is closed for a new one, so that connections that bring nothing
keep nobody out; only where all of them are being served is a new one refused.

The times that a body may take are in ``bodies.py``, that of an idle connection is the
HTTP server's own.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

import msgspec
from aiohttp import web

from sgl_tiered.router.refusals import error_body

__all__ = ["Door", "connection_of"]


class Door:
    """Makes the protocols of a listening socket.

    Args:
        server: makes the protocol of the HTTP server.
        max_connections: open at one time.
        header_timeout_s: from connecting, or from the first byte after an answer, until
            a request's headers are whole.
        idle_s: for which a client may take nothing of an answer that waits for it.
        on_refusal: called with one word for each connection that is ended here.
    """

    def __init__(
        self,
        server: Callable[[], asyncio.BaseProtocol],
        max_connections: int,
        header_timeout_s: float,
        idle_s: float,
        on_refusal: Callable[[str], None],
    ) -> None:
        self._server = server
        self._max_connections = max_connections
        self.header_timeout_s = header_timeout_s
        self.idle_s = idle_s
        self.on_refusal = on_refusal
        self.num_open = 0
        self.waiting: OrderedDict[_Connection, None] = OrderedDict()

    def __call__(self) -> asyncio.Protocol:
        """Return the protocol of one connection."""
        inner = self._server()
        assert isinstance(inner, asyncio.Protocol)
        return _Connection(self, inner)

    def has_room(self) -> bool:
        """Return whether one more may be open, after closing one that waits."""
        if self.num_open >= self._max_connections:
            longest = next((each for each in self.waiting if each.has_taken_all), None)
            if longest is not None:
                longest.stop("connections")
        return self.num_open < self._max_connections


class _Connection(asyncio.Protocol):
    """Passes everything on to the HTTP server's protocol and looks at the clock."""

    def __init__(self, door: Door, inner: asyncio.Protocol) -> None:
        self._door = door
        self._inner = inner
        self._transport: asyncio.Transport | None = None
        self._is_let_in = False
        self._has_place = False
        self._is_served = False
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    @property
    def has_taken_all(self) -> bool:
        """Whether nothing of an answer waits for the client."""
        assert self._transport is not None
        return not self._transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if not self._door.has_room():
            self._door.on_refusal("connections")
            transport.write(_TOO_MANY)
            transport.close()
            return
        self._is_let_in = self._has_place = True
        self._door.num_open += 1
        self._door.waiting[self] = None
        self._expect_headers()
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if not self._is_let_in:
            return
        if self._has_place and not self._is_served and self._reading is None:
            self._expect_headers()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._is_let_in else None

    def connection_lost(self, exc: Exception | None) -> None:
        self._give_place()
        if self._is_let_in:
            self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        if self._has_place:
            loop = asyncio.get_running_loop()
            self._writing = loop.call_later(self._door.idle_s, self.stop, "slow_reader")
        if self._is_let_in:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None
        if self._is_let_in:
            self._inner.resume_writing()

    def begin(self) -> None:
        """Note that a request's headers have come."""
        self._is_served = True
        self._door.waiting.pop(self, None)
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def end(self) -> None:
        """Note that a request was served."""
        self._is_served = False
        if self._has_place:
            self._door.waiting[self] = None

    def stop(self, reason: str) -> None:
        """End a connection that brings or takes nothing."""
        assert self._transport is not None
        self._door.on_refusal(reason)
        self._give_place()
        self._transport.abort()

    def _expect_headers(self) -> None:
        self._reading = asyncio.get_running_loop().call_later(
            self._door.header_timeout_s, self.stop, "header_time"
        )

    def _give_place(self) -> None:
        for timer in (self._reading, self._writing):
            if timer is not None:
                timer.cancel()
        self._reading = self._writing = None
        self._door.waiting.pop(self, None)
        if self._has_place:
            self._has_place = False
            self._door.num_open -= 1


def connection_of(request: web.Request) -> _Connection | None:
    """Return the connection of a request; None where it is gone already."""
    if request.transport is None:
        return None
    found = request.transport.get_protocol()
    return found if isinstance(found, _Connection) else None


_SENTENCE = "all connections are in use: try again later, or raise --max-connections"
_BODY = msgspec.json.encode(error_body(503, _SENTENCE))
_TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)
"""What one gets for whom there is no room, without the HTTP server."""
