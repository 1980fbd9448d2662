"""SGLang's pool of multi-head KV, with a row of its own for every token of every layer.

To SGLang it is a pool of slots. Below, there is one tensor of rows, any of which may
hold any token of any layer. The buffers of all layers are that one tensor, so whoever
reads or writes here has to translate first; those parts of SGLang that do not are
refused.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sgl_tiered.engines.sglang.sparse.capacity import RowPlan
from sgl_tiered.errors import EngineCompatibilityError
from sgl_tiered.sparse.gauge import MassGauge
from sgl_tiered.sparse.rows import PADDING_ROW

__all__ = ["SparsePool"]


class SparsePool(MHATokenToKVPool):
    """A pool whose layers share one tensor; ``row_plan`` says how large all is.

    Attributes:
        binding: where each token of each layer lies.
        rows: int32 [num_layers, num_slots], the same memory as ``binding.table``.
        gauge: what attention gave to tokens; None until somebody asks for it.
        measured: ids of the requests whose attention is added to it.
    """

    row_plan: ClassVar[RowPlan]

    def _create_buffers_normal(self) -> None:
        plan = type(self).row_plan
        layout = plan.layout
        token_bytes = self.head_num * self.head_dim * self.store_dtype.itemsize
        expected = (layout.num_layers, layout.page_tokens, layout.token_bytes)
        actual = (self.layer_num, self.page_size, token_bytes)
        if actual != expected or self.head_dim != self.v_head_dim:
            raise EngineCompatibilityError(
                "sparse KV needs keys and values of one size in all layers; leave "
                "--tiered-sparsity out."
            )
        if self.kv_cache_layout != "nhd":
            raise EngineCompatibilityError(
                "sparse KV needs KV in rows of tokens, not as "
                f"{self.kv_cache_layout!r}; leave --tiered-sparsity out."
            )
        both = torch.zeros(
            (2, plan.num_rows + 1, self.head_num, self.head_dim),
            dtype=self.store_dtype,
            device=self.device,
        )
        self.k_buffer = [both[0]] * self.layer_num
        self.v_buffer = [both[1]] * self.layer_num
        self.binding = plan.binding()
        self.rows = torch.from_numpy(self.binding.table)
        self.gauge: MassGauge | None = None
        self.measured: set[str] = set()

    def _store_kv_layer(
        self,
        layer_idx: int,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
    ) -> None:
        where = self.rows[layer_idx].index_select(0, loc).to(torch.int64)
        assert not len(where) or int(where.min()) >= PADDING_ROW, "a slot has no row"
        self.k_buffer[layer_idx][where] = cache_k
        self.v_buffer[layer_idx][where] = cache_v

    def _build_kv_buffer_descs(self) -> list[Any]:
        return []  # for transfers between servers, which are refused

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Return the bytes of keys and of values on the device."""
        return self.k_buffer[0].nbytes, self.v_buffer[0].nbytes

    def get_contiguous_buf_infos(self) -> NoReturn:
        """Refuse: a layer has no memory of its own."""
        _refuse("a transfer of KV to another server")

    def get_device_pool_infos(self) -> NoReturn:
        """Refuse: a layer has no memory of its own."""
        _refuse("SGLang's hierarchical cache")

    def get_cpu_copy(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: it would read SGLang's slots as rows."""
        _refuse("a copy of a retracted request's KV")

    def load_cpu_copy(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: it would write to SGLang's slots as rows."""
        _refuse("a copy of a retracted request's KV")

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> NoReturn:
        """Refuse: it would move SGLang's slots as rows."""
        _refuse("moving KV, which speculative decoding does,")


def _refuse(what: str) -> NoReturn:
    raise EngineCompatibilityError(
        f"{what} does not work with sparse KV; leave --tiered-sparsity out."
    )
