"""What SGLang's disaggregated modes need where there is no accelerator.

Each takes one use of CUDA away that SGLang 0.5.23 makes unasked; none is applied where
there is an accelerator. The default that retracted requests are kept in plain tensors
is set with the platform's other defaults (``cpu_platform.py``).
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

__all__ = ["cpu_hooks"]

_DEVICE_KINDS = ("VRAM", "cuda")
_NIXL_CALLS = (
    "register_memory",
    "get_reg_descs",
    "get_xfer_descs",
    "prep_xfer_dlist",
    "query_memory",
)


def cpu_hooks() -> list[tuple[str, Any, Any]]:
    """Return the hooks of a scheduler on a machine without an accelerator."""
    from sglang.srt.plugins.hook_registry import HookType

    target = "sglang.srt.managers.scheduler.Scheduler.init_disaggregation"
    return [(target, _repair, HookType.BEFORE)]


def _repair(scheduler: Any) -> None:
    server_args = scheduler.server_args
    if server_args.disaggregation_mode == "null":
        return
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

    # Else indices of pages go through pinned memory, which only CUDA has.
    MooncakeKVSender.supports_host_tensor_indices = False
    if server_args.disaggregation_transfer_backend == "nixl":
        _name_memory_as_it_is()


def _name_memory_as_it_is() -> None:
    """Let SGLang's NIXL classes register main memory: they call it the device's."""
    if importlib.util.find_spec("nixl") is None:
        return
    nixl_agent = importlib.import_module("nixl._api").nixl_agent

    for name in _NIXL_CALLS:
        original = getattr(nixl_agent, name, None)
        if original is not None:
            setattr(nixl_agent, name, _with_main_memory(original))


def _with_main_memory(original: Any) -> Any:
    def call(agent: Any, *args: Any, **kwargs: Any) -> Any:
        named = {key: _kind(value) for key, value in kwargs.items()}
        return original(agent, *map(_kind, args), **named)

    return call


def _kind(value: Any) -> Any:
    is_kind = isinstance(value, str) and value in _DEVICE_KINDS
    return "DRAM" if is_kind else value
