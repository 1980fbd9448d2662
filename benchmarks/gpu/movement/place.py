"""Where a benchmark runs: a CUDA device, or the CPU for a dry run.

The copies are the product's own device pools, on buffers as SGLang's pool has them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from sgl_tiered.core.layout import PageLayout
from sgl_tiered.engines.device.cuda_ops import CudaOps, cuda_register
from sgl_tiered.engines.device.pools import make_device_pool, page_layout
from sgl_tiered.pipelines.base import DevicePool
from sgl_tiered.pipelines.stream_pool import LoadWay, StreamPool
from sgl_tiered.tiers.memory import MemoryRegion

__all__ = ["Place", "Shape", "Store"]


@dataclass(frozen=True)
class Shape:
    """A model's KV, and the pages that a benchmark moves.

    Attributes:
        num_layers, num_heads, head_dim: KV heads of each layer; bfloat16.
        page_tokens: tokens in a page.
        num_pages: of the pool.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    page_tokens: int
    num_pages: int


class Place:
    """A torch device and the product's pool on it."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.is_cuda = self.device.type == "cuda"

    @property
    def ways(self) -> list[str]:
        """How a layer can be loaded here."""
        return [way.value for way in LoadWay] if self.is_cuda else ["cpu"]

    def synchronize(self) -> None:
        """Wait for all that was queued."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def synchronize_this(self) -> None:
        """Wait for what the calling thread's stream holds, and for nothing else."""
        if self.is_cuda:
            torch.cuda.current_stream(self.device).synchronize()

    def buffers(self, shape: Shape) -> Any:
        """Return a KV pool full of noise, as SGLang lays it out."""
        size = (shape.num_pages * shape.page_tokens, shape.num_heads, shape.head_dim)

        def layers() -> list[torch.Tensor]:
            return [
                torch.randn(size, device=self.device, dtype=torch.bfloat16)
                for _ in range(shape.num_layers)
            ]

        return SimpleNamespace(k_buffer=layers(), v_buffer=layers())

    def pool(self, buffers: Any, layout: PageLayout, way: str) -> DevicePool:
        """Return the product's pool over the buffers, loading in one way."""
        if not self.is_cuda:
            pool: DevicePool = make_device_pool(buffers, layout, None)
            return pool
        ops = CudaOps(buffers, layout, None)
        return StreamPool(ops, staging=ops, way=LoadWay(way))

    def region(
        self, num_rows: int, layout: PageLayout, *, pinned: bool = True
    ) -> MemoryRegion:
        """Return host memory for pages, pinned where there is a device."""
        register = None
        if self.is_cuda and pinned:
            # As the tiers do.
            register = cuda_register("memory of the benchmark", self.device)
        return MemoryRegion(num_rows, layout.slot_bytes, register=register)


class Store:
    """Buffers, a pool over them, and host rows with other noise."""

    def __init__(self, place: Place, shape: Shape, way: str, num_rows: int) -> None:
        self.shape = shape
        self.buffers = place.buffers(shape)
        self.layout = page_layout(self.buffers, shape.page_tokens)
        self.pool = place.pool(self.buffers, self.layout, way)
        self._memory = place.region(num_rows, self.layout)
        self.region = self._memory.array
        rng = np.random.default_rng(0)
        self.region[:] = rng.integers(0, 256, self.region.shape, np.uint8)
        self.rows = rng.permutation(num_rows).astype(np.int64)
        self.pages = rng.permutation(shape.num_pages)[:num_rows].astype(np.int64)

    def facts(self) -> dict[str, Any]:
        """Return what a record has to say about the shape."""
        return {
            **dataclasses.asdict(self.shape),
            "piece_bytes": self.layout.part_bytes,
            "pages_moved": len(self.rows),
        }

    def layer(self, layer: int) -> np.ndarray:
        """Return the moved pages of a layer as they lie on the device."""
        pages = torch.from_numpy(self.pages)
        both = [
            buffers[layer]
            .view(self.shape.num_pages, -1)
            .view(torch.uint8)[pages.to(buffers[layer].device)]
            for buffers in (self.buffers.k_buffer, self.buffers.v_buffer)
        ]
        found: np.ndarray = torch.cat(both, dim=1).cpu().numpy()
        return found

    def wanted(self, layer: int) -> np.ndarray:
        """Return the same bytes as they lie in the rows."""
        begin = self.layout.key_offset(layer)
        rows: np.ndarray = self.region[
            self.rows, begin : begin + self.layout.layer_page_bytes
        ]
        return rows

    def close(self) -> None:
        """Unpin the rows."""
        self._memory.close()
