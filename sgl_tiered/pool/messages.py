"""What instances say to each other: requests and one kind of answer.

Typed structs (``transport/messages.py``); arrays are bytes, little endian. Messages may
be lost, doubled, or come late: a request is sent again until it is answered, has a
number, and is carried out once. It names both incarnations; one for an incarnation that
is over is refused.

Every type checks its own fields, so that none out of range can be made or read. No
message names memory, hosts or ports: how an instance is built (``PoolInfo``) stands in
its entry in the registry. Whether an answer fits its request, ``misfit`` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from sgl_tiered.core.addresses import (
    MAX_INSTANCE,
    MAX_SLOT,
    instances_of,
    mediums_of,
    slots_of,
)
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
    "as_entry",
    "from_entry",
    "from_wire",
    "misfit",
    "to_wire",
    "tokens_from_wire",
    "tokens_to_wire",
]

Incarnation = tuple[int, int]
"""An instance id and the number of one of its starts."""
MAX_TIMEOUT_S = 86400.0
MAX_PRIVATE = 1 << 20
_MAX_INCARNATION = (1 << 32) - 1
_MAX_NUMBER = 1 << 62
_MAX_COUNT = MAX_SLOT + 1
_MAX_NAMESPACE = 64
_MAX_RANKS = 4096
_MAX_MEDIUM = 15
_WORD = 8
_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Place:
    """Where the blocks of a medium lie in the memory of one rank."""

    medium: int
    region: int
    form: MemoryForm

    def __post_init__(self) -> None:
        _demand_count(self.medium, "medium", _MAX_MEDIUM)


@dataclass(frozen=True, slots=True)
class RankInfo:
    """One rank of an instance: how to reach it, and what it holds where."""

    address: PeerAddress
    places: tuple[Place, ...]

    def __post_init__(self) -> None:
        regions = len(self.address.regions)
        if not all(0 <= place.region < regions for place in self.places):
            raise ValueError("a medium lies in no region")
        if len({place.form.shard for place in self.places}) > 1:
            raise ValueError("a rank holds other parts of pages in other media")

    def place(self, medium: int) -> Place | None:
        """Return where a medium's blocks lie, or None if they cannot be reached."""
        return next((p for p in self.places if p.medium == medium), None)


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """The parallelism of an instance: its KV's shape and its ranks."""

    shape: KVShape
    ranks: tuple[RankInfo, ...]

    def __post_init__(self) -> None:
        if len(self.ranks) > _MAX_RANKS:
            raise ValueError(f"there are more than {_MAX_RANKS} ranks")
        for rank in self.ranks:
            for place in rank.places:
                size = rank.address.regions[place.region].num_bytes
                refusal = place.form.refusal(self.shape, size)
                if refusal:
                    raise ValueError(refusal)

    def refusal(self, addresses: UInt64s) -> str:
        """Return why blocks of this instance cannot be reached; else an empty text."""
        if not self.ranks or not all(rank.places for rank in self.ranks):
            return "it has no memory that others reach"
        media, slots = mediums_of(addresses), slots_of(addresses)
        for medium in np.unique(media).tolist():
            last = int(slots[media == medium].max())
            for rank in self.ranks:
                place = rank.place(medium)
                if place is None:
                    return f"its medium {medium} cannot be reached"
                size = rank.address.regions[place.region].num_bytes
                if last * place.form.slot_stride >= size:
                    return f"its medium {medium} has no slot {last}"
        return ""


def as_entry(info: PoolInfo) -> str:
    """Return how an instance is built as its entry in the registry says it."""
    return msgspec.json.encode(info).decode()


def from_entry(text: str) -> PoolInfo | None:
    """Return how the instance of an entry is built; None where it does not say.

    Raises:
        ValueError: it says something else.
    """
    return msgspec.json.decode(text, type=PoolInfo) if text else None


def _demand_count(value: int, name: str, most: int = _MAX_COUNT) -> None:
    if not 0 <= value <= most:
        raise ValueError(f"{name} is {value}, and not 0 to {most}")


def _demand_words(raw: bytes, name: str) -> None:
    if len(raw) % _WORD:
        raise ValueError(f"{name} ends within a number")


def _demand_addresses(raw: bytes) -> None:
    """Raise ValueError unless these are addresses, each once."""
    _demand_words(raw, "addresses")
    found = from_wire(raw)
    # Ascending more often than not.
    if not (found[1:] > found[:-1]).all() and len(np.unique(found)) < len(found):
        raise ValueError("an address is named twice")


def _demand_prompt(namespace: bytes, tokens: bytes, first_page: int) -> None:
    if len(namespace) > _MAX_NAMESPACE:
        raise ValueError(f"a namespace has {len(namespace)} bytes")
    if len(tokens) % _TOKEN:
        raise ValueError("tokens end within one")
    _demand_count(first_page, "first_page")


def _demand_seconds(value: float, name: str) -> None:
    # Not a number fails every comparison.
    if not 0.0 <= value <= MAX_TIMEOUT_S:
        raise ValueError(f"{name} is {value}, and not 0 to {MAX_TIMEOUT_S:.0f}")


class AskBlocks(Message, frozen=True):
    """Allocate blocks that belong to the sender until it frees or finishes them.

    Attributes:
        num_blocks: of the prompt's pages from ``first_page`` on, or of anything.
        type: where.
        only_missing: none for pages that the receiver's index has; the next three say
            of which prompt, as in ``BlockStore.insert``.
        namespace, tokens, first_page: tokens are int32.
    """

    num_blocks: int
    type: BlockType
    only_missing: bool = False
    namespace: bytes = b""
    tokens: bytes = b""
    first_page: int = 0

    def __post_init__(self) -> None:
        _demand_count(self.num_blocks, "num_blocks")
        _demand_prompt(self.namespace, self.tokens, self.first_page)


class FreeBlocks(Message, frozen=True):
    """Free blocks that belong to the sender."""

    addresses: bytes

    def __post_init__(self) -> None:
        _demand_addresses(self.addresses)


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

    def __post_init__(self) -> None:
        _demand_addresses(self.addresses)
        _demand_prompt(self.namespace, self.tokens, self.first_page)
        if self.sums and len(self.sums) != len(self.addresses):
            raise ValueError("there are not as many sums as addresses")
        _demand_count(len(self.private), "bytes of private", MAX_PRIVATE)


class AskHeld(Message, frozen=True):
    """Say how many first pages of a prompt you hold, and in which media.

    Attributes:
        namespace, tokens: as in ``BlockStore.match``; tokens are int32.
        first_page: the sender needs none before this one.
    """

    namespace: bytes
    tokens: bytes
    first_page: int = 0

    def __post_init__(self) -> None:
        _demand_prompt(self.namespace, self.tokens, self.first_page)


class AskPages(Message, frozen=True):
    """Write pages of a prompt to blocks of the sender, and say what they sum to.

    Attributes:
        addresses: the sender's blocks, for pages ``first_page`` and on; those that you
            do not have are left out from the end.
        namespace, tokens, first_page: as in ``BlockStore.insert``; tokens are int32.
        timeout_s: how long it waits.
    """

    addresses: bytes
    namespace: bytes
    tokens: bytes
    first_page: int
    timeout_s: float

    def __post_init__(self) -> None:
        _demand_addresses(self.addresses)
        _demand_prompt(self.namespace, self.tokens, self.first_page)
        _demand_seconds(self.timeout_s, "timeout_s")


class AskDone(Message, frozen=True):
    """Say whether something writes to the sender that you began in former times.

    That is before one of you two was the incarnation that it is now.

    Attributes:
        incarnation: yours, of that time; refuse it if it was another process.
    """

    incarnation: int

    def __post_init__(self) -> None:
        _demand_count(self.incarnation, "incarnation", _MAX_INCARNATION)


class Cancel(Message, frozen=True):
    """A former request is not to be carried out any more, if it was not yet.

    It is answered when nothing is written for that request any more.

    Attributes:
        request: its number. What it allocated is freed.
        addresses: blocks of the sender to free, if they are its own still.
    """

    request: int
    addresses: bytes = b""

    def __post_init__(self) -> None:
        _demand_count(self.request, "request", _MAX_NUMBER)
        _demand_addresses(self.addresses)


class Answer(Message, frozen=True):
    """What came of a request.

    Attributes:
        refusal: one clause: why it was not carried out; else empty.
        addresses: blocks allocated.
        num_inserted: blocks entered into the index.
        num_pages: first pages of the prompt that its index has, or pages that were
            written.
        media: (medium, pages) for those of ``AskHeld``; later versions may know more
            media than this one.
        sums: uint64, xxh3-64 of each page that was written.
        num_read: of those, how many a disk was read for first.
        read_s: how long that took, or for ``AskHeld`` would take.
    """

    refusal: str = ""
    addresses: bytes = b""
    num_inserted: int = 0
    num_pages: int = 0
    media: tuple[tuple[int, int], ...] = ()
    sums: bytes = b""
    num_read: int = 0
    read_s: float = 0.0

    def __post_init__(self) -> None:
        _demand_addresses(self.addresses)
        _demand_words(self.sums, "sums")
        for name in ("num_inserted", "num_pages", "num_read"):
            _demand_count(getattr(self, name), name)
        for medium, num_pages in self.media:
            _demand_count(medium, "medium", _MAX_MEDIUM)
            _demand_count(num_pages, "pages of a medium")
        if len(self.media) > _MAX_MEDIUM + 1:
            raise ValueError("a medium is named twice")
        _demand_seconds(self.read_s, "read_s")


Body = AskBlocks | FreeBlocks | Finish | AskHeld | AskPages | AskDone | Cancel | Answer


class Envelope(Message, frozen=True):
    """A message with its sender, its receiver and its number.

    Attributes:
        sender, receiver: instances and incarnations.
        request: number of the request, growing per sender; an answer has the same.
        settled: the sender asks no more about its requests below this number.
        body: the message.
        nonce: of a request: what only those know that got it; an answer has the same
            (``guard.py``).
    """

    sender: Incarnation
    receiver: Incarnation
    request: int
    settled: int
    body: Body
    nonce: int = 0

    def __post_init__(self) -> None:
        for instance, incarnation in (self.sender, self.receiver):
            _demand_count(instance, "instance", MAX_INSTANCE)
            _demand_count(incarnation, "incarnation", _MAX_INCARNATION)
        _demand_count(self.request, "request", _MAX_NUMBER)
        # What is asked about right now cannot be settled.
        _demand_count(self.settled, "settled", self.request)
        _demand_count(self.nonce, "nonce", (1 << 64) - 1)
        if isinstance(self.body, Cancel) and self.body.request >= self.request:
            raise ValueError("it cancels what was not asked yet")


class Channel(Protocol):
    """Carries messages; they may be lost. One thread calls it."""

    def send(self, message: Envelope) -> None:
        """Send, without waiting and without a promise."""
        ...

    def take(self) -> list[Envelope]:
        """Return what has arrived since the last call, or so much as one turn bears."""
        ...


def misfit(answer: Answer, body: Body, peer: Incarnation) -> str:
    """Return why an answer cannot be one to this request of ours; else an empty text.

    Args:
        answer: what came.
        body: what was asked.
        peer: whom.
    """
    if answer.refusal:
        return ""
    num_addresses, num_sums = (
        len(raw) // _WORD for raw in (answer.addresses, answer.sums)
    )
    if isinstance(body, AskBlocks):
        num_known = 0
        if body.only_missing:
            num_known = max(answer.num_pages - body.first_page, 0)
        if num_addresses != max(body.num_blocks - num_known, 0):
            return f"it gives {num_addresses} blocks for {body.num_blocks}"
    if isinstance(body, AskHeld) and answer.num_pages > len(body.tokens) // _TOKEN:
        return f"it holds {answer.num_pages} pages of fewer tokens"
    if isinstance(body, AskPages):
        num_asked = len(body.addresses) // _WORD
        if not 0 < num_sums <= num_asked or answer.num_pages != num_sums:
            return f"it has sums of {num_sums} pages of {num_asked}"
        if answer.num_read > num_sums:
            return "it has read more pages than it has sent"
    if isinstance(body, Finish) and num_addresses > len(body.addresses) // _WORD:
        return "it has taken more blocks than there were"
    addresses = from_wire(answer.addresses)
    if len(addresses) and (instances_of(addresses) != peer[0]).any():
        return "it names blocks of another instance"
    return ""


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
