"""A model of whole numbers: answers are equal bit for bit, however they were computed.

Each layer writes keys and values of its new tokens into pages, reads those of all
tokens before them, and mixes both into its output, which is the input of the next
layer. Sums are of 64-bit whole numbers, so neither their order nor the size of a batch
changes a bit: an answer over loaded pages has to equal that of the same prompt computed
at once. A wrong byte of one page in one layer changes all that comes behind it.

Beside it, matrix products of an 8B model's sizes keep the device as busy as a forward
does; nothing reads what they compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Model", "Shape"]

_MASK = (1 << 31) - 1
_VOCABULARY = 32_000


@dataclass(frozen=True)
class Shape:
    """Sizes of KV, of the pool and of the products beside it.

    Attributes:
        num_layers, num_heads, head_dim: KV heads of each layer; 16-bit numbers.
        page_tokens: tokens in a page.
        hidden, intermediate: of the products beside the forward; 0 for none.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    page_tokens: int
    hidden: int = 0
    intermediate: int = 0

    @property
    def width(self) -> int:
        """Whole numbers of 32 bits in the keys of a token."""
        return self.num_heads * self.head_dim // 2

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token over all layers."""
        return 2 * 2 * self.num_layers * self.num_heads * self.head_dim


class Model:
    """Layers without weights; every layer has numbers of its own.

    Args:
        shape: sizes.
        device: of the tensors.
    """

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self._columns = torch.arange(shape.width, device=device, dtype=torch.int64)
        self._products: list[torch.Tensor] = []
        if shape.hidden:
            sizes = (
                (shape.hidden, shape.hidden + 2 * shape.num_heads * shape.head_dim),
                (shape.hidden, shape.hidden),
                (shape.hidden, 2 * shape.intermediate),
                (shape.intermediate, shape.hidden),
            )
            self._products = [
                torch.randn(size, device=device, dtype=torch.bfloat16) * size[0] ** -0.5
                for size in sizes
            ]

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return int64 [n, width] of int64 [n]."""
        mixed = tokens[:, None] * 2_654_435_761 + self._columns * 40_503 + 12_345
        return (mixed ^ (mixed >> 13)) & _MASK

    def kv(self, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return int32 [n, width] each."""
        keys = (x * (2 * layer + 3) + 7 * layer + 1) & _MASK
        values = (x * (2 * layer + 5) ^ (layer * 1_234_567 + self._columns)) & _MASK
        return keys.to(torch.int32), values.to(torch.int32)

    def before(
        self, keys: torch.Tensor, values: torch.Tensor, is_real: torch.Tensor | None
    ) -> torch.Tensor:
        """Return what earlier tokens give to each later one, int64 [..., width].

        Args:
            keys, values: int32 [..., m, width] of positions from 0 on.
            is_real: bool [..., m]; what it leaves out is not read. None for all.
        """
        weights = self._weights(0, keys.shape[-2])
        mixed = keys.to(torch.int64) * weights + values.to(torch.int64)
        if is_real is not None:
            mixed = mixed * is_real[..., None]
        return mixed.sum(-2)

    def mix(
        self,
        x: torch.Tensor,
        before: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        first: int | torch.Tensor,
    ) -> torch.Tensor:
        """Return the input of the next layer, int64 [n, width].

        Args:
            x: int64 [n, width], of new tokens that follow each other.
            before: int64 [width], from ``before``.
            keys, values: int32 [n, width], of the new tokens.
            first: position of the first of them.
        """
        weights = self._weights(first, keys.shape[-2])
        mixed = keys.to(torch.int64) * weights + values.to(torch.int64)
        return self._next(x, before + mixed.cumsum(-2))

    def mix_single(
        self,
        x: torch.Tensor,
        before: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Do the same for one new token each of several requests, int64 [r, width]."""
        mixed = keys.to(torch.int64) * (2 * positions[:, None] + 1)
        return self._next(x, before + mixed + values.to(torch.int64))

    def pick(self, x: torch.Tensor) -> torch.Tensor:
        """Return the next token of each last state, int64 [r] of [r, width]."""
        return (x * (2 * self._columns + 1)).sum(-1).remainder(_VOCABULARY)

    @staticmethod
    def digest(x: torch.Tensor) -> torch.Tensor:
        """Return a number of each state that tells states apart, int64 [r]."""
        return (x * (x + 977)).sum(-1)

    def busy(self, num_tokens: int) -> None:
        """Queue a layer's products over so many tokens."""
        if not self._products or not num_tokens:
            return
        shape = self.shape
        x = torch.ones(
            (num_tokens, shape.hidden), device=self.device, dtype=torch.bfloat16
        )
        qkv, out, up, down = self._products
        x @ qkv
        x @ out
        (x @ up)[:, : shape.intermediate] @ down

    def recompute(self, tokens: torch.Tensor, num_last: int) -> torch.Tensor:
        """Return the last states of a whole sequence computed at once.

        Args:
            tokens: int64 [n], prompt and answer.
            num_last: how many of the last tokens' states, int64 [num_last, width].
        """
        x = self.embed(tokens)
        nothing = torch.zeros(self.shape.width, device=self.device, dtype=torch.int64)
        for layer in range(self.shape.num_layers):
            keys, values = self.kv(layer, x)
            x = self.mix(x, nothing, keys, values, 0)
        return x[-num_last:]

    def _weights(self, first: Any, count: int) -> torch.Tensor:
        positions = torch.arange(count, device=self.device, dtype=torch.int64) + first
        return (2 * positions + 1)[:, None]

    @staticmethod
    def _next(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        mixed = 3 * x + (seen ^ (seen >> 17))
        return (mixed ^ (mixed >> 11)) & _MASK
