"""Pool messages between processes: a ``Channel`` over control endpoints.

What comes is taken by the endpoint's own thread, and waits here for the one that owns
the pool; what goes is handed to the network at once. Endpoint and public key of a peer
stand in its entry in the view, and nothing is heard that does not come under the key of
a member (``guard.py``). An endpoint that another process has taken over is of no harm:
it has another key, and messages name the incarnation that they are for.

Every process has a key pair: that of a file, beyond one machine, else one of its own
that is made at the start, and that whoever may write to the registry may publish.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from sgl_tiered.errors import ConfigError
from sgl_tiered.pool.guard import CONTROL, CONTROL_KEY, Guard
from sgl_tiered.pool.membership import View
from sgl_tiered.pool.messages import Envelope
from sgl_tiered.transport.control import ControlServer, Request
from sgl_tiered.transport.courier import Courier
from sgl_tiered.transport.incidents import Incidents
from sgl_tiered.transport.keys import Keyring, is_loopback, new_keys
from sgl_tiered.transport.messages import MessageSet

__all__ = ["CONTROL", "CONTROL_KEY", "MESSAGES", "ControlChannel"]

MESSAGES = MessageSet(Envelope, max_bytes=16 << 20)
_MAX_INBOX = 8192
_MAX_INBOX_BYTES = 64 << 20
"""Messages that wait here. More come only while the owner does nothing for long; what
is dropped then is sent again by who asked."""
_MAX_TAKEN = 128
_MAX_TAKEN_BYTES = 1 << 20
"""Of them, what one call takes: a message takes 0.1 ms to act on, as a KiB of addresses
takes 10 us. One that is longer is taken alone."""
_LOG = logging.getLogger(__name__)


class ControlChannel:
    """A ``Channel``. One thread calls it, but for ``wake``, which is called by another.

    Args:
        host: address of this machine that others reach it by.
        port: its port; 0 for a free one.
        keyring: keys; None only on loopback: then a pair is made for this process.
        wake: called after a message has come, or was left; must not wait.
        incidents: counts what is refused.

    Raises:
        ConfigError: no keys, and the host is not on loopback.
        TransportUnavailableError: the host has no such address.
    """

    def __init__(
        self,
        host: str,
        port: int,
        keyring: Keyring | None,
        wake: Callable[[], None],
        incidents: Incidents | None = None,
    ) -> None:
        where = f"[{host}]" if ":" in host else host
        endpoint = f"tcp://{where}:{port or '*'}"
        if keyring is None and not is_loopback(endpoint):
            raise ConfigError(
                f"control endpoint {endpoint}",
                "it can be reached from other machines and has no keys",
                "give it a key file, or bind it to 127.0.0.1",
            )
        keys = new_keys() if keyring is None else keyring.keys
        admitted = None if keyring is None else keyring.admitted
        self._incidents = incidents or Incidents()
        self._guard = Guard(self._incidents)
        self._wake = wake
        self._lock = threading.Lock()
        # With the key that each came under, and its bytes.
        self._inbox: deque[tuple[Envelope, str, int]] = deque()
        self._inbox_bytes = 0
        self._peers: dict[int, tuple[str, str]] = {}
        self._courier = Courier(MESSAGES, keys=keys, admitted=admitted)
        try:
            self._server = ControlServer(
                endpoint,
                MESSAGES,
                self._put,
                keys=keys,
                admitted=admitted,
                hears=self._guard.hears,
                incidents=self._incidents,
            )
        except BaseException:
            self._courier.close()
            raise
        self.endpoints = {CONTROL: self._server.endpoint, CONTROL_KEY: keys.public}

    def see(self, view: View) -> None:
        """Learn who is where; connections to those who have left are closed."""
        self._guard.see(view)
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
        """Send, without waiting and without a promise: what fails is a lost message."""
        self._incidents.guard("a message's sending", partial(self._send, message))

    def take(self) -> list[Envelope]:
        """Return what has arrived, of whom it says that it is.

        So much of it as takes some milliseconds to act on, oldest first. Where more
        waits, the owner is woken again: what it has to do besides comes first.
        """
        if not self._inbox:
            return []
        taken: list[tuple[Envelope, str]] = []
        num_bytes = 0
        with self._lock:
            while self._inbox and len(taken) < _MAX_TAKEN:
                message, key, size = self._inbox[0]
                if taken and num_bytes + size > _MAX_TAKEN_BYTES:
                    break
                self._inbox.popleft()
                taken.append((message, key))
                num_bytes += size
            self._inbox_bytes -= num_bytes
            has_more = bool(self._inbox)
        if has_more:
            self._wake()
        return [each for each, key in taken if self._guard.admits(each, key)]

    def troubles(self) -> dict[str, str]:
        """Return what is known to be wrong with a peer's endpoint, by endpoint."""
        return self._courier.troubles()

    def close(self) -> None:
        """Leave the network; may be called twice."""
        self._server.close()
        self._courier.close()

    def _send(self, message: Envelope) -> None:
        peer = self._peers.get(message.receiver[0])
        if peer is not None:
            refusal = self._courier.send(*peer, self._guard.stamp(message))
            if refusal:
                _LOG.debug("instance %d: %s", message.receiver[0], refusal)

    def _put(self, request: Request) -> None:
        """Take a message, on the thread of the endpoint."""
        request.drop()
        if not isinstance(request.message, Envelope):
            return
        with self._lock:
            is_full = (
                len(self._inbox) >= _MAX_INBOX
                or self._inbox_bytes + request.num_bytes > _MAX_INBOX_BYTES
            )
            if not is_full:
                size = request.num_bytes
                self._inbox.append((request.message, request.sender, size))
                self._inbox_bytes += request.num_bytes
        if is_full:
            self._incidents.note("inbox-full", "too many messages wait to be handled")
        self._wake()
