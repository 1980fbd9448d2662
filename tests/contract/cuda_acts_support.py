"""Pages of activations for ``cuda_build_program.py``: projections, and their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from flashinfer_support import DIM, HEADS, LAYERS, PAGE
from sgl_tiered_kernels.kv_gen import KVProjection, Rotary, rebuild_kv

HIDDEN = HEADS * DIM
PAGE_BYTES = PAGE * HIDDEN * 4
NUM_POSITIONS = 256


def act_plan(scale: int = 1) -> Any:
    """Return sizes: half of the host's rows, and an act area."""
    from sgl_tiered.layered.base import ActPlan

    return ActPlan(20 * scale, 60 * scale, 10 * scale, 4 * scale, PAGE_BYTES)


class Projections:
    """In the place of what is found in a model: weights of chance."""

    hidden, layer_params = HIDDEN, 0

    def __init__(self) -> None:
        gen = torch.Generator().manual_seed(1)
        angles = torch.rand((NUM_POSITIONS, DIM // 2), generator=gen)
        table = torch.cat((angles.cos(), angles.sin()), dim=-1)
        self._made = [
            KVProjection(
                torch.randn((2 * HEADS * DIM, HIDDEN), generator=gen) * HIDDEN**-0.5,
                None,
                HEADS,
                DIM,
                Rotary(table),
            )
            for _ in range(LAYERS)
        ]
        self._modules = [torch.nn.Identity() for _ in range(LAYERS)]

    def __len__(self) -> int:
        return LAYERS

    def __getitem__(self, layer: int) -> KVProjection:
        return self._made[layer]

    def module(self, layer: int) -> torch.nn.Module:
        """Return what captures are hooked to."""
        return self._modules[layer]

    def truth(self, layer: int) -> KVProjection:
        """Return what K and V are made of."""
        return self[layer]

    def run(self, layer: int, inputs: torch.Tensor) -> None:
        """Call a layer."""
        self._modules[layer](inputs)


def chosen(offload_bytes: int | None = None) -> Any:
    """Return a choice of half of all pages.

    Args:
        offload_bytes: of layers that SGLang is to keep in host memory; None for no
            offloader.
    """
    from sgl_tiered.engines.sglang.layered.activations.choosing import Chosen
    from sgl_tiered.policies.activations.base import PageLine

    line = PageLine(0.0, 1e-6)
    if offload_bytes is None:
        projections: Any = Projections()
        return Chosen(0.5, "a test", None, line, line, projections)
    from cuda_offload_support import OffloadedProjections

    moved: Any = OffloadedProjections(offload_bytes)
    lines = (line, line)
    away = moved.offloaded if moved.offloaded.away else None
    return Chosen(0.5, "a test", None, *lines, moved, None, away)


class Inputs:
    """Gives K and V of inputs of chance, which a forward's hooks see.

    Args:
        projections: of the pool.

    Attributes:
        seen: inputs of each token, by request and layer.
        ready: waits until a layer may be called.
    """

    def __init__(self, projections: Any) -> None:
        self._projections = projections
        self.seen: dict[str, list[list[torch.Tensor]]] = {}
        self.ready: Callable[[int], None] = lambda layer: None

    def __call__(
        self, layer: int, batch: list[tuple[str, int]], lens: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V, [tokens, HEADS, DIM], of the new tokens of a batch."""
        total = sum(new for _, new in batch)
        inputs = torch.randn(total, HIDDEN)
        self.ready(layer)
        self._projections.run(layer, inputs)
        spans = zip(batch, lens, strict=True)
        positions = torch.cat([torch.arange(kv - new, kv) for (_, new), kv in spans])
        keys, values = (torch.empty(total, HEADS, DIM) for _ in "kv")
        rows = torch.arange(total)
        made = self._projections.truth(layer)
        rebuild_kv(inputs, rows, made, keys, values, rows, positions)
        begin = 0
        for rid, new in batch:
            told = self.seen.setdefault(rid, [[] for _ in range(LAYERS)])
            told[layer] += list(inputs[begin : begin + new])
            begin += new
        return keys, values

    def pages(self, rid: str, layer: int, num_pages: int) -> np.ndarray:
        """Return uint8 [num_pages, PAGE_BYTES] as they were captured."""
        both = torch.stack(self.seen[rid][layer][: num_pages * PAGE])
        return both.reshape(num_pages, -1).numpy().view(np.uint8)
