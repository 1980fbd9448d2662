"""How much attention some queries gave to each token, in float32.

A stand-in until the kernel of this name serves: one KV head at a time, so that no more
than ``queries x group x tokens`` scores are there at once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from sgl_tiered.sparse.mass import LOCAL

__all__ = ["mass_of"]


def mass_of(
    query: torch.Tensor,
    keys: torch.Tensor,
    positions: npt.NDArray[np.int64],
    first_position: int,
    scale: float,
) -> npt.NDArray[np.float32]:
    """Return what consecutive queries gave to tokens at least ``LOCAL`` away.

    Args:
        query: [num_queries, num_heads, head_dim], of positions ``first_position`` on.
        keys: [num_tokens, num_kv_heads, head_dim], in order of position.
        positions: int64 [num_tokens], ascending.
        first_position: of the first query.
        scale: of the scores.

    Returns:
        float32 [num_tokens], summed over the queries, a mean over the heads.
    """
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    own = torch.arange(first_position, first_position + num_queries)
    own = own.repeat_interleave(group)[:, None]
    seen = torch.from_numpy(positions)[None, :]
    hidden, near = seen > own, seen > own - LOCAL
    total = torch.zeros(len(positions))
    for head in range(num_kv_heads):
        rows = query[:, head * group : (head + 1) * group].reshape(-1, head_dim)
        scores = rows.float() @ keys[:, head].float().T * scale
        scores.masked_fill_(hidden, float("-inf"))
        total += torch.softmax(scores, dim=1).masked_fill_(near, 0.0).sum(dim=0)
    mass: npt.NDArray[np.float32] = (total / num_heads).numpy()
    return mass
