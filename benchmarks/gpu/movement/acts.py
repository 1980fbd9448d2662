"""K and V rebuilt from activations while others are loaded, a layer at a time.

Half of a prefix comes as KV and half as activations, through two halves of staging
memory, by the product's mover and copiers; nothing computes beside them. Measured, of a
layer: rebuilding by itself, its activations' load, the load of as many pages of KV, and
all layers with loads and rebuilds under each other (HybridServe's T_kv_gen, T_load_kv).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from movement.place import Place
from movement.stack import StackShape
from sgl_tiered_kernels.kv_gen import KVProjection, Rotary
from sgl_tiered_kernels.kv_gen.reference import rebuild_reference

from sgl_tiered.core.layout import PageLayout
from sgl_tiered.engines.device.cuda_ops import as_byte_pages
from sgl_tiered.engines.device.layer_copier import CpuLayerCopier
from sgl_tiered.engines.sglang.layered.activations.copier import CpuActCopier
from sgl_tiered.engines.sglang.layered.activations.cuda import act_layout
from sgl_tiered.engines.sglang.layered.cuda import cuda_copies
from sgl_tiered.layered.mover import LayerMover
from sgl_tiered.layered.units import ActPart, Unit

__all__ = ["measure_acts"]

_TOLERANCE = 0.05
"""Of numbers about 1, twice rounded to bfloat16; a wrong row is about 1 off."""


def measure_acts(
    place: Place,
    model: StackShape,
    *,
    page_tokens: int,
    cached_tokens: int,
    repeats: int,
) -> Iterator[dict[str, Any]]:
    """Yield one record.

    Raises:
        AssertionError: other KV was rebuilt, or came up.
    """
    torch.manual_seed(0)
    run = _Run(place, model, page_tokens, max(cached_tokens // page_tokens // 2, 1))
    try:
        yield {
            "kind": "acts",
            "way": "cuda" if place.is_cuda else "cpu",
            "page_tokens": page_tokens,
            "act_pages": run.count,
            "kv_pages": run.count,
            "act_page_bytes": run.act_page_bytes,
            "kv_page_bytes": run.kv_page_bytes,
            **run.measure(repeats),
        }
    finally:
        run.close()


class _Run:
    """Staging halves for KV and for activations, host rows, and weights."""

    def __init__(
        self, place: Place, model: StackShape, page_tokens: int, count: int
    ) -> None:
        self._place, self.count, self._page_tokens = place, count, page_tokens
        self._num_layers = model.num_layers
        device, dtype = place.device, torch.bfloat16
        heads = (model.num_heads, model.head_dim)
        keys, values = (
            torch.zeros((4 * count * page_tokens, *heads), device=device, dtype=dtype)
            for _ in range(2)
        )
        area = torch.zeros(
            (2 * count + 1, page_tokens, model.hidden), device=device, dtype=dtype
        )
        size = keys.element_size()
        self._layout = PageLayout(model.num_layers, page_tokens, model.hidden * size)
        acts = act_layout(area, model.num_layers)
        self._memories = [place.region(count, one) for one in (self._layout, acts)]
        gen = torch.Generator().manual_seed(0)
        for memory in self._memories:
            # Row by row: the whole of it is twice as large as numbers of 4 bytes.
            for row in memory.array:
                noise = torch.randn(len(row) // size, generator=gen).to(dtype)
                row[:] = noise.view(torch.uint8).numpy()
        angles = torch.rand((2 * count * page_tokens, model.head_dim // 2))
        table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)
        width = 2 * model.hidden
        self._projections = [
            KVProjection(
                (torch.randn(width, model.hidden) * model.hidden**-0.5).to(
                    device, dtype
                ),
                None,
                *heads,
                Rotary(table),
            )
            for _ in range(model.num_layers)
        ]
        self._pool = SimpleNamespace(
            k_buffer=[keys] * model.num_layers,
            v_buffer=[values] * model.num_layers,
            region=self._memories[0],
            acts=area,
            act_region=self._memories[1],
            plan=SimpleNamespace(chosen=SimpleNamespace(projections=self._projections)),
        )
        self._close: Callable[[], None] = lambda: None
        self._copier: Any
        self._acts: Any
        if place.is_cuda:
            copies = cuda_copies(self._pool, self._layout, None)
            self._copier, self._acts = copies.copier, copies.acts
            self._close = copies.close
        else:
            self._copier = CpuLayerCopier(self._pool, self._layout)
            self._acts = CpuActCopier(self._pool, self._projections)  # type: ignore[arg-type]
        self.act_page_bytes, self.kv_page_bytes = (
            acts.layer_page_bytes,
            self._layout.layer_page_bytes,
        )
        self._mover = LayerMover(
            self._copier,
            self.kv_page_bytes,
            acts=self._acts,
            act_page_bytes=self.act_page_bytes,
        )
        order = np.random.default_rng(1).permutation(count).astype(np.int64)
        self._rows = order
        self._positions = page_tokens * (count + order)
        self._kv_half = np.arange(4 * count, dtype=np.int32).reshape(2, 2, count)
        self._act_half = 1 + np.arange(2 * count, dtype=np.int32).reshape(2, count)

    def close(self) -> None:
        self._place.synchronize()
        self._mover.close()
        self._close()
        for memory in self._memories:
            memory.close()

    def measure(self, repeats: int) -> dict[str, Any]:
        """Return the raw seconds of each form; one turn before them is not counted."""
        forms: dict[str, Callable[[], object]] = {
            "kv_gen_s": self._rebuild,
            "load_act_s": self._load_acts,
            "load_kv_s": self._load_kv,
            "loads_s": lambda: self._stream(rebuilds=False),
            "both_s": lambda: self._stream(rebuilds=True),
        }
        seconds: dict[str, list[float]] = {name: [] for name in forms}
        told: dict[str, list[float]] = {"rebuild_s": [], "stall_s": []}
        for turn in range(repeats + 1):
            for name, form in forms.items():
                self._place.synchronize()
                began = time.perf_counter()
                form()
                self._place.synchronize()
                if turn:
                    seconds[name].append(time.perf_counter() - began)
            self._check()
            if turn:
                told["rebuild_s"].append(self._rebuild_s)
                told["stall_s"].append(self._stall_s)
        return {"num_layers": self._num_layers, **seconds, **told}

    def _rebuild(self) -> None:
        """Rebuild one layer whose activations are there."""
        self._acts.rebuild(
            0,
            self._act_half[0],
            self._kv_half[0, 1],
            self._positions,
            self._copier.mark(),
        )

    def _load_acts(self) -> None:
        mark = self._copier.mark()
        self._acts.acts_to_device(0, self._rows, self._act_half[0], mark)

    def _load_kv(self) -> None:
        """Load as many pages of a layer as KV."""
        mark = self._copier.mark()
        self._copier.to_device(0, self._rows, self._kv_half[0, 0], mark)

    def _stream(self, *, rebuilds: bool) -> None:
        """Bring all layers through the halves; with or without their rebuilds."""
        if not rebuilds:
            for layer in range(self._num_layers):
                mark, half = self._copier.mark(), layer % 2
                acts = self._act_half[half]
                self._acts.acts_to_device(layer, self._rows, acts, mark)
                kv = self._kv_half[half, 0]
                self._copier.to_device(layer, self._rows, kv, mark)
            return
        self._spoil()
        stream = self._mover.stream([self._unit(n) for n in range(self._num_layers)])
        for layer in range(self._num_layers):
            stream.wait(layer)
            stream.done(layer)
        self._stall_s = stream.end()
        self._rebuild_s = stream.rebuild_s
        assert not stream.failed, f"units failed: {stream.failed}"

    def _unit(self, layer: int) -> Unit:
        half = layer % 2
        part = ActPart(
            self._rows,
            self._rows,
            self._act_half[half],
            self._kv_half[half, 1],
            self._positions,
        )
        return Unit(layer, 0, self._rows, self._kv_half[half, 0], self._rows, part)

    def _spoil(self) -> None:
        for buffer in (self._pool.k_buffer[0], self._pool.v_buffer[0]):
            buffer.fill_(7.0)

    def _check(self) -> None:
        """Compare the last layer's KV: loaded bytes, and one rebuilt token."""
        layer = self._num_layers - 1
        loaded, rebuilt = self._kv_half[layer % 2]
        buffers = (self._pool.k_buffer[0], self._pool.v_buffer[0])
        index = torch.from_numpy(loaded.astype(np.int64)).to(self._place.device)
        pages = [as_byte_pages(one, self._layout)[index] for one in buffers]
        begin = self._layout.key_offset(layer)
        wanted = self._memories[0].array[
            self._rows, begin : begin + self._layout.layer_page_bytes
        ]
        found = torch.cat(pages, dim=1).cpu().numpy()
        assert np.array_equal(found, wanted), "other KV came up"
        one = self._projections[layer]
        assert one.rotary is not None
        projection = KVProjection(
            one.weight.cpu(),
            None,
            one.num_kv_heads,
            one.head_dim,
            Rotary(one.rotary.cos_sin.cpu()),
        )
        begin = layer * self.act_page_bytes
        row = self._memories[1].array[int(self._rows[-1])]
        act = torch.from_numpy(row[begin : begin + self.act_page_bytes].copy())
        rows = act.view(torch.bfloat16).view(self._page_tokens, -1)
        truth = rebuild_reference(
            rows,
            torch.tensor([0]),
            projection,
            torch.tensor([int(self._positions[-1])]),
        )
        slot = int(rebuilt[-1]) * self._page_tokens
        for name, buffer, kv in zip("KV", buffers, truth, strict=True):
            off = (buffer[slot].cpu().float() - kv[0].float()).abs().max()
            assert float(off) <= _TOLERANCE, f"another {name} was rebuilt, {off} off"
