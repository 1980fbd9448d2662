"""SGLang's own offloader on a device that is a CPU.

``OffloaderV1`` leaves layers alone that are on a CPU. Here it is told that the CPU is
none, so that it moves parameters from one memory to another and calls layers with
copies. Which parameters it has moved is what "in host memory" means then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class _NoCpu:
    """Torch, for a module that is to take the CPU for a device."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, name: str) -> Any:
        return object() if name == "cpu" else torch.device(name)


def offload(layers: Sequence[torch.nn.Module], num_bytes: int) -> int:
    """Let SGLang offload layers, and have ours know what it has moved.

    Args:
        layers: in order.
        num_bytes: at most, but for the last parameter.

    Returns:
        Parameters that were moved.
    """
    from sglang.srt.utils import offloader

    from sgl_tiered.engines.sglang.layered.activations import offloaded

    own = [one for layer in layers for one in layer.parameters()]
    before = [one.data_ptr() for one in own]
    theirs: Any = offloader
    there, theirs.torch = theirs.torch, _NoCpu()
    try:
        wrapped = offloader.OffloaderV1(num_bytes).wrap_modules(iter(layers))
    finally:
        theirs.torch = there
    assert all(one is layer for one, layer in zip(wrapped, layers, strict=True))
    pairs = zip(own, before, strict=True)
    moved = {id(one) for one, address in pairs if one.data_ptr() != address}
    ours: Any = offloaded
    ours.is_away = lambda one, device: id(one) in moved
    return len(moved)
