"""Control messages: typed structs in an envelope with a version, never pickle.

Each room that talks defines its messages as subclasses of ``Message`` and puts them in
a ``MessageSet``; both sides use the same set. On the wire a message is a MessagePack
array: version, request id, what it is, times, body. The first two places never change,
so that any version can refuse any other in words that it understands.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any, Union

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = [
    "MAX_MESSAGE_BYTES",
    "VERSION",
    "Cancelled",
    "Envelope",
    "Head",
    "Message",
    "MessageSet",
    "Part",
    "Refused",
    "Reply",
    "Times",
    "pack_int64s",
    "pack_uint64s",
    "unpack_int64s",
    "unpack_uint64s",
]

VERSION = 2
"""Grows with every change of a message that an older program would misread."""
MAX_MESSAGE_BYTES = 4 << 20
"""The longest message either way: half a million addresses."""

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding ends with; the last one for values nested too deeply."""


class Message(
    msgspec.Struct,
    frozen=True,
    tag=True,
    tag_field="message",
    forbid_unknown_fields=True,
):
    """Base of all messages; the name of the class is what the wire says.

    Fields are what msgspec knows: numbers, strings, bytes, tuples, dataclasses. Arrays
    travel as bytes (``pack_uint64s``). What else a field must be, ``__post_init__``
    checks: a message that breaks it cannot be made, and none such can be read.
    """


class Reply(Message, frozen=True):
    """A reply that says no more than that it was done."""


class Refused(Message, frozen=True):
    """The other side got the request and does not do it.

    Attributes:
        reason: one word: version, unreadable, busy, failed, or a word of the handler's.
        detail: one clause for a person.
    """

    reason: str
    detail: str


class Cancelled(Message, frozen=True):
    """Who asked has stopped waiting: a request not handled yet need not be."""


class Part(IntEnum):
    """What an envelope carries."""

    REQUEST = 0
    REPLY = 1


class Head(msgspec.Struct, frozen=True, array_like=True):
    """The places of an envelope that all versions share.

    Attributes:
        version: of who wrote it.
        request_id: chosen by who asks, unique on its connection.
    """

    version: int
    request_id: int


class Times(msgspec.Struct, frozen=True, array_like=True):
    """Seconds, told between two machines whose clocks have nothing in common.

    A reply says what the server's clock shows. So who asks knows from then on a time
    that this clock has surely passed, and can say on it until when it waits: a request
    that is late for any reason is recognised, and not carried out.

    Attributes:
        timeout_s: of a request: how long who asks waits, from when it was sent.
        origin: which run of the server the clock belongs to; 0: none is known.
        clock_s: of a reply: the server's clock; of a request: its expiry on that clock.
    """

    timeout_s: float = 0.0
    origin: int = 0
    clock_s: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.timeout_s) and math.isfinite(self.clock_s)):
            raise ValueError("a time is not finite")


class Envelope(Head, frozen=True, array_like=True):
    """A message under way.

    Attributes:
        part: a request or the reply to it.
        times: when it was sent, or until when it is good.
        body: the encoded message.
    """

    part: Part
    times: Times
    body: msgspec.Raw


class MessageSet:
    """The messages that two sides may exchange; knows how to write and read them.

    Args:
        types: subclasses of ``Message``; those of this file always belong to it.
        max_bytes: longest message, envelope included.
    """

    def __init__(
        self, *types: type[Message], max_bytes: int = MAX_MESSAGE_BYTES
    ) -> None:
        known: tuple[type[Message], ...] = (*types, Reply, Refused, Cancelled)
        known = tuple(dict.fromkeys(known))
        names = [known_type.__name__ for known_type in known]
        if len(set(names)) != len(names):
            raise ValueError(f"two messages of one name: {sorted(names)}")
        self.max_bytes = max_bytes
        self._encoder = msgspec.msgpack.Encoder()
        union: Any = Union[known]  # noqa: UP007 - built from a tuple
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(union)
        self._head = msgspec.msgpack.Decoder(Head)
        self._envelope = msgspec.msgpack.Decoder(Envelope)

    def encode(
        self,
        request_id: int,
        part: Part,
        message: Message,
        times: Times,
        version: int = VERSION,
    ) -> bytes | Refused:
        """Return the bytes, or ``Refused`` (too-big) where they would be too many."""
        body = msgspec.Raw(self._encoder.encode(message))
        whole = self._encoder.encode(Envelope(version, request_id, part, times, body))
        if len(whole) > self.max_bytes:
            name = type(message).__name__
            detail = f"{name} has {len(whole)} bytes, at most {self.max_bytes} are sent"
            return Refused("too-big", detail)
        return whole

    def head(self, data: bytes) -> Head | Refused:
        """Read what all versions share, or say why it cannot be read."""
        try:
            return self._head.decode(data)
        except _UNREADABLE as error:
            return Refused("unreadable", f"no envelope: {error}")

    def decode(self, data: bytes) -> tuple[Envelope, Message] | Refused:
        """Read a message of this version, or say why it is refused."""
        head = self.head(data)
        if isinstance(head, Refused):
            return head
        if head.version != VERSION:
            detail = f"version {head.version} is not spoken here, {VERSION} is"
            return Refused("version", detail)
        if len(data) > self.max_bytes:
            return Refused("too-big", f"{len(data)} bytes")
        try:
            envelope = self._envelope.decode(data)
            return envelope, self._decoder.decode(envelope.body)
        except _UNREADABLE as error:
            return Refused("unreadable", str(error))


def pack_int64s(values: Int64s) -> bytes:
    """Return int64 [n] as bytes, little-endian."""
    return np.ascontiguousarray(values, "<i8").tobytes()


def unpack_int64s(data: bytes) -> Int64s:
    """Return the int64 [n] of ``pack_int64s``; ValueError on a cut-off one."""
    return np.frombuffer(data, "<i8").astype(np.int64, copy=False)


def pack_uint64s(values: UInt64s) -> bytes:
    """Return uint64 [n], a list of addresses, as bytes, little-endian."""
    return np.ascontiguousarray(values, "<u8").tobytes()


def unpack_uint64s(data: bytes) -> UInt64s:
    """Return the uint64 [n] of ``pack_uint64s``; ValueError on a cut-off one."""
    return np.frombuffer(data, "<u8").astype(np.uint64, copy=False)
