"""Starts SGLang's server where torch is built with CUDA and the machine has none of it.

``cpu_server.py ARGUMENTS OF sglang.launch_server``

``/release_memory_occupation`` waits for the device that torch names first, which is
CUDA's there, and ends the scheduler: plain SGLang's as well. Here the processor stands
in for it, as with a torch that is built without CUDA. The scheduler's process imports
this file again, as every process does that Python spawns.
"""

from __future__ import annotations

import runpy
from typing import Any

import torch

__all__: list[str] = []

_named = torch.get_device_module


def _on_processor(device: Any = None) -> Any:
    """Return torch's module of a device; without a name, the processor's."""
    return torch.cpu if device is None else _named(device)


if not torch.accelerator.is_available():
    torch.get_device_module = _on_processor

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
