"""A small random decoder in numpy, whose KV lies in the blocks of a pool.

Every row is computed by itself, by products of the same shapes wherever it is computed:
so the same prefix gives the same bits, whoever holds which part of it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sgl_tiered.core.addresses import slots_of
from sgl_tiered.pool.layouts import KVShape

__all__ = ["SHAPE", "ToyDecoder"]

NUM_LAYERS, NUM_HEADS, HEAD, PAGE = 3, 2, 8, 4
VOCABULARY = 40
WIDTH = NUM_HEADS * HEAD
SHAPE = KVShape(NUM_LAYERS, NUM_HEADS, 4 * HEAD, PAGE)


class ToyDecoder:
    """The same model for every instance, over its own memory.

    Args:
        memory: uint8 [num_blocks, page_bytes], aggregated pages.
    """

    def __init__(self, memory: np.ndarray) -> None:
        num_blocks = len(memory)
        self.kv = memory.view(np.float32).reshape(
            num_blocks, NUM_LAYERS, 2, PAGE, NUM_HEADS, HEAD
        )
        rng = np.random.default_rng(11)

        def weights(*shape: int) -> np.ndarray:
            return rng.normal(0, 0.4, shape).astype(np.float32)

        self.embedding = weights(VOCABULARY, WIDTH)
        self.positions = weights(512, WIDTH)
        self.projections = weights(NUM_LAYERS, 3, WIDTH, WIDTH)
        self.output = weights(NUM_LAYERS, WIDTH, WIDTH)
        self.feed = weights(NUM_LAYERS, WIDTH, WIDTH)

    def rows(self, tokens: np.ndarray, first: int) -> list[np.ndarray]:
        """Return the input of the first layer for tokens from position ``first`` on."""
        return [
            self.embedding[token] + self.positions[first + i]
            for i, token in enumerate(tokens.tolist())
        ]

    def write(
        self, layer: int, rows: list[np.ndarray], first: int, blocks: np.ndarray
    ) -> None:
        """Compute keys and values of a layer into blocks, which begin at position 0."""
        slots = slots_of(blocks)
        for i, row in enumerate(rows, first):
            for half in (0, 1):
                made = row @ self.projections[layer, 1 + half]
                self.kv[slots[i // PAGE], layer, half, i % PAGE] = made.reshape(
                    NUM_HEADS, HEAD
                )

    def attend(
        self, layer: int, rows: list[np.ndarray], first: int, blocks: np.ndarray
    ) -> list[np.ndarray]:
        """Return the rows after a layer, each over all positions up to its own."""
        pages = self.kv[slots_of(blocks), layer]
        keys, values = (
            np.ascontiguousarray(pages[:, half]).reshape(-1, NUM_HEADS, HEAD)
            for half in (0, 1)
        )
        after = []
        for position, row in enumerate(rows, first):
            query = (row @ self.projections[layer, 0]).reshape(NUM_HEADS, HEAD)
            found = np.empty((NUM_HEADS, HEAD), np.float32)
            for head in range(NUM_HEADS):
                seen = np.ascontiguousarray(keys[: position + 1, head])
                scores = seen @ query[head] / np.float32(HEAD**0.5)
                shares = np.exp(scores - scores.max())
                shares /= shares.sum()
                seen = np.ascontiguousarray(values[: position + 1, head])
                found[head] = shares @ seen
            row = row + found.reshape(-1) @ self.output[layer]
            after.append(row + np.tanh(row @ self.feed[layer]))
        return after

    def compute(
        self,
        tokens: np.ndarray,
        first: int,
        blocks: np.ndarray,
        between: Callable[[int], np.ndarray] | None = None,
    ) -> np.ndarray:
        """Compute tokens after a context; return the last row's logits.

        Args:
            tokens: from position ``first`` on.
            first: tokens whose KV is there already.
            blocks: of all positions from 0 on; those before ``first`` may come late.
            between: called when a layer's KV is written, returns the blocks to attend.
        """
        rows = self.rows(tokens, first)
        for layer in range(NUM_LAYERS):
            self.write(layer, rows, first, blocks)
            if between is not None:
                blocks = between(layer)
            rows = self.attend(layer, rows, first, blocks)
        return rows[-1] @ self.embedding.T
