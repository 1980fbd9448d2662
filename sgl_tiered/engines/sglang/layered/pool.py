"""SGLang's pool of multi-head KV, with every layer of every page placed by itself.

To SGLang it is a pool of logical pages. Below, there is one tensor of layer-pages, any
of which may hold any layer of any page, and one host region with a row per logical
page. The buffers of all layers are that one tensor, so whoever reads or writes here
has to translate first; those parts of SGLang that do not are refused.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sgl_tiered.engines.sglang.layered.capacity import LayerPlan
from sgl_tiered.errors import EngineCompatibilityError
from sgl_tiered.layered.binding import LayerBinding
from sgl_tiered.tiers.memory import MemoryRegion

__all__ = ["LayeredPool"]

Int64s = npt.NDArray[np.int64]


class LayeredPool(MHATokenToKVPool):  # type: ignore[misc]
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
        # The last page takes what padding writes, as page 0 does in SGLang's pool.
        rows = (plan.num_layer_pages + 1) * self.page_size
        both = torch.zeros(
            (2, rows, self.head_num, self.head_dim),
            dtype=self.store_dtype,
            device=self.device,
        )
        self.k_buffer = [both[0]] * self.layer_num
        self.v_buffer = [both[1]] * self.layer_num
        self.region = MemoryRegion(plan.num_pages + 1, layout.slot_bytes)
        # Logical page 0 is that of padding: it has a row, and no place.
        self.binding = LayerBinding(
            self.layer_num, plan.num_pages + 1, plan.num_layer_pages
        )

    @property
    def padding_page(self) -> int:
        """Where padding is written to, in any layer."""
        return type(self).plan.num_layer_pages

    def slots(self, layer: int, loc: torch.Tensor) -> torch.Tensor:
        """Return where tokens lie in the tensor that all layers share.

        Args:
            layer: counted from the first of this pool.
            loc: int64 [n], SGLang's slots; their pages must be on the device.
        """
        pages = loc // self.page_size
        places = torch.from_numpy(self.binding.device[layer])[pages.cpu()]
        places = torch.where(pages.cpu() == 0, self.padding_page, places)
        if places.numel() and int(places.min()) < 0:
            raise RuntimeError(f"a page of layer {layer} is written without a place")
        return places.to(loc.device) * self.page_size + loc % self.page_size

    def _store_kv_layer(
        self,
        layer_idx: int,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
    ) -> None:
        where = self.slots(layer_idx, loc)
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
