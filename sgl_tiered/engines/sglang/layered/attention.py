"""Attention of ``tiered_cpu`` over a `LayeredPool`: each layer has its own places.

Before a layer of a group of requests is read, its pages have to be on the device. The
layer manager sees to that, and says where they are. One table per layer is translated
for all requests of a group at once, so that a decode step with all layers on the device
costs little more than on SGLang's own pool.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sgl_tiered_kernels.paged_attention import RequestRows

from sgl_tiered.engines.sglang.cpu_attention import TieredCpuAttention
from sgl_tiered.layered.base import PassPlan, PassRequest

__all__ = ["LayeredCpuAttention"]


class LayeredCpuAttention(TieredCpuAttention):
    """Paged attention whose layers lie in different places.

    Args:
        req_to_token_pool: SGLang's table of slots.
        pool: a `LayeredPool`, whose ``driver`` is set before the first forward.
    """

    def __init__(self, req_to_token_pool: Any, pool: Any) -> None:
        super().__init__(req_to_token_pool, pool)
        self._page_tokens: int = pool.page_size
        self._offsets = torch.arange(self._page_tokens)
        # Of the forward under way: first row, new tokens, all tokens, by request.
        self._rows: list[tuple[int, int, int]] = []
        self._plan: PassPlan | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Read each request's pages once, and say what the forward reads and writes."""
        kv_lens = forward_batch.seq_lens.tolist()
        if forward_batch.forward_mode.is_decode_or_idle():
            new_lens = [1] * len(kv_lens)
        else:
            new_lens = forward_batch.extend_seq_lens.tolist()
        table = self._req_to_token_pool.req_to_token
        rows = forward_batch.req_pool_indices.tolist()
        requests, start = [], 0
        self._rows = []
        for rid, row, kv_len, new_len in zip(
            forward_batch.rids, rows, kv_lens, new_lens, strict=True
        ):
            if new_len > 0:
                slots = table[row, : kv_len : self._page_tokens].numpy()
                pages = slots.astype(np.int64) // self._page_tokens
                requests.append((rid, pages, kv_len - new_len, new_len))
                self._rows.append((start, new_len, kv_len))
            start += new_len
        driver = self._pool.driver
        batch = [
            PassRequest(rid, pages, context, new, driver.decided(rid))
            for rid, pages, context, new in requests
        ]
        if driver.packing is not None:
            order = driver.packing.order(batch)
            batch = [batch[n] for n in order]
            self._rows = [self._rows[n] for n in order]
        self._plan = driver.begin_pass(batch)
        if driver.plan.acts is not None:
            driver.capture(forward_batch.out_cache_loc)

    def _attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        layer: Any,
        out: torch.Tensor,
    ) -> int:
        """Attend group by group, each as soon as its pages are there."""
        plan, manager = self._plan, self._pool.driver.manager
        assert plan is not None
        number = layer.layer_id - self._pool.start_layer
        done = 0
        for group, (first, last) in enumerate(plan.groups):
            manager.wait_unit(number, group)
            # Staged pages have their places once their unit has come.
            base = int(plan.indptr[first])
            places = manager.table(number)[base : int(plan.indptr[last])]
            starts = torch.from_numpy(places).to(torch.int64) * self._page_tokens
            slots = (starts[:, None] + self._offsets).view(-1)
            for position in range(first, last):
                start, new_len, kv_len = self._rows[position]
                begin = (int(plan.indptr[position]) - base) * self._page_tokens
                rows = RequestRows(start, new_len, slots[begin : begin + kv_len], -1)
                self._attention.attend(
                    query, key_cache, value_cache, rows, layer.scaling, out
                )
                done = max(done, start + new_len)
            manager.unit_done(number, group)
        if number == self._pool.layer_num - 1:
            self._plan = None
            self._pool.driver.end_pass()
        return done
