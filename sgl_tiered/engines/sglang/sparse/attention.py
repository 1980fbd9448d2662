"""Attention of ``tiered_cpu`` over a `SparsePool`: each layer has its own rows.

A layer's slots are translated for all requests of a forward at once. Slots without a
row were dropped: the new rows attend to what is kept, which all lies before them, so
that only the lengths differ from layer to layer. Rotary positions are in the keys.
Where a selection asks, a prefill's queries are asked what they have read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sgl_tiered_kernels.attention_mass import attention_mass, row_statistics
from sgl_tiered_kernels.paged_attention import RequestRows

from sgl_tiered.engines.sglang.cpu_attention import TieredCpuAttention
from sgl_tiered.sparse.gauge import MassBook, MassGauge
from sgl_tiered.sparse.mass import reads_of

__all__ = ["SparseCpuAttention"]

Float32s = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Part:
    """One request of the forward under way.

    Attributes:
        begin, end: where its slots are among those of all requests.
        is_sparse: some of its pages lack rows.
        is_measured: what its queries read is added to the mass.
    """

    begin: int
    end: int
    is_sparse: bool
    is_measured: bool


class SparseCpuAttention(TieredCpuAttention):
    """Paged attention whose layers may lack tokens.

    Args:
        req_to_token_pool: SGLang's table of slots.
        pool: a `SparsePool`.
    """

    def __init__(self, req_to_token_pool: Any, pool: Any) -> None:
        super().__init__(req_to_token_pool, pool)
        self._parts: list[_Part] = []
        self._slots = torch.zeros(0, dtype=torch.int64)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Take a copy of each request's slots, and look which of them lack rows."""
        super().init_forward_metadata(forward_batch)
        pool, binding = self._pool, self._pool.binding
        is_prefill = not forward_batch.forward_mode.is_decode_or_idle()
        rids = list(forward_batch.rids or [])
        if is_prefill:
            lens = forward_batch.extend_seq_lens.tolist()
            rids = [rid for rid, num in zip(rids, lens, strict=False) if num > 0]
        books = () if pool.gauge is None else pool.gauge.books
        self._parts, begin = [], 0
        for number, request in enumerate(self._requests):
            end = begin + request.slots.numel()
            is_sparse = False
            if binding.num_dropped:
                firsts = request.slots[:: binding.page_tokens].numpy()
                is_sparse = binding.lacks_any(firsts // binding.page_tokens)
            rid = rids[number] if number < len(rids) else ""
            is_measured = bool(books) and is_prefill and rid in pool.measured
            self._parts.append(_Part(begin, end, is_sparse, is_measured))
            begin = end
        if self._requests:
            self._slots = torch.cat([request.slots for request in self._requests])

    def _attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        layer: Any,
        out: torch.Tensor,
    ) -> int:
        """Attend the forward's requests over what this layer has of them."""
        if not self._requests:
            return 0
        number = layer.layer_id - self._pool.start_layer
        found = self._pool.rows[number].index_select(0, self._slots).to(torch.int64)
        done = 0
        for request, part in zip(self._requests, self._parts, strict=True):
            rows = found[part.begin : part.end]
            if part.is_sparse:
                rows = rows[rows >= 0]
            moved = RequestRows(request.start, request.num_queries, rows, -1)
            self._attention.attend(
                query, key_cache, value_cache, moved, layer.scaling, out
            )
            if part.is_measured:
                self._measure(number, query, key_cache, moved, part, layer.scaling)
            done = request.start + request.num_queries
        return done

    def _measure(
        self,
        number: int,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        request: RequestRows,
        part: _Part,
        scale: float,
    ) -> None:
        """Add what a request's queries read in this layer to the mass."""
        slots = self._slots[part.begin : part.end].numpy()
        positions: Int64s = np.arange(len(slots))
        if part.is_sparse:
            kept = self._pool.binding.table[number, slots] >= 0
            positions, slots = positions[kept], slots[kept]
        queries = query[request.start : request.start + request.num_queries]
        keys = key_cache.index_select(0, request.slots)
        first = part.end - part.begin - request.num_queries
        gauge: MassGauge = self._pool.gauge
        for book in gauge.books:
            mass, reads = _asked(gauge, book, queries, keys, positions, first, scale)
            book.slots.add(number, slots, mass, reads, book.window)


def _asked(
    gauge: MassGauge,
    book: MassBook,
    queries: torch.Tensor,
    keys: torch.Tensor,
    positions: Int64s,
    first: int,
    scale: float,
) -> tuple[Float32s, Float32s]:
    """Return what a pass's queries gave to keys, and how many of them saw each.

    Args:
        gauge: says what of attention counts.
        book: says which queries are asked.
        queries: [num_queries, num_heads, head_dim], from position ``first`` on.
        keys: [n, num_kv_heads, head_dim].
        positions: int64 [n], of the keys.
        first: see above.
        scale: of the scores.

    Returns:
        float32 [num_kv_heads, n] and [n].
    """
    # A key's own position is its place unless some are missing.
    is_whole = len(positions) == first + len(queries)
    places = None if is_whole else torch.from_numpy(positions)
    mass = torch.zeros(keys.shape[1], len(keys))
    reads = np.zeros(len(keys), np.float32)
    for begin, end, weight in book.runs(len(queries)):
        asked, at = queries[begin:end], first + begin
        lse = None
        if gauge.power != 1:
            # p ** power = exp(power * s - power * lse)
            lse = row_statistics(asked, keys, at, scale, positions=places)[1]
            lse = lse * gauge.power
        part = torch.zeros_like(mass)
        attention_mass(
            asked,
            keys,
            lse,
            at,
            scale * gauge.power,
            part,
            local=gauge.local_tokens,
            positions=places,
        )
        mass.add_(part, alpha=weight)
        reads += weight * reads_of(positions, at, first + end, gauge.local_tokens)
    return mass.numpy(), reads
