"""Which tokens of their pages the tiers hold, where they hold the same number of each.

A page's tokens are chosen when it is first stored, from the attention that they had got
by then. All its copies are of that choice, so it is kept beside the row of the cache's
table, as long as the page has one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sgl_tiered.sparse.keep import SINKS

__all__ = ["StoredTokens", "best_of_pages"]

Bools = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]
Float32s = npt.NDArray[np.float32]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

_FIRST_CAPACITY = 256


def best_of_pages(mass: Float32s, pages: Int32s, page_tokens: int, count: int) -> Bools:
    """Return what to keep of pages: in each layer, the tokens of each read most.

    The first tokens of the prompt are among them.

    Args:
        mass: float32 [num_layers, num_tokens], what attention gave to the tokens of a
            prompt from its first one on; known for all tokens of these pages.
        pages: int32 [n], which pages of the prompt.
        page_tokens: of a page.
        count: tokens to keep of a page, at least ``SINKS``.

    Returns:
        bool [num_layers, n * page_tokens].
    """
    worth = mass.copy()
    worth[:, :SINKS] = np.inf
    paged = worth.reshape(len(mass), -1, page_tokens)[:, pages]
    # Stable, so that equal masses give the same choice everywhere.
    best = np.argsort(-paged, axis=2, kind="stable")[:, :, :count]
    kept = np.zeros(paged.shape, np.bool_)
    np.put_along_axis(kept, best, True, axis=2)
    return kept.reshape(len(mass), -1)


class StoredTokens:
    """The choices, by row of the cache's table: a bit a token and layer.

    Args:
        num_layers: of the model.
        page_tokens: of a page.
    """

    def __init__(self, num_layers: int, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        width = -(-page_tokens // 8)
        self._bits: Bytes = np.zeros((_FIRST_CAPACITY, num_layers, width), np.uint8)
        self._known: Bools = np.zeros(_FIRST_CAPACITY, np.bool_)

    @property
    def num_pages(self) -> int:
        """Pages whose choice is known."""
        return int(np.count_nonzero(self._known))

    @property
    def num_bytes(self) -> int:
        """Host memory of the choices."""
        return self._bits.nbytes + self._known.nbytes

    def agree(self, rows: Int32s, kept: Bools) -> Bools:
        """Note what is stored of pages, and return it: an earlier choice stays.

        Args:
            rows: int32 [n], of the cache's table, each once.
            kept: bool [num_layers, n * page_tokens], what would be chosen now.

        Returns:
            bool, the same shape.
        """
        if not len(rows):
            return kept
        self._grow(int(rows.max()) + 1)
        paged = kept.reshape(len(kept), len(rows), -1).transpose(1, 0, 2)
        new = ~self._known[rows]
        self._bits[rows[new]] = np.packbits(paged[new], axis=2)
        self._known[rows] = True
        return self._read(rows)

    def kept(self, rows: Int32s) -> list[Int64s] | None:
        """Return per layer which tokens of pages are stored, ascending.

        Args:
            rows: int32 [n].

        Returns:
            Places among the n * page_tokens; None where a choice is not known.
        """
        if not len(rows) or rows.max() >= len(self._known):
            return None
        if not self._known[rows].all():
            return None
        return [np.flatnonzero(layer).astype(np.int64) for layer in self._read(rows)]

    def forget(self, rows: Int32s) -> None:
        """Forget pages, known or not: their rows are given up."""
        self._known[rows[rows < len(self._known)]] = False

    def _read(self, rows: Int32s) -> Bools:
        bits = np.unpackbits(self._bits[rows], axis=2, count=self._page_tokens)
        flat = bits.transpose(1, 0, 2).reshape(bits.shape[1], -1)
        return flat.astype(np.bool_)

    def _grow(self, size: int) -> None:
        missing = size - len(self._known)
        if missing > 0:
            more = max(missing, len(self._known))
            blank = np.zeros((more, *self._bits.shape[1:]), np.uint8)
            self._bits = np.concatenate([self._bits, blank])
            self._known = np.concatenate([self._known, np.zeros(more, np.bool_)])
