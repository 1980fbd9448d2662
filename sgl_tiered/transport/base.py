"""Interface of a transport: bytes between the registered memories of two instances.

An instance registers memory once, hands its ``PeerAddress`` to others (in a control
message or through the registry), connects to theirs, and pushes or pulls *pieces*. All
of it is one-sided: the peer's program takes no part in a transfer, so it learns of it
by control messages only.

A transfer ends by itself: it has a deadline of ours, whatever the library below thinks
of a peer that hangs. After one that failed or came late, the library may still read the
local pieces of a push, write those of a pull, and write or read the peer's. So its
pieces are *quarantined* (``quarantine.py``): who owns the memory must not use it again
while ``held`` says so. A failed transfer, a late one and a lost peer are values; only
wrong use raises.

Nothing here encrypts or authenticates the bytes: whoever reaches the data port of an
instance can read and write what it registered. Data ports belong on a private network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sgl_tiered.transport.quarantine import Quarantine

__all__ = [
    "Peer",
    "PeerAddress",
    "PeerLost",
    "Pieces",
    "Region",
    "Transfer",
    "TransferStatus",
    "Transport",
]

Bools = npt.NDArray[np.bool_]
Int64s = npt.NDArray[np.int64]
UInt8s = npt.NDArray[np.uint8]

_MAX_NAME = 256
_MAX_METADATA = 256 << 10


class TransferStatus(IntEnum):
    """State of a transfer; all but RUNNING are final."""

    RUNNING = 0
    DONE = 1
    FAILED = 2
    TIMED_OUT = 3


@dataclass(frozen=True, slots=True)
class Region:
    """A registered memory, as its owner and others name it.

    Attributes:
        number: position in the owner's list of regions, from 0.
        address: where it begins in the owner's memory; others never follow it.
        num_bytes: how long it is.
    """

    number: int
    address: int
    num_bytes: int

    def __post_init__(self) -> None:
        end = self.address + self.num_bytes
        if self.number < 0 or self.address < 0 or self.num_bytes < 1 or end >= 1 << 63:
            raise ValueError("a region lies outside of any memory")


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """What an instance must know of another to reach its memory; may be sent.

    Attributes:
        kind: which transport it speaks: mooncake, nixl or loopback. Both sides must
            speak the same.
        endpoint: the name of its data port, as the library writes it (host:port, an
            agent's name).
        regions: what it had registered when this value was made.
        metadata: what else the library needs; opaque, at most some KiB.
    """

    kind: str
    endpoint: str
    regions: tuple[Region, ...]
    metadata: bytes = b""

    def __post_init__(self) -> None:
        if max(len(self.kind), len(self.endpoint)) > _MAX_NAME:
            raise ValueError(f"a name has more than {_MAX_NAME} characters")
        if len(self.metadata) > _MAX_METADATA:
            raise ValueError(f"there are more than {_MAX_METADATA} bytes of metadata")
        if [region.number for region in self.regions] != [*range(len(self.regions))]:
            raise ValueError("regions are not in the order of their numbers")


@dataclass(frozen=True, slots=True)
class PeerLost:
    """A peer is gone for good: its transfers fail, and new ones fail at once.

    It may come back under a new address only, with a new ``connect``.

    Attributes:
        address: whose.
        reason: one clause.
    """

    address: PeerAddress
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Byte ranges to move: piece i is ``lengths[i]`` bytes on either side.

    Attributes:
        local: int64 [n], offsets in a region of this instance.
        remote: int64 [n], offsets in a region of the peer.
        lengths: int64 [n], bytes, at least 1 each.
        local_region, remote_region: numbers of the regions.
    """

    local: Int64s
    remote: Int64s
    lengths: Int64s
    local_region: int = 0
    remote_region: int = 0
    num_bytes: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        for name in ("local", "remote", "lengths"):
            values = np.ascontiguousarray(getattr(self, name), np.int64)
            if values.ndim != 1 or len(values) != len(self.local):
                raise ValueError(f"{name} has shape {values.shape}, not [n] as local")
            object.__setattr__(self, name, values)
        if len(self.lengths) and int(self.lengths.min()) < 1:
            raise ValueError(f"a piece of {int(self.lengths.min())} bytes")
        object.__setattr__(self, "num_bytes", int(self.lengths.sum()))

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def one(cls, local: int, remote: int, length: int) -> Pieces:
        """Return a single piece of the first regions."""
        return cls(np.array([local]), np.array([remote]), np.array([length]))

    def cut(self, start: int, stop: int) -> Pieces:
        """Return pieces ``start`` to ``stop - 1``."""
        return Pieces(
            self.local[start:stop],
            self.remote[start:stop],
            self.lengths[start:stop],
            self.local_region,
            self.remote_region,
        )


class Transfer(Protocol):
    """A push or a pull under way. Any thread may ask."""

    @property
    def pieces(self) -> Pieces:
        """What it moves."""
        ...

    @property
    def arrived(self) -> Bools:
        """bool [n]: the pieces known to have arrived; all of them when DONE.

        Under FAILED and TIMED_OUT the others may have arrived too, in part.
        """
        ...

    @property
    def error(self) -> str:
        """One clause: why it is FAILED or TIMED_OUT; else empty."""
        ...

    def poll(self) -> TransferStatus:
        """Move things along without waiting, and return the status."""
        ...

    def wait(self, timeout_s: float | None = None) -> TransferStatus:
        """Poll until it ends, for at most ``timeout_s``; then it may be RUNNING still.

        With None it returns when the transfer ends, which its deadline bounds.
        """
        ...


class Peer(Protocol):
    """Another instance, as this one is connected to it."""

    @property
    def address(self) -> PeerAddress:
        """What it was connected by."""
        ...

    @property
    def lost(self) -> str:
        """Why it is lost, in one clause; empty while it is not known to be."""
        ...

    @property
    def quarantine(self) -> Quarantine:
        """What is held of *its* memory, as far as this instance knows."""
        ...


class Transport(Protocol):
    """Moves bytes between instances; all methods may be called by several threads."""

    @property
    def address(self) -> PeerAddress:
        """What others connect by, with all regions that are registered now."""
        ...

    @property
    def quarantine(self) -> Quarantine:
        """What is held of this instance's own memory."""
        ...

    def register(self, memory: UInt8s) -> Region:
        """Make memory known to peers.

        Args:
            memory: uint8, C-contiguous; it must stay where it is until ``close``, and
                is kept alive by the transport until then.

        Raises:
            ValueError: it is not such an array, or it is empty.
            TransportUnavailableError: the library refuses it.
        """
        ...

    def connect(self, address: PeerAddress) -> Peer:
        """Make a peer known; returns at once, and a dead one is found by a transfer.

        Raises:
            ValueError: the address is of another kind of transport, or malformed.
        """
        ...

    def disconnect(self, peer: Peer) -> None:
        """Forget a peer: what runs with it fails, and its quarantine goes on."""
        ...

    def push(
        self, peer: Peer, pieces: Pieces, *, timeout_s: float | None = None
    ) -> Transfer:
        """Begin to write local pieces to the peer's memory.

        Args:
            peer: a result of ``connect``.
            pieces: what; any number, cut to what the library takes at once.
            timeout_s: until when it must have ended, from now; None takes the
                transport's default.

        Raises:
            ValueError: a piece lies outside its region, or the region is not there.
        """
        ...

    def pull(
        self, peer: Peer, pieces: Pieces, *, timeout_s: float | None = None
    ) -> Transfer:
        """Begin to read the peer's pieces into local memory; as ``push`` otherwise."""
        ...

    def notify(self, call: Callable[[], None]) -> Callable[[], None]:
        """Have something called whenever a transfer has ended, by any thread.

        Returns:
            What ends this; after it returns, there are no more calls.
        """
        ...

    def take_lost(self) -> list[PeerLost]:
        """Return the peers lost since the last call, each once."""
        ...

    def close(self) -> None:
        """Fail what runs and leave the network; may be called twice."""
        ...
