"""What instances say to each other: requests and one kind of answer.

Frozen values of plain types, so that any codec can carry them; arrays are bytes, little
endian. Messages may be lost, doubled, or come late: a request is sent again until it is
answered, has a number, and is carried out once. It names both incarnations; one for an
incarnation that is over is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sgl_tiered.core.plans import UInt64s
from sgl_tiered.pool.base import BlockType
from sgl_tiered.pool.layouts import KVShape, MemoryForm
from sgl_tiered.transport.base import PeerAddress

__all__ = [
    "Answer",
    "AskBlocks",
    "Body",
    "Cancel",
    "Channel",
    "Envelope",
    "Finish",
    "FreeBlocks",
    "Incarnation",
    "Place",
    "PoolInfo",
    "RankInfo",
    "from_wire",
    "to_wire",
]

Incarnation = tuple[int, int]
"""An instance id and the number of one of its starts."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the blocks of a medium lie in the memory of one rank."""

    medium: int
    region: int
    form: MemoryForm


@dataclass(frozen=True, slots=True)
class RankInfo:
    """One rank of an instance: how to reach it, and what it holds where."""

    address: PeerAddress
    places: tuple[Place, ...]

    def place(self, medium: int) -> Place | None:
        """Return where a medium's blocks lie, or None if they cannot be reached."""
        return next((p for p in self.places if p.medium == medium), None)


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """The parallelism of an instance: its KV's shape and its ranks."""

    shape: KVShape
    ranks: tuple[RankInfo, ...]


@dataclass(frozen=True, slots=True)
class AskBlocks:
    """Allocate blocks that belong to the sender until it frees or finishes them."""

    num_blocks: int
    type: BlockType
    shape: KVShape


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """Free blocks that belong to the sender."""

    addresses: bytes


@dataclass(frozen=True, slots=True)
class Finish:
    """All bytes have arrived: the blocks are the receiver's from now on.

    Attributes:
        addresses: of blocks that belonged to the sender.
        type: where they are to be in the end.
        private: the sender's own data, for whoever takes the arrival.
        insert: enter them into the index; then the next three say as what.
        namespace, tokens, first_page: as in ``BlockStore.insert``; tokens are int32.
    """

    addresses: bytes
    type: BlockType
    private: bytes
    insert: bool = False
    namespace: bytes = b""
    tokens: bytes = b""
    first_page: int = 0


@dataclass(frozen=True, slots=True)
class Cancel:
    """A former request is not to be carried out any more, if it was not yet.

    Attributes:
        request: its number. What it allocated is freed.
        addresses: blocks of the sender to free, if they are its own still.
    """

    request: int
    addresses: bytes = b""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a request.

    Attributes:
        refusal: one clause: why it was not carried out; else empty.
        addresses: blocks allocated.
        num_inserted: blocks entered into the index.
        info: with blocks: how the receiver is built.
    """

    refusal: str = ""
    addresses: bytes = b""
    num_inserted: int = 0
    info: PoolInfo | None = None


Body = AskBlocks | FreeBlocks | Finish | Cancel | Answer


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message with its sender, its receiver and its number.

    Attributes:
        sender, receiver: instances and incarnations.
        request: number of the request, growing per sender; an answer has the same.
        settled: the sender asks no more about its requests below this number.
        body: the message.
    """

    sender: Incarnation
    receiver: Incarnation
    request: int
    settled: int
    body: Body


class Channel(Protocol):
    """Carries messages; they may be lost. One thread calls it."""

    def send(self, message: Envelope) -> None:
        """Send, without waiting and without a promise."""
        ...

    def take(self) -> list[Envelope]:
        """Return what has arrived since the last call."""
        ...


def to_wire(addresses: UInt64s) -> bytes:
    """Return addresses as bytes."""
    return addresses.astype("<u8").tobytes()


def from_wire(raw: bytes) -> UInt64s:
    """Return addresses from bytes; a last partial one is left out."""
    return np.frombuffer(raw, "<u8", len(raw) // 8).astype(np.uint64)
