"""What instances say to each other: requests and one kind of answer.

Typed structs (``transport/messages.py``); arrays are bytes, little endian. Messages may
be lost, doubled, or come late: a request is sent again until it is answered, has a
number, and is carried out once. It names both incarnations; one for an incarnation that
is over is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.keys import as_tokens
from sgl_tiered.core.plans import Int32s, UInt64s
from sgl_tiered.pool.base import BlockType
from sgl_tiered.pool.layouts import KVShape, MemoryForm
from sgl_tiered.transport.base import PeerAddress
from sgl_tiered.transport.messages import Message

__all__ = [
    "Answer",
    "AskBlocks",
    "AskDone",
    "AskHeld",
    "AskPages",
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
    "tokens_from_wire",
    "tokens_to_wire",
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


class AskBlocks(Message, frozen=True):
    """Allocate blocks that belong to the sender until it frees or finishes them.

    Attributes:
        num_blocks: of the prompt's pages from ``first_page`` on, or of anything.
        type: where.
        shape: of the sender's KV.
        only_missing: none for pages that the receiver's index has; the next three say
            of which prompt, as in ``BlockStore.insert``.
        namespace, tokens, first_page: tokens are int32.
    """

    num_blocks: int
    type: BlockType
    shape: KVShape
    only_missing: bool = False
    namespace: bytes = b""
    tokens: bytes = b""
    first_page: int = 0


class FreeBlocks(Message, frozen=True):
    """Free blocks that belong to the sender."""

    addresses: bytes


class Finish(Message, frozen=True):
    """All bytes have arrived: the blocks are the receiver's from now on.

    Attributes:
        addresses: of blocks that belonged to the sender.
        type: where they are to be in the end.
        private: the sender's own data, for whoever takes the arrival.
        insert: enter them into the index; then the next three say as what.
        namespace, tokens, first_page: as in ``BlockStore.insert``; tokens are int32.
        sums: uint64, xxh3-64 of each page as it was sent; empty: nobody checks.
    """

    addresses: bytes
    type: BlockType
    private: bytes
    insert: bool = False
    namespace: bytes = b""
    tokens: bytes = b""
    first_page: int = 0
    sums: bytes = b""


class AskHeld(Message, frozen=True):
    """Say how many first pages of a prompt you hold, and in which media.

    Attributes:
        namespace, tokens: as in ``BlockStore.match``; tokens are int32.
        first_page: the sender needs none before this one.
    """

    namespace: bytes
    tokens: bytes
    first_page: int = 0


class AskPages(Message, frozen=True):
    """Write pages of a prompt to blocks of the sender, and say what they sum to.

    Attributes:
        addresses: the sender's blocks, for pages ``first_page`` and on; those that you
            do not have are left out from the end.
        namespace, tokens, first_page: as in ``BlockStore.insert``; tokens are int32.
        info: how the sender is built.
        timeout_s: how long it waits.
    """

    addresses: bytes
    namespace: bytes
    tokens: bytes
    first_page: int
    info: PoolInfo
    timeout_s: float


class AskDone(Message, frozen=True):
    """Say whether something writes to the sender that you began in former times.

    That is before one of you two was the incarnation that it is now.

    Attributes:
        incarnation: yours, of that time; refuse it if it was another process.
    """

    incarnation: int


class Cancel(Message, frozen=True):
    """A former request is not to be carried out any more, if it was not yet.

    It is answered when nothing is written for that request any more.

    Attributes:
        request: its number. What it allocated is freed.
        addresses: blocks of the sender to free, if they are its own still.
    """

    request: int
    addresses: bytes = b""


class Answer(Message, frozen=True):
    """What came of a request.

    Attributes:
        refusal: one clause: why it was not carried out; else empty.
        addresses: blocks allocated.
        num_inserted: blocks entered into the index.
        info: with blocks: how the receiver is built.
        num_pages: first pages of the prompt that its index has, or pages that were
            written.
        media: (medium, pages) for those of ``AskHeld``.
        sums: uint64, xxh3-64 of each page that was written.
        num_read: of those, how many a disk was read for first.
        read_s: how long that took, or for ``AskHeld`` would take.
    """

    refusal: str = ""
    addresses: bytes = b""
    num_inserted: int = 0
    info: PoolInfo | None = None
    num_pages: int = 0
    media: tuple[tuple[int, int], ...] = ()
    sums: bytes = b""
    num_read: int = 0
    read_s: float = 0.0


Body = AskBlocks | FreeBlocks | Finish | AskHeld | AskPages | AskDone | Cancel | Answer


class Envelope(Message, frozen=True):
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


def tokens_to_wire(tokens: npt.ArrayLike) -> bytes:
    """Return token ids as bytes."""
    return as_tokens(tokens).astype("<i4", copy=False).tobytes()


def tokens_from_wire(raw: bytes) -> Int32s:
    """Return token ids from bytes; a last partial one is left out."""
    tokens: Int32s = np.frombuffer(raw, "<i4", len(raw) // 4)
    return tokens
