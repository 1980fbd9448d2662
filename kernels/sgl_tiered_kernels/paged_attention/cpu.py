"""Paged causal attention on a CPU that computes the new rows only.

Each request is computed by itself, so a row never depends on what else is in the batch.
Its keys and values are gathered once into a buffer (a load may have put some there
already) that is padded with zero rows to whole ``_PAD_TOKENS``; then torch's blocked
flash kernel runs over them with an additive mask. Requests of one new row each, as in a
decode step, are entries of one such product, and shorter ones are padded to the
longest: blocks that a mask hides add nothing to the sums of those before them. Every
row thus sees the same blocks of 512 keys from position zero, whether its prefix was
cached, chunked or computed in one go: with bfloat16 on a machine with AMX the outputs
of the three are equal bit for bit (without the padding, the length of the last block
changes the order of its sums).

Grouped heads share gathered keys: the query heads of a KV head become further rows
of the same product, or further batch entries over a stride-zero view of the keys.

Not thread-safe: one instance belongs to one model runner's forward thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sgl_tiered_kernels.tensors import first_of_run

__all__ = [
    "DecodeBatch",
    "Gathered",
    "PagedAttention",
    "RequestRows",
    "padded_length",
    "plan_decode",
]

# The kernel works in steps of 32 keys in bfloat16; 64 covers every head size tried.
_PAD_TOKENS = 64
# Rows of one masked product. Fewer pack the keys again and again, more waste the upper
# triangle; the mask takes rows x context x 2 bytes. 2,048 new rows behind 3,952 cached
# (8 heads, 4 KV heads, head size 64, bfloat16, one thread): 134 ms with 256 rows,
# 126 with 512, 115 with 1,024, 120 with 2,048.
_MAX_ROWS = 1024
_GROW_TOKENS = 2048
# Tokens of padding that cost as much as another product, and tokens of one product:
# more leave the cache between their gathering and their use. 16 requests of 300 to 900
# tokens (8 heads, 4 KV heads, head size 64, bfloat16, one thread) take 5.2 ms one by
# one, 3.8 ms with 2,048 and 16,384, and 3.4 ms so; of 60 to 120 tokens 2.8 and 0.6 ms.
_CALL_TOKENS = 512
_BATCH_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class RequestRows:
    """One request of a batch: which query rows are its, and where its tokens lie.

    ``slots`` is ``[kv_len]`` (int64), oldest token first, new tokens included.
    ``first_slot`` is their first one if they are consecutive, else -1.
    """

    start: int
    num_queries: int
    slots: torch.Tensor
    first_slot: int

    @classmethod
    def from_table(cls, start: int, num_queries: int, row: torch.Tensor) -> RequestRows:
        """Take a copy of a request's row of the token table, cut to ``kv_len``."""
        slots = row.to(torch.int64, copy=True)
        return cls(start, num_queries, slots, first_of_run(slots))


@dataclass(frozen=True, slots=True)
class Gathered:
    """A request's keys and values of one layer, in the order of its tokens.

    ``pair`` is ``[2, >= padded_length(kv_len), num_kv_heads, head_dim]`` of the cache's
    type, keys first. ``missing`` are the runs of tokens, begin and end, that are not
    there yet and are taken from the cache.
    """

    pair: torch.Tensor
    missing: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Requests of one new row each that are computed in one product.

    ``rows`` is ``[n]`` (int64), their query rows. ``slots`` is ``[n, length]`` (int64),
    filled up with a slot of the same request, so that what is masked is as finite as
    what is seen. ``mask`` is ``[n, 1, 1, length]``, 0 or minus infinity.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def from_requests(
        cls, requests: Sequence[RequestRows], dtype: torch.dtype
    ) -> DecodeBatch:
        """Pad requests to the longest of them; ``dtype`` is that of the queries."""
        lengths = torch.tensor([request.slots.numel() for request in requests])
        length = _round_up(int(lengths.max()), _PAD_TOKENS)
        slots = torch.empty((len(requests), length), dtype=torch.int64)
        for row, request in zip(slots, requests, strict=True):
            row[: request.slots.numel()] = request.slots
            row[request.slots.numel() :] = request.slots[0]
        hidden = torch.arange(length) >= lengths.unsqueeze(1)
        mask = torch.zeros(hidden.shape, dtype=dtype)
        mask.masked_fill_(hidden, float("-inf"))
        rows = torch.tensor([request.start for request in requests])
        return cls(rows, slots, mask.view(len(requests), 1, 1, length))


def plan_decode(requests: Sequence[RequestRows]) -> list[list[RequestRows]]:
    """Group requests of one new row each by length, so that little is padding.

    Returns:
        Groups whose padding costs less than a product more would.
    """
    groups: list[list[RequestRows]] = []
    longest = padding = 0
    for request in sorted(requests, key=lambda one: -one.slots.numel()):
        kv_len = request.slots.numel()
        padding += longest - kv_len
        fits = groups and longest * (len(groups[-1]) + 1) <= _BATCH_TOKENS
        if fits and padding <= _CALL_TOKENS:
            groups[-1].append(request)
        else:
            groups.append([request])
            longest, padding = kv_len, 0
    return groups


class PagedAttention:
    """Attention over paged KV; owns the scratch buffers and the masks."""

    def __init__(self, num_threads: int | None = None) -> None:
        """Share the work among ``num_threads`` (torch's own number if None)."""
        self._num_threads = num_threads or torch.get_num_threads()
        self._scratch: dict[tuple[torch.dtype, int, int], torch.Tensor] = {}
        self._masks: dict[tuple[torch.dtype, int], torch.Tensor] = {}

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        request: RequestRows,
        scale: float,
        out: torch.Tensor,
        gathered: Gathered | None = None,
    ) -> None:
        """Write the attention of one request's new rows into ``out``.

        Args:
            query: ``[num_tokens, num_heads, head_dim]`` of the whole batch.
            key_cache: ``[num_slots, num_kv_heads, head_dim]``, new tokens included.
            value_cache: like ``key_cache``.
            request: The rows and slots to use; its last rows are the new ones.
            scale: Factor of the scores before the softmax.
            out: Like ``query``; only this request's rows are written.
            gathered: What is gathered of the request already; None for nothing.
        """
        rows = slice(request.start, request.start + request.num_queries)
        if gathered is None:
            kv_len = request.slots.numel()
            pair = self._scratch_pair(key_cache, padded_length(kv_len))
            gathered = Gathered(pair, [(0, kv_len)])
        keys, values = _gather(key_cache, value_cache, request, gathered, query.dtype)
        if request.num_queries == request.slots.numel():
            _attend_whole(query[rows], keys, values, scale, out[rows])
        else:
            self._attend_tail(
                query[rows], keys, values, request.slots.numel(), scale, out[rows]
            )

    def attend_decode(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: DecodeBatch,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """Write the attention of a batch's rows into ``out``; see ``attend``."""
        num, length = batch.slots.shape
        num_kv_heads, head_dim = key_cache.shape[1:]
        flat = batch.slots.view(-1)
        pair = self._scratch_pair(key_cache, num * length)
        for cache, target in zip((key_cache, value_cache), pair, strict=True):
            torch.index_select(cache, 0, flat, out=target[: num * length])
        shape = (2, num, length, num_kv_heads, head_dim)
        keys, values = pair[:, : num * length].to(query.dtype).view(shape)
        rows = query[batch.rows].view(num, num_kv_heads, -1, head_dim)
        result, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            rows,
            keys.transpose(1, 2),
            values.transpose(1, 2),
            0.0,
            False,
            attn_mask=batch.mask,
            scale=scale,
        )
        out[batch.rows] = result.reshape(num, -1, head_dim)

    def suits(self, num_kv_heads: int) -> bool:
        """Return whether two requests in a product give every thread work."""
        return 2 * num_kv_heads >= self._num_threads

    def _scratch_pair(self, cache: torch.Tensor, num_tokens: int) -> torch.Tensor:
        _, num_kv_heads, head_dim = cache.shape
        which = (cache.dtype, num_kv_heads, head_dim)
        pair = self._scratch.get(which)
        if pair is None or pair.shape[1] < num_tokens:
            shape = (2, _round_up(num_tokens, _GROW_TOKENS), num_kv_heads, head_dim)
            pair = self._scratch[which] = torch.empty(shape, dtype=cache.dtype)
        return pair

    def _attend_tail(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        kv_len: int,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """Attend the last rows of a longer sequence, ``_MAX_ROWS`` at a time."""
        num_queries, num_heads, _ = query.shape
        num_kv_heads = keys.shape[1]
        splits = self._num_splits(num_queries, num_heads, num_kv_heads)
        group = num_heads // num_kv_heads // splits
        step = max(1, _MAX_ROWS // group)
        first = kv_len - num_queries
        for begin in range(0, num_queries, step):
            end = min(begin + step, num_queries)
            visible = _round_up(first + end, _PAD_TOKENS)
            mask = self._mask(query.dtype, group, first + begin, end - begin, visible)
            _flash(
                query[begin:end],
                keys[:visible],
                values[:visible],
                scale,
                out[begin:end],
                splits=splits,
                mask=mask,
            )

    def _num_splits(self, num_queries: int, num_heads: int, num_kv_heads: int) -> int:
        """Batch entries per KV head: few for few rows, but work for every thread."""
        group = num_heads // num_kv_heads
        if num_queries * group > _MAX_ROWS:
            return group
        divisors = (s for s in range(1, group + 1) if group % s == 0)
        return next(
            (s for s in divisors if s * num_kv_heads >= self._num_threads), group
        )

    def _mask(
        self, dtype: torch.dtype, group: int, first: int, num_queries: int, width: int
    ) -> torch.Tensor:
        """Return ``[num_queries * group, width]``: row r sees keys to first + r//group.

        It is a window of one constant table whose columns are ``origin`` zeros and
        then a staircase, so no mask is built per call.
        """
        step = max(1, _MAX_ROWS // group)
        tail = step + _PAD_TOKENS
        table = self._masks.get((dtype, group))
        if table is None or table.shape[1] - tail < first:
            origin = _round_up(max(first, 1), _GROW_TOKENS)
            position = torch.arange(step * group).unsqueeze(1) // group
            hidden = torch.arange(tail).unsqueeze(0) > position
            table = torch.zeros(step * group, origin + tail, dtype=dtype)
            table[:, origin:].masked_fill_(hidden, float("-inf"))
            self._masks[(dtype, group)] = table
        begin = table.shape[1] - tail - first
        return table[: num_queries * group, begin : begin + width]


def padded_length(kv_len: int) -> int:
    """Return how many rows the keys of so many tokens are padded to."""
    return _round_up(kv_len, _PAD_TOKENS)


def _gather(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    request: RequestRows,
    gathered: Gathered,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values ``[padded_len, heads, dim]``, zero beyond kv_len."""
    kv_len = request.slots.numel()
    padded_len = padded_length(kv_len)
    for cache, target in zip((key_cache, value_cache), gathered.pair, strict=True):
        for begin, end in gathered.missing:
            rows = target[begin:end]
            if request.first_slot >= 0:
                first = request.first_slot + begin
                rows.copy_(cache[first : first + end - begin])
            else:
                torch.index_select(cache, 0, request.slots[begin:end], out=rows)
        # Zero, not merely masked: a weight of 0 times a stale NaN is a NaN.
        target[kv_len:padded_len].zero_()
    keys, values = gathered.pair[0, :padded_len], gathered.pair[1, :padded_len]
    return keys.to(dtype), values.to(dtype)


def _attend_whole(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Attend a whole sequence; the kernel skips the blocks above the diagonal."""
    splits = query.shape[1] // keys.shape[1]
    _flash(query, keys, values, scale, out, splits=splits, mask=None)


def _flash(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    splits: int,
    mask: torch.Tensor | None,
) -> None:
    """Run torch's CPU flash kernel with grouped heads; causal from 0 without a mask.

    Query head ``(kv * splits + s) * group + g`` becomes row ``token * group + g`` of
    batch entry ``s``, head ``kv``; keys are a stride-zero view over the entries.
    """
    num_queries, num_heads, head_dim = query.shape
    kv_len, num_kv_heads, _ = keys.shape
    group = num_heads // num_kv_heads // splits
    shape = (num_queries, num_kv_heads, splits, group, head_dim)
    rows = query.view(shape).permute(2, 1, 0, 3, 4)
    rows = rows.reshape(splits, num_kv_heads, num_queries * group, head_dim)
    kv_shape = (splits, num_kv_heads, kv_len, head_dim)
    result, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        rows,
        keys.transpose(0, 1).unsqueeze(0).expand(kv_shape),
        values.transpose(0, 1).unsqueeze(0).expand(kv_shape),
        0.0,
        mask is None,
        attn_mask=mask,
        scale=scale,
    )
    result = result.view(splits, num_kv_heads, num_queries, group, head_dim)
    out.view(shape).copy_(result.permute(2, 1, 0, 3, 4))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
