"""How messages are written and read."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from sgl_tiered.transport.base import PeerAddress, Region
from sgl_tiered.transport.messages import (
    Message,
    MessageSet,
    Part,
    Refused,
    Reply,
    Times,
    pack_int64s,
    pack_uint64s,
    unpack_int64s,
    unpack_uint64s,
)


class Hello(Message, frozen=True):
    """A message with a value of the transport in it."""

    address: PeerAddress


def test_a_peer_address_travels() -> None:
    """What ``connect`` needs comes back equal."""
    address = PeerAddress("mooncake", "h:1", (Region(0, 2**47, 2**40),), b"\x00\xff")
    messages = MessageSet(Hello)
    data = messages.encode(3, Part.REPLY, Hello(address), Times(0.0, 9, 2.5))
    assert isinstance(data, bytes)
    read = messages.decode(data)
    assert not isinstance(read, Refused)
    envelope, message = read
    assert message == Hello(address)
    assert (envelope.request_id, envelope.part) == (3, Part.REPLY)
    assert envelope.times == Times(0.0, 9, 2.5)


def test_the_head_can_be_read_of_any_version() -> None:
    """Version and request id keep their places, whatever comes after them."""
    data = msgspec.msgpack.encode([99, 7, {"anything": 1}, "else"])
    head = MessageSet().head(data)
    assert not isinstance(head, Refused)
    assert (head.version, head.request_id) == (99, 7)


def test_the_limit_is_exact() -> None:
    """A message of just ``max_bytes`` goes both ways, one byte more does not."""
    refused = Refused("r", "x" * 50)
    data = MessageSet().encode(1, Part.REPLY, refused, Times())
    assert isinstance(data, bytes)
    exact, short = MessageSet(max_bytes=len(data)), MessageSet(max_bytes=len(data) - 1)
    assert exact.encode(1, Part.REPLY, refused, Times()) == data
    assert not isinstance(exact.decode(data), Refused)
    for result in (short.encode(1, Part.REPLY, refused, Times()), short.decode(data)):
        assert isinstance(result, Refused)
        assert result.reason == "too-big"


def test_two_messages_of_one_name_are_a_defect() -> None:
    """The name is what the wire says, so it must be unique."""
    other = type("Reply", (Message,), {}, frozen=True)
    with pytest.raises(ValueError, match="one name"):
        MessageSet(other)
    assert MessageSet(Reply) is not None


@pytest.mark.parametrize(
    ("pack", "unpack", "dtype"),
    [
        (pack_int64s, unpack_int64s, np.int64),
        (pack_uint64s, unpack_uint64s, np.uint64),
    ],
)
def test_arrays_travel_as_bytes(pack, unpack, dtype) -> None:
    """Any values, none, and slices that are not contiguous."""
    info = np.iinfo(dtype)
    values = np.array([info.min, 0, 1, info.max, 5], dtype)
    for array in (values, values[:0], values[::2]):
        found = unpack(pack(array))
        assert found.dtype == dtype
        assert found.tolist() == array.tolist()
    with pytest.raises(ValueError, match="multiple"):
        unpack(b"123")
