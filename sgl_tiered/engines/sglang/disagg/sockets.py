"""Sockets of SGLang's threads: who speaks is looked at, or shown, on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.utils.network import NetworkAddress

from sgl_tiered.serving.disagg.speaking import StrangerError
from sgl_tiered.transport.incidents import Incidents

__all__ = ["Ear", "Mouth", "tcp"]


class Ear:
    """A socket of which SGLang's thread hears what is said by whom it says."""

    def __init__(
        self,
        socket: Any,
        hear: Callable[[list[bytes]], list[bytes]],
        incidents: Incidents,
    ) -> None:
        self._socket = socket
        self._hear = hear
        self._incidents = incidents

    def recv_multipart(self) -> list[bytes] | None:
        """Return the next message; None for one that is dropped."""
        try:
            return self._hear(self._socket.recv_multipart())
        except StrangerError as error:
            self._incidents.note("stranger", str(error))
        except (LookupError, ValueError) as error:
            self._incidents.note("message", str(error))
        return None


class Mouth:
    """A socket by which a decode instance says what it says."""

    def __init__(
        self, socket: Any, say: Callable[[Sequence[bytes]], list[bytes]]
    ) -> None:
        self._socket = socket
        self._say = say

    def send_multipart(self, message: Sequence[bytes], flags: int = 0) -> None:
        """Send a message with the key."""
        self._socket.send_multipart(self._say(message), flags=flags)


def tcp(host: str, port: int) -> str:
    """Return where a rank listens, as SGLang's sockets name it."""
    return str(NetworkAddress(host, port).to_tcp())
