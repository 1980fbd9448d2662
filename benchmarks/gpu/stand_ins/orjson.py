"""Stands for orjson on a machine without it: the standard library, as bytes.

Used by ``session.py`` alone, where nothing can be installed. Not as fast, and the same
for the plain values that the product writes.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = [
    "OPT_APPEND_NEWLINE",
    "OPT_SERIALIZE_NUMPY",
    "JSONDecodeError",
    "dumps",
    "loads",
]

OPT_APPEND_NEWLINE = 1 << 10
OPT_SERIALIZE_NUMPY = 1 << 4
JSONDecodeError = json.JSONDecodeError


def dumps(value: Any, default: Any = None, option: int = 0) -> bytes:
    """Return JSON as UTF-8."""

    def plain(one: Any) -> Any:
        if hasattr(one, "tolist") and option & OPT_SERIALIZE_NUMPY:
            return one.tolist()
        if default is None:
            raise TypeError(f"{type(one).__name__} is not JSON")
        return default(one)

    text = json.dumps(value, default=plain, separators=(",", ":"), ensure_ascii=False)
    return (text + "\n" * bool(option & OPT_APPEND_NEWLINE)).encode()


def loads(data: bytes | str) -> Any:
    """Return the value of JSON."""
    return json.loads(data)
