"""How much attention each key received, and how many entries of it are next to nothing.

Both from queries and keys alone, block by block: the score matrix is never whole in
memory. See README.md here for the maths and the bytes moved.

Query ``i`` has position ``first_position + i`` and sees the keys whose position is not
above its own. Keys lie in the order of their positions, which are 0, 1, 2, ... unless
``positions`` says others (a prefix of which some tokens were dropped). Query head ``h``
reads KV head ``h // (num_heads // num_kv_heads)``. Tensors are float32, bfloat16 or
float16, all on one device; sums are float32. The CPU form runs on torch's threads, the
CUDA form is Triton.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from sgl_tiered_kernels.attention_mass import cpu
from sgl_tiered_kernels.tensors import FLOAT_TYPES, check_tensor

__all__ = ["SMALL_SHARE", "attention_mass", "row_statistics", "small_entries"]

SMALL_SHARE = 0.01
"""CaR counts entries below 1 % of their row's maximum as zeros (Figure 4)."""


def attention_mass(
    query: torch.Tensor,
    keys: torch.Tensor,
    lse: torch.Tensor | None,
    first_position: int,
    scale: float,
    out: torch.Tensor,
    *,
    local: int = 0,
    positions: torch.Tensor | None = None,
) -> None:
    """Add to ``out`` the attention that each key receives from these queries.

    Args:
        query: ``[num_queries, num_heads, head_dim]``.
        keys: ``[kv_len, num_kv_heads, head_dim]``.
        lse: ``[num_heads, num_queries]`` float32, logarithm of the sum of exponentials
            of each row's scores, as the attention that was computed had it; None to
            compute it here, over ``keys``.
        first_position: Position of the first query.
        scale: Factor of the scores before the softmax.
        out: ``[num_kv_heads, kv_len]`` float32; added to, summed over the queries and
            over the query heads of a KV head.
        local: Leaves out keys less than so many positions before their query (1: the
            query's own). Their share of the row stays theirs: nothing is rescaled.
        positions: ``[kv_len]`` int64, ascending; a key's own if not given.

    Raises:
        ValueError: a shape, a type or a number does not fit. The order of ``positions``
            on a device is the caller's to check.
    """
    num_heads, num_queries = _check(query, keys, first_position, positions)
    check_tensor(
        "out", out, (keys.shape[1], keys.shape[0]), torch.float32, query.device
    )
    if lse is not None:
        check_tensor("lse", lse, (num_heads, num_queries), torch.float32, query.device)
    if local < 0:
        raise ValueError(f"local is negative: {local}")
    if num_queries and keys.shape[0]:
        _form(query).attention_mass(
            query, keys, lse, first_position, scale, out, local, positions
        )


def row_statistics(
    query: torch.Tensor,
    keys: torch.Tensor,
    first_position: int,
    scale: float,
    *,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest score of each row, and the row's logsumexp.

    Args:
        query: As for ``attention_mass``, and so are the others.
        keys: Likewise.
        first_position: Likewise.
        scale: Likewise.
        positions: Likewise.

    Returns:
        Two ``[num_heads, num_queries]`` float32; -inf where a query sees no key.

    Raises:
        ValueError: as for ``attention_mass``.
    """
    num_heads, num_queries = _check(query, keys, first_position, positions)
    shape = (num_heads, num_queries)
    if not num_queries or not keys.shape[0]:
        nothing = torch.full(shape, -math.inf, device=query.device)
        return nothing, nothing.clone()
    maximum, lse = (
        torch.empty(shape, dtype=torch.float32, device=query.device) for _ in "ml"
    )
    _form(query).row_statistics(
        query, keys, first_position, scale, positions, maximum, lse
    )
    return maximum, lse


def small_entries(
    query: torch.Tensor,
    keys: torch.Tensor,
    maximum: torch.Tensor | None,
    first_position: int,
    scale: float,
    out: torch.Tensor,
    *,
    share: float = SMALL_SHARE,
    positions: torch.Tensor | None = None,
) -> int:
    """Add to ``out`` how many visible entries are below a share of their row's maximum.

    Probabilities are compared, so it takes scores alone: an entry is small if its score
    is below the row's largest by more than ``log(1 / share)``.

    Args:
        query: As for ``attention_mass``, and so are the others.
        keys: Likewise.
        maximum: ``[num_heads, num_queries]`` float32, of each row's scores; None to
            compute it here.
        first_position: Likewise.
        scale: Likewise.
        out: ``[num_heads]`` int64; added to.
        share: Above 0, at most 1.
        positions: Likewise.

    Returns:
        How many entries of each head were looked at: all that are visible.

    Raises:
        ValueError: as for ``attention_mass``.
    """
    num_heads, num_queries = _check(query, keys, first_position, positions)
    check_tensor("out", out, (num_heads,), torch.int64, query.device)
    if maximum is not None:
        check_tensor(
            "maximum", maximum, (num_heads, num_queries), torch.float32, query.device
        )
    if not 0.0 < share <= 1.0:
        raise ValueError(f"share is {share}, not above 0 and at most 1")
    kv_len = keys.shape[0]
    if not num_queries or not kv_len:
        return 0
    _form(query).small_entries(
        query, keys, maximum, first_position, scale, out, math.log(share), positions
    )
    return _num_visible(num_queries, kv_len, first_position, positions)


def _num_visible(
    num_queries: int, kv_len: int, first: int, positions: torch.Tensor | None
) -> int:
    """Return how many pairs of a query and a key there are that is not after it."""
    if positions is not None:
        # A key is seen by all queries from its own position on.
        readers = (first + num_queries - positions).clamp(0, num_queries)
        return int(readers.sum())
    # Rows grow by one key each until they hold all.
    growing = max(0, min(num_queries, kv_len - first))
    return (
        growing * first
        + growing * (growing + 1) // 2
        + (num_queries - growing) * min(kv_len, first + num_queries)
    )


def _form(query: torch.Tensor) -> Any:
    if query.is_cuda:
        from sgl_tiered_kernels.attention_mass import triton

        return triton
    return cpu


def _check(
    query: torch.Tensor,
    keys: torch.Tensor,
    first_position: int,
    positions: torch.Tensor | None,
) -> tuple[int, int]:
    """Return heads and queries."""
    for name, tensor in (("query", query), ("keys", keys)):
        if tensor.ndim != 3:
            raise ValueError(f"{name} must have 3 dimensions, not {tensor.ndim}")
        if tensor.dtype not in FLOAT_TYPES:
            raise ValueError(f"{name} must not be {tensor.dtype}")
    num_queries, num_heads, head_dim = query.shape
    kv_len, num_kv_heads, key_dim = keys.shape
    if head_dim != key_dim:
        raise ValueError(f"heads differ in size: {head_dim}, {key_dim}")
    if not num_kv_heads or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} heads do not share {num_kv_heads} KV heads")
    if query.device != keys.device:
        raise ValueError(f"query is on {query.device}, keys on {keys.device}")
    if first_position < 0:
        raise ValueError(f"first_position is negative: {first_position}")
    if positions is not None:
        check_tensor("positions", positions, (kv_len,), torch.int64, query.device)
        if not positions.is_cuda and bool((positions.diff() <= 0).any()):
            raise ValueError("positions do not ascend")
    return num_heads, num_queries
