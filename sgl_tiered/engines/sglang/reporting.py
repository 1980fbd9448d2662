"""What the scheduler process tells of the tiers: per request, as state, as metrics."""

from __future__ import annotations

import gc
import logging
import time
from typing import Any

from sgl_tiered.cache.config import LOAD_POLICIES
from sgl_tiered.core.ids import TierId
from sgl_tiered.engines.sglang.admin import admin_hooks
from sgl_tiered.engines.sglang.disagg.backend import pd_state
from sgl_tiered.engines.sglang.http import (
    DROP_KNOBS,
    EXPLAIN_KEY,
    FAULTS_KEY,
    LOAD_POLICY_KNOB,
    PROFILE_KEY,
    PROFILE_KNOB,
)
from sgl_tiered.engines.sglang.layered.capacity import sized
from sgl_tiered.engines.sglang.ordering import schedule_policy
from sgl_tiered.engines.sglang.profiling import (
    profile_state,
    refused_profile,
    switch_profile,
)
from sgl_tiered.engines.sglang.requeue import (
    drop_results,
    requeue,
    without_stand_ins,
)
from sgl_tiered.engines.sglang.seams import tiered_runtime as _tiered
from sgl_tiered.engines.sglang.slo_admission import adder_class
from sgl_tiered.serving.attribution import cached_by_tier
from sgl_tiered.serving.lossy import is_lossy_key, mark_generation
from sgl_tiered.serving.prometheus import PrometheusSink

__all__ = ["scheduler_hooks"]

logger = logging.getLogger(__name__)

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_COMPONENTS = "sglang.srt.managers.scheduler_components."
_STATE = _COMPONENTS + "internal_state.SchedulerInternalStateController."
_WORKER = "sglang.srt.managers.tp_worker.TpModelWorker."
_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator."
_MOST_LOCAL_TOKENS = 1 << 31
_MIN_PREFILL_TOKENS = 32
"""A shorter prefill is mostly overhead and would teach the planner little."""


def scheduler_hooks() -> list[tuple[str, Any, Any]]:
    """Return the hooks of the scheduler process."""
    from sglang.srt.plugins.hook_registry import HookType

    return [
        (_CONFIGURATOR + "_resolve_memory_pool_config", sized, HookType.AROUND),
        (_SCHEDULER + "init_schedule_policy", _attach_scheduler, HookType.AFTER),
        (_SCHEDULER + "get_output_streamer_class", _streamer_class, HookType.AROUND),
        (_SCHEDULER + "_create_generation_req", _mark, HookType.AFTER),
        (_SCHEDULER + "_add_request_to_queue", _note_queued, HookType.AFTER),
        (_SCHEDULER + "_get_new_batch_prefill_raw", _note_pass, HookType.AFTER),
        (_SCHEDULER + "get_prefill_adder_class", adder_class, HookType.AROUND),
        (_SCHEDULER + "process_batch_result", _end_loads, HookType.BEFORE),
        (_SCHEDULER + "launch_batch_sample_if_needed", requeue, HookType.AFTER),
        (_SCHEDULER + "_record_step_counters", _observe_step, HookType.AFTER),
        (_STATE + "get_internal_state", _add_state, HookType.AFTER),
        (_STATE + "_update_handlers", _add_knobs, HookType.AFTER),
        (_STATE + "set_internal_state", _switch_faults, HookType.AROUND),
        (_WORKER + "forward_batch_generation", _forward, HookType.AROUND),
        (
            _COMPONENTS + "metrics_reporter.SchedulerMetricsReporter."
            "log_batch_result_stats",
            _publish_metrics,
            HookType.AFTER,
        ),
        *admin_hooks(),
    ]


def _attach_scheduler(result: Any, scheduler: Any) -> None:
    """Make the scheduler call our cache's events, and let us see whether it idles."""
    del result
    runtime = _tiered(scheduler.tree_cache)
    if runtime is None:
        return
    # What the start has made stays, a million objects that a full collection would go
    # through for half a second whenever the index has grown by a quarter of them.
    gc.collect()
    gc.freeze()
    # The two switches under which SGLang drives a cache with storage behind it: the
    # linker's (events, layer-wise loads) and LMCache's (holding requests back).
    scheduler.enable_unified_cache_external_linker = True
    scheduler.enable_lmcache = True

    def idle() -> bool:
        # A prefill that was just launched is among those that run with the next turn.
        is_launched = scheduler.last_batch is not None
        is_running = not scheduler.running_batch.is_empty()
        return not (is_launched or is_running or scheduler.chunked_req is not None)

    runtime.engine_idle = idle
    runtime.engine_free = lambda: idle() and not scheduler.waiting_queue

    def has_room() -> None:
        # SGLang looks for prompts again only when a request has left. An offload may
        # have kept the pages of one that left, and so its room, a moment longer.
        scheduler.running_batch.batch_is_full = False

    runtime.on_offloaded = has_room
    scheduler.tree_cache.watch_queue(scheduler)
    if runtime.lengths is not None:
        runtime.lengths.watch(scheduler, runtime.ledger, runtime.metrics, runtime.clock)
    if runtime.config.queue.order != "fcfs":
        scheduler.policy = schedule_policy(scheduler, runtime.agreement)
    if runtime.config.layerkv is not None:
        from sgl_tiered.engines.sglang.layered.build import attach_scheduler

        attach_scheduler(scheduler, runtime)
    if runtime.config.sparsity is not None:
        from sgl_tiered.engines.sglang.sparse import build

        build.attach_scheduler(scheduler)
    if runtime.pool is not None:
        from sgl_tiered.engines.sglang.pooled import build as pooled

        pooled.attach_scheduler(scheduler, runtime.pool)


def _mark(req: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Keep requests apart that may not share KV, before anything is looked up."""
    del args, kwargs
    runtime = _tiered(scheduler.tree_cache)
    if runtime is None:
        return
    has_adapters = runtime.adapters.has_manager
    mark_generation(req, runtime.config, has_adapters=has_adapters)
    if runtime.config.is_lossy:
        word = "allow" if is_lossy_key(req.extra_key) else "refuse"
        runtime.metrics.add(f"requests_{word}_lossy")


def _note_queued(result: Any, scheduler: Any, req: Any, *args: Any, **kw: Any) -> None:
    """Follow a request from the queue on; one that was refused is not in it."""
    del result, args, kw
    runtime = _tiered(scheduler.tree_cache)
    waiting = scheduler.waiting_queue
    if runtime is not None and waiting and waiting[-1] is req:
        runtime.note_queued(req)


def _note_pass(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Note why the search for a pass has ended."""
    del args, kwargs
    runtime = _tiered(scheduler.tree_cache)
    if runtime is not None and runtime.explainer.is_on:
        runtime.explainer.end_pass(is_full=result[1].batch_is_full)


def _forward(original: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a batch; once more where its loads failed and what they lack is computed."""
    cache: Any = getattr(batch, "tree_cache", None)
    runtime = _tiered(cache)
    result = original(worker, batch, *args, **kwargs)
    if runtime is not None and batch.hicache_consumer_index >= 0:
        # The overlap schedule's copy of a batch, whose results come, lacks the index.
        for req in batch.reqs:
            req.tiered_loading_launch = batch.launch_ts
    if runtime is None or not cache.repair_loads(worker.model_runner, batch):
        return result
    return original(worker, batch, *args, **kwargs)


def _end_loads(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """Let no result out before the loads that it rests on are known to be good."""
    del args, kwargs
    cache = scheduler.tree_cache
    if _tiered(cache) is None:
        return
    failed = cache.end_passes(batch)
    if failed:
        drop_results(scheduler, batch, failed)


def _streamer_class(original: Any, scheduler: Any) -> Any:
    base = original(scheduler)
    runtime = _tiered(scheduler.tree_cache)
    if runtime is None:
        return base
    has_cxl = runtime.has_tier(TierId.CXL)

    class TieredOutputStreamer(base):  # type: ignore[misc, valid-type]
        """Names our tiers in ``cached_tokens_details``, and tells the decisions."""

        __slots__ = ()
        # SGLang's Rust front end carries no such values.
        has_additional_customized_info = getattr(scheduler, "rust_server", None) is None

        def stream_output(self, reqs: Any, *args: Any, **kwargs: Any) -> None:
            """Send what clients wait for; nobody does for our own questions."""
            asks = None if runtime.lengths is None else runtime.lengths.asks
            theirs = reqs if asks is None else asks.without_ours(reqs)
            theirs = without_stand_ins(scheduler.tree_cache, theirs)
            super().stream_output(theirs, *args, **kwargs)

        def build_additional_customized_info(self, reqs: Any) -> dict[str, Any]:
            """Return what was decided for requests that end now, as ``tiered``."""
            if not any(req.finished() for req in reqs):
                return {}
            # SGLang joins the lists of a request's outputs, so there is one with one.
            reports = [
                runtime.explainer.finished(req, _report(runtime, req.rid))
                if req.finished()
                else None
                for req in reqs
            ]
            return {"tiered": [[] if told is None else [told] for told in reports]}

        def is_request_level_customized_info_key(self, key: str) -> bool:
            """Tell our value once per request, not token by token."""
            return key == "tiered" or super().is_request_level_customized_info_key(key)

        def get_cached_tokens_details(self, req: Any) -> dict[str, int] | None:
            """Return cached tokens by tier; None where nothing was cached.

            ``storage`` repeats ``disk`` for SGLang's own readers of this value, and
            ``cxl`` is left out where there is no such tier.
            """
            if req.cached_tokens == 0:
                return None
            details = {tier.label: n for tier, n in cached_by_tier(req).items()}
            if not has_cxl:
                del details[TierId.CXL.label]
            details["storage"] = details[TierId.DISK.label]
            return details

    return TieredOutputStreamer


def _report(runtime: Any, rid: str) -> dict[str, Any] | None:
    """Return what was decided for a request; with the encoding, where there is one."""
    report: dict[str, Any] | None = runtime.take_report(rid)
    if report is None or not runtime.config.is_encoded:
        return report
    return {**report, "encoding": runtime.config.lossy.encoding.label}


def _errors(runtime: Any) -> dict[str, Any]:
    """Return what the encoding changes, by layer; empty where nothing is encoded."""
    errors = getattr(runtime.parts.device, "errors", None)
    return {} if errors is None else {"encoding_error": errors.stats()}


def _observe_step(result: Any, scheduler: Any, batch: Any, *args: Any) -> None:
    """Learn the cost of computing from prefills of a single request."""
    del result, args
    runtime = _tiered(scheduler.tree_cache)
    if runtime is not None and runtime.admission is not None:
        runtime.admission.observe_step(batch)
    if runtime is not None and runtime.config.layerkv is not None:
        runtime.step_times.observe(batch)
    if runtime is None or batch.launch_ts is None:
        # A decode instance's requests that come computed are launched by nobody.
        return
    # Of every pass, since the next one waits for it.
    seconds = runtime.pass_times.ended(batch.launch_ts, time.monotonic())
    if (
        not batch.forward_mode.is_extend_without_speculative()
        or not batch.extend_lens
        or len(batch.extend_lens) != 1
        or batch.extend_lens[0] < _MIN_PREFILL_TOKENS
        # Its time is not only computing's.
        or batch.hicache_consumer_index >= 0
        or getattr(batch.reqs[0], "tiered_loading_launch", None) == batch.launch_ts
    ):
        return
    runtime.observe_prefill(batch.prefix_lens[0], batch.extend_lens[0], seconds)


def _add_state(out: Any, controller: Any, recv_req: Any) -> Any:
    runtime = _tiered(controller.scheduler.tree_cache)
    question = recv_req.rid or ""
    if runtime is not None and question.startswith(EXPLAIN_KEY):
        asked = question.removeprefix(EXPLAIN_KEY)
        out.internal_state = {"tiered_explain": runtime.explainer.answer(asked)}
    elif runtime is not None and question == PROFILE_KEY:
        out.internal_state = {"tiered_profile": profile_state(controller.scheduler)}
    elif runtime is not None:
        pool = {} if runtime.pool is None else {"pool": runtime.pool.stats()}
        flows = {"flows": controller.scheduler.tree_cache.num_flows}
        state = {**runtime.stats(), **flows, **_errors(runtime), **pool}
        out.internal_state["tiered"] = state
    if not question and (told := pd_state(controller.scheduler)) is not None:
        out.internal_state["tiered_pd"] = told
    return out


def _add_knobs(handlers: dict[str, Any], controller: Any) -> dict[str, Any]:
    """Let ``POST /tiered/drop`` reach the cache through SGLang's numeric knobs."""
    from sglang.srt.managers.scheduler_components.internal_state import (
        UpdateRejected,
        _UpdateHandler,
    )

    scheduler = controller.scheduler
    if _tiered(scheduler.tree_cache) is None:
        return handlers

    def tier_of(key: str) -> TierId:
        label = next(name for name, knob in DROP_KNOBS.items() if knob == key)
        return TierId[label.upper()]

    def validate(key: str, value: Any) -> None:
        tier = tier_of(key)
        if tier is not TierId.DEVICE and not scheduler.tree_cache.tiered.has_tier(tier):
            raise UpdateRejected(f"{key}: there is no {tier.label} tier.")
        only_when_idle(key, value)

    def only_when_idle(key: str, value: Any) -> None:
        del value
        scheduler.tree_cache.finish_offloads()
        if not scheduler.is_fully_idle():
            raise UpdateRejected(f"{key}: requests are running.")

    def apply(key: str, value: Any) -> None:
        scheduler.tree_cache.drop(tier_of(key))

    def whole(key: str, value: Any, numbers: range) -> None:
        # SGLang's own endpoint takes any value, and applies it on this thread.
        if type(value) is not int or value not in numbers:
            first, last = numbers[0], numbers[-1]
            raise UpdateRejected(
                f"{key}: {value!r} is no whole number from {first} to {last}."
            )

    def may_use_policy(key: str, value: Any) -> None:
        whole(key, value, range(len(LOAD_POLICIES)))
        only_when_idle(key, value)

    def use_policy(key: str, value: Any) -> None:
        del key
        scheduler.tree_cache.tiered.cache.use_load_policy(LOAD_POLICIES[value])

    def may_profile(key: str, value: Any) -> None:
        whole(key, value, range(-1, _MOST_LOCAL_TOKENS))
        only_when_idle(key, value)
        reason = refused_profile(scheduler)
        if reason:
            raise UpdateRejected(f"{key}: {reason}.")

    def profile(key: str, value: Any) -> None:
        del key
        switch_profile(scheduler, value)

    handlers[PROFILE_KNOB] = _UpdateHandler(may_profile, profile)
    for knob in DROP_KNOBS.values():
        handlers[knob] = _UpdateHandler(validate, apply)
    handlers[LOAD_POLICY_KNOB] = _UpdateHandler(may_use_policy, use_policy)
    return handlers


def _switch_faults(original: Any, controller: Any, recv_req: Any) -> Any:
    """Take what ``POST /tiered/faults`` sends: a text as the key of a knob."""
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    keys = [k for k in recv_req.server_args if k.startswith(FAULTS_KEY)]
    runtime = _tiered(controller.scheduler.tree_cache)
    if not keys or runtime is None:
        return original(controller, recv_req)
    problem = runtime.switch_faults(keys[0].removeprefix(FAULTS_KEY))
    if problem:
        logger.warning("sgl-tiered: %s", problem)
    return SetInternalStateReqOutput(updated=not problem)


def _publish_metrics(result: Any, reporter: Any, *args: Any, **kwargs: Any) -> None:
    """Have the runtime publish from now on, which it does between passes."""
    del result, args, kwargs
    runtime = _tiered(reporter.scheduler.tree_cache)
    if runtime is None or not reporter.enable_metrics:
        return
    # Made here and not at import: SGLang sets prometheus_client's multi-process folder
    # up only shortly before.
    if runtime.publish is None:
        runtime.publish = PrometheusSink(runtime.page_tokens).publish
