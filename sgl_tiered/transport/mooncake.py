"""Mooncake's transfer engine: TCP here, RDMA where there is an RDMA card.

Facts of mooncake-transfer-engine 0.3.13 that shape this file:

- A batch of several pieces can be waited for, but only by spinning on a core, and it
  counts as failed while others of its pieces still move. So every piece is a batch of
  its own: its state can be asked for without waiting, is exact, and it is no slower.
- The queue of a peer takes 1024 pieces (``MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER``); a
  longer batch fails at once, half of it under way.
- The first contact with a peer waits for its answer without a limit, under a lock that
  every other submission needs. So ``reach`` asks with a probe first, which takes none.
- The data port listens on all interfaces, whatever host is given.
"""

from __future__ import annotations

import importlib
import os
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

__all__ = ["MooncakeLibrary", "import_mooncake", "open_mooncake"]

Int64s = npt.NDArray[np.int64]

_MAX_IN_FLIGHT = 256
"""Of a queue of 1024: more are no faster, and time out together."""
_MAX_DIGITS = 5
_OPENING_FAILED = 2**64 - 1
_INSTALL = (
    "pip install 'sgl-tiered[mooncake]' (without CUDA) or the extra mooncake-cuda12 or "
    "mooncake-cuda13; on Debian also apt-get install libibverbs1 libnuma1 libcurl4"
)


class MooncakeLibrary:
    """A transfer engine with peer-to-peer metadata.

    Args:
        host: address of this machine that others reach it by.
        protocol: tcp or rdma.
        devices: RDMA cards, comma-separated; empty lets Mooncake choose.

    Raises:
        TransportUnavailableError: not installed, or the engine does not start.
    """

    kind = "mooncake"
    max_in_flight = _MAX_IN_FLIGHT

    def __init__(self, host: str, protocol: str = "tcp", devices: str = "") -> None:
        self._engine = import_mooncake().TransferEngine()
        code = self._engine.initialize(host, "P2PHANDSHAKE", protocol, devices)
        if code != 0:
            raise TransportUnavailableError(
                f"Mooncake does not start with {protocol} on {host} (code {code})"
            )
        self._endpoint = f"{host}:{self._engine.get_rpc_port()}"
        self._registered: list[int] = []

    def endpoint(self) -> tuple[str, bytes]:
        """Return host and port of the handshake."""
        return self._endpoint, b""

    def register(self, address: int, num_bytes: int) -> None:
        """Make memory known."""
        code = self._engine.register_memory(address, num_bytes)
        if code != 0:
            raise TransportUnavailableError(
                f"Mooncake does not register {num_bytes} bytes (code {code})"
            )
        self._registered.append(address)

    def connect(self, address: PeerAddress) -> str:
        """Return the endpoint, as the engine wants it."""
        host, _, port = address.endpoint.rpartition(":")
        # Nothing else reaches the library, which reads it in its own way.
        is_port = port.isascii() and port.isdigit() and len(port) <= _MAX_DIGITS
        if not host or not is_port or not host.isprintable():
            raise ValueError(f"{address.endpoint!r} is not host:port")
        return address.endpoint

    def reach(self, link: str) -> str:
        """Wait for the answer to a probe."""
        return self.gone(link)

    def gone(self, link: str) -> str:
        """Return whether nobody listens at the endpoint any more."""
        code = self._engine.send_probe(link)
        return f"{link} does not answer (code {code})" if code != 0 else ""

    def submit(
        self, link: str, is_push: bool, local: Int64s, remote: Int64s, lengths: Int64s
    ) -> list[tuple[int, Any]]:
        """Queue every piece as a batch of its own."""
        engine = self._engine
        begin = (
            engine.batch_transfer_async_write
            if is_push
            else engine.batch_transfer_async_read
        )
        rows = zip(local.tolist(), remote.tolist(), lengths.tolist(), strict=True)
        tickets = [begin(link, [here], [there], [size]) for here, there, size in rows]
        return [(1, None if t in (0, _OPENING_FAILED) else t) for t in tickets]

    def check(self, ticket: Any) -> TransferStatus:
        """Ask for the state of the one piece of a batch."""
        code = self._engine.transfer_check_status(ticket)
        if code == 1:
            return TransferStatus.DONE
        # -2, timed out, is not an end: the engine still has it.
        return TransferStatus.FAILED if code == -1 else TransferStatus.RUNNING

    def disconnect(self, link: str) -> None:
        """Nothing to do: the engine forgets an idle peer by itself."""

    def close(self) -> None:
        """Take memory back; the engine's ports close with the process at the latest."""
        for address in self._registered:
            self._engine.unregister_memory(address)
        self._registered.clear()
        self._engine = None


def import_mooncake() -> Any:
    """Return Mooncake's module ``mooncake.engine``.

    Raises:
        TransportUnavailableError: it cannot be imported; says what to install.
    """
    # It writes every step to stderr by itself.
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        return importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise TransportUnavailableError(
            f"Mooncake cannot be used ({error}): {_INSTALL}"
        ) from error


def open_mooncake(
    host: str = "127.0.0.1",
    *,
    protocol: str = "tcp",
    devices: str = "",
    clock: Clock | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    grace_s: float = DEFAULT_GRACE_S,
) -> BatchedTransport:
    """Return a transport over Mooncake; see ``MooncakeLibrary`` for what is raised."""
    library = MooncakeLibrary(host, protocol, devices)
    return BatchedTransport(library, clock=clock, timeout_s=timeout_s, grace_s=grace_s)
