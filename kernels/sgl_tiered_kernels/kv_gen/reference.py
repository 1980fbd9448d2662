"""The same written out, one token and one head at a time."""

from __future__ import annotations

import torch

from sgl_tiered_kernels.kv_gen.projection import KVProjection, Rotary

__all__ = ["rebuild_reference"]


def rebuild_reference(
    acts: torch.Tensor,
    rows: torch.Tensor,
    projection: KVProjection,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V, ``[n, num_kv_heads, head_dim]`` each; see ``rebuild_kv``.

    Sums are float64. What the projection gives is rounded to its type, as a model's
    linear layer does; then K is rotated in float32 and rounded once more.
    """
    num_kv_heads, head_dim = projection.num_kv_heads, projection.head_dim
    shape = (rows.numel(), num_kv_heads, head_dim)
    keys, values = (torch.empty(shape, dtype=acts.dtype) for _ in "kv")
    for token, row in enumerate(rows.tolist()):
        for head in range(num_kv_heads):
            keys[token, head] = _project(acts[row], projection, head)
            values[token, head] = _project(acts[row], projection, num_kv_heads + head)
            if projection.rotary is not None:
                assert positions is not None
                position = int(positions[token])
                keys[token, head] = _rotate(
                    keys[token, head].float(), projection.rotary, position
                )
    return keys, values


def _project(act: torch.Tensor, projection: KVProjection, head: int) -> torch.Tensor:
    """Return one head of K, or one of V, which come after those of K."""
    part = slice(head * projection.head_dim, (head + 1) * projection.head_dim)
    numbers = projection.weight[part].double() @ act.double()
    if projection.bias is not None:
        numbers += projection.bias[part].double()
    return numbers


def _rotate(head: torch.Tensor, rotary: Rotary, position: int) -> torch.Tensor:
    num_pairs = rotary.rotary_dim // 2
    table = rotary.cos_sin[position].float()
    turned = head.clone()
    for pair in range(num_pairs):
        one, other = 2 * pair, 2 * pair + 1
        if rotary.neox:
            one, other = pair, pair + num_pairs
        cos, sin = table[pair], table[num_pairs + pair]
        turned[one] = head[one] * cos - head[other] * sin
        turned[other] = head[other] * cos + head[one] * sin
    return turned
