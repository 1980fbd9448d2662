"""Layer-wise KV on CUDA: how its pool comes into SGLang, and how its layers move.

SGLang asks its platform for the classes of pool and allocator. On CUDA we stand around
those two questions, instead of bringing a platform of our own: SGLang picks the
platform before it has read a flag, and refuses to start where two distributions offer
one. Both hooks answer as before unless the pool's sizing (``capacity.sized``) has
planned layers.

Not validated on a GPU: see ``flashinfer.py``. What runs here was tested with streams
that are played by a CPU, and is marked ``gpu`` in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sgl_tiered_kernels.page_copy.dma import CopyEngines, part_addresses

from sgl_tiered.core.layout import PageLayout
from sgl_tiered.engines.sglang.cuda_ops import CudaOps
from sgl_tiered.engines.sglang.layered.capacity import allocator_class, pool_class
from sgl_tiered.errors import ConfigError
from sgl_tiered.pipelines.stream_layers import StreamLayerCopier
from sgl_tiered.tiers.memory import MemoryRegion, Register

__all__ = [
    "CudaLayerOps",
    "CudaPlaces",
    "cuda_hooks",
    "cuda_layer_copier",
    "refuse_on_cuda",
]

UInt8s = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]

_PLATFORM = "sglang.srt.platforms.cuda.CudaSRTPlatform."
_FLAG = "--tiered-layerkv"


class CudaPlaces:
    """Goes before `LayeredPool` among the bases of a pool on CUDA.

    Attributes:
        write_slots: returns where a forward's new tokens go in a layer, int64 [n] on
            the device, or None while nothing is placed; the attention backend sets it.
    """

    write_slots: Callable[[int], torch.Tensor | None] | None = None
    page_size: int
    k_buffer: list[torch.Tensor]
    v_buffer: list[torch.Tensor]
    region: MemoryRegion
    driver: Any

    def pin(self, register: Register) -> None:
        """Change the host region, which nobody has used yet, for a pinned one.

        Raises:
            ConfigError: as ``register`` raises it; the region then stays as it was.
        """
        rows, row_bytes = self.region.array.shape
        pinned = MemoryRegion(rows, row_bytes, register=register)
        self.region.close()
        self.region = pinned

    def _store_kv_layer(
        self,
        layer_idx: int,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
    ) -> None:
        """Store by the places that are already on the device; nothing is read back."""
        slots = None if self.write_slots is None else self.write_slots(layer_idx)
        padding = loc % self.page_size  # in page 0, as SGLang has it
        where = padding
        if slots is not None:
            where = torch.cat([slots, padding[len(slots) :]])
        self.k_buffer[layer_idx][where] = cache_k
        self.v_buffer[layer_idx][where] = cache_v
        if slots is not None:
            self.driver.manager.layer_written(layer_idx)


class CudaLayerOps(CudaOps):
    """The copies of a `LayeredPool` on CUDA: `LayerCopyOps`.

    Args:
        pool: its ``k_buffer`` and ``v_buffer`` name one tensor in all layers.
        layout: shape of a page.
        forward_stream: on which SGLang's overlap scheduler runs the model; or None.
        engines: the copy engines; those of the CUDA driver if None.
    """

    def __init__(
        self,
        pool: Any,
        layout: PageLayout,
        forward_stream: Any,
        *,
        engines: CopyEngines | None = None,
    ) -> None:
        super().__init__(pool, layout, forward_stream, engines=engines)
        if len({address for layer in self._addresses for address in layer[:1]}) != 1:
            raise ValueError("the layers of this pool do not share one tensor")

    def store_by_engines(
        self,
        stream: Any,
        layer: int,
        memory: UInt8s,
        rows: Int64s,
        first_byte: int,
        pages: Int64s,
    ) -> None:
        """Queue two copies a layer-page: its keys and its values."""
        keys, values = self._addresses[layer]
        frm, to = part_addresses(
            keys,
            values,
            pages,
            memory.ctypes.data,
            memory.strides[0],
            rows,
            first_byte,
            self._layout.part_bytes,
        )
        # The forward that writes them may be under way: read in the stream's order.
        self._engines.submit(
            to, frm, self._layout.part_bytes, stream.cuda_stream, source_complete=False
        )


def cuda_layer_copier(
    pool: Any, layout: PageLayout, forward_stream: Any, *, guarded: bool = False
) -> StreamLayerCopier:
    """Return the copies between a `LayeredPool` on CUDA and its host region.

    Args:
        pool: on CUDA.
        layout: shape of a page.
        forward_stream: see `CudaLayerOps`.
        guarded: the mover asks a guard before each copy.
    """
    ops = CudaLayerOps(pool, layout, forward_stream)
    return StreamLayerCopier(ops, pool.region.array, ahead=not guarded)


def cuda_hooks() -> list[tuple[str, Any, Any]]:
    """List (target, hook, type) that let a pool of layers into SGLang on CUDA."""
    from sglang.srt.plugins.hook_registry import HookType

    return [
        (_PLATFORM + "get_kv_pool_cls", _pool_class, HookType.AROUND),
        (_PLATFORM + "get_paged_allocator_cls", _allocator_class, HookType.AROUND),
    ]


def refuse_on_cuda(server_args: Any) -> None:
    """Refuse what layer-wise KV on CUDA was not made for.

    Raises:
        ConfigError: one sentence that says what to add.
    """
    config = getattr(server_args, "cuda_graph_config", None)
    for phase in ("decode", "prefill"):
        backend = getattr(getattr(config, phase, None), "backend", None)
        if backend is not None and backend != "disabled":
            raise ConfigError(
                _FLAG,
                f"runs without CUDA graphs, and {phase} has {backend!r} ones",
                "add --cuda-graph-backend-decode disabled --cuda-graph-backend-prefill "
                "disabled",
            )
    if not getattr(server_args, "disable_overlap_schedule", False):
        raise ConfigError(
            _FLAG,
            "does not go with the overlap schedule yet",
            "add --disable-overlap-schedule",
        )
    for name in ("prefill_attention_backend", "decode_attention_backend"):
        backend = getattr(server_args, name, None)
        if (backend or getattr(server_args, "attention_backend", None)) != "flashinfer":
            raise ConfigError(
                _FLAG,
                "is made for FlashInfer on CUDA",
                "add --attention-backend flashinfer",
            )


def _pool_class(original: Any, platform: Any, *, kind: str) -> type | None:
    """Stand around SGLang's question for the class of its KV pool."""
    planned = pool_class() if kind == "mha" else None
    if planned is None:
        answer: type | None = original(platform, kind=kind)
        return answer
    return type("CudaLayeredPool", (CudaPlaces, planned), {})


def _allocator_class(original: Any, platform: Any) -> type | None:
    """Stand around SGLang's question for the class of its allocator of pages."""
    answer: type | None = allocator_class() or original(platform)
    return answer
