"""What comes to SGLang's own threads, looked at before they read it.

Whoever reaches their port is heard, and a message that one of them cannot read ends it:
no transfer is begun, or none ends, until the server is started anew. So what would be
raised there is found here, by the same readers, and such a message is dropped.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.disaggregation.mooncake.conn import KVArgsRegisterInfo, TransferInfo

__all__ = ["refusal_on_decode", "refusal_on_prefill"]

_REGISTRATION = "None"
_ABORT = "ABORT"
_STAGING = ("WATERMARK", "STAGING_RSP")
_AUX = b"AUX_DATA"
_STAGING_ASKED = b"STAGING_REQ"
_SESSION, _NUM_EXPECTED = 3, 7


def refusal_on_prefill(manager: Any, message: Sequence[bytes]) -> str:
    """Return why a prefill instance cannot read a message; else an empty text.

    Args:
        manager: of its transfers.
        message: from a decode instance.
    """
    return _refusal(_read_on_prefill, manager, message)


def refusal_on_decode(manager: Any, message: Sequence[bytes]) -> str:
    """Return why a decode instance cannot read a message; else an empty text.

    Args:
        manager: of its transfers.
        message: from a prefill instance.
    """
    return _refusal(_read_on_decode, manager, message)


def _refusal(
    read: Callable[[Any, Sequence[bytes]], None], manager: Any, message: Sequence[bytes]
) -> str:
    try:
        read(manager, message)
    except Exception as error:  # noqa: BLE001 - whatever it is, SGLang would raise it
        return f"{message[0][:40]!r} ({type(error).__name__}: {error})"
    return ""


def _read_on_prefill(manager: Any, message: Sequence[bytes]) -> None:
    """Read a message as SGLang's thread does; raise what it would."""
    name = message[0].decode("ascii")
    if name == _ABORT:
        return
    if name in _STAGING:
        raise ValueError("there are no staging buffers here")
    message[_SESSION].decode("ascii")
    if name == _REGISTRATION:
        info = KVArgsRegisterInfo.from_zmq(list(message))
        if manager.requires_dcp_relayout(info.dst_dcp_size, info.dst_dcp_rank):
            args = manager.kv_args
            num_draft = args.num_draft_entries
            lengths = [info.dst_kv_item_len] * (len(args.kv_item_lens) - num_draft)
            manager.prepare_dcp_token_item_lens(
                [*lengths, *[None] * num_draft], info.dst_dcp_size
            )
        return
    int(name)
    # Its scheduler shares work by it.
    int(message[_SESSION].decode("ascii").rsplit(":", 1)[1])
    int(message[_NUM_EXPECTED].decode("ascii"))
    TransferInfo.from_zmq(list(message))


def _read_on_decode(manager: Any, message: Sequence[bytes]) -> None:
    """Read what SGLang's thread does not look at before it uses it."""
    if message[0] == _STAGING_ASKED:
        raise ValueError("there are no staging buffers here")
    if message[0] != _AUX:
        return
    # It is copied to where these say: nothing may lie outside of the buffer.
    room, buffer, place = (int(part.decode("ascii")) for part in message[1:4])
    (num_bytes,) = struct.unpack(">I", message[4])
    args = manager.kv_args
    if not 0 <= buffer < len(args.aux_data_ptrs):
        raise ValueError(f"room {room}: there is no buffer {buffer}")
    item = args.aux_item_lens[buffer]
    num_items = args.aux_data_lens[buffer] // item
    if not 0 <= place < num_items or not num_bytes == len(message[5]) <= item:
        raise ValueError(f"room {room}: it does not fit item {place} of {num_items}")
