"""A stack of transformer layers in plain torch, reading its prefix from paged KV.

No norms, positions or sampling: what counts is that it computes as much per layer as a
model of that shape does, and reads the loaded pages just before it needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Stack", "StackShape"]


@dataclass(frozen=True)
class StackShape:
    """Sizes; the defaults are Llama-2-7B's (config.json of that model)."""

    num_layers: int = 32
    hidden: int = 4096
    intermediate: int = 11008
    num_heads: int = 32

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.hidden // self.num_heads


class Stack:
    """Random weights, each layer its own."""

    def __init__(self, shape: StackShape, device: torch.device) -> None:
        self.shape = shape
        scale = shape.hidden**-0.5

        def weight(rows: int, columns: int) -> torch.Tensor:
            drawn = torch.randn(rows, columns, device=device, dtype=torch.bfloat16)
            return drawn * scale

        self._layers = [
            {
                "qkv": weight(shape.hidden, 3 * shape.hidden),
                "out": weight(shape.hidden, shape.hidden),
                "up": weight(shape.hidden, 2 * shape.intermediate),
                "down": weight(shape.intermediate, shape.hidden),
            }
            for _ in range(shape.num_layers)
        ]

    @torch.no_grad()
    def forward(
        self,
        x: torch.Tensor,
        buffers: Any,
        slots: torch.Tensor,
        wait_layer: Callable[[int], None],
    ) -> torch.Tensor:
        """Compute new tokens behind a cached prefix.

        Args:
            x: [new, hidden].
            buffers: the KV pool, ``k_buffer`` and ``v_buffer`` per layer.
            slots: int64 [prefix], where the prefix lies in it.
            wait_layer: called before a layer's prefix is read.

        Returns:
            [new, hidden].
        """
        heads, size = self.shape.num_heads, self.shape.head_dim
        num_new = x.shape[0]
        mask = torch.ones(
            num_new, len(slots) + num_new, dtype=torch.bool, device=x.device
        ).tril(len(slots))
        for layer, weights in enumerate(self._layers):
            q, k, v = (x @ weights["qkv"]).view(num_new, 3, heads, size).unbind(1)
            wait_layer(layer)
            keys = torch.cat([buffers.k_buffer[layer][slots], k])
            values = torch.cat([buffers.v_buffer[layer][slots], v])
            attended = torch.nn.functional.scaled_dot_product_attention(
                q.transpose(0, 1).unsqueeze(0),
                keys.transpose(0, 1).unsqueeze(0),
                values.transpose(0, 1).unsqueeze(0),
                attn_mask=mask,
            )
            mixed = attended[0].transpose(0, 1).reshape(num_new, -1)
            x = x + mixed @ weights["out"]
            gate, up = (x @ weights["up"]).chunk(2, dim=-1)
            x = x + (torch.nn.functional.silu(gate) * up) @ weights["down"]
            # Without norms the numbers would grow from layer to layer.
            x = torch.nn.functional.layer_norm(x, x.shape[-1:])
        return x
