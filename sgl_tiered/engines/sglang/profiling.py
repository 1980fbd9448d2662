"""What ``sgl-tiered profile`` measures inside the server: sums of prefills' attention.

While sums are on, the CPU attention hands each layer's queries and keys of a prefill
over, and nothing of what it computes changes. One prompt is summed up at a time: its
chunks follow each other, and any other pass is counted and left out. With sums off a
layer pays one comparison. Everything runs on the thread that runs the model.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sgl_tiered_kernels.attention_mass import (
    attention_mass,
    row_statistics,
    small_entries,
)
from sgl_tiered_kernels.paged_attention import RequestRows

from sgl_tiered.engines.sglang.seams import tiered_runtime

__all__ = ["AttentionSums", "profile_state", "refused_profile", "switch_profile"]


class AttentionSums:
    """Small entries, visible entries and long-range mass of one prompt, layer by layer.

    Args:
        num_layers: of the pool.
        start_layer: number of its first layer.
        local_tokens: keys nearer than that to their query are not long-range.
    """

    def __init__(self, num_layers: int, start_layer: int, local_tokens: int) -> None:
        self._num_layers = num_layers
        self._start_layer = start_layer
        self._local_tokens = local_tokens
        # Sized by the first pass, which knows heads and tokens.
        self._small: npt.NDArray[np.int64] | None = None
        self._mass = np.zeros((num_layers, 0))
        self._num_kv_heads = 0
        self._visible = 0
        self._first = 0
        self._num_queries = 0
        self._num_skipped = 0
        self._pass: RequestRows | None = None

    def add(
        self,
        layer: Any,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        requests: Sequence[RequestRows],
    ) -> None:
        """Add one layer of one prefill.

        Args:
            layer: SGLang's ``RadixAttention``.
            query: ``[num_tokens, num_heads, head_dim]`` of the batch.
            key_cache: ``[num_slots, num_kv_heads, head_dim]``, new tokens included.
            requests: of the batch.
        """
        number = layer.layer_id - self._start_layer
        if number == 0:
            self._pass = self._follows(requests)
        request = self._pass
        if request is None:
            return
        num_queries, kv_len = request.num_queries, request.slots.numel()
        first = kv_len - num_queries
        rows = query[request.start : request.start + num_queries]
        keys = _keys(key_cache, request)
        maximum, lse = row_statistics(rows, keys, first, layer.scaling)
        small = torch.zeros(query.shape[1], dtype=torch.int64)
        visible = small_entries(rows, keys, maximum, first, layer.scaling, small)
        mass = torch.zeros(keys.shape[1], kv_len)
        attention_mass(
            rows, keys, lse, first, layer.scaling, mass, local=self._local_tokens
        )
        if number == 0:
            self._grow(query.shape[1], keys.shape[1], kv_len)
            self._visible += visible
            self._num_queries += num_queries
        assert self._small is not None
        self._small[number] += small.numpy()
        self._mass[number, :kv_len] += mass.sum(dim=0).numpy()

    def report(self) -> dict[str, Any]:
        """Return all of it, JSON-able.

        ``small`` is ``[layers][heads]``, ``visible`` counts the entries of each of
        these; ``mass`` has for each layer the base64 text of ``[tokens]`` float32,
        little-endian, summed over heads. ``first`` is the position of the first query.
        """
        small = [] if self._small is None else self._small.tolist()
        return {
            "local_tokens": self._local_tokens,
            "num_kv_heads": self._num_kv_heads,
            "first": self._first,
            "num_queries": self._num_queries,
            "num_skipped": self._num_skipped,
            "visible": self._visible,
            "small": small,
            "mass": [
                base64.b64encode(row.astype("<f4").tobytes()).decode()
                for row in self._mass
            ],
        }

    def _follows(self, requests: Sequence[RequestRows]) -> RequestRows | None:
        """Return a pass's request if it goes on where the last one ended."""
        if len(requests) == 1:
            (request,) = requests
            first = request.slots.numel() - request.num_queries
            if not self._num_queries:
                self._first = first
            if first == self._first + self._num_queries:
                return request
        self._num_skipped += 1
        return None

    def _grow(self, num_heads: int, num_kv_heads: int, kv_len: int) -> None:
        if self._small is None:
            self._small = np.zeros((self._num_layers, num_heads), np.int64)
            self._num_kv_heads = num_kv_heads
        more = max(0, kv_len - self._mass.shape[1])
        self._mass = np.pad(self._mass, ((0, 0), (0, more)))


def _keys(key_cache: torch.Tensor, request: RequestRows) -> torch.Tensor:
    if request.first_slot >= 0:
        return key_cache[request.first_slot :][: request.slots.numel()]
    return key_cache.index_select(0, request.slots)


def refused_profile(scheduler: Any) -> str:
    """Say why this server cannot be profiled; empty if it can."""
    from sgl_tiered.engines.sglang.cpu_attention import TieredCpuAttention

    backend = _backend(scheduler)
    if not isinstance(backend, TieredCpuAttention):
        return (
            "attention is measured by the CPU backend tiered_cpu only, so far; this "
            f"server runs {type(backend).__name__}"
        )
    if type(backend) is not TieredCpuAttention:
        return "a server with --tiered-layerkv or the like cannot be profiled"
    runtime = tiered_runtime(scheduler.tree_cache)
    if runtime.parts.agreement.num_ranks > 1:
        return "a server with --tp-size above 1 has its heads in several processes"
    if runtime.weights.value is None:
        return "its weights have changed and are being read; ask again in a moment"
    return ""


def switch_profile(scheduler: Any, local_tokens: int) -> None:
    """Begin new sums, or end them where ``local_tokens`` is negative."""
    backend = _backend(scheduler)
    pool = backend._pool
    backend.sums = None
    if local_tokens >= 0:
        layers = (pool.layer_num, pool.start_layer)
        backend.sums = AttentionSums(*layers, local_tokens)


def profile_state(scheduler: Any) -> dict[str, Any]:
    """Answer ``GET /tiered/profile``.

    ``refused`` says why not, or is empty; ``sums`` is None while they are off.
    """
    refused = refused_profile(scheduler)
    if refused:
        return {"refused": refused, "fingerprint": "", "sums": None}
    sums = _backend(scheduler).sums
    return {
        "refused": "",
        "fingerprint": tiered_runtime(scheduler.tree_cache).weights.value,
        "sums": None if sums is None else sums.report(),
    }


def _backend(scheduler: Any) -> Any:
    return getattr(scheduler.tp_worker.model_runner, "attn_backend", None)
