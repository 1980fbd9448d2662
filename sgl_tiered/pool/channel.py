"""Pool messages between processes: a ``Channel`` over control endpoints.

What comes is taken by the endpoint's own thread, and waits here for the one that owns
the pool; what goes is handed to the network at once. Endpoint and public key of a peer
stand in its entry in the view. An endpoint that another process has taken over is of no
harm: messages name the incarnation that they are for, and the pool refuses others.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from sgl_tiered.pool.membership import View
from sgl_tiered.pool.messages import Envelope
from sgl_tiered.transport.control import ControlServer, Request
from sgl_tiered.transport.courier import Courier
from sgl_tiered.transport.keys import Keyring
from sgl_tiered.transport.messages import MessageSet

__all__ = ["CONTROL", "CONTROL_KEY", "MESSAGES", "ControlChannel"]

CONTROL = "control"
"""Name of the endpoint in a member's entry."""
CONTROL_KEY = "control_key"
"""Name of its public key there; without one it speaks in clear, on loopback."""
MESSAGES = MessageSet(Envelope, max_bytes=16 << 20)
_MAX_INBOX = 8192
"""Messages that wait here. More come only while the owner does nothing for long; what
is dropped then is sent again by who asked."""
_LOG = logging.getLogger(__name__)


class ControlChannel:
    """A ``Channel``. One thread calls it, but for ``wake``, which is called by another.

    Args:
        host: address of this machine that others reach it by.
        port: its port; 0 for a free one.
        keyring: keys; None only on loopback.
        wake: called after a message has come; must not wait.

    Raises:
        ConfigError: no keys, and the host is not on loopback.
        TransportUnavailableError: the host has no such address.
    """

    def __init__(
        self, host: str, port: int, keyring: Keyring | None, wake: Callable[[], None]
    ) -> None:
        keys = None if keyring is None else keyring.keys
        admitted = frozenset[str]() if keyring is None else keyring.admitted
        self._wake = wake
        self._inbox: deque[Envelope] = deque(maxlen=_MAX_INBOX)
        self._peers: dict[int, tuple[str, str]] = {}
        self._courier = Courier(MESSAGES, keys=keys, admitted=admitted)
        where = f"[{host}]" if ":" in host else host
        try:
            self._server = ControlServer(
                f"tcp://{where}:{port or '*'}",
                MESSAGES,
                self._put,
                keys=keys,
                admitted=admitted,
            )
        except BaseException:
            self._courier.close()
            raise
        self.endpoints = {CONTROL: self._server.endpoint}
        if keys is not None:
            self.endpoints[CONTROL_KEY] = keys.public

    def see(self, view: View) -> None:
        """Learn who is where; connections to those who have left are closed."""
        self._peers = {
            member.instance: (
                member.endpoints[CONTROL],
                member.endpoints.get(CONTROL_KEY, ""),
            )
            for member in view.members
            if CONTROL in member.endpoints
        }
        self._courier.keep(set(self._peers.values()))

    def send(self, message: Envelope) -> None:
        """Send, without waiting and without a promise."""
        peer = self._peers.get(message.receiver[0])
        if peer is not None:
            refusal = self._courier.send(*peer, message)
            if refusal:
                _LOG.debug("instance %d: %s", message.receiver[0], refusal)

    def take(self) -> list[Envelope]:
        """Return what has arrived since the last call."""
        found: list[Envelope] = []
        with suppress(IndexError):
            while True:
                found.append(self._inbox.popleft())
        return found

    def troubles(self) -> dict[str, str]:
        """Return what is known to be wrong with a peer's endpoint, by endpoint."""
        return self._courier.troubles()

    def close(self) -> None:
        """Leave the network; may be called twice."""
        self._server.close()
        self._courier.close()

    def _put(self, request: Request) -> None:
        """Take a message, on the thread of the endpoint."""
        request.drop()
        if isinstance(request.message, Envelope):
            self._inbox.append(request.message)
            self._wake()
