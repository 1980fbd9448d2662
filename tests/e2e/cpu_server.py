"""Starts SGLang's server where torch is built with CUDA and the machine has none of it.

``cpu_server.py ARGUMENTS OF sglang.launch_server``

``/release_memory_occupation`` waits for the device that torch names first, and LoRA's
layers pin their memory. Both ask CUDA there and end the scheduler: plain SGLang's as
well. Here the processor stands in for it, as with a torch that is built without CUDA.
The scheduler's process imports this file again, as every process does that Python
spawns.
"""

from __future__ import annotations

import functools
import runpy
import sys
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["CPU_SERVER"]

CPU_SERVER = (sys.executable, __file__)
"""``ServerSpec.program``."""

_named = torch.get_device_module


def _on_processor(device: Any = None) -> Any:
    """Return torch's module of a device; without a name, the processor's."""
    return torch.cpu if device is None else _named(device)


def _pageable(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the function that makes a tensor, which pins no more."""

    @functools.wraps(make)
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        del pin_memory
        return make(*args, **kwargs)

    return made


def _as_it_is(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    del device
    return tensor


def _do_without_cuda() -> None:
    torch.get_device_module = _on_processor
    torch.Tensor.pin_memory = _as_it_is  # type: ignore[method-assign]
    for name in ("arange", "empty", "tensor", "zeros"):
        setattr(torch, name, _pageable(getattr(torch, name)))


# In the servers' processes, not in the tests that name this file.
if __name__ in ("__main__", "__mp_main__") and not torch.accelerator.is_available():
    _do_without_cuda()

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
