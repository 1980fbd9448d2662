"""Makes ``tiered`` a transfer backend of SGLang, and hooks its scheduler loops."""

from __future__ import annotations

import math
import threading
from typing import Any

from sgl_tiered.engines.sglang.seams import tiered_runtime
from sgl_tiered.serving.disagg.caching import read_pd
from sgl_tiered.serving.options import BACKEND_NAME, PdCaching

__all__ = ["add_choice", "disagg_hooks", "pd_state", "service_hooks"]

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_PREALLOC = "sglang.srt.disaggregation.decode.DecodePreallocQueue."
_GET_CLASS = "sglang.srt.disaggregation.utils.get_kv_class"
_HOLD_NAP_S = 0.005


def add_choice() -> None:
    """Let the command line take our name; called before it is parsed."""
    from sglang.srt.arg_groups import choices

    if BACKEND_NAME not in choices.DISAGG_TRANSFER_BACKEND_CHOICES:
        choices.add_disagg_transfer_backend_choices([BACKEND_NAME])


def service_hooks() -> list[tuple[str, Any, Any]]:
    """Return the hooks of every process that asks for a backend's classes."""
    from sglang.srt.disaggregation.utils import TransferBackend
    from sglang.srt.plugins.hook_registry import HookType

    _add_member(TransferBackend)
    return [(_GET_CLASS, _kv_class, HookType.AROUND)]


def disagg_hooks() -> list[tuple[str, Any, Any]]:
    """Return the hooks of the scheduler process."""
    from sglang.srt.plugins.hook_registry import HookType

    return [
        (_SCHEDULER + "init_disaggregation", _after_init, HookType.AFTER),
        (_SCHEDULER + "process_decode_queue", _take_events, HookType.BEFORE),
        (_SCHEDULER + "maybe_send_cached_prefix_chunk", _send_early, HookType.AROUND),
        (_PREALLOC + "_update_handshake_waiters", _load_first, HookType.AFTER),
    ]


def pd_state(scheduler: Any) -> dict[str, Any] | None:
    """Return what was transferred; None where our backend is not used."""
    manager = _manager(scheduler)
    return None if manager is None else dict(manager.pd_stats())


def _manager(scheduler: Any) -> Any:
    """Return our manager of transfers; None where there is none."""
    for name in ("disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue"):
        queue = getattr(scheduler, name, None)
        found = getattr(queue, "kv_manager", None)
        if hasattr(found, "pd_stats"):
            return found
    return None


def _add_member(backends: Any) -> None:
    """Give SGLang's closed list of backends one more: an enum asks ``_missing_``."""
    if isinstance(getattr(backends, "_tiered", None), backends):
        return
    member = object.__new__(backends)
    member._name_ = BACKEND_NAME.upper()
    member._value_ = BACKEND_NAME

    def missing(cls: Any, value: object) -> Any:
        del cls
        return member if value == BACKEND_NAME else None

    backends._missing_ = classmethod(missing)
    backends._tiered = member


def _kv_class(original: Any, transfer_backend: Any, class_type: Any) -> Any:
    """Return our class for our backend, SGLang's for any other."""
    from sglang.srt.disaggregation.utils import KVClassType

    name = getattr(transfer_backend, "value", None)
    if name != BACKEND_NAME or class_type == KVClassType.KVARGS:
        return original(transfer_backend, class_type)
    from sgl_tiered.engines.sglang.disagg import conn

    return {
        KVClassType.MANAGER: conn.TieredKVManager,
        KVClassType.SENDER: conn.TieredKVSender,
        KVClassType.RECEIVER: conn.TieredKVReceiver,
        KVClassType.BOOTSTRAP_SERVER: conn.TieredKVBootstrapServer,
    }[class_type]


def _after_init(result: Any, scheduler: Any) -> None:
    """Join the manager of transfers to the scheduler, and to its pool if it has one."""
    del result
    manager = _manager(scheduler)
    if manager is None:
        return
    queue = scheduler.disagg_decode_transfer_queue
    if queue is not None:
        # Never by the clock: ``ReleaseWatch`` knows when.
        queue.deferred_kv_release_timeout = math.inf
    asked = read_pd(scheduler.server_args)
    runtime = tiered_runtime(scheduler.tree_cache)
    sources = getattr(runtime, "sources", None)
    if sources is not None:
        manager.send_from(sources)
    if queue is not None and runtime is not None:
        scheduler.tree_cache.load_first(manager.link_bytes_per_s)
        scheduler.tree_cache.watch_prefill(manager.prefill_of)
    elif runtime is not None:
        manager.weights = runtime.weights.told
    if asked.caching is not PdCaching.RETURNED or runtime is None:
        return
    node = runtime.pool.node
    if queue is None:
        from sgl_tiered.serving.disagg.figures import teller

        manager.tell = teller(runtime, lambda: (node.instance, node.incarnation))
        return
    from sgl_tiered.serving.disagg.judging import ReturnJudge
    from sgl_tiered.serving.disagg.returning import AnswerReturns

    def is_there(instance: int, incarnation: int) -> bool:
        return bool(node.view.has(instance, incarnation))

    judge = ReturnJudge(asked.returns, runtime.parts.device.layout, manager.count)
    manager.returning = judge.stats
    returns = AnswerReturns(node.pool, is_there, manager.count)
    scheduler.tree_cache.return_answers(returns, manager.take_prefill, judge)


def _take_events(scheduler: Any) -> None:
    """Let a tiered cache take the ends of its transfers: SGLang asks HiCache only."""
    if tiered_runtime(scheduler.tree_cache) is not None:
        scheduler.tree_cache.check_hicache_events()
    if _only_holds(scheduler):
        # SGLang turns without a pause while anything is held, which may be long.
        threading.Event().wait(_HOLD_NAP_S)


def _load_first(result: Any, queue: Any, *args: Any, **kwargs: Any) -> None:
    """Let requests wait a moment whose prompts this server's tiers are bringing."""
    del result, args, kwargs
    if tiered_runtime(queue.tree_cache) is None:
        return
    # Those that are computed anew take nothing from a cache.
    able = [d for d in queue.queue if d.waiting_for_input and not d.is_rebootstrap]
    held = queue.tree_cache.held_back([each.req for each in able])
    for each in able:
        if each.req.rid in held:
            # SGLang sets it again in its next turn.
            each.waiting_for_input = False


def _only_holds(scheduler: Any) -> bool:
    """Say whether held memory is all that keeps a decode instance from sleeping."""
    queue = scheduler.disagg_decode_transfer_queue
    ahead = scheduler.disagg_decode_prealloc_queue
    return (
        queue.has_pending_deferred_releases()
        and not queue.queue
        and not ahead.queue
        and not ahead.retracted_queue
        and not scheduler.waiting_queue
        and scheduler.running_batch.is_empty()
    )


def _send_early(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Send a cached prefix before the prefill, where that is sure to be there.

    With tiers a part of the prefix may still be loading. And without an accelerator
    SGLang's overlap schedule waits for an event of CUDA's here.
    """
    from sgl_tiered.engines.device.accelerator import has_accelerator

    if tiered_runtime(scheduler.tree_cache) is not None:
        return
    if scheduler.enable_overlap and not has_accelerator():
        return
    original(scheduler, *args, **kwargs)
