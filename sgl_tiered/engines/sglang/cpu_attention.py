"""SGLang's attention backend ``tiered_cpu``: new rows only, on torch's CPU kernels.

Stock ``torch_native`` pads the query to the whole length, so that a prefix hit still
pays for the full square. Here a hit of P tokens with n new rows costs n x (P + n).
The arithmetic is ``sgl_tiered_kernels.paged_attention``; this file translates
SGLang's batch into it and refuses the models that it does not serve.
"""

from __future__ import annotations

from typing import Any

import torch
from sgl_tiered_kernels.paged_attention import (
    DecodeBatch,
    PagedAttention,
    RequestRows,
    plan_decode,
)
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sgl_tiered.engines.device.pools import CpuDevicePool
from sgl_tiered.engines.device.read_rows import ReadRows, rows_needed
from sgl_tiered.engines.sglang.profiling import AttentionSums
from sgl_tiered.errors import EngineCompatibilityError
from sgl_tiered.serving.layer_counter import LayerCounter

__all__ = ["TieredCpuAttention", "create_cpu_attention"]

_MAX_READ_BYTES = 128 << 20
"""Of the keys and values of one layer of a batch with loads, which loads fill for
attention to read, beside the pool."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TieredCpuAttention(AttentionBackend):
    """Paged attention of dense decoder layers (MHA, GQA, MQA) on a CPU."""

    def __init__(self, req_to_token_pool: Any, token_to_kv_pool: Any) -> None:
        """Read token tables and KV through the two pools of the model runner."""
        super().__init__()
        self._req_to_token_pool = req_to_token_pool
        self._pool = token_to_kv_pool
        self._attention = PagedAttention()
        self._requests: list[RequestRows] = []
        # Of a decode step: those attended together, made once the type is known.
        self._groups: list[list[RequestRows]] = []
        self._batches: list[DecodeBatch] = []
        # What the forward's loads fill as well as the pool, and memory for it.
        self._read_rows: ReadRows | None = None
        self._loads_into: CpuDevicePool | None = None
        self._room = torch.empty((2, 0))
        self.sums: AttentionSums | None = None
        """What prefills are added to while ``sgl-tiered profile`` measures."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Take a copy of each request's slots once, for all layers of the forward."""
        kv_lens = forward_batch.seq_lens.tolist()
        is_decode = forward_batch.forward_mode.is_decode_or_idle()
        if is_decode:
            new_lens = [1] * len(kv_lens)
        else:
            new_lens = forward_batch.extend_seq_lens.tolist()
        self._requests = plan_requests(
            self._req_to_token_pool.req_to_token,
            forward_batch.req_pool_indices.tolist(),
            kv_lens,
            new_lens,
        )
        self._groups = plan_decode(self._requests) if is_decode else []
        self._batches = []
        self._plan_reads([] if is_decode else self._requests)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Store the new keys and values, then attend the new rows over the pool.

        Args:
            q: ``[num_tokens, num_heads * head_dim]``.
            k: ``[num_tokens, num_kv_heads, head_dim]``, or None if another layer's
                keys are read.
            v: like ``k``.
            layer: SGLang's ``RadixAttention``.
            forward_batch: SGLang's ``ForwardBatch``.
            save_kv_cache: Whether ``k`` and ``v`` go to the pool.
            **kwargs: Extras of other model families; anything set is refused.

        Returns:
            ``[num_tokens, num_heads * head_dim]``.

        Raises:
            EngineCompatibilityError: if the model asks for more than plain attention.
        """
        for name, value in kwargs.items():
            if value is not None:
                raise EngineCompatibilityError(
                    f"tiered_cpu does not support the attention input {name!r} that "
                    "this model passes; use --attention-backend torch_native."
                )
        if save_kv_cache and k is not None and v is not None:
            self._pool.set_kv_buffer(
                layer, KVWriteLoc(forward_batch.out_cache_loc), k, v
            )
        # Reading through the getters is what waits for a layer still being loaded.
        key_cache = self._pool.get_key_buffer(layer.layer_id)
        value_cache = self._pool.get_value_buffer(layer.layer_id)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = torch.empty(query.shape, dtype=query.dtype)
        done = self._attend(query, key_cache, value_cache, layer, out)
        if self.sums is not None and not forward_batch.forward_mode.is_decode_or_idle():
            self.sums.add(layer, query, key_cache, self._requests)
        out[done:].zero_()  # rows that only pad the batch
        return out.view(out.shape[0], -1)

    forward_decode = forward_extend

    def _plan_reads(self, requests: list[RequestRows]) -> None:
        """Let loads that this thread copies fill what attention reads, as well."""
        if self._loads_into is not None:
            self._loads_into.read_rows = None
        self._read_rows = self._loads_into = None
        counter = getattr(self._pool, "layer_transfer_counter", None)
        device = counter.waiter_pool if isinstance(counter, LayerCounter) else None
        if not isinstance(device, CpuDevicePool):
            return
        page_tokens = device.layout.page_tokens
        most = _MAX_READ_BYTES // device.layout.layer_page_bytes
        num_rows = min(rows_needed(requests, page_tokens), most)
        if not num_rows:
            return
        keys = self._pool.k_buffer[0]
        if self._room.shape[1] < num_rows * page_tokens:
            # Twice as many as needed, since a conversation grows turn by turn.
            shape = (2, min(2 * num_rows, most) * page_tokens, *keys.shape[1:])
            self._room = torch.empty(shape, dtype=keys.dtype)
        num_pages = keys.shape[0] // page_tokens
        self._loads_into = device
        self._read_rows = ReadRows(self._room, requests, page_tokens, num_pages)
        device.read_rows = self._read_rows

    def _attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        layer: Any,
        out: torch.Tensor,
    ) -> int:
        """Attend the forward's requests; return the rows of ``out`` up to the last."""
        done, alone = 0, self._requests
        if self._groups and self._attention.suits(key_cache.shape[1]):
            self._batches = self._batches or [
                DecodeBatch.from_requests(group, query.dtype)
                for group in self._groups
                if len(group) > 1
            ]
            for batch in self._batches:
                self._attention.attend_decode(
                    query, key_cache, value_cache, batch, layer.scaling, out
                )
            alone = [group[0] for group in self._groups if len(group) == 1]
            done = len(self._requests)
        for index, request in enumerate(alone):
            there = None
            if self._read_rows is not None:
                number = layer.layer_id - self._pool.start_layer
                there = self._read_rows.gathered(number, index)
            self._attention.attend(
                query, key_cache, value_cache, request, layer.scaling, out, there
            )
            done = max(done, request.start + request.num_queries)
        return done

    def support_triton(self) -> bool:
        """No Triton on a CPU: SGLang then uses its torch writers."""
        return False


def create_cpu_attention(model_runner: Any) -> TieredCpuAttention:
    """Build the backend for a model runner whose model is loaded.

    Raises:
        EngineCompatibilityError: one sentence that names what is not supported.
    """
    pool = model_runner.token_to_kv_pool
    reason = _refused_pool(model_runner)
    layers = (m for m in model_runner.model.modules() if isinstance(m, RadixAttention))
    reason = reason or next(filter(None, map(refused_layer, layers)), None)
    if reason is not None:
        raise EngineCompatibilityError(
            f"tiered_cpu does not support {reason}; use --attention-backend "
            "torch_native if that backend serves the model."
        )
    if hasattr(pool, "plan"):
        from sgl_tiered.engines.sglang.layered.attention import LayeredCpuAttention

        return LayeredCpuAttention(model_runner.req_to_token_pool, pool)
    if hasattr(pool, "row_plan"):
        from sgl_tiered.engines.sglang.sparse.attention import SparseCpuAttention

        return SparseCpuAttention(model_runner.req_to_token_pool, pool)
    return TieredCpuAttention(model_runner.req_to_token_pool, pool)


def plan_requests(
    req_to_token: torch.Tensor,
    rows: list[int],
    kv_lens: list[int],
    new_lens: list[int],
) -> list[RequestRows]:
    """Cut the token table into requests, in batch order; empty ones are left out.

    Args:
        req_to_token: ``[max_requests, max_context]`` table of slots.
        rows: The requests' rows in it.
        kv_lens: Tokens of each request, new ones included.
        new_lens: New tokens of each, the last of its ``kv_lens``.
    """
    requests, start = [], 0
    for row, kv_len, new_len in zip(rows, kv_lens, new_lens, strict=True):
        if new_len > 0:
            table = req_to_token[row, :kv_len]
            requests.append(RequestRows.from_table(start, new_len, table))
        start += new_len
    return requests


def refused_layer(layer: Any) -> str | None:
    """Say what in an attention layer is not served, None if it all is."""
    if layer.is_cross_attention:
        return "cross-attention (encoder-decoder) layers"
    if layer.attn_type != AttentionType.DECODER:
        return f"{layer.attn_type.value} attention layers"
    if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
        return "sliding-window attention layers"
    if layer.logit_cap is not None and layer.logit_cap > 0:
        return "attention layers with a logit soft-cap"
    if layer.xai_temperature_len > 0:
        return "attention layers with a length-dependent temperature"
    if layer.qk_head_dim != layer.v_head_dim:
        return "attention layers whose key and value heads differ in size"
    return None


def _refused_pool(model_runner: Any) -> str | None:
    """Say what in the model's KV cache is not served, None if it all is."""
    if model_runner.use_mla_backend:
        return "multi-head latent attention (MLA) models"
    if model_runner.is_hybrid_swa:
        return "models with sliding-window layers"
    if model_runner.kv_cache_dtype not in _DTYPES:
        return f"a quantised KV cache ({model_runner.kv_cache_dtype})"
    return None
