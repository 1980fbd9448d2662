"""Token ids for texts without a tokenizer.

Benchmarks of caches need token ids that repeat exactly where texts repeat and that
are about as many as a tokenizer would give; they need no meaning.
"""

from __future__ import annotations

import re
import zlib

from sgl_tiered_workloads.sessions import FIRST_PLAIN_TOKEN

__all__ = ["WordEncoder"]

# Runs of letters in pieces of up to nine, numbers in pieces of up to three, and marks
# in pairs: prose and code come out within a fifth of the Llama-3 tokenizer's count.
_PIECE = re.compile(r"\s?[^\W\d_]{1,9}|\d{1,3}|[^\w\s]{1,2}|_|\s{2,}|\n")


class WordEncoder:
    """Cuts a text into pieces and names each by its hash.

    Equal texts give equal ids. A text that begins with another text gives the same
    ids up to the last piece that they share.

    Args:
        vocab_tokens: ids are below it and above the special tokens.
    """

    def __init__(self, vocab_tokens: int) -> None:
        self._num_ids = vocab_tokens - FIRST_PLAIN_TOKEN
        if self._num_ids < 1:
            raise ValueError(f"a vocabulary of {vocab_tokens} has no plain tokens")
        self._known: dict[str, int] = {}

    def __call__(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text."""
        return tuple(self._id(piece) for piece in _PIECE.findall(text))

    def _id(self, piece: str) -> int:
        found = self._known.get(piece)
        if found is None:
            digest = zlib.crc32(piece.encode("utf-8", "surrogatepass"))
            found = self._known[piece] = FIRST_PLAIN_TOKEN + digest % self._num_ids
        return found
