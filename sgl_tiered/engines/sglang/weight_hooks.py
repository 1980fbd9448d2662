"""SGLang's ways to change weights: the hooks on all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sgl_tiered.engines.sglang.seams import tiered_runtime

__all__ = ["weight_hooks"]

logger = logging.getLogger(__name__)

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_UPDATER = (
    "sglang.srt.managers.scheduler_components.weight_updater."
    "SchedulerWeightUpdaterManager."
)


def weight_hooks() -> list[tuple[str, Any, Any]]:
    """Return the hooks on whatever changes the weights of a scheduler's model."""
    from sglang.srt.plugins.hook_registry import HookType

    return [
        (_UPDATER + name, _around(may_change), HookType.AROUND)
        for name, may_change in _CHANGES.items()
    ] + [
        (_SCHEDULER + "load_lora_adapter", _loaded_adapter, HookType.AFTER),
        (
            _SCHEDULER + "load_lora_adapter_from_tensors",
            _loaded_adapter,
            HookType.AFTER,
        ),
        (_SCHEDULER + "unload_lora_adapter", _unloaded_adapter, HookType.AFTER),
    ]


def _always(manager: Any, recv_req: Any) -> bool:
    del manager, recv_req
    return True


def _in_session(manager: Any, recv_req: Any) -> bool:
    """Say whether SGLang takes it: without a session it is refused."""
    del recv_req
    return manager._session is not None


def _of_weights(manager: Any, recv_req: Any) -> bool:
    """Say whether memory of weights is released or comes back; no tag means all."""
    from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS

    del manager
    return not recv_req.tags or GPU_MEMORY_TYPE_WEIGHTS in recv_req.tags


def _resets(manager: Any, recv_req: Any) -> bool:
    """Say whether SGLang's check of weights overwrites them."""
    del manager
    return bool(recv_req.action == "reset_tensors")


_CHANGES: dict[str, Callable[[Any, Any], bool]] = {
    "update_weights_from_disk": _always,
    "update_weights_from_ipc": _always,
    "update_weights_from_distributed": _in_session,
    "update_weights_from_tensor": _in_session,
    "begin_weight_update": _always,
    "end_weight_update": _in_session,
    "release_memory_occupation": _of_weights,
    "resume_memory_occupation": _of_weights,
    "check_weights": _resets,
}
"""SGLang's method -> whether this call of it may change weights."""


def _around(may_change: Callable[[Any, Any], bool]) -> Callable[..., Any]:
    """Return the hook around a method: changes are announced, and their end told.

    Within a session, and while their memory is released, the weights are not yet what
    will be computed with.
    """

    def hook(original: Any, manager: Any, recv_req: Any) -> Any:
        from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS

        cache: Any = getattr(manager.scheduler, "tree_cache", None)
        if tiered_runtime(cache) is None or not may_change(manager, recv_req):
            return original(manager, recv_req)
        if GPU_MEMORY_TYPE_WEIGHTS not in manager.offload_tags:
            # Else it was said when they went away, and nothing was computed since.
            cache.weights_changing()
        try:
            result = original(manager, recv_req)
            _flush_alike(manager, cache.tiered)
            return result
        finally:
            # Also where it failed: who knows how far it came.
            is_over = manager._session is None
            if is_over and GPU_MEMORY_TYPE_WEIGHTS not in manager.offload_tags:
                cache.weights_changed()

    return hook


def _flush_alike(manager: Any, runtime: Any) -> None:
    """Flush what a rank has cached, where another has flushed.

    SGLang flushes on the ranks that have loaded weights, not on those that failed to;
    ranks with other caches build other batches, and hang.
    """
    told = runtime.agreement.gathered(runtime.weights.was_emptied)
    if any(told) and not all(told):
        logger.warning(
            "sgl-tiered: %d of %d ranks have flushed their cache after a change of "
            "weights that failed on the others: all of them are flushed",
            sum(told),
            len(told),
        )
        manager.flush_cache()


def _loaded_adapter(result: Any, scheduler: Any, recv_req: Any) -> None:
    del result
    if tiered_runtime(scheduler.tree_cache) is not None:
        scheduler.tree_cache.adapter_loaded(recv_req.lora_id)


def _unloaded_adapter(result: Any, scheduler: Any, recv_req: Any) -> None:
    runtime = tiered_runtime(scheduler.tree_cache)
    if runtime is not None and result.success:
        runtime.adapters.unloaded(recv_req.lora_id)
        runtime.namespaces.forget_adapter(recv_req.lora_id)
