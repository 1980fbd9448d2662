"""Layer-wise KV on CUDA: how its pool comes into SGLang, and how its layers move.

SGLang asks its platform for defaults and for the classes of pool and allocator. On CUDA
we stand around those questions, instead of bringing a platform of our own: SGLang picks
the platform before it has read a flag, and refuses to start where two distributions
offer one. The hooks answer as before unless ``--tiered-layerkv`` is on, and the pool's
sizing (``capacity.sized``) has planned layers.

Not validated on a GPU: see ``flashinfer.py``. What runs here was tested with streams
that are played by a CPU, and is marked ``gpu`` in the tests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sgl_tiered_kernels.page_copy.dma import CopyEngines, part_addresses

from sgl_tiered.core.layout import PageLayout
from sgl_tiered.engines.device.cuda_ops import CudaOps, cuda_register, pin_if_possible
from sgl_tiered.engines.device.layer_stream_pool import (
    LayeredStreamPool,
    StreamActBytes,
)
from sgl_tiered.engines.sglang.layered.activations.cuda import (
    NOT_VALIDATED,
    CudaActOps,
)
from sgl_tiered.engines.sglang.layered.capacity import allocator_class, pool_class
from sgl_tiered.engines.sglang.layered.device_pool import LayerCopies
from sgl_tiered.pipelines.stream_acts import StreamActCopier
from sgl_tiered.pipelines.stream_layers import StreamLayerCopier
from sgl_tiered.pipelines.stream_pool import StreamPool, scattered
from sgl_tiered.pipelines.stream_weights import WeightSlots
from sgl_tiered.serving.option_clashes import CUDA_ATTENTION, names_attention
from sgl_tiered.serving.option_reader import given_value
from sgl_tiered.tiers.memory import MemoryRegion

__all__ = [
    "CudaLayerOps",
    "CudaPlaces",
    "cuda_copies",
    "cuda_hooks",
]

logger = logging.getLogger(__name__)

UInt8s = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]

_PLATFORM = "sglang.srt.platforms.cuda.CudaSRTPlatform."


class CudaPlaces:
    """Goes before `LayeredPool` among the bases of a pool on CUDA.

    Attributes:
        write_slots: returns where a forward's new tokens go in a layer, int64 [n] on
            the device, or None while nothing is placed; the attention backend sets it.
        pinning_refused_bytes: of host memory that CUDA did not pin.
    """

    write_slots: Callable[[int], torch.Tensor | None] | None = None
    pinning_refused_bytes = 0
    page_size: int
    device: str
    k_buffer: list[torch.Tensor]
    v_buffer: list[torch.Tensor]
    driver: Any

    def _host_region(self, num_rows: int, row_bytes: int) -> MemoryRegion:
        """Return pinned memory; ordinary one where CUDA cannot pin so much."""

        def refused(num_bytes: int) -> None:
            self.pinning_refused_bytes += num_bytes

        register = cuda_register("--tiered-layerkv-host-size", self.device)
        pin = pin_if_possible(register, self.device, refused)
        return MemoryRegion(num_rows, row_bytes, register=pin)

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

    @property
    def num_pages(self) -> int:
        """Layer-pages of the tensor, page 0 included."""
        return len(self._parts[0][0])

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


def cuda_copies(
    pool: Any,
    layout: PageLayout,
    forward_stream: Any,
    *,
    guarded: bool = False,
    breaks_staging: bool = False,
) -> LayerCopies:
    """Return the copies of a `LayeredPool` on CUDA; its layer-pages hold nothing yet.

    Args:
        pool: on CUDA.
        layout: shape of a page.
        forward_stream: see `CudaLayerOps`.
        guarded: the mover asks a guard before each copy.
        breaks_staging: for tests: stream wrongly.
    """
    ops = CudaLayerOps(pool, layout, forward_stream)
    region: UInt8s = pool.region.array
    copier = StreamLayerCopier(
        ops, region, ahead=not guarded, breaks_staging=breaks_staging
    )
    _prepare(copier.pool, "layers", region, ops.num_pages)
    by_kernel = copier.pool.loads_by_kernel
    if getattr(pool, "acts", None) is None:
        return LayerCopies(
            copier,
            lambda driver: LayeredStreamPool(ops, region, driver, by_kernel=by_kernel),
            copier.close,
        )
    chosen, act_region = pool.plan.chosen, pool.act_region.array
    act_ops = CudaActOps(
        pool,
        layout.num_layers,
        forward_stream,
        chosen.projections,
        offloaded=chosen.offloaded,
    )
    weights = None
    if chosen.offloaded is not None:
        weights = WeightSlots(act_ops, chosen.offloaded.away)
    acts = StreamActCopier(
        act_ops,
        act_region,
        len(pool.acts),
        ahead=not guarded,
        weights=weights,
        breaks_staging=breaks_staging,
    )
    _prepare(acts.copies.pool, "activations", act_region, len(pool.acts))
    away = frozenset() if weights is None else frozenset(chosen.offloaded.away)
    both = (away, frozenset(range(layout.num_layers)) - away)
    acts.warm([min(layers) for layers in both if layers])
    logger.warning(NOT_VALIDATED)
    act_bytes = StreamActBytes(act_ops, act_region)

    def close() -> None:
        acts.close()
        copier.close()

    return LayerCopies(
        copier,
        lambda driver: LayeredStreamPool(
            ops, region, driver, by_kernel=by_kernel, acts=act_bytes
        ),
        close,
        acts,
        weights,
    )


def _prepare(loads: StreamPool, what: str, region: UInt8s, num_pages: int) -> None:
    """Run the kernels of loads once, and measure loads where they can choose.

    Args:
        loads: of layers, from rows of the region.
        what: is loaded.
        region: as allocated; row 0 stands for padding, as page 0 does.
        num_pages: of the device; they hold nothing yet.
    """
    rng = np.random.default_rng(0)
    rows, pages = scattered(rng, range(1, len(region)), range(1, num_pages))
    if not len(pages):
        return
    loads.warm(pages, stores=False)
    if loads.reaches(region):
        logger.info(
            "sgl-tiered: %s up from memory: %s", what, loads.tune(region, rows, pages)
        )


def cuda_hooks() -> list[tuple[str, Any, Any]]:
    """List (target, hook, type) that let a pool of layers into SGLang on CUDA."""
    from sglang.srt.plugins.hook_registry import HookType

    return [
        (_PLATFORM + "apply_server_args_defaults", _defaults, HookType.AROUND),
        (_PLATFORM + "get_kv_pool_cls", _pool_class, HookType.AROUND),
        (_PLATFORM + "get_paged_allocator_cls", _allocator_class, HookType.AROUND),
    ]


def _defaults(original: Any, platform: Any, server_args: Any) -> None:
    """Choose FlashInfer where layers are asked for, and nothing else is."""
    original(platform, server_args)
    given = getattr(server_args, "_raw_input", None) or {}
    is_on = given_value(server_args, "layerkv") == "on"
    if is_on and not names_attention(given):
        server_args.attention_backend = CUDA_ATTENTION


def _pool_class(original: Any, platform: Any, *, kind: str) -> type | None:
    """Stand around SGLang's question for the class of its KV pool."""
    planned = pool_class() if kind == "mha" else None
    if planned is None:
        answer: type | None = original(platform, kind=kind)
        return answer
    from sgl_tiered.engines.sglang.layered.flashinfer import register_layered_flashinfer

    # Before the backend is built, which reads this pool.
    register_layered_flashinfer()
    return type("CudaLayeredPool", (CudaPlaces, planned), {})


def _allocator_class(original: Any, platform: Any) -> type | None:
    """Stand around SGLang's question for the class of its allocator of pages."""
    answer: type | None = allocator_class() or original(platform)
    return answer
