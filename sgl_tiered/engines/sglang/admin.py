"""SGLang's admin calls that meet the cache: what each of them does to the tiers.

Our cache is driven by switches that SGLang has for its own caches with storage, which
open some of their calls as well. None of them may end or hold the scheduler:

- ``POST /hicache/storage-backend/clear`` forgets what is on disk, at once, whatever
  runs; slots come back and records are voided by and by. Without a disk it is refused.
  Attaching and detaching storage is refused by
  SGLang.
- ``POST /flush_cache`` and ``/release_memory_occupation`` want a server that is idle,
  and the copies of the last answer belong to nobody who could be waited for: they are
  ended first. Where one does not end, a flush goes on as soon as it is given up, but no
  memory is released under it, which a line in the log says and
  ``refused_memory_release`` counts: SGLang's answer has no word for it. What was not
  released is then not resumed.
- While generation is paused, or the server sleeps, the loop that takes the ends of
  transfers does not turn: they are taken, or the sleep put off.
- A beam search is refused: SGLang refuses it for its own caches with storage.
"""

from __future__ import annotations

import logging
from typing import Any

from sgl_tiered.engines.sglang.seams import tiered_runtime as _tiered

__all__ = ["admin_hooks"]

logger = logging.getLogger(__name__)

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_WEIGHTS = (
    "sglang.srt.managers.scheduler_components.weight_updater."
    "SchedulerWeightUpdaterManager."
)
_BEAMS = "sglang.srt.beam_search.coordinator.BeamCoordinator."


def admin_hooks() -> list[tuple[str, Any, Any]]:
    """Return the hooks of admin calls; all of them run in the scheduler process."""
    from sglang.srt.plugins.hook_registry import HookType

    return [
        (_SCHEDULER + "clear_hicache_storage_wrapped", _clear, HookType.AROUND),
        (_SCHEDULER + "flush_cache", _finish_offloads, HookType.BEFORE),
        (_WEIGHTS + "release_memory_occupation", _release, HookType.AROUND),
        (_WEIGHTS + "resume_memory_occupation", _resume, HookType.AROUND),
        (
            _SCHEDULER + "_record_scheduler_state_for_paused_engine",
            _take_ends,
            HookType.BEFORE,
        ),
        (_SCHEDULER + "maybe_sleep_on_idle", _sleep, HookType.AROUND),
        (_BEAMS + "validate_and_init", _refuse_beams, HookType.AROUND),
    ]


def _clear(original: Any, scheduler: Any, recv_req: Any) -> Any:
    """Forget what is on disk; say so where there is none."""
    from sglang.srt.managers.io_struct import ClearHiCacheReqOutput

    cache = scheduler.tree_cache
    if _tiered(cache) is None:
        return original(scheduler, recv_req)
    return ClearHiCacheReqOutput(success=cache.clear_storage_backend())


def _finish_offloads(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Let the last offload end, so that SGLang finds its cache idle and flushes it."""
    del args, kwargs
    if _tiered(scheduler.tree_cache) is not None:
        scheduler.tree_cache.finish_offloads()


def _release(original: Any, manager: Any, recv_req: Any) -> Any:
    """Let copies from and to the device end before its memory is taken away.

    Where one does not, nothing is: it would read memory that is no longer there.
    """
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqOutput

    scheduler = manager.scheduler
    runtime = None if scheduler is None else _tiered(scheduler.tree_cache)
    if runtime is None or scheduler.tree_cache.leave_device():
        return original(manager, recv_req)
    runtime.metrics.add("refused_memory_release")
    logger.error(
        "sgl-tiered: the device's memory is not released, as a copy from it has not "
        "ended: ask again when it has, or start the server anew"
    )
    return ReleaseMemoryOccupationReqOutput()


def _resume(original: Any, manager: Any, recv_req: Any) -> Any:
    """Resume what was released, which may be less than what is asked for."""
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqOutput

    scheduler = manager.scheduler
    if scheduler is None or _tiered(scheduler.tree_cache) is None:
        return original(manager, recv_req)
    asked = recv_req.tags or GPU_MEMORY_ALL_TYPES
    tags = [tag for tag in asked if tag in manager.offload_tags]
    if not tags:
        return ResumeMemoryOccupationReqOutput()
    recv_req.tags = tags
    return original(manager, recv_req)


def _take_ends(scheduler: Any) -> None:
    """Take the ends of transfers while generation is paused, on all ranks alike."""
    if _tiered(scheduler.tree_cache) is not None:
        scheduler.tree_cache.take_ends()


def _sleep(original: Any, scheduler: Any) -> None:
    """Sleep until a request comes, unless there is something to do before.

    That is, pages of a former server to adopt, pages that were forgotten to give back,
    or a transfer's end to be taken.
    """
    runtime = _tiered(scheduler.tree_cache)
    if runtime is None or scheduler.idle_sleeper is None:
        original(scheduler)
    elif runtime.is_adopting or runtime.is_freeing:
        return
    elif not runtime.is_moving:
        original(scheduler)
    else:
        runtime.nap()


def _refuse_beams(original: Any, coordinator: Any, req: Any, recv_req: Any) -> Any:
    """Return why a beam search is not made; SGLang tells the client."""
    runtime = _tiered(coordinator.tree_cache)
    if runtime is None:
        return original(coordinator, req, recv_req)
    runtime.metrics.add("refused_beam_search")
    return (
        "Beam search is not supported with --radix-cache-backend tiered: leave "
        "beam_width out, or serve without it."
    )
