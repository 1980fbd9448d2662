"""Prompts of a trace as lists of page ids: what the timeless replays read.

A page id stands for a whole prefix up to the end of that page, so ids form a tree: an
id has one predecessor wherever it occurs. Blocks of the trace may be cut into smaller
pages, whose ids are made per request on demand, so that a long trace stays small; or
joined to larger ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.plans import Int32s, Int64s
from sgl_tiered.errors import ConfigError

__all__ = ["PageTrace"]


class PageTrace:
    """Requests in order of arrival, each a run of pages from its first token on.

    Where pages are the trace's own blocks, a last partial block is a page if the trace
    names it, and takes the room of a whole one. Where blocks are cut or joined, a
    prompt has its whole pages only, as in an engine.

    Args:
        block_ids: per request, ids of its blocks in order; any integers.
        num_tokens: per request, tokens of the prompt.
        block_tokens: tokens of one block.
        page_tokens: tokens of one page; None for ``block_tokens``.

    Attributes:
        page_tokens: tokens of one page.
        num_tokens: int64 [requests].
        num_pages: int64 [requests].

    Raises:
        ConfigError: neither divides page or block the other, a prompt has more blocks
            than tokens for them, or an id has two predecessors.
    """

    def __init__(
        self,
        block_ids: Sequence[npt.NDArray[np.integer]],
        num_tokens: npt.ArrayLike,
        block_tokens: int,
        page_tokens: int | None = None,
    ) -> None:
        self.page_tokens = block_tokens if page_tokens is None else page_tokens
        small, large = sorted((self.page_tokens, block_tokens))
        if small < 1 or large % small:
            raise ConfigError(
                "page_tokens",
                f"{self.page_tokens} neither divides the trace's blocks of "
                f"{block_tokens} tokens nor is a multiple",
                "give a divisor or a multiple",
            )
        self.num_tokens: Int64s = np.asarray(num_tokens, np.int64)
        lengths = np.array([len(ids) for ids in block_ids], np.int64)
        if len(lengths) != len(self.num_tokens):
            raise ConfigError(
                "num_tokens",
                f"{len(self.num_tokens)} lengths for {len(lengths)} requests",
                "give one per request",
            )
        excess = np.flatnonzero((lengths - 1) * block_tokens >= self.num_tokens)
        excess = excess[lengths[excess] > 0]
        if len(excess):
            raise ConfigError(
                f"request {excess[0]}",
                f"{lengths[excess[0]]} blocks of {block_tokens} tokens for "
                f"{self.num_tokens[excess[0]]} tokens",
                "give the trace's own block size",
            )
        if self.page_tokens > block_tokens:
            # The id of a page's last block stands for all that the page does.
            step = self.page_tokens // block_tokens
            whole = self.num_tokens // self.page_tokens
            block_ids = [
                ids[step - 1 :: step][:count]
                for ids, count in zip(block_ids, whole, strict=True)
            ]
            lengths = np.array([len(ids) for ids in block_ids], np.int64)
        self._per_block = max(1, block_tokens // self.page_tokens)
        self._offsets: Int64s = np.concatenate([[0], np.cumsum(lengths)])
        flat = np.concatenate([*block_ids, np.zeros(0, np.int64)])
        _, dense = np.unique(flat, return_inverse=True)
        self._blocks = dense.astype(np.int32)
        self._check_tree()
        self.num_pages: Int64s = lengths
        if self._per_block > 1:
            whole = self.num_tokens // self.page_tokens
            self.num_pages = np.minimum(lengths * self._per_block, whole)

    def __len__(self) -> int:
        return len(self.num_tokens)

    @property
    def total_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return int(self.num_tokens.sum())

    @property
    def max_ids(self) -> int:
        """One more than the highest page id."""
        highest = int(self._blocks.max(initial=-1)) + 1
        return highest * self._per_block

    def pages(self, request: int) -> Int32s:
        """Return the ids of a request's pages, int32 [num_pages]."""
        start, stop = self._offsets[request], self._offsets[request + 1]
        blocks = self._blocks[start:stop]
        if self._per_block == 1:
            return blocks
        ids = blocks[:, None] * np.int32(self._per_block)
        ids = ids + np.arange(self._per_block, dtype=np.int32)
        return ids.reshape(-1)[: self.num_pages[request]]

    def tokens_of(self, request: int, num_pages: int) -> int:
        """Return the tokens in a request's first pages; the last may be partial."""
        return min(num_pages * self.page_tokens, int(self.num_tokens[request]))

    def _check_tree(self) -> None:
        before = np.full(len(self._blocks), -1, np.int32)
        before[1:] = self._blocks[:-1]
        starts = self._offsets[:-1]
        before[starts[starts < len(before)]] = -1
        first = np.full(int(self._blocks.max(initial=-1)) + 1, -2, np.int32)
        # Of equal indices the last is stored: any one will do.
        first[self._blocks] = before
        wrong = np.flatnonzero(first[self._blocks] != before)
        if len(wrong):
            request = int(np.searchsorted(self._offsets, wrong[0], "right")) - 1
            raise ConfigError(
                f"request {request}",
                "one of its block ids follows different blocks in different requests",
                "give ids that stand for whole prefixes",
            )
