"""Paged attention written out in float32, one row and one head at a time."""

from __future__ import annotations

import torch

__all__ = ["attend_reference"]


def attend_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attend the last ``num_queries`` positions of one request over its slots.

    Args:
        query: ``[num_queries, num_heads, head_dim]``, the rows of the last positions.
        key_cache: ``[num_slots, num_kv_heads, head_dim]``.
        value_cache: like ``key_cache``.
        slots: ``[kv_len]``, the cache row of each position, oldest first.
        scale: Factor of the scores before the softmax.

    Returns:
        ``[num_queries, num_heads, head_dim]`` in float32.
    """
    num_queries, num_heads, _ = query.shape
    group = num_heads // key_cache.shape[1]
    prefix_len = slots.numel() - num_queries
    out = torch.empty_like(query, dtype=torch.float32)
    for row in range(num_queries):
        visible = slots[: prefix_len + row + 1].long()
        for head in range(num_heads):
            keys = key_cache[visible, head // group].float()
            values = value_cache[visible, head // group].float()
            weights = torch.softmax(keys @ query[row, head].float() * scale, dim=0)
            out[row, head] = weights @ values
    return out
