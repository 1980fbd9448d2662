"""Tells the contention guard of SGLang's tensor-parallel collectives.

All of them go through ``GroupCoordinator``, in the process of the rank. The hooks stand
around its methods, and count a call only where the group has several ranks. On CUDA a
call only queues work, so an event before it and one behind it tell when the device is
at it; on a CPU (gloo) the call returns when the collective has ended.

Off where a swap has links of its own: one rank, or NVLink between all devices.
"""

from __future__ import annotations

from typing import Any

import torch

from sgl_tiered.core.clock import Clock
from sgl_tiered.errors import EngineCompatibilityError
from sgl_tiered.pipelines.contention import (
    CollectiveWatch,
    ContentionGuard,
    CountedCollectives,
    QueuedCollectives,
)

__all__ = [
    "COLLECTIVES",
    "collective_hooks",
    "group_has_nvlink",
    "guard_counters",
    "hook_collectives",
    "link_is_shared",
    "make_guard",
    "make_watch",
    "watch_collectives",
]

_GROUP = "sglang.srt.distributed.parallel_state.GroupCoordinator."
COLLECTIVES = ("all_reduce", "all_gather")
"""Methods that a forward waits for; each takes the tensor first, as ``input_``."""

# Whom the hooks tell: they are applied before anything is measured or built.
_watches: list[CollectiveWatch] = []


def link_is_shared(num_ranks: int, device: str, *, nvlink: bool | None) -> bool:
    """Return whether collectives cross the links that KV is swapped over.

    Args:
        num_ranks: of the tensor-parallel group.
        device: its torch type.
        nvlink: whether NVLink joins all of its devices; None if that is unknown.
    """
    return num_ranks > 1 and not (device == "cuda" and nvlink is True)


def group_has_nvlink(group: Any) -> bool | None:
    """Return what SGLang found out about a group's devices; None if it did not look.

    It looks as it sets up its own all-reduce, and gives that up, before it has written
    the answer down, where more than two devices lack NVLink.
    """
    found = getattr(getattr(group, "ca_comm", None), "full_nvlink", None)
    return None if found is None else bool(found)


def make_watch(device: str, clock: Clock) -> CollectiveWatch:
    """Return the watch that fits how a device runs collectives."""
    if device == "cuda":
        return QueuedCollectives(
            lambda: torch.cuda.Event(enable_timing=True), torch.cuda.current_stream
        )
    return CountedCollectives(clock)


def make_guard(
    num_ranks: int, device: str, clock: Clock, *, nvlink: bool | None
) -> ContentionGuard | None:
    """Return the guard of a rank's swaps, None where its links are its own.

    The hooks (``collective_hooks``) have to be applied; they tell the guard's watch.
    """
    if not link_is_shared(num_ranks, device, nvlink=nvlink):
        return None
    watch = make_watch(device, clock)
    watch_collectives(watch)
    return ContentionGuard(watch, clock)


def watch_collectives(watch: CollectiveWatch | None) -> None:
    """Tell ``watch`` of every collective of this process from now on; None: nobody."""
    _watches[:] = [] if watch is None else [watch]


def guard_counters(guard: ContentionGuard) -> dict[str, float]:
    """Return what a guard of this process was asked, and how often it waited."""
    return {
        "layerkv_guard_asked": guard.num_asked,
        "layerkv_guard_waits": guard.num_waits,
        "layerkv_guard_waited_s": guard.waited_s,
        "layerkv_guard_expired": guard.num_expired,
        "layerkv_guard_collectives": _watches[0].num_seen if _watches else 0,
    }


def hook_collectives() -> None:
    """Put the hooks around SGLang's collectives, in the process of a rank.

    Only where a guard was made: without one, nothing stands around them.

    Raises:
        EngineCompatibilityError: SGLang's collectives are elsewhere.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    for target, hook, kind in collective_hooks():
        if target in HookRegistry._patched:
            continue
        HookRegistry.register(target, hook, kind)
        HookRegistry.apply_hooks()
        if target not in HookRegistry._patched:
            raise EngineCompatibilityError(f"no hook could be put around {target}")


def collective_hooks() -> list[tuple[str, Any, Any]]:
    """List (target, hook, type) to register in the process of a rank."""
    from sglang.srt.plugins.hook_registry import HookType

    return [(_GROUP + name, _around, HookType.AROUND) for name in COLLECTIVES]


def _around(original: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand around one collective."""
    if not _watches or group.world_size == 1:
        return original(group, *args, **kwargs)
    watch = _watches[0]
    tensor = args[0] if args else kwargs["input_"]
    begun = watch.begin(tensor.numel() * tensor.element_size())
    try:
        return original(group, *args, **kwargs)
    finally:
        watch.end(begun)
