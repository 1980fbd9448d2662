"""SGLang's pool of multi-head KV, with every layer of every page placed by itself.

To SGLang it is a pool of logical pages. Below, there is one tensor of layer-pages, any
of which may hold any layer of any page, and one host region with a row per logical
page. The buffers of all layers are that one tensor, so whoever reads or writes here
has to translate first; those parts of SGLang that do not are refused.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sgl_tiered.engines.sglang.layered.capacity import LayerPlan
from sgl_tiered.engines.sglang.layered.sending import LayerSources
from sgl_tiered.errors import EngineCompatibilityError
from sgl_tiered.tiers.memory import MemoryRegion

__all__ = ["LayeredPool"]


class LayeredPool(MHATokenToKVPool):
    """A pool whose layers share one tensor; ``plan`` says how large all is."""

    plan: ClassVar[LayerPlan]

    def _create_buffers_normal(self) -> None:
        plan = type(self).plan
        layout = plan.layout
        expected = (layout.num_layers, layout.page_tokens, layout.token_bytes)
        token_bytes = self.head_num * self.head_dim * self.store_dtype.itemsize
        actual = (self.layer_num, self.page_size, token_bytes)
        if actual != expected or self.head_dim != self.v_head_dim:
            raise EngineCompatibilityError(
                "layer-wise KV needs keys and values of one size in all layers; leave "
                "--tiered-layerkv out."
            )
        if self.kv_cache_layout != "nhd":
            raise EngineCompatibilityError(
                "layer-wise KV needs KV in rows of tokens, not as "
                f"{self.kv_cache_layout!r}; leave --tiered-layerkv out."
            )
        # Page 0 takes what padding writes, as in SGLang's pool.
        rows = (plan.num_layer_pages + 1) * self.page_size
        both = torch.zeros(
            (2, rows, self.head_num, self.head_dim),
            dtype=self.store_dtype,
            device=self.device,
        )
        self.k_buffer = [both[0]] * self.layer_num
        self.v_buffer = [both[1]] * self.layer_num
        self.region = self._host_region(plan.num_kv_rows, layout.slot_bytes)
        # Activations, where pages are kept as these: page 0 is nobody's.
        self.acts: torch.Tensor | None = None
        if plan.acts is not None:
            chosen = plan.chosen
            assert chosen is not None, "an act area that nobody has chosen"
            assert chosen.projections is not None, "an act area without projections"
            hidden = chosen.projections.hidden
            shape = (plan.acts.num_acts + 1, self.page_size, hidden)
            self.acts = torch.zeros(shape, dtype=self.store_dtype, device=self.device)
            row_bytes = layout.num_layers * plan.acts.act_layer_page_bytes
            self.act_region = self._host_region(plan.acts.num_act_rows, row_bytes)
        # Places the layers; set once the cache is built, before anything runs.
        self.driver: Any = None
        # Says what a transfer to another server is to read; set where there is one.
        self.sources: LayerSources | None = None

    def _host_region(self, num_rows: int, row_bytes: int) -> MemoryRegion:
        return MemoryRegion(num_rows, row_bytes)

    def forget(self, pages: torch.Tensor) -> None:
        """Take back what logical pages have, for SGLang has freed them."""
        if self.driver is not None and pages.numel():
            self.driver.freed(pages.cpu().numpy().astype(np.int64))

    def _store_kv_layer(
        self,
        layer_idx: int,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
    ) -> None:
        where = self.driver.slots_for_write(layer_idx, loc)
        self.k_buffer[layer_idx][where] = cache_k
        self.v_buffer[layer_idx][where] = cache_v
        self.driver.manager.layer_written(layer_idx)

    def _build_kv_buffer_descs(self) -> list[Any]:
        return []  # for transfers by offsets in a layer's own memory

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Return the bytes of keys and of values on the device, and what makes them."""
        half = 0 if self.acts is None else self.acts.nbytes // 2
        return self.k_buffer[0].nbytes + half, self.v_buffer[0].nbytes + half

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Return address, bytes and bytes per page of each layer's keys, then values.

        All layers have the same: who sends from there asks ``sources`` where.

        Raises:
            EngineCompatibilityError: nobody can be asked.
        """
        if self.sources is None:
            _refuse("a transfer of KV to another server")
        both = [self.k_buffer[0]] * self.layer_num + [self.v_buffer[0]] * self.layer_num
        return (
            [buffer.data_ptr() for buffer in both],
            [buffer.nbytes for buffer in both],
            [self.sources.part_bytes] * len(both),
        )

    def get_device_pool_infos(self) -> NoReturn:
        """Refuse: a layer has no memory of its own."""
        _refuse("SGLang's hierarchical cache")

    def get_cpu_copy(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: it would read SGLang's slots as places."""
        _refuse("a copy of a retracted request's KV")

    def load_cpu_copy(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: it would write to SGLang's slots as places."""
        _refuse("a copy of a retracted request's KV")

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> NoReturn:
        """Refuse: it would move SGLang's slots as places."""
        _refuse("moving KV, which speculative decoding does,")


def _refuse(what: str) -> NoReturn:
    raise EngineCompatibilityError(
        f"{what} does not work with layer-wise KV; leave --tiered-layerkv out."
    )
