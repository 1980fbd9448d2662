"""Activations on CUDA: how the act area is copied, and how KV is computed from it.

Not validated on a GPU. What runs without one was tested with streams that are played by
a CPU, and is marked ``gpu`` in the tests; see ``../CUDA.md``.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sgl_tiered_kernels.kv_gen import rebuild_kv
from sgl_tiered_kernels.page_copy.dma import (
    CopyEngines,
    common_alignment,
    row_addresses,
)

from sgl_tiered.core.layout import PageLayout
from sgl_tiered.engines.device.cuda_ops import CudaStreams
from sgl_tiered.engines.sglang.layered.activations.offloaded import OffloadedWeights
from sgl_tiered.engines.sglang.layered.activations.projections import LayerProjections
from sgl_tiered.pipelines.stream_acts import act_layout_token_bytes

__all__ = ["NOT_VALIDATED", "CudaActOps", "act_layout"]

logger = logging.getLogger(__name__)

UInt8s = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]

NOT_VALIDATED = (
    "sgl-tiered: activations (--tiered-activations) are experimental and have not been "
    "validated on a GPU; before you rely on them, compare answers with those of a "
    "server without the flag."
)


def act_layout(area: torch.Tensor, num_layers: int) -> PageLayout:
    """Return how a row holds the layers of a page of activations.

    Args:
        area: ``[num_acts + 1, page_tokens, hidden]``.
        num_layers: of the model.
    """
    page_tokens = int(area.shape[1])
    page_bytes = page_tokens * int(area.shape[2]) * area.element_size()
    token_bytes = act_layout_token_bytes(page_bytes, page_tokens)
    return PageLayout(num_layers, page_tokens, token_bytes)


class CudaActOps(CudaStreams):
    """``ActOps`` over the act area of a `LayeredPool`.

    Args:
        pool: on CUDA, with an act area; its layers share one tensor.
        num_layers: of the model.
        forward_stream: on which SGLang's overlap scheduler runs the model; or None.
        projections: of the layers.
        offloaded: parameters of these that are in host memory; None where none are.
        engines: the copy engines; those of the CUDA driver if None.
    """

    def __init__(
        self,
        pool: Any,
        num_layers: int,
        forward_stream: Any,
        projections: LayerProjections,
        *,
        offloaded: OffloadedWeights | None = None,
        engines: CopyEngines | None = None,
    ) -> None:
        area: torch.Tensor = pool.acts
        super().__init__(area.device, forward_stream, engines=engines)
        self._layout = act_layout(area, num_layers)
        self._rows = area.view(-1, area.shape[2])
        self._address = area.data_ptr()
        self._alignment = common_alignment([self._address])
        # One part a layer, where KV has two.
        self._table = torch.tensor([self._address], dtype=torch.int64).to(area.device)
        self._keys, self._values = pool.k_buffer[0], pool.v_buffer[0]
        self._projections = projections
        self._offloaded = offloaded
        if offloaded is not None:
            offloaded.allocate()

    @property
    def layout(self) -> PageLayout:
        """Shape of a page of activations."""
        return self._layout

    @property
    def half_pages(self) -> int:
        """No pages: activations leave layer by layer."""
        return 0

    def load_by_engines(
        self,
        stream: Any,
        layer: int,
        memory: UInt8s,
        rows: Int64s,
        first_byte: int,
        pages: Int64s,
    ) -> None:
        """Queue one copy a page."""
        del layer
        to, frm = self._sides(memory, rows, first_byte, pages)
        width = self._layout.layer_page_bytes
        self._engines.submit(to, frm, width, stream.cuda_stream, source_complete=True)

    def load_by_kernel(
        self,
        stream: Any,
        layer: int,
        memory: UInt8s,
        rows: torch.Tensor,
        first_byte: int,
        pages: torch.Tensor,
    ) -> None:
        """Queue one kernel that reads the rows in place."""
        del layer
        from sgl_tiered_kernels.page_copy import triton as kernels

        with torch.cuda.stream(stream):
            kernels.scatter_parts(
                self._table,
                pages,
                torch.from_numpy(memory),
                rows,
                first_byte,
                self._layout.layer_page_bytes,
                alignment=self._alignment,
            )

    def store_by_engines(
        self,
        stream: Any,
        layer: int,
        memory: UInt8s,
        rows: Int64s,
        first_byte: int,
        pages: Int64s,
    ) -> None:
        """Queue one copy a page, which reads it in the stream's order."""
        del layer
        frm, to = self._sides(memory, rows, first_byte, pages)
        width = self._layout.layer_page_bytes
        self._engines.submit(to, frm, width, stream.cuda_stream, source_complete=False)

    def gather(self, *args: Any) -> None:
        """Refuse: a page's layers do not lie together here."""
        raise NotImplementedError("activations leave layer by layer")

    def copy_out(self, *args: Any) -> None:
        """Refuse, as ``gather`` does."""
        raise NotImplementedError("activations leave layer by layer")

    def bring_weights(self, stream: Any, layer: int, slot: int) -> int:
        """Queue the copy of a layer's parameters from host memory; see `WeightOps`."""
        assert self._offloaded is not None, "all weights are on the device"
        pairs = self._offloaded.pairs(layer, slot)
        self._copy_all(stream, pairs)
        return sum(host.nbytes for _, host in pairs)

    def rebuild(
        self,
        stream: Any,
        layer: int,
        numbers: torch.Tensor,
        count: int,
        slot: int | None,
    ) -> object:
        """Queue ``kv_gen`` for so many tokens; see ``pipelines/stream_acts.py``."""
        if slot is None:
            projection = self._projections[layer]
        else:
            assert self._offloaded is not None, "a slot of no weights"
            places = self._offloaded.places(layer, slot)
            projection = self._projections.over(layer, **places)
        rows, slots, positions = numbers.view(3, count).unbind(0)
        # SGLang's tensors may be inference tensors, which others may not write to.
        with self._on(stream), torch.inference_mode():
            rebuild_kv(
                self._rows,
                rows,
                projection,
                self._keys,
                self._values,
                slots,
                positions,
            )
        # Another rotary table may take the place of its own before this has run.
        return projection

    def _copy_all(
        self, stream: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        with self._on(stream):
            for to, frm in pairs:
                to.copy_(frm, non_blocking=True)

    def _on(self, stream: Any) -> Any:
        return torch.cuda.stream(stream)

    def _sides(
        self, memory: UInt8s, rows: Int64s, first_byte: int, pages: Int64s
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Return addresses of places, and of the layer in rows."""
        places = row_addresses(self._address, self._layout.layer_page_bytes, pages)
        base, step = memory.ctypes.data, memory.strides[0]
        return places, row_addresses(base, step, rows, first_byte)
