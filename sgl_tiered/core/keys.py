"""Namespaces and page keys.

A page key names the KV of one page: the chained 128-bit hash of the page's tokens and
of all tokens before it, under a namespace. Keys address pages on disk and between
machines. A key never decides alone: stored token ids are compared as well, so that a
collision can cost a miss but not an answer.
"""

from __future__ import annotations

import hashlib
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt
import xxhash

__all__ = ["KEY_BYTES", "Namespace", "as_tokens", "page_keys"]

KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything besides the tokens on which the bytes of a page depend.

    Two pages with equal tokens are the same KV only under equal namespaces.

    Attributes:
        model_fingerprint: identifies the weights, all of them, and the architecture.
        kv_dtype: element type of the pool, e.g. ``bfloat16``.
        page_tokens: tokens in one page.
        shard: tensor-parallel rank and size, e.g. ``0/1``.
        lora: identifies the adapter, empty for none.
        cache_salt: the tenant's salt, empty for none.
        extra_key: what else the sender keeps apart by, empty for nothing.
    """

    model_fingerprint: str
    kv_dtype: str
    page_tokens: int
    shard: str = "0/1"
    lora: str = ""
    cache_salt: str = ""
    extra_key: str = ""

    def digest(self) -> bytes:
        """Return 16 bytes that name the namespace and do not reveal the salt."""
        # Length-prefixed fields: ("ab", "c") and ("a", "bc") must differ.
        # What a sender gives need not be text: half a surrogate is a character too.
        parts = [str(part).encode(errors="surrogatepass") for part in astuple(self)]
        framed = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        return hashlib.blake2b(framed, digest_size=KEY_BYTES).digest()


def as_tokens(token_ids: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Return token ids as a contiguous int32 array of shape [num_tokens]."""
    return np.ascontiguousarray(token_ids, dtype=np.int32)


def page_keys(
    parent: bytes, tokens: npt.NDArray[np.int32], page_tokens: int
) -> npt.NDArray[np.uint8]:
    """Derive the chained keys of the whole pages in ``tokens``.

    Args:
        parent: key of the page before the first one; the namespace's digest at the
            start of a sequence. 16 bytes.
        tokens: int32 token ids, shape [num_tokens]; a last partial page is left out.
        page_tokens: tokens in one page.

    Returns:
        uint8 array of shape [num_pages, 16].
    """
    num_pages = len(tokens) // page_tokens
    raw = tokens[: num_pages * page_tokens].tobytes()
    step = page_tokens * tokens.itemsize
    digest = xxhash.xxh3_128_digest
    keys = []
    for start in range(0, num_pages * step, step):
        parent = digest(parent + raw[start : start + step])
        keys.append(parent)
    return np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(num_pages, KEY_BYTES)
