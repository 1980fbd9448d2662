"""Attention of ``tiered_cpu`` over a `LayeredPool`: each layer has its own places.

Before a layer's first read of a group of requests its pages have to be on the device;
`placement` sees to that, and says where they are. What was said of a forward is
translated for all layers at once where nothing is streamed, so that a decode step with
all layers on the device costs little more than on SGLang's own pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from sgl_tiered_kernels.paged_attention import RequestRows

from sgl_tiered.engines.sglang.cpu_attention import TieredCpuAttention

__all__ = ["ForwardRequest", "LayeredCpuAttention", "Placement"]

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """One request of a forward.

    Attributes:
        row: of SGLang's token table, which is the request's own until it ends.
        pages: int32 [n], logical, oldest first; the new tokens' pages included.
        kv_len: tokens, the new ones included.
        new_len: new tokens.
        start: first query row.
    """

    row: int
    pages: Int32s
    kv_len: int
    new_len: int
    start: int


class Placement(Protocol):
    """Brings layers to the device while a forward runs; called on its thread."""

    def begin(self, requests: Sequence[ForwardRequest]) -> Sequence[Sequence[int]]:
        """Begin a forward; return its groups of positions in ``requests``."""
        ...

    def before_write(self, layer: int) -> None:
        """Give the pages that the forward writes in a layer a place on the device."""
        ...

    def places(self, layer: int, group: int) -> Int32s:
        """Wait for the pages of a group; return their layer-pages, end to end."""
        ...

    def attended(self, layer: int, group: int) -> None:
        """Note that a group was read; its staged pages may be written over."""
        ...

    def end(self) -> None:
        """Note that the forward's last layer was read."""
        ...


class LayeredCpuAttention(TieredCpuAttention):
    """Paged attention whose layers lie in different places.

    Args:
        req_to_token_pool: SGLang's table of slots.
        pool: a `LayeredPool`, whose ``placement`` is set before the first forward.
    """

    def __init__(self, req_to_token_pool: Any, pool: Any) -> None:
        super().__init__(req_to_token_pool, pool)
        self._page_tokens: int = pool.page_size
        self._last_layer: int = pool.start_layer + pool.layer_num - 1
        self._of_forward: list[ForwardRequest] = []
        self._groups: Sequence[Sequence[int]] = ()
        self._offsets = np.arange(self._page_tokens, dtype=np.int64)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Read each request's pages once, and say what the forward reads and writes."""
        kv_lens = forward_batch.seq_lens.tolist()
        if forward_batch.forward_mode.is_decode_or_idle():
            new_lens = [1] * len(kv_lens)
        else:
            new_lens = forward_batch.extend_seq_lens.tolist()
        table = self._req_to_token_pool.req_to_token
        requests, start = [], 0
        rows = forward_batch.req_pool_indices.tolist()
        for row, kv_len, new_len in zip(rows, kv_lens, new_lens, strict=True):
            if new_len > 0:
                slots = table[row, : kv_len : self._page_tokens].numpy()
                pages = (slots // self._page_tokens).astype(np.int32)
                requests.append(ForwardRequest(row, pages, kv_len, new_len, start))
            start += new_len
        self._of_forward = requests
        self._groups = self._pool.placement.begin(requests)

    def _attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        layer: Any,
        out: torch.Tensor,
    ) -> int:
        """Attend group by group, each as soon as its pages are there."""
        placement = self._pool.placement
        number = layer.layer_id - self._pool.start_layer
        done = 0
        for index, group in enumerate(self._groups):
            places = placement.places(number, index).astype(np.int64)
            slots = places[:, None] * self._page_tokens + self._offsets
            tokens = torch.from_numpy(slots.reshape(-1))
            first = 0
            for position in group:
                request = self._of_forward[position]
                rows = RequestRows(
                    request.start,
                    request.new_len,
                    tokens[first : first + request.kv_len],
                    -1,
                )
                first += len(request.pages) * self._page_tokens
                self._attention.attend(
                    query, key_cache, value_cache, rows, layer.scaling, out
                )
                done = max(done, request.start + request.new_len)
            placement.attended(number, index)
        if layer.layer_id == self._last_layer:
            placement.end()
        return done
