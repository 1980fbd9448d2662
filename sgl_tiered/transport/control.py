"""Requests and replies over ZeroMQ (ROUTER and DEALER), with CURVE keys.

A ``ControlServer`` hands each request to a handler on its thread; a ``ControlClient``
asks one server, from any number of threads at once. Every request has a deadline, every
message a greatest length, and both sides refuse what they cannot read. Whatever goes
wrong is a ``Refused`` in place of the reply, never an exception:

    timeout       nothing came back in time (dead, stopped, unreachable, wrong key)
    not-admitted  the server does not know our key
    too-big       the message is longer than the limit; it was not sent
    version       the other side speaks another version
    unreadable    it cannot be decoded there, or its reply cannot be here
    unexpected    the reply is of another type than was asked for
    busy, failed  too many requests wait there; the handler raised
    closed        the client was closed

A request is sent once, and is not carried out after its deadline: a server that was
stopped, or is far behind, skips it (``messages.Times``; the first request of a client,
which knows nothing of the server's clock yet, is the exception). Its reply may come too
late all the same; then a handler that gave something away must have it back by a
deadline of its own.

Without keys a server binds to this machine only.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import zmq
import zmq.utils.z85
from zmq.utils.monitor import recv_monitor_message

from sgl_tiered.core.clock import Clock, SystemClock
from sgl_tiered.errors import ConfigError, TransportUnavailableError
from sgl_tiered.transport.incidents import Incidents
from sgl_tiered.transport.keys import KeyPair, is_loopback
from sgl_tiered.transport.messages import (
    Cancelled,
    Envelope,
    Message,
    MessageSet,
    Part,
    Refused,
    Times,
)

__all__ = ["ControlClient", "ControlServer", "Handler", "Request", "set_limits"]

R = TypeVar("R", bound=Message)

_IDLE_S = 2
"""Of silence, before the kernel asks whether the other machine is there."""
_DEAD_S = 5
"""In which its kernel does not answer, or takes nothing of what we send, before the
connection is closed."""
_RECONNECT_MS = 50
_MAX_RECONNECT_MS = 1000
_MAX_TAKEN_AT_ONCE = 256
"""Messages read before any is handled, so that a cancellation is seen in time."""
_MAX_UNREAD = 128
"""Messages of one connection that ZeroMQ keeps for us."""
_MAX_WAITING = 4096
"""Requests that a server has taken and not answered."""
_ZAP = "inproc://zeromq.zap.01"


@dataclass(eq=False)
class Request:
    """A request under way; answered once, from any thread.

    Attributes:
        message: what is asked.
        sender: public key of who asks; empty without keys.
        expires_at_s: when who asks stops waiting, on this server's clock; it may be
            a little earlier than that, or later in a client's first request.
        num_bytes: of the message on the wire.
        cancelled: who asked has stopped waiting.
    """

    message: Message
    sender: str
    expires_at_s: float
    request_id: int
    route: bytes
    server: ControlServer = field(repr=False)
    num_bytes: int = 0
    cancelled: bool = False
    answered: bool = False

    def reply(self, message: Message) -> None:
        """Send the reply; a second one is dropped."""
        self.server.send_reply(self, message)

    def drop(self) -> None:
        """Let go of a request that is a message only: there will be no reply."""
        self.server.forget(self)


Handler = Callable[[Request], "Message | None"]
"""Returns the reply, or None when ``Request.reply`` will be called later, or after
``Request.drop``. It runs on the server's thread, so it must not wait."""


class ControlServer:
    """Answers requests at an endpoint, on a thread of its own.

    Args:
        endpoint: ``tcp://host:port``; port ``*`` takes a free one.
        messages: what is spoken.
        handler: gets every request.
        keys: the server's pair; None only on loopback.
        admitted: public keys of who may ask; the server's own always may. None: who
            has any key, as far as ``hears`` says.
        hears: asked with the sender's key before a message is read; what it does not
            hear is dropped, and counted as of a stranger.
        incidents: counts what is dropped or cannot be read.
        clock: the time.

    Raises:
        ConfigError: no keys, and the endpoint is not on loopback.
        TransportUnavailableError: the endpoint cannot be bound.
    """

    def __init__(
        self,
        endpoint: str,
        messages: MessageSet,
        handler: Handler,
        *,
        keys: KeyPair | None = None,
        admitted: frozenset[str] | None = frozenset(),
        hears: Callable[[str], bool] = lambda key: True,
        incidents: Incidents | None = None,
        clock: Clock | None = None,
    ) -> None:
        if keys is None and not is_loopback(endpoint):
            raise ConfigError(
                f"control endpoint {endpoint}",
                "it can be reached from other machines and has no keys",
                "give it a key file, or bind it to 127.0.0.1",
            )
        self._messages = messages
        self._handler = handler
        self._clock = clock or SystemClock()
        self._admitted = admitted
        if keys is not None and admitted is not None:
            self._admitted = admitted | {keys.public}
        self._hears = hears
        self._incidents = incidents or Incidents("control endpoint")
        self._lock = threading.Lock()
        self._waiting: dict[tuple[bytes, int], Request] = {}
        self._outbox: collections.deque[tuple[bytes, bytes]] = collections.deque()
        self._origin = int.from_bytes(os.urandom(4)) or 1
        self._closing = False
        self._context = zmq.Context()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._zap = self._context.socket(zmq.ROUTER)
        self._zap.bind(_ZAP)
        self._socket = self._context.socket(zmq.ROUTER)
        set_limits(self._socket, endpoint, messages.max_bytes)
        if keys is not None:
            self._socket.curve_server = True
            self._socket.curve_secretkey = keys.secret.encode()
            self._socket.curve_publickey = keys.public.encode()
            self._socket.zap_domain = b"tiered"
        try:
            self._socket.bind(endpoint)
        except (zmq.ZMQError, ValueError) as error:
            self._release()
            raise TransportUnavailableError(
                f"control endpoint {endpoint} cannot be bound: {error}"
            ) from error
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(
            target=self._run, name="tiered-control-server", daemon=True
        )
        self._thread.start()

    def send_reply(self, request: Request, message: Message) -> None:
        """Queue the reply to a request; what ``Request.reply`` calls."""
        data = self._encode(request.request_id, message)
        with self._lock:
            if request.answered:
                return
            request.answered = True
            self._waiting.pop((request.route, request.request_id), None)
            if self._closing or request.cancelled:
                return
            self._outbox.append((request.route, data))
            self._signal()

    def forget(self, request: Request) -> None:
        """Let go of a request without a reply; what ``Request.drop`` calls."""
        with self._lock:
            request.answered = True
            self._waiting.pop((request.route, request.request_id), None)

    def close(self) -> None:
        """Stop answering; may be called twice, but not by the handler."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._signal()
        self._thread.join()
        self._release()

    def _signal(self) -> None:
        """Wake the thread; the caller holds the lock, so the descriptor is open."""
        os.eventfd_write(self._wake, 1)

    def _encode(self, request_id: int, message: Message) -> bytes:
        """Return a reply with the time, or the reason why it cannot be sent."""
        times = Times(origin=self._origin, clock_s=self._clock.now())
        data = self._messages.encode(request_id, Part.REPLY, message, times)
        if isinstance(data, Refused):
            data = self._messages.encode(request_id, Part.REPLY, data, times)
        assert isinstance(data, bytes), "a refusal is longer than the limit"
        return data

    def _release(self) -> None:
        self._socket.close(linger=0)
        self._zap.close(linger=0)
        self._context.term()
        os.close(self._wake)

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._zap, self._wake):
            poller.register(source, zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll())
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if self._zap in ready:
                self._admit()
            if self._socket in ready:
                for request in self._take():
                    self._handle(request)
            self._send()

    def _admit(self) -> None:
        """Answer ZeroMQ's question whether a client's key is known (RFC 27)."""
        route, _, version, request_id, _, _, _, mechanism, *credentials = (
            self._zap.recv_multipart()
        )
        key = zmq.utils.z85.encode(credentials[0]).decode() if credentials else ""
        admitted = self._admitted
        known = mechanism == b"CURVE" and (admitted is None or key in admitted)
        verdict = (b"200", b"OK", key.encode()) if known else (b"400", b"no", b"")
        self._zap.send_multipart([route, b"", version, request_id, *verdict, b""])

    def _take(self) -> list[Request]:
        """Read what has come, and drop what was cancelled meanwhile."""
        taken: dict[tuple[bytes, int], Request] = {}
        for _ in range(_MAX_TAKEN_AT_ONCE):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            if len(frames) != 2:
                continue
            sender = ""
            with contextlib.suppress(zmq.ZMQError):
                sender = str(frames[1].get("User-Id"))
            if not self._hears(sender):
                self._incidents.note("stranger", "a message has the key of no member")
                continue
            route, data = frames[0].bytes, frames[1].bytes
            read = self._messages.decode(data)
            if isinstance(read, Refused):
                self._refuse(route, data, read)
                continue
            envelope, message = read
            key = (route, envelope.request_id)
            if envelope.part is not Part.REQUEST:
                continue
            if isinstance(message, Cancelled):
                self._cancel(key)
                taken.pop(key, None)
                continue
            request = self._request(envelope, message, sender, route)
            request.num_bytes = len(data)
            taken[key] = request
        return list(taken.values())

    def _request(
        self, envelope: Envelope, message: Message, sender: str, route: bytes
    ) -> Request:
        times = envelope.times
        known = times.origin == self._origin
        expires_at_s = times.clock_s if known else self._clock.now() + times.timeout_s
        return Request(
            message=message,
            sender=sender,
            expires_at_s=expires_at_s,
            request_id=envelope.request_id,
            route=route,
            server=self,
        )

    def _refuse(self, route: bytes, data: bytes, refusal: Refused) -> None:
        """Answer what cannot be read, if at least its request id can be."""
        self._incidents.note(refusal.reason, refusal.detail)
        head = self._messages.head(data)
        request_id = 0 if isinstance(head, Refused) else head.request_id
        self._outbox.append((route, self._encode(request_id, refusal)))

    def _cancel(self, key: tuple[bytes, int]) -> None:
        with self._lock:
            request = self._waiting.pop(key, None)
            if request is not None:
                request.cancelled = True

    def _handle(self, request: Request) -> None:
        if request.expires_at_s <= self._clock.now():
            return
        with self._lock:
            self._forget_expired()
            busy = len(self._waiting) >= _MAX_WAITING
            if not busy:
                self._waiting[request.route, request.request_id] = request
        if busy:
            request.reply(Refused("busy", f"{_MAX_WAITING} requests wait"))
            return
        try:
            reply = self._handler(request)
        except Exception as error:  # noqa: BLE001 - the thread has to live on
            name = type(request.message).__name__
            self._incidents.note("failed", f"a {name} request failed", error)
            reply = Refused("failed", f"{type(error).__name__} in the handler")
        if reply is not None:
            request.reply(reply)

    def _forget_expired(self) -> None:
        """Let go of requests that nobody waits for any more."""
        if len(self._waiting) < _MAX_WAITING:
            return
        now_s = self._clock.now()
        for key, request in list(self._waiting.items()):
            if request.expires_at_s <= now_s:
                request.cancelled = True
                del self._waiting[key]

    def _send(self) -> None:
        while self._outbox:
            # A client that has gone is no error to a ROUTER: the reply is dropped.
            with contextlib.suppress(zmq.Again):
                self._socket.send_multipart(self._outbox.popleft(), zmq.NOBLOCK)


class _Pending:
    """A request of a client: its encoded form until sent, then its reply."""

    def __init__(self, data: bytes, expires_at_s: float) -> None:
        self.data = data
        self.expires_at_s = expires_at_s
        self.sent = False
        self.reply: Message | None = None
        self.done = threading.Event()


class ControlClient:
    """Asks one server, from any thread; connects again by itself.

    But not to a server that has refused its key: that one will not be asked again.

    Args:
        endpoint: the server's.
        messages: what is spoken, as the server has it.
        keys: the client's pair, and
        server_key: the server's public key; both or none.
        clock: the time.

    Raises:
        ConfigError: no keys, and the server is on another machine.
        TransportUnavailableError: the endpoint is malformed.
    """

    def __init__(
        self,
        endpoint: str,
        messages: MessageSet,
        *,
        keys: KeyPair | None = None,
        server_key: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        if (keys is None) != (server_key is None):
            raise ValueError("keys and server_key belong together")
        if keys is None and not is_loopback(endpoint):
            raise ConfigError(
                f"control endpoint {endpoint}",
                "it is on another machine, and there are no keys",
                "give the key file of this instance and the server's public key",
            )
        self.endpoint = endpoint
        self._messages = messages
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._waiting: dict[int, _Pending] = {}
        self._unsent: collections.deque[tuple[int, bytes]] = collections.deque()
        self._next_id = 1
        self._origin = 0
        self._ahead_s = -math.inf
        self._refused: Refused | None = None
        self._closing = False
        self._context = zmq.Context()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._socket = self._context.socket(zmq.DEALER)
        set_limits(self._socket, endpoint, messages.max_bytes)
        # What waits for a connection waits here, where its deadline is known.
        self._socket.immediate = True
        self._socket.reconnect_ivl = _RECONNECT_MS
        self._socket.reconnect_ivl_max = _MAX_RECONNECT_MS
        if keys is not None and server_key is not None:
            self._socket.curve_secretkey = keys.secret.encode()
            self._socket.curve_publickey = keys.public.encode()
            self._socket.curve_serverkey = server_key.encode()
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_DISCONNECTED
        )
        try:
            self._socket.connect(endpoint)
        except (zmq.ZMQError, ValueError) as error:
            self._release()
            raise TransportUnavailableError(
                f"control endpoint {endpoint} cannot be used: {error}"
            ) from error
        self._thread = threading.Thread(
            target=self._run, name="tiered-control-client", daemon=True
        )
        self._thread.start()

    def ask(self, message: Message, expected: type[R], timeout_s: float) -> R | Refused:
        """Send a request and wait for its reply, or for the reason why there is none.

        Args:
            message: the request.
            expected: the type of the reply.
            timeout_s: how long to wait.
        """
        with self._lock:
            request_id = self._next_id
            self._next_id += 1
            times = self._times(timeout_s)
        data = self._messages.encode(request_id, Part.REQUEST, message, times)
        if isinstance(data, Refused):
            return data
        pending = _Pending(data, self._clock.now() + timeout_s)
        with self._lock:
            if self._closing:
                return Refused("closed", "this client is closed")
            if self._refused is not None:
                return self._refused
            self._waiting[request_id] = pending
            self._unsent.append((request_id, data))
            self._signal()
        pending.done.wait(max(0.0, timeout_s))
        with self._lock:
            reply = pending.reply
            if reply is None:
                self._give_up(request_id, pending)
        if reply is None:
            how = "answered in time" if pending.sent else "could be reached"
            return Refused("timeout", f"{self.endpoint}: nobody {how}, {timeout_s} s")
        if isinstance(reply, (expected, Refused)):
            return reply
        name = type(reply).__name__
        return Refused("unexpected", f"{name} is no {expected.__name__}")

    def close(self) -> None:
        """Answer what waits with ``closed``; may be called twice."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._signal()
        self._thread.join()
        self._fail_all(Refused("closed", "this client was closed"))
        self._release()

    def _signal(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _release(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()
        os.close(self._wake)

    def _times(self, timeout_s: float) -> Times:
        if self._origin == 0:
            return Times(timeout_s)
        clock_s = self._clock.now() + timeout_s + self._ahead_s
        return Times(timeout_s, self._origin, clock_s)

    def _learn(self, times: Times) -> None:
        """Note how far the server's clock is ahead of ours, at least."""
        ahead_s = times.clock_s - self._clock.now()
        if times.origin != self._origin:
            self._origin, self._ahead_s = times.origin, ahead_s
        self._ahead_s = max(self._ahead_s, ahead_s)

    def _give_up(self, request_id: int, pending: _Pending) -> None:
        """Stop waiting; tell the server so if it may have got the request."""
        if self._waiting.pop(request_id, None) is None or self._closing:
            return
        if pending.sent:
            data = self._messages.encode(request_id, Part.REQUEST, Cancelled(), Times())
            assert isinstance(data, bytes)
            self._unsent.append((0, data))
            self._signal()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._monitor, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while not self._closing:
            # Writable is asked for only while something waits to be sent.
            wanted = zmq.POLLIN | (zmq.POLLOUT if self._unsent else 0)
            poller.register(self._socket, wanted)
            ready = dict(poller.poll())
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if self._monitor in ready:
                self._note_event()
            if ready.get(self._socket, 0) & zmq.POLLIN:
                self._receive()
            self._send()

    def _note_event(self) -> None:
        event = recv_monitor_message(self._monitor)["event"]
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            detail = f"{self.endpoint} does not admit our key"
            # Remembered: nobody may ask yet, and ZeroMQ does not connect again.
            with self._lock:
                self._refused = Refused("not-admitted", detail)
            self._fail_all(self._refused)

    def _fail_all(self, refusal: Refused) -> None:
        with self._lock:
            for pending in self._waiting.values():
                pending.reply = refusal
                pending.done.set()
            self._waiting.clear()
            self._unsent.clear()

    def _receive(self) -> None:
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            head = self._messages.head(data)
            if isinstance(head, Refused):
                continue
            read = self._messages.decode(data)
            reply = read if isinstance(read, Refused) else read[1]
            with self._lock:
                if not isinstance(read, Refused):
                    self._learn(read[0].times)
                pending = self._waiting.pop(head.request_id, None)
                if pending is not None:
                    pending.reply = reply
                    pending.done.set()

    def _send(self) -> None:
        with self._lock:
            while self._unsent:
                request_id, data = self._unsent[0]
                pending = self._waiting.get(request_id)
                if request_id and pending is None:
                    self._unsent.popleft()
                    continue
                try:
                    self._socket.send(data, zmq.NOBLOCK)
                except zmq.Again:
                    return
                self._unsent.popleft()
                if pending is not None:
                    pending.sent = True


def set_limits(socket: zmq.Socket[bytes], endpoint: str, max_bytes: int) -> None:
    """Set what both ends of a connection agree on: lengths, and when one is dead."""
    # With IPv6 on, an IPv4 endpoint would come back as ::ffff:127.0.0.1.
    socket.ipv6 = "[" in endpoint
    # A longer message closes the connection that it comes over, before it is read.
    socket.maxmsgsize = max_bytes
    # Per connection; more wait at the sender.
    socket.rcvhwm = _MAX_UNREAD
    # The kernel finds what is dead. ZeroMQ's heartbeats abort the process (libzmq up to
    # 4.3.5) where a connection breaks from which nothing is read as too much is unread.
    # So may a PING of the other end: no instance may have them on.
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = _IDLE_S
    socket.tcp_keepalive_intvl = 1
    socket.tcp_keepalive_cnt = _DEAD_S - _IDLE_S
    socket.tcp_maxrt = 1000 * _DEAD_S
    socket.linger = 0
