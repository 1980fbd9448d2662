"""Stands for xxhash on a machine without it: other hashes, of the same lengths.

Used by ``session.py`` alone, where nothing can be installed. Names of pages differ from
those of xxhash, so what is kept by one must not be read by the other: the session keeps
nothing on a disk.
"""

from __future__ import annotations

import hashlib
from typing import Any

__all__ = [
    "xxh3_64_digest",
    "xxh3_64_intdigest",
    "xxh3_128",
    "xxh3_128_digest",
]


def xxh3_64_digest(data: Any, seed: int = 0) -> bytes:
    """Return 8 bytes."""
    return _hash(data, seed, 8)


def xxh3_64_intdigest(data: Any, seed: int = 0) -> int:
    """Return the same as a number."""
    return int.from_bytes(_hash(data, seed, 8), "big")


def xxh3_128_digest(data: Any, seed: int = 0) -> bytes:
    """Return 16 bytes."""
    return _hash(data, seed, 16)


def xxh3_128(data: Any = b"", seed: int = 0) -> Any:
    """Return an object with ``update`` and ``digest`` of 16 bytes."""
    found = hashlib.blake2b(digest_size=16, salt=seed.to_bytes(8, "little"))
    found.update(memoryview(data).cast("B"))
    return found


def _hash(data: Any, seed: int, size: int) -> bytes:
    salt = seed.to_bytes(8, "little")
    return hashlib.blake2b(
        memoryview(data).cast("B"), digest_size=size, salt=salt
    ).digest()
