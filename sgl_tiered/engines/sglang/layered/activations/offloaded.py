"""Fused projections that SGLang's ``--cpu-offload-gb`` keeps in host memory.

SGLang moves parameters of whole decoder layers to the host when it loads them. Before a
layer is computed it copies them to the device, on the model's stream, and calls the
layer with the copies (``OffloaderV1`` and ``functional_call``); what is on the device
already it takes as it is. That gives a rebuild, which comes ahead of the layer, nothing
to read. So the projection's parameters are copied ahead (``pipelines/stream_weights``),
and lent to SGLang while the layer is called, which then copies them no second time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from sgl_tiered.pipelines.stream_weights import NUM_SLOTS, WeightSlots

if TYPE_CHECKING:
    from sgl_tiered.engines.sglang.layered.driver import LayerDriver

__all__ = ["OffloadedWeights", "hook_offloaded", "is_away", "on_device"]


def is_away(parameter: torch.Tensor, device: torch.device) -> bool:
    """Return whether a device has to copy a parameter to compute with it."""
    return bool(parameter.device.type != device.type)


@contextlib.contextmanager
def on_device(module: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Have all parameters of a module on a device for a while."""
    moved = [(one, one.data) for one in module.parameters() if is_away(one, device)]
    try:
        for parameter, host in moved:
            parameter.data = host.to(device)
        yield
    finally:
        for parameter, host in moved:
            parameter.data = host


class OffloadedWeights:
    """Parameters of the layers' fused projections that are in host memory.

    Args:
        layers: the decoder layers, in order.
        linears: their fused projections.
        device: that computes.

    Attributes:
        away: of each layer that has any: by name, what is in host memory.
        slot_bytes: of the largest layer's.
        layer_bytes: of all that a decoder layer has in host memory, in the mean.
    """

    def __init__(
        self,
        layers: Sequence[torch.nn.Module],
        linears: Sequence[torch.nn.Module],
        device: torch.device,
    ) -> None:
        self._layers = list(layers)
        self._device = device
        self.away: dict[int, dict[str, torch.nn.Parameter]] = {}
        for layer, linear in enumerate(linears):
            named = linear.named_parameters(recurse=False)
            found = {name: one for name, one in named if is_away(one, device)}
            if found:
                self.away[layer] = found
        self._most: dict[str, torch.Tensor] = {}
        for found in self.away.values():
            for name, one in found.items():
                most = self._most.get(name)
                if most is None or most.nbytes < one.nbytes:
                    self._most[name] = one.data
        self.slot_bytes = sum(one.nbytes for one in self._most.values())
        streamed = sum(
            one.nbytes
            for layer in self._layers
            for one in layer.parameters()
            if is_away(one, device)
        )
        self.layer_bytes = streamed // max(len(self._layers), 1)
        self._slots: list[dict[str, torch.Tensor]] = []
        self._home: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

    def layer(self, number: int) -> torch.nn.Module:
        """Return a decoder layer."""
        return self._layers[number]

    def allocate(self) -> None:
        """Take the slots' memory on the device."""
        # Parameters are given them, and those are no inference tensors.
        with torch.inference_mode(False):
            self._slots = [
                {
                    name: torch.empty(most.numel(), dtype=most.dtype).to(self._device)
                    for name, most in self._most.items()
                }
                for _ in range(NUM_SLOTS)
            ]

    def pairs(self, layer: int, slot: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return, of each of a layer's parameters, its place in a slot and itself."""
        places = self.places(layer, slot)
        return [(places[name], one.data) for name, one in self.away[layer].items()]

    def places(self, layer: int, slot: int) -> dict[str, torch.Tensor]:
        """Return by name where a layer's parameters lie in a slot."""
        return {
            name: self._slots[slot][name][: one.numel()].view(one.shape)
            for name, one in self.away[layer].items()
        }

    def hand_over(self, layer: int, slot: int) -> None:
        """Let the layer's parameters lie in a slot, until ``restore``."""
        self.restore()
        for name, place in self.places(layer, slot).items():
            parameter = self.away[layer][name]
            self._home.append((parameter, parameter.data))
            parameter.data = place

    def restore(self) -> None:
        """Let parameters lie in host memory again."""
        for parameter, host in self._home:
            parameter.data = host
        self._home = []


def hook_offloaded(
    weights: OffloadedWeights,
    linears: Sequence[torch.nn.Module],
    slots: WeightSlots,
    driver: LayerDriver,
) -> None:
    """Lend slots to the layers that SGLang computes, until they were projected.

    Args:
        weights: of the model; its slots have memory.
        linears: the layers' fused projections.
        slots: which layers are in them.
        driver: of the pool; slots are brought anew for each of its forwards.
    """

    def make(layer: int) -> tuple[Callable[..., None], Callable[..., None]]:
        def begin(_: Any, args: tuple[Any, ...]) -> None:
            del args
            # Inside SGLang's own call it begins once more, on what it has then.
            if is_handed[layer]:
                return
            weights.restore()
            slot = slots.lend(layer)
            if slot is not None:
                weights.hand_over(layer, slot)
                is_handed[layer] = True

        def projected(_: Any, args: tuple[Any, ...], result: Any) -> None:
            del args, result
            give_back()

        return begin, projected

    is_handed = dict.fromkeys(weights.away, False)

    def give_back() -> None:
        # In this order: what may be overwritten is nobody's weights any more.
        weights.restore()
        slots.take_back()
        is_handed.update(dict.fromkeys(is_handed, False))

    def forget() -> None:
        # Also what a forward that broke off has left.
        give_back()
        slots.forget()

    for layer in weights.away:
        begin, projected = make(layer)
        weights.layer(layer).register_forward_pre_hook(begin)
        linears[layer].register_forward_hook(projected)
    driver.on_begin = forget
    driver.weights_brought = lambda: slots.num_bytes
