"""What programs write into ``private``: a small head, and bytes.

Whoever takes an arrival finds out by it what the arrival is; bytes that are no note of
ours give None, never an error.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["read_note", "write_note"]

_LENGTH_BYTES = 4


def write_note(kind: str, head: dict[str, Any], body: bytes = b"") -> bytes:
    """Return a note.

    Args:
        kind: which program it belongs to.
        head: plain values.
        body: anything, as it is.
    """
    text = json.dumps({**head, "kind": kind}).encode()
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text + body


def read_note(kind: str, raw: bytes) -> tuple[dict[str, Any], bytes] | None:
    """Return head and body of a note of this kind; None for anything else."""
    stop = _LENGTH_BYTES + int.from_bytes(raw[:_LENGTH_BYTES], "little")
    if len(raw) < stop:
        return None
    try:
        head = json.loads(raw[_LENGTH_BYTES:stop])
    except ValueError:
        return None
    if not isinstance(head, dict) or head.pop("kind", None) != kind:
        return None
    return head, raw[stop:]
