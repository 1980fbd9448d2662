"""Who holds more of a prompt, as the router says: from HTTP header to scheduler.

A router names them in ``X-Tiered-Holders`` (``NAME=URL;tokens=N;tier=WORD, ...``). The
HTTP process puts that into the request's own field for such hints, beside what a client
may have put there, and SGLang carries it to the scheduler. A hint is no more than that:
names that nobody in the pool has are passed over, and pages are checked when they come.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from sgl_tiered.pool.peers import Hint

__all__ = ["HEADER", "add_hints", "hints_of", "parse_holders"]

HEADER = "X-Tiered-Holders"
_ACTION = "sgl_tiered.holders"
_VERSION = "1"
_MAX_HOLDERS = 8
_MAX_HEADER = 8192
_HOLDER = re.compile(r"([^=;,\s]{1,200})=([^;,\s]*);tokens=([0-9]{1,9})((?:;[^,]*)?)")
_ON_DISK = ";tier=disk;"


def parse_holders(header: str) -> tuple[Hint, ...]:
    """Return what a header names; what is malformed in it is left out."""
    found = []
    for part in header[:_MAX_HEADER].split(",")[:_MAX_HOLDERS]:
        match = _HOLDER.fullmatch(part.strip())
        if match is not None:
            on_disk = _ON_DISK in f"{match[4]};".replace(" ", "")
            found.append(Hint(match[1], match[2].rstrip("/"), int(match[3]), on_disk))
    return tuple(found)


def add_hints(manager: Any, obj: Any, request: Any = None) -> None:
    """Take the header of a request that SGLang's tokenizer manager begins with.

    A server without a pool reads them nowhere.
    """
    del manager
    header = None if request is None else request.headers.get(HEADER)
    hints = parse_holders(header) if header else ()
    if not hints or not hasattr(obj, "kv_hints") or isinstance(obj.kv_hints, list):
        return
    from sglang.srt.managers.kv_hints import (
        KvHintAction,
        KvHintsEnvelope,
        decode_kv_hints_envelope,
    )

    holders = [[hint.name, hint.url, hint.num_tokens, hint.on_disk] for hint in hints]
    action = KvHintAction(
        action_id=_ACTION,
        action_type=_ACTION,
        action_version=_VERSION,
        payload={"holders": holders},
    )
    if obj.kv_hints is None:
        obj.kv_hints = KvHintsEnvelope(
            protocol_version="1", message_id=_ACTION, actions=[action]
        )
        return
    try:
        given = decode_kv_hints_envelope(obj.kv_hints)
    except ValueError:
        # SGLang will say so itself.
        return
    obj.kv_hints = KvHintsEnvelope(
        protocol_version=given.protocol_version,
        message_id=given.message_id,
        actions=[*given.actions, action],
    )


def hints_of(req: Any) -> Sequence[Hint]:
    """Return the holders that came with SGLang's request."""
    envelope = getattr(req, "kv_hints", None)
    found = []
    for action in getattr(envelope, "actions", ()):
        if action.action_type != _ACTION or action.action_version != _VERSION:
            continue
        holders = action.payload.get("holders")
        # A client may have written it himself.
        for each in holders[:_MAX_HOLDERS] if isinstance(holders, list) else ():
            if isinstance(each, list | tuple) and len(each) in (3, 4):
                name, url, num_tokens, *more = each
                if isinstance(num_tokens, int):
                    on_disk = more == [True]
                    found.append(Hint(str(name), str(url), num_tokens, on_disk))
    return found
