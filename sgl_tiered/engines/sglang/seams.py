"""Every SGLang symbol that the plugin stands on, and the check that it is there.

SGLang renames its internals often, and logs a failed hook instead of stopping. So the
plugin names what it needs here, with the parameters that it relies on, and refuses to
serve when one is missing.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
import pkgutil
from dataclasses import dataclass
from typing import Any

from sgl_tiered.errors import EngineCompatibilityError

__all__ = [
    "SEAMS",
    "TESTED_VERSION",
    "Seam",
    "SeamReport",
    "check_seams",
    "require_seams",
    "tiered_runtime",
]

TESTED_VERSION = "0.5.23"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Seam:
    """One symbol.

    Attributes:
        name: what we use it for.
        target: dotted path.
        parameters: names that its signature must have (functions).
        attributes: names that it must have (classes).
        http: needed by the HTTP process only (its import is heavy elsewhere).
    """

    name: str
    target: str
    parameters: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    http: bool = False


@dataclass(frozen=True, slots=True)
class SeamReport:
    """Whether a seam is there; ``detail`` says what is missing."""

    name: str
    found: bool
    detail: str


_SRT = "sglang.srt."
_SCHEDULER = _SRT + "managers.scheduler.Scheduler"
_DISAGG = _SRT + "disaggregation."

SEAMS: tuple[Seam, ...] = (
    Seam(
        "plugin hooks",
        _SRT + "plugins.hook_registry.HookRegistry",
        attributes=("register", "apply_hooks", "_patched"),
    ),
    Seam(
        "flags",
        _SRT + "server_args.ServerArgs",
        attributes=("check_server_args", "resolved_dict"),
    ),
    Seam(
        "flag metadata",
        _SRT + "arg_groups.arg_utils.Arg",
        parameters=("help", "choices"),
    ),
    Seam("command line", _SRT + "server_args.prepare_server_args", ("argv",)),
    Seam(
        "cache registry",
        _SRT + "mem_cache.registry.register_radix_cache_backend",
        ("name", "factory"),
    ),
    Seam(
        "cache factory",
        _SRT + "mem_cache.registry.create_unified_radix_cache",
        ("ctx", "cache_class"),
    ),
    Seam(
        "radix cache",
        _SRT + "mem_cache.unified_radix_cache.UnifiedRadixCache",
        attributes=(
            "match_prefix",
            "_match_tree",
            "init_load_back",
            "ready_to_load_host_cache",
            "finish_external_linker_loads",
            "load_back_is_cache_owned",
            "check_hicache_events",
            "flush_pending_backups",
            "checkpoint_into_tree",
            "prefix_device_indices",
            "prefetch_from_storage",
            "check_prefetch_progress",
            "pop_prefetch_loaded_span",
            "release_aborted_request",
            "on_release",
            "is_backuped",
            "get_last_hash_value",
            "clear_storage_backend",
            "release_host_resources",
            "inc_lock_ref",
            "dec_lock_ref",
            "evict",
            "evict_for_alloc",
            "evictable_size",
            "path_device_indices",
            "reset",
            "take_events",
        ),
    ),
    Seam(
        "tree core",
        _SRT + "mem_cache.unified_cache.unified_tree_core_interface."
        "UnifiedTreeCoreInterface",
        attributes=(
            "collect_full_device_indices",
            "match_full_device_prefix",
            "root_node_handle",
            "evictable_size",
        ),
    ),
    Seam(
        "device eviction",
        _SRT + "mem_cache.utils.get_eviction_strategy",
        ("eviction_policy", "config"),
    ),
    Seam(
        "tree choice",
        _SRT + "mem_cache.cache_init_params.CacheInitParams",
        ("eviction_policy", "eviction_policy_config", "tree_core_backend"),
    ),
    Seam(
        "node of the Python tree",
        _SRT + "mem_cache.unified_cache.unified_tree_core.UnifiedTreeCore",
        attributes=("node_by_id",),
    ),
    Seam(
        "radix key",
        _SRT + "mem_cache.radix_cache.RadixKey",
        ("token_ids", "extra_key", "cache_salt"),
    ),
    Seam(
        "KV events",
        _SRT + "disaggregation.kv_events.BlockStored",
        (
            "block_hashes",
            "parent_block_hash",
            "token_ids",
            "block_size",
            "lora_id",
            "medium",
            "cache_salt",
            "lora_name",
        ),
    ),
    Seam(
        "events of pages given up",
        _SRT + "disaggregation.kv_events.BlockRemoved",
        ("block_hashes", "medium"),
    ),
    Seam(
        "names of adapters' pages in events",
        _SRT + "disaggregation.kv_events.namespaced_block_hash",
        ("block_hash", "namespace_seed"),
    ),
    Seam(
        "match result",
        _SRT + "mem_cache.base_prefix_cache.MatchResult",
        attributes=("device_prefix_len", "host_hit_length", "last_device_node"),
    ),
    Seam(
        "KV pool",
        _SRT + "mem_cache.memory_pool.MHATokenToKVPool",
        attributes=("get_key_buffer", "register_layer_transfer_counter"),
    ),
    Seam(
        "size of the KV pool",
        _SRT + "mem_cache.kv_cache_configurator.KVCacheConfigurator"
        "._resolve_memory_pool_config",
        ("pre_model_load_memory",),
    ),
    Seam(
        "class of the KV pool",
        _SRT + "platforms.interface.SRTPlatform",
        attributes=(
            "get_kv_pool_cls",
            "get_paged_allocator_cls",
            "apply_server_args_defaults",
            "is_cuda",
        ),
    ),
    Seam(
        "layer-wise KV pool",
        _SRT + "mem_cache.memory_pool.MHATokenToKVPool",
        attributes=(
            "_create_buffers_normal",
            "_store_kv_layer",
            "_build_kv_buffer_descs",
            "get_kv_size_bytes",
            "get_contiguous_buf_infos",
            "get_device_pool_infos",
            "get_cpu_copy",
            "load_cpu_copy",
            "move_kv_cache",
        ),
    ),
    Seam(
        "collectives",
        _SRT + "distributed.parallel_state.GroupCoordinator",
        attributes=("all_reduce", "all_gather"),
    ),
    Seam(
        "pages given back",
        _SRT + "mem_cache.allocator.paged.PagedTokenToKVPoolAllocator",
        attributes=(
            "_release_page_ids",
            "clear",
            "free_segment",
            "alloc",
            "alloc_extend",
            "alloc_decode",
            "available_size",
        ),
    ),
    Seam(
        "size that the pool's use is told by",
        _SRT + "managers.scheduler_components.pool_stats_observer."
        "SchedulerPoolStatsObserver",
        attributes=("max_total_num_tokens",),
    ),
    Seam(
        "size that leaks are told by",
        _SRT + "managers.scheduler_components.invariant_checker."
        "SchedulerInvariantChecker",
        attributes=("max_total_num_tokens",),
    ),
    Seam(
        "weights in host memory",
        _SRT + "utils.offloader.OffloaderV1",
        ("cpu_offload_max_bytes",),
        ("wrap_modules",),
    ),
    Seam(
        "copies of weights for a layer",
        _SRT + "utils.offloader._get_offloaded_device_state",
        ("module", "device"),
    ),
    Seam("decode step", _SCHEDULER + ".update_running_batch", ("batch",)),
    Seam(
        "part of a batch",
        _SRT + "managers.schedule_batch.ScheduleBatch",
        attributes=("filter_batch", "check_decode_mem"),
    ),
    Seam(
        "layer counter",
        _SRT + "managers.tp_worker.TpModelWorker",
        attributes=("register_hicache_layer_transfer_counter",),
    ),
    Seam(
        "graphs of prefills",
        _SRT + "model_executor.cuda_graph_config.check_cuda_graph_backend",
        ("phase", "backend"),
    ),
    Seam(
        "forward of a batch",
        _SRT + "managers.tp_worker.TpModelWorker.forward_batch_generation",
        ("batch",),
    ),
    Seam(
        "forward of a span",
        _SRT + "model_executor.forward_batch_info.ForwardBatch.init_new",
        (
            "batch",
            "model_runner",
            "capture_hidden_mode",
            "return_hidden_states_before_norm",
        ),
    ),
    Seam(
        "scheduler",
        _SCHEDULER,
        attributes=(
            "init_schedule_policy",
            "get_output_streamer_class",
            "get_prefill_adder_class",
            "flush_cache",
            "process_batch_result",
            "launch_batch_sample_if_needed",
            "_record_step_counters",
            "clear_hicache_storage_wrapped",
            "_record_scheduler_state_for_paused_engine",
            "maybe_sleep_on_idle",
        ),
    ),
    Seam(
        "changes of weights",
        _SRT + "managers.scheduler_components.weight_updater."
        "SchedulerWeightUpdaterManager",
        attributes=(
            "update_weights_from_disk",
            "update_weights_from_distributed",
            "update_weights_from_tensor",
            "update_weights_from_ipc",
            "begin_weight_update",
            "end_weight_update",
            "release_memory_occupation",
            "resume_memory_occupation",
            "check_weights",
            "offload_tags",
            "scheduler",
            "_session",
        ),
    ),
    Seam(
        "adapters that come and go",
        _SCHEDULER,
        attributes=(
            "load_lora_adapter",
            "load_lora_adapter_from_tensors",
            "unload_lora_adapter",
        ),
    ),
    Seam(
        "an adapter's tensors",
        _SRT + "lora.lora.LoRAAdapter",
        attributes=("initialize_weights", "initialize_weights_from_tensors"),
    ),
    Seam(
        "beam search",
        _SRT + "beam_search.coordinator.BeamCoordinator.validate_and_init",
        ("req", "recv_req"),
    ),
    Seam("a new request", _SCHEDULER + "._create_generation_req", ("recv_req",)),
    Seam("queue", _SCHEDULER + "._add_request_to_queue", ("req",)),
    Seam(
        "requests that are taken out of a batch",
        _SRT + "managers.schedule_batch.release_req",
        (
            "req",
            "remaing_req_count",
            "req_to_token_pool",
            "token_to_kv_pool_allocator",
            "tree_cache",
            "hisparse_coordinator",
        ),
    ),
    Seam(
        "batches that requests are taken out of",
        _SRT + "managers.schedule_batch.ScheduleBatch.filter_batch",
        ("keep_indices",),
    ),
    Seam(
        "requests of our own",
        _SCHEDULER,
        attributes=(
            "handle_generate_request",
            "get_num_allocatable_reqs",
            "_release_aborted_request",
        ),
    ),
    Seam(
        "a request of our own",
        _SRT + "managers.io_struct.TokenizedGenerateReqInput",
        ("rid", "input_ids", "sampling_params", "extra_key", "cache_salt", "priority"),
    ),
    Seam(
        "sampling of our own",
        _SRT + "sampling.sampling_params.SamplingParams",
        ("max_new_tokens", "temperature"),
    ),
    Seam(
        "outputs on their way",
        _SRT + "managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
        ".stream_output",
        ("reqs",),
    ),
    Seam(
        "search for a pass",
        _SCHEDULER + "._get_new_batch_prefill_raw",
        ("running_batch",),
    ),
    Seam(
        "order of the queue",
        _SRT + "managers.schedule_policy.SchedulePolicy",
        parameters=(
            "policy",
            "tree_cache",
            "enable_hierarchical_cache",
            "enable_priority_scheduling",
            "schedule_low_priority_values_first",
        ),
        attributes=("calc_priority", "waiting_queue_prefix_matched"),
    ),
    Seam(
        "order of a pass",
        _SRT + "managers.schedule_policy.SchedulePolicy.calc_priority",
        ("waiting_queue",),
    ),
    Seam(
        "prefill adder",
        _SRT + "managers.schedule_policy.PrefillAdder",
        attributes=(
            "add_one_req",
            "_select_prefill_admission",
            "_commit_prefill_admission",
            "add_chunked_req",
        ),
    ),
    Seam(
        "chunk of a prompt",
        _SRT + "managers.schedule_policy._PrefillAdmission",
        ("prefix_len", "extend_len", "max_new_tokens", "is_chunked", "replay_len"),
    ),
    Seam(
        "tokens that a request may reuse",
        _SRT + "managers.schedule_batch.Req._compute_max_prefix_len",
        ("input_len",),
    ),
    Seam(
        "end of a request",
        _SRT + "managers.schedule_batch.Req",
        attributes=("finished", "output_ids_through_stop"),
    ),
    Seam(
        "request times",
        _SRT + "observability.req_time_stats.SchedulerReqTimeStats",
        attributes=("prefill_finished_time", "scheduler_recv_time"),
    ),
    Seam(
        "per-tier report",
        _SRT + "managers.scheduler_components.output_streamer.SchedulerOutputStreamer",
        attributes=(
            "get_cached_tokens_details",
            "build_additional_customized_info",
            "has_additional_customized_info",
            "is_request_level_customized_info_key",
        ),
    ),
    Seam(
        "state report",
        _SRT + "managers.scheduler_components.internal_state."
        "SchedulerInternalStateController",
        attributes=("get_internal_state", "set_internal_state", "_update_handlers"),
    ),
    Seam(
        "question for the state",
        _SRT + "managers.io_struct.GetInternalStateReq",
        ("rid",),
    ),
    Seam(
        "metrics",
        _SRT + "managers.scheduler_components.metrics_reporter."
        "SchedulerMetricsReporter.log_batch_result_stats",
    ),
    Seam(
        "names of transfer backends",
        _SRT + "arg_groups.choices",
        attributes=(
            "DISAGG_TRANSFER_BACKEND_CHOICES",
            "add_disagg_transfer_backend_choices",
        ),
    ),
    Seam(
        "classes of transfer backends",
        _DISAGG + "utils.get_kv_class",
        ("transfer_backend", "class_type"),
    ),
    Seam(
        "transfers of a rank",
        _DISAGG + "mooncake.conn.MooncakeKVManager",
        attributes=(
            "init_engine",
            "register_buffer_to_engine",
            "build_receiver_registration_message",
            "_make_worker_recv",
            "_connect",
            "_send_multipart_locked",
            "send_kv_status_message",
            "register_deferred_ack_target",
            "update_status",
            "record_failure",
            "_publish_peer_registration",
            "_poison_unsettled_send",
            "_maybe_ack_drained_abort",
            "is_abort_release_safe",
            "clear_deferred_abort_state",
            "_encode_kv_status_message",
            "parse_kv_status_message",
            "requires_dcp_relayout",
            "prepare_dcp_token_item_lens",
            "send_kvcache",
            "transfer_worker",
            "conclude_failure",
        ),
    ),
    Seam(
        "a decode instance's registration",
        _DISAGG + "mooncake.conn.KVArgsRegisterInfo",
        attributes=("from_zmq",),
    ),
    Seam(
        "a decode instance's request",
        _DISAGG + "mooncake.conn.TransferInfo",
        attributes=("from_zmq",),
    ),
    Seam(
        "a transfer's sender",
        _DISAGG + "mooncake.conn.MooncakeKVSender",
        attributes=(
            "init",
            "send",
            "poll",
            "clear",
            "abort",
            "pop_decode_prefix_len",
            "_record_transfer_indices",
            "supports_host_tensor_indices",
        ),
    ),
    Seam(
        "a transfer's receiver",
        _DISAGG + "mooncake.conn.MooncakeKVReceiver",
        attributes=(
            "init",
            "send_metadata",
            "_send_abort_notification",
            "_connect_to_bootstrap_server",
            "failure_exception",
            "invalidate_cached_bootstrap_infos",
        ),
    ),
    Seam(
        "where a rank listens",
        _SRT + "utils.network.NetworkAddress",
        ("host", "port"),
        ("to_tcp",),
    ),
    Seam(
        "requests that a decode instance has no room for yet",
        _DISAGG + "decode.DecodePreallocQueue",
        attributes=("_update_handshake_waiters",),
    ),
    Seam(
        "transfers that a decode instance waits for",
        _DISAGG + "decode.DecodeTransferQueue",
        attributes=("resolve_deferred_releases", "_defer_release"),
    ),
    Seam(
        "disaggregated loops",
        _SCHEDULER,
        attributes=(
            "init_disaggregation",
            "process_decode_queue",
            "maybe_send_cached_prefix_chunk",
        ),
    ),
    Seam(
        "fields that other flags set",
        _SRT + "arg_groups.overrides.declare_resolution",
        ("server_args", "source"),
    ),
    Seam(
        "probes of sessions that failed",
        _SRT + "environ.envs",
        attributes=("SGLANG_ENABLE_FAILED_SESSION_PROBE",),
    ),
    Seam(
        "HTTP server",
        _SRT + "entrypoints.http_server._setup_and_run_http_server",
        ("server_args", "tokenizer_manager"),
        http=True,
    ),
    Seam("HTTP app", _SRT + "entrypoints.http_server.app", http=True),
    Seam(
        "headers of a request",
        _SRT + "managers.tokenizer_manager.TokenizerManager.generate_request",
        ("obj", "request"),
        http=True,
    ),
    Seam(
        "hints for a request",
        _SRT + "managers.kv_hints.KvHintAction",
        ("action_id", "action_type", "action_version", "payload"),
    ),
    Seam(
        "sleep while idle",
        _SRT + "managers.scheduler_components.idle_sleeper.IdleSleeper",
        ("sockets",),
        attributes=("maybe_sleep",),
    ),
)


def check_seams(*, http: bool = True) -> list[SeamReport]:
    """Look every seam up; ``http=False`` leaves the HTTP process's out.

    Raises:
        ImportError: SGLang is not installed.
    """
    importlib.metadata.version("sglang")
    return [_check(seam) for seam in SEAMS if http or not seam.http]


def require_seams(*, http: bool) -> None:
    """Raise unless every seam is there; warn of a version that was not tested.

    Raises:
        EngineCompatibilityError: names both versions and what is missing.
    """
    version = importlib.metadata.version("sglang")
    reports = check_seams(http=http)
    missing = [report for report in reports if not report.found]
    if missing:
        raise EngineCompatibilityError(
            f"sgl-tiered is made for SGLang {TESTED_VERSION} and cannot attach to the "
            f"installed {version}, which lacks {len(missing)} of {len(reports)} symbols"
            f": {missing[0].name} ({missing[0].detail}); install "
            f"sglang=={TESTED_VERSION} or serve without --radix-cache-backend tiered."
        )
    if version != TESTED_VERSION:
        logger.warning(
            "sgl-tiered was tested with SGLang %s and not with the installed %s, whose "
            "symbols agree",
            TESTED_VERSION,
            version,
        )


def tiered_runtime(cache: Any) -> Any:
    """Return the runtime of a tiered cache, None for any other cache."""
    return getattr(cache, "tiered", None)


def _check(seam: Seam) -> SeamReport:
    try:
        found: Any = pkgutil.resolve_name(seam.target)
    except (ImportError, AttributeError) as error:
        return SeamReport(seam.name, False, f"{seam.target} is missing: {error}")
    lacking = [name for name in seam.attributes if not _has(found, name)]
    if lacking:
        return SeamReport(seam.name, False, f"{seam.target} lacks {lacking[0]}")
    if seam.parameters:
        names = _parameters(found)
        gone = [name for name in seam.parameters if name not in names]
        if gone:
            return SeamReport(
                seam.name, False, f"{seam.target} takes no argument {gone[0]!r}"
            )
    return SeamReport(seam.name, True, seam.target)


def _has(found: Any, name: str) -> bool:
    return hasattr(found, name) or name in getattr(found, "__annotations__", {})


def _parameters(found: Any) -> set[str]:
    fields = getattr(found, "__struct_fields__", None)
    return set(fields or inspect.signature(inspect.unwrap(found)).parameters)
