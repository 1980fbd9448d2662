"""NIXL's UCX plugin: shared memory on one machine, TCP or RDMA between machines.

Facts of NIXL 1.5 that shape this file:

- A batch has one state. So what is submitted together is cut into batches of 32 pieces.
- A lost peer raises; a stopped one is RUNNING for ever.
- Over TCP the progress thread of an idle agent takes a quarter of a core.
- Metadata of an agent names its memory, so it is made anew for every address.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
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

__all__ = ["NixlLibrary", "import_nixl", "open_nixl"]

Int64s = npt.NDArray[np.int64]

_MAX_IN_FLIGHT = 256
_PIECES_PER_BATCH = 32
_INSTALL = "pip install 'sgl-tiered[nixl]'"


@dataclass(slots=True, eq=False)
class _Link:
    """A remote agent, and why it is gone if it is."""

    agent: str
    why_gone: str = ""


class NixlLibrary:
    """An agent with the UCX backend.

    Raises:
        TransportUnavailableError: not installed, or the agent cannot be made.
    """

    kind = "nixl"
    max_in_flight = _MAX_IN_FLIGHT
    _numbers = itertools.count()

    def __init__(self) -> None:
        api = import_nixl()
        # Two machines may have processes of one number.
        unique = os.urandom(4).hex()
        self._name = f"tiered-{os.getpid()}-{next(self._numbers)}-{unique}"
        try:
            config = api.nixl_agent_config(backends=["UCX"])
            self._agent = api.nixl_agent(self._name, config)
        except Exception as error:
            raise TransportUnavailableError(f"NIXL does not start: {error}") from error
        self._registered: list[Any] = []
        # By remote agent: the connections to it. The library keeps one, by its name.
        self._links: dict[str, list[_Link]] = {}

    def endpoint(self) -> tuple[str, bytes]:
        """Return the agent's name, and what UCX needs to reach it."""
        return self._name, bytes(self._agent.get_agent_metadata())

    def register(self, address: int, num_bytes: int) -> None:
        """Make memory known."""
        try:
            found = self._agent.register_memory([(address, num_bytes, 0, "")], "DRAM")
        except Exception as error:
            raise TransportUnavailableError(
                f"NIXL does not register {num_bytes} bytes: {error}"
            ) from error
        self._registered.append(found)

    def connect(self, address: PeerAddress) -> _Link:
        """Load the agent's metadata; nothing is sent."""
        links = self._links.get(address.endpoint, [])
        if any(link.why_gone for link in links):
            # NIXL would keep the endpoint that has failed.
            self._remove(address.endpoint)
            links[:] = [link for link in links if not link.why_gone]
        try:
            name = self._agent.add_remote_agent(address.metadata)
        except Exception as error:
            raise ValueError(
                f"{address.endpoint}: no NIXL metadata ({error})"
            ) from error
        name = name.decode() if isinstance(name, bytes) else str(name)
        if name != address.endpoint:
            raise ValueError(f"the metadata is {name}'s, not {address.endpoint}'s")
        link = _Link(name)
        self._links.setdefault(name, []).append(link)
        return link

    def reach(self, link: _Link) -> str:
        """Nothing to wait for: the first transfer connects by itself."""
        return link.why_gone

    def gone(self, link: _Link) -> str:
        """Return what the last transfer said of the peer."""
        return link.why_gone

    def submit(
        self, link: _Link, is_push: bool, local: Int64s, remote: Int64s, lengths: Int64s
    ) -> list[tuple[int, Any]]:
        """Start batches of at most 32 pieces."""
        tickets = []
        for start in range(0, len(lengths), _PIECES_PER_BATCH):
            part = slice(start, start + _PIECES_PER_BATCH)
            ticket = self._start(
                link, is_push, local[part], remote[part], lengths[part]
            )
            tickets.append((len(lengths[part]), ticket))
        return tickets

    def check(self, ticket: Any) -> TransferStatus:
        """Ask for the state of a batch, and let go of one that has ended."""
        link, handle = ticket
        try:
            state = self._agent.check_xfer_state(handle)
        except Exception as error:  # noqa: BLE001 - the API raises classes of its own
            _note(link, error)
            state = "ERR"
        if state == "PROC":
            return TransferStatus.RUNNING
        with contextlib.suppress(Exception):
            self._agent.release_xfer_handle(handle)
        return TransferStatus.DONE if state == "DONE" else TransferStatus.FAILED

    def disconnect(self, link: _Link) -> None:
        """Forget the remote agent, with the last connection to it."""
        links = self._links.get(link.agent, [])
        # One that was lost does not count where its peer was connected anew.
        if link in links:
            links.remove(link)
            if not links:
                del self._links[link.agent]
                self._remove(link.agent)

    def close(self) -> None:
        """Take memory back and end the agent."""
        for found in self._registered:
            with contextlib.suppress(Exception):
                self._agent.deregister_memory(found)
        self._registered.clear()
        self._agent = None

    def _remove(self, agent: str) -> None:
        with contextlib.suppress(Exception):
            self._agent.remove_remote_agent(agent)

    def _start(
        self, link: _Link, is_push: bool, local: Int64s, remote: Int64s, lengths: Int64s
    ) -> Any:
        agent = self._agent
        try:
            handle = agent.initialize_xfer(
                "WRITE" if is_push else "READ",
                agent.get_xfer_descs(_rows(local, lengths), "DRAM"),
                agent.get_xfer_descs(_rows(remote, lengths), "DRAM"),
                link.agent,
            )
        except Exception as error:  # noqa: BLE001 - the API raises classes of its own
            _note(link, error)
            return None
        try:
            state = agent.transfer(handle)
        except Exception as error:  # noqa: BLE001 - the API raises classes of its own
            _note(link, error)
            state = "ERR"
        if state == "ERR":
            with contextlib.suppress(Exception):
                agent.release_xfer_handle(handle)
            return None
        return link, handle


def _rows(addresses: Int64s, lengths: Int64s) -> npt.NDArray[np.uint64]:
    """Return NIXL's descriptors: address, length and device 0."""
    rows = np.zeros((len(lengths), 3), np.uint64)
    rows[:, 0], rows[:, 1] = addresses, lengths
    return rows


def _note(link: _Link, error: Exception) -> None:
    """Keep what an exception says of the peer."""
    if "disconnect" in type(error).__name__.lower():
        link.why_gone = f"NIXL: {error or type(error).__name__}"


def import_nixl() -> Any:
    """Return NIXL's module ``nixl._api``, which imports torch.

    Raises:
        TransportUnavailableError: it cannot be imported; says what to install.
    """
    # It writes to stderr by itself.
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    try:
        return importlib.import_module("nixl._api")
    except ImportError as error:
        raise TransportUnavailableError(
            f"NIXL cannot be used ({error}): {_INSTALL}"
        ) from error


def open_nixl(
    *,
    clock: Clock | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    grace_s: float = DEFAULT_GRACE_S,
) -> BatchedTransport:
    """Return a transport over NIXL; see ``NixlLibrary`` for what is raised."""
    library = NixlLibrary()
    return BatchedTransport(library, clock=clock, timeout_s=timeout_s, grace_s=grace_s)
