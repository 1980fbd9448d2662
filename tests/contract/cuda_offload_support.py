"""Decoder layers that SGLang has offloaded, for ``cuda_build_program.py``."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from cuda_acts_support import HIDDEN, NUM_POSITIONS
from flashinfer_support import DIM, HEADS, LAYERS
from offload_support import offload
from sgl_tiered_kernels.kv_gen import KVProjection, Rotary

_WIDTH = 3 * HEADS * DIM


class Layer(torch.nn.Module):
    """As much of a decoder layer as there is to be offloaded."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = torch.nn.Linear(HIDDEN, _WIDTH)
        self.mlp = torch.nn.Linear(HIDDEN, 2 * HIDDEN)
        self.read: list[int] = []
        """Where the weights were that each call has read."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return Q, K and V of inputs."""
        self.read.append(self.qkv_proj.weight.data_ptr())
        result: torch.Tensor = self.qkv_proj(inputs)
        self.mlp(inputs)
        return result


class OffloadedProjections:
    """In the place of what is found in a model: layers that SGLang has offloaded.

    Args:
        num_bytes: that are offloaded at most; SGLang counts in whole parameters.
    """

    hidden, layer_params = HIDDEN, 0

    def __init__(self, num_bytes: int) -> None:
        from sgl_tiered.engines.sglang.layered.activations import offloaded

        gen = torch.Generator().manual_seed(2)
        angles = torch.rand((NUM_POSITIONS, DIM // 2), generator=gen)
        self._table = torch.cat((angles.cos(), angles.sin()), dim=-1)
        layers = [Layer() for _ in range(LAYERS)]
        for layer in layers:
            layer.requires_grad_(False)
            for one in layer.parameters():
                one.data = torch.randn(one.shape, generator=gen) * HIDDEN**-0.5
        self._truth = [
            [one.data.clone() for one in layer.qkv_proj.parameters()]
            for layer in layers
        ]
        self.layers = layers
        self.num_moved = offload(layers, num_bytes)
        device = torch.device("cpu")
        self.offloaded = offloaded.OffloadedWeights(self.layers, self.linears, device)
        self.worst = 0.0

    def __len__(self) -> int:
        return LAYERS

    def __getitem__(self, layer: int) -> KVProjection:
        return self.over(layer)

    @property
    def linears(self) -> list[Any]:
        """Return the fused projections."""
        return [layer.qkv_proj for layer in self.layers]

    def over(self, layer: int, weight: Any = None, bias: Any = None) -> KVProjection:
        """Return a projection over copies, and what of it is on the device."""
        linear = self.linears[layer]
        away = set(self.offloaded.away.get(layer, ()))
        copied = {"weight": weight, "bias": bias}
        given = {name for name, one in copied.items() if one is not None}
        assert given == away, f"{given} of layer {layer} were copied, and not {away}"
        weight = linear.weight if weight is None else weight
        bias = linear.bias if bias is None else bias
        return KVProjection.from_fused(weight, bias, HEADS, DIM, Rotary(self._table))

    def truth(self, layer: int) -> KVProjection:
        """Return what K and V are made of, wherever it lies."""
        weight, bias = self._truth[layer]
        return KVProjection.from_fused(weight, bias, HEADS, DIM, Rotary(self._table))

    def module(self, layer: int) -> torch.nn.Module:
        """Return what captures are hooked to."""
        return self.linears[layer]

    def run(self, layer: int, inputs: torch.Tensor) -> None:
        """Call a layer, as SGLang does."""
        with torch.inference_mode():
            found = self.layers[layer](inputs)
        weight, bias = self._truth[layer]
        off = (found - torch.nn.functional.linear(inputs, weight, bias)).abs().max()
        # Nan is no rounding.
        self.worst = max(self.worst, float(off) if off == off else 1e9)

    def told(self, home: Collection[int]) -> dict[str, Any]:
        """Return what SGLang's calls have read, and whether all is at home again."""
        reads = [address for layer in self.layers for address in layer.read]
        slots = {
            one.data_ptr() for slot in self.offloaded._slots for one in slot.values()
        }
        return {
            "moved": self.num_moved,
            "away": sorted(self.offloaded.away),
            "off": self.worst,
            "from_slots": sum(address in slots for address in reads),
            "from_elsewhere": sum(address not in slots for address in reads),
            "at_home": [one.data_ptr() for one in self._all()] == list(home),
        }

    def addresses(self) -> list[int]:
        """Return where all parameters are."""
        return [one.data_ptr() for one in self._all()]

    def _all(self) -> list[torch.nn.Parameter]:
        return [one for layer in self.layers for one in layer.parameters()]
