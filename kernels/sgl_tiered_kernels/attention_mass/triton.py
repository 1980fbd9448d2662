"""Mass, row statistics and small entries as Triton programs.

A program owns what it writes, so sums have one order and need no atomics: the mass of a
block of keys of one KV head, or the statistics and the count of a block of rows of one
query head. Scores live in registers. In float32 products are exact to float32 (no
TF32); in bfloat16 and float16 they are sums in float32 of exact products.

The functions take checked arguments; see the entry in ``__init__.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["attention_mass", "row_statistics", "small_entries"]

_BLOCK_ROWS = 64
_BLOCK_KEYS = 64
_MIN_DIM = 16
"""Below it the tensor cores' products are not defined."""
_WIDE_DEPTH, _WIDE_WARPS = 16, 8
"""Of products in float32, which no tensor core makes exactly: over a whole head they
take more registers than there are, and spilled 30 KB a thread."""


@triton.jit
def _scores(  # type: ignore[no-untyped-def]  # noqa: ANN202
    query,  # noqa: ANN001
    keys,  # noqa: ANN001
    rows,  # noqa: ANN001
    columns,  # noqa: ANN001
    head,  # noqa: ANN001
    kv_head,  # noqa: ANN001
    num_queries,  # noqa: ANN001
    kv_len,  # noqa: ANN001
    q_row,  # noqa: ANN001
    q_head,  # noqa: ANN001
    k_row,  # noqa: ANN001
    k_head,  # noqa: ANN001
    scale,  # noqa: ANN001
    HEAD_DIM: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    WIDEN: tl.constexpr,  # noqa: N803
    DEPTH: tl.constexpr,  # noqa: N803
):
    q_at = query + head * q_head + rows[:, None].to(tl.int64) * q_row
    k_at = keys + kv_head * k_head + columns[None, :].to(tl.int64) * k_row
    scores = tl.zeros([rows.shape[0], columns.shape[0]], tl.float32)
    for begin in range(0, DIM, DEPTH):
        dims = begin + tl.arange(0, DEPTH)
        inside = dims < HEAD_DIM
        mask = (rows < num_queries)[:, None] & inside[None, :]
        q = tl.load(q_at + dims[None, :], mask=mask, other=0.0)
        mask = (columns < kv_len)[None, :] & inside[:, None]
        k = tl.load(k_at + dims[:, None], mask=mask, other=0.0)
        if WIDEN:
            q = q.to(tl.float32)
            k = k.to(tl.float32)
        scores = tl.dot(q, k, scores, input_precision="ieee")
    return scores * scale


@triton.jit
def _places(  # type: ignore[no-untyped-def]  # noqa: ANN202
    positions,  # noqa: ANN001
    columns,  # noqa: ANN001
    kv_len,  # noqa: ANN001
    HAS_POSITIONS: tl.constexpr,  # noqa: N803
):
    if HAS_POSITIONS:
        places = tl.load(positions + columns, mask=columns < kv_len, other=0)
    else:
        places = columns.to(tl.int64)
    return places


@triton.jit
def _mass_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN202
    query,  # noqa: ANN001
    keys,  # noqa: ANN001
    lse,  # noqa: ANN001
    positions,  # noqa: ANN001
    out,  # noqa: ANN001
    num_queries,  # noqa: ANN001
    kv_len,  # noqa: ANN001
    first,  # noqa: ANN001
    local,  # noqa: ANN001
    q_row,  # noqa: ANN001
    q_head,  # noqa: ANN001
    k_row,  # noqa: ANN001
    k_head,  # noqa: ANN001
    scale,  # noqa: ANN001
    GROUP: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    HAS_POSITIONS: tl.constexpr,  # noqa: N803
    WIDEN: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    KEYS: tl.constexpr,  # noqa: N803
    DEPTH: tl.constexpr,  # noqa: N803
):
    begin = tl.program_id(0) * KEYS
    kv_head = tl.program_id(1)
    columns = begin + tl.arange(0, KEYS)
    places = _places(positions, columns, kv_len, HAS_POSITIONS)
    nearest = begin
    if HAS_POSITIONS:
        nearest = tl.load(positions + begin).to(tl.int32)
    # Queries before this one see none of the keys.
    start = tl.maximum(nearest + local - first, 0) // ROWS * ROWS
    mass = tl.zeros([KEYS], tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        for row in range(start, num_queries, ROWS):
            rows = row + tl.arange(0, ROWS)
            scores = _scores(
                query,
                keys,
                rows,
                columns,
                head,
                kv_head,
                num_queries,
                kv_len,
                q_row,
                q_head,
                k_row,
                k_head,
                scale,
                HEAD_DIM,
                DIM,
                WIDEN,
                DEPTH,
            )
            sums = tl.load(lse + head * num_queries + rows, mask=rows < num_queries)
            bounds = (first + rows - local).to(tl.int64)
            counts = places[None, :] <= bounds[:, None]
            counts = counts & (rows < num_queries)[:, None]
            # Chosen before the exponential: what does not count may be anything.
            logs = tl.where(counts, scores - sums[:, None], float("-inf"))
            mass += tl.sum(tl.exp(logs), 0)
    at = out + kv_head * kv_len + columns
    here = columns < kv_len
    tl.store(at, tl.load(at, mask=here, other=0.0) + mass, mask=here)


@triton.jit
def _row_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN202
    query,  # noqa: ANN001
    keys,  # noqa: ANN001
    positions,  # noqa: ANN001
    maximum,  # noqa: ANN001
    lse,  # noqa: ANN001
    counts,  # noqa: ANN001
    num_queries,  # noqa: ANN001
    kv_len,  # noqa: ANN001
    first,  # noqa: ANN001
    q_row,  # noqa: ANN001
    q_head,  # noqa: ANN001
    k_row,  # noqa: ANN001
    k_head,  # noqa: ANN001
    scale,  # noqa: ANN001
    log_share,  # noqa: ANN001
    GROUP: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    HAS_POSITIONS: tl.constexpr,  # noqa: N803
    WIDEN: tl.constexpr,  # noqa: N803
    COUNT: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    KEYS: tl.constexpr,  # noqa: N803
    DEPTH: tl.constexpr,  # noqa: N803
):
    block = tl.program_id(0)
    head = tl.program_id(1)
    kv_head = head // GROUP
    rows = block * ROWS + tl.arange(0, ROWS)
    real = rows < num_queries
    bounds = (first + rows).to(tl.int64)
    at = head * num_queries + rows
    end = kv_len
    if not HAS_POSITIONS:
        end = tl.minimum(kv_len, first + (block + 1) * ROWS)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    sums = tl.zeros([ROWS], tl.float32)
    small = tl.zeros([ROWS], tl.int32)
    if COUNT:
        limit = tl.load(maximum + at, mask=real, other=0.0) + log_share
    for begin in range(0, end, KEYS):
        columns = begin + tl.arange(0, KEYS)
        scores = _scores(
            query,
            keys,
            rows,
            columns,
            head,
            kv_head,
            num_queries,
            kv_len,
            q_row,
            q_head,
            k_row,
            k_head,
            scale,
            HEAD_DIM,
            DIM,
            WIDEN,
            DEPTH,
        )
        places = _places(positions, columns, kv_len, HAS_POSITIONS)
        seen = (places[None, :] <= bounds[:, None]) & (columns < kv_len)[None, :]
        seen = seen & real[:, None]
        if COUNT:
            below = seen & (scores < limit[:, None])
            small += tl.sum(below.to(tl.int32), 1)
        else:
            scores = tl.where(seen, scores, float("-inf"))
            after = tl.maximum(largest, tl.max(scores, 1))
            # Zero stands in where nothing was seen yet: no -inf minus -inf.
            base = tl.where(after == float("-inf"), 0.0, after)
            sums = sums * tl.exp(largest - base)
            sums += tl.sum(tl.exp(scores - base[:, None]), 1)
            largest = after
    if COUNT:
        tl.store(counts + head * tl.num_programs(0) + block, tl.sum(small, 0))
    else:
        empty = largest == float("-inf")
        logs = tl.log(tl.where(empty, 1.0, sums))
        tl.store(maximum + at, largest, mask=real)
        tl.store(lse + at, tl.where(empty, float("-inf"), largest + logs), mask=real)


def attention_mass(
    query: torch.Tensor,
    keys: torch.Tensor,
    lse: torch.Tensor | None,
    first_position: int,
    scale: float,
    out: torch.Tensor,
    local: int,
    positions: torch.Tensor | None,
) -> None:
    """Add the mass to ``out``."""
    query, keys = _dense(query), _dense(keys)
    if lse is None:
        shape = (query.shape[1], query.shape[0])
        lse = torch.empty(shape, dtype=torch.float32, device=query.device)
        row_statistics(
            query, keys, first_position, scale, positions, torch.empty_like(lse), lse
        )
    num_queries, num_heads, head_dim = query.shape
    kv_len, num_kv_heads, _ = keys.shape
    dim = max(_MIN_DIM, triton.next_power_of_2(head_dim))
    _mass_kernel[(triton.cdiv(kv_len, _BLOCK_KEYS), num_kv_heads)](
        query,
        keys,
        lse,
        keys if positions is None else positions,
        out,
        num_queries,
        kv_len,
        first_position,
        local,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        keys.stride(1),
        scale,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        DIM=dim,
        HAS_POSITIONS=positions is not None,
        WIDEN=_widens(query, keys),
        ROWS=_BLOCK_ROWS,
        KEYS=_BLOCK_KEYS,
        **_product(query, keys, dim),
    )


def row_statistics(
    query: torch.Tensor,
    keys: torch.Tensor,
    first_position: int,
    scale: float,
    positions: torch.Tensor | None,
    maximum: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Write every element of ``maximum`` and ``lse``."""
    _run_rows(query, keys, first_position, scale, positions, maximum, lse, None, 0.0)


def small_entries(
    query: torch.Tensor,
    keys: torch.Tensor,
    maximum: torch.Tensor | None,
    first_position: int,
    scale: float,
    out: torch.Tensor,
    log_share: float,
    positions: torch.Tensor | None,
) -> None:
    """Add the counts to ``out``."""
    num_queries, num_heads, _ = query.shape
    if maximum is None:
        shape = (num_heads, num_queries)
        maximum = torch.empty(shape, dtype=torch.float32, device=query.device)
        lse = torch.empty_like(maximum)
        row_statistics(query, keys, first_position, scale, positions, maximum, lse)
    shape = (num_heads, triton.cdiv(num_queries, _BLOCK_ROWS))
    counts = torch.empty(shape, dtype=torch.int32, device=query.device)
    _run_rows(
        query,
        keys,
        first_position,
        scale,
        positions,
        maximum,
        maximum,
        counts,
        log_share,
    )
    out += counts.sum(dim=1)


def _run_rows(
    query: torch.Tensor,
    keys: torch.Tensor,
    first_position: int,
    scale: float,
    positions: torch.Tensor | None,
    maximum: torch.Tensor,
    lse: torch.Tensor,
    counts: torch.Tensor | None,
    log_share: float,
) -> None:
    """Launch the row kernel: statistics, or counts where there is room for them."""
    query, keys = _dense(query), _dense(keys)
    num_queries, num_heads, head_dim = query.shape
    kv_len, num_kv_heads, _ = keys.shape
    dim = max(_MIN_DIM, triton.next_power_of_2(head_dim))
    _row_kernel[(triton.cdiv(num_queries, _BLOCK_ROWS), num_heads)](
        query,
        keys,
        keys if positions is None else positions,
        maximum,
        lse,
        maximum if counts is None else counts,
        num_queries,
        kv_len,
        first_position,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        keys.stride(1),
        scale,
        log_share,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        DIM=dim,
        HAS_POSITIONS=positions is not None,
        WIDEN=_widens(query, keys),
        COUNT=counts is not None,
        ROWS=_BLOCK_ROWS,
        KEYS=_BLOCK_KEYS,
        **_product(query, keys, dim),
    )


def _product(query: torch.Tensor, keys: torch.Tensor, dim: int) -> dict[str, int]:
    """Return how much of a head is multiplied at a time, and by how many warps."""
    if query.dtype is keys.dtype is not torch.float32:
        return {"DEPTH": dim, "num_warps": 4}
    return {"DEPTH": min(_WIDE_DEPTH, dim), "num_warps": _WIDE_WARPS}


def _widens(query: torch.Tensor, keys: torch.Tensor) -> bool:
    """Say whether products take float32: types differ, or Triton is interpreted.

    The interpreter multiplies bfloat16 as if it were integers.
    """
    return query.dtype != keys.dtype or not query.is_cuda


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose last dimension is without gaps."""
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()
