"""Builds the tiered cache of one rank; refuses what is not supported, in a sentence."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from sgl_tiered.cache.config import CacheConfig, TierConfig
from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.core.clock import SystemClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import Namespace
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.cost.calibrated import read_fitting
from sgl_tiered.engines.sglang.args import tiered_config
from sgl_tiered.engines.sglang.cache import TieredRadixCache
from sgl_tiered.engines.sglang.config import TieredConfig
from sgl_tiered.engines.sglang.fingerprint import model_fingerprint
from sgl_tiered.engines.sglang.pools import make_device_pool, page_layout
from sgl_tiered.engines.sglang.probe import measure_costs
from sgl_tiered.engines.sglang.runtime import Parts, TieredRuntime
from sgl_tiered.engines.sglang.seams import require_seams
from sgl_tiered.engines.sglang.served import machine_facts, model_facts, report
from sgl_tiered.errors import ConfigError, EngineCompatibilityError
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.pipelines.completions import CompletionQueue
from sgl_tiered.pipelines.demote import DemoteWorker
from sgl_tiered.pipelines.layerwise_load import LayerwiseLoader
from sgl_tiered.pipelines.offload import OffloadWorker
from sgl_tiered.pipelines.staging import StagingReader, part_pages
from sgl_tiered.policies.eviction.registry import make_eviction_policy
from sgl_tiered.tiers.base import MemoryTier, Tier
from sgl_tiered.tiers.disk import DiskTier
from sgl_tiered.tiers.faulty import Faults, FaultyMemoryTier
from sgl_tiered.tiers.host import HostTier
from sgl_tiered.tiers.throttled import ThrottledMemoryTier, ThrottledTier

__all__ = ["build_cache", "refuse_unsupported"]

logger = logging.getLogger(__name__)

_REMEDY = "serve this model without --radix-cache-backend tiered"


def build_cache(ctx: Any) -> Any:
    """Make the cache for SGLang's ``TreeCacheBuildContext``.

    Raises:
        EngineCompatibilityError: this SGLang or this model is not supported.
        ConfigError: a setting does not fit the machine.
    """
    from sglang.srt.mem_cache.registry import create_unified_radix_cache

    require_seams(http=False)
    config = tiered_config(ctx.server_args)
    assert config is not None, "the factory is only called for --radix-cache-backend"
    refuse_unsupported(ctx)
    runtime = _build_runtime(ctx, config)

    def make(params: Any) -> TieredRadixCache:
        return TieredRadixCache(params, runtime)

    cache = create_unified_radix_cache(ctx, cache_class=make)
    counter = runtime.counter
    ctx.params.token_to_kv_pool_allocator.get_kvcache().register_layer_transfer_counter(
        counter
    )
    ctx.tp_worker.register_hicache_layer_transfer_counter(counter)
    return cache


def refuse_unsupported(ctx: Any) -> None:
    """Refuse models and pools that the tiers were not tested with.

    Raises:
        EngineCompatibilityError: one sentence that says which and what to do.
    """
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    model = ctx.model_config
    pool = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    name = model.hf_config.architectures[0]
    reasons = {
        "it has Mamba or other recurrent state": ctx.is_hybrid_ssm,
        "it has sliding-window attention": ctx.is_hybrid_swa
        or getattr(model, "sliding_window_size", None) not in (None, -1, 0),
        "it uses latent attention (MLA)": model.attention_arch != AttentionArch.MHA,
        f"its KV pool is a {type(pool).__name__}": not isinstance(
            pool, MHATokenToKVPool
        ),
        "its KV pool is quantised": getattr(pool, "is_quantized_kv_cache", False)
        # Pools of other kinds, refused above, need not have a dtype.
        or getattr(pool, "dtype", torch.bfloat16).itemsize < 2,
    }
    for reason, applies in reasons.items():
        if applies:
            raise EngineCompatibilityError(
                f"sgl-tiered does not support {name} yet, because {reason}; {_REMEDY}."
            )


def _build_runtime(ctx: Any, config: TieredConfig) -> TieredRuntime:
    clock = SystemClock()
    runner = ctx.tp_worker.model_runner
    allocator = ctx.params.token_to_kv_pool_allocator
    pool = allocator.get_kvcache()
    layout = page_layout(pool, ctx.params.page_size)
    device = make_device_pool(pool, layout, getattr(runner, "forward_stream", None))
    engine = "sglang " + importlib.metadata.version("sglang")
    model = model_facts(ctx, layout)

    def fingerprint() -> str:
        return model_fingerprint(runner.model, ctx.model_config.hf_config, engine)

    namespace = Namespace(
        fingerprint(),
        f"{pool.dtype} {model.attention_backend}",
        layout.page_tokens,
        "0/1",
    )
    register = _cuda_register() if pool.k_buffer[0].is_cuda else None
    metrics = MetricsRegistry()
    host = _open_host(config, layout, register)
    disk = _open_disk(config, layout, namespace)
    cost, figures = measure_costs(
        model=runner.model,
        layout=layout,
        attention_width=model.attention_width,
        device=device,
        num_device_pages=allocator.size // layout.page_tokens,
        host=host,
        disk=disk,
        clock=clock,
        calibration=read_fitting("--tiered-calibration", config.calibration, model),
    )
    rng = np.random.default_rng(config.seed)
    tiers = [tier for tier in (host, disk) if tier is not None]
    cache = TieredCache(
        CacheConfig(
            layout=layout,
            tiers=tuple(TierConfig(tier.tier_id, tier.num_slots) for tier in tiers),
            load_policy=config.load_policy,
            write_policy=config.write_policy,
            demote_policy=config.demote_policy,
            # Where the model's thread copies, a load and its pass add up.
            load_overlaps=not device.waiter_copies or host.health().emulated,
        ),
        cost=cost,
        eviction={
            tier.tier_id: make_eviction_policy(config.eviction_policy, rng)
            for tier in tiers
        },
        clock=clock,
    )
    completions = CompletionQueue()
    stager = demoter = None
    if disk is not None:
        _adopt(cache, disk)
        num_rows = max(config.staging_bytes // layout.slot_bytes, 1)
        stager = StagingReader(
            disk,
            num_rows,
            completions,
            clock,
            metrics,
            register=register,
            part_pages=part_pages(*cost.link_figures(TierId.DISK), layout.page_bytes),
        )
        reader = stager
        demoter = DemoteWorker(
            host, disk, completions, clock, metrics, busy=lambda: reader.busy
        )
    parts = Parts(
        config=config,
        namespace=namespace,
        fingerprint=fingerprint,
        clock=clock,
        cost=cost,
        cache=cache,
        device=device,
        host=host,
        disk=disk,
        metrics=metrics,
        completions=completions,
        loader=LayerwiseLoader(
            device,
            completions,
            clock,
            metrics,
            link=lambda: cost.link_figures(TierId.HOST),
        ),
        offloader=OffloadWorker(device, host, completions, clock, metrics),
        demoter=demoter,
        stager=stager,
        probe=figures,
        served=report(ctx, model, machine_facts(pool.k_buffer[0].device), engine),
    )
    _log_start(parts, layout)
    return TieredRuntime(parts, wait_whole=_forward_skips_layers(ctx, pool))


def _open_host(config: TieredConfig, layout: PageLayout, register: Any) -> MemoryTier:
    num_slots = config.host_bytes // layout.slot_bytes
    if num_slots == 0:
        raise ConfigError(
            "--tiered-host-size",
            f"{config.host_bytes} bytes is less than a page of {layout.slot_bytes}",
            "give more",
        )
    host: MemoryTier = HostTier(
        layout.slot_bytes, num_slots, register=register, page_bytes=layout.page_bytes
    )
    if config.fault_corrupt is not None:
        host = FaultyMemoryTier(host, Faults(corrupt=config.fault_corrupt))
    emulation = config.emulate.get(TierId.HOST)
    if emulation is not None:
        host = ThrottledMemoryTier(
            host, emulation.bandwidth_bytes_per_s, emulation.latency_s
        )
    return host


def _open_disk(
    config: TieredConfig, layout: PageLayout, namespace: Namespace
) -> Tier | None:
    if config.disk_path is None:
        return None
    disk: Tier = DiskTier.open(
        config.disk_path,
        slot_bytes=layout.slot_bytes,
        page_bytes=layout.page_bytes,
        page_tokens=layout.page_tokens,
        max_bytes=config.disk_bytes,
        fingerprint=namespace.digest().hex(),
        num_threads=config.disk_threads,
    )
    emulation = config.emulate.get(TierId.DISK)
    if emulation is not None:
        disk = ThrottledTier(disk, emulation.bandwidth_bytes_per_s, emulation.latency_s)
    return disk


def _adopt(cache: TieredCache, disk: Tier) -> None:
    """Take over what a former server left, after the checks that need no payload."""
    adopted = refused = 0
    for records in disk.recover():
        count, orphans = cache.adopt(disk.tier_id, records)
        disk.forget(orphans)
        adopted += count
        refused += len(orphans)
    if adopted or refused:
        logger.info(
            "sgl-tiered: %d pages from a former run are on disk, %d more were unusable",
            adopted,
            refused,
        )


def _cuda_register() -> Callable[[int, int], Callable[[], None]]:
    """Return a function that pins memory for CUDA and gives back how to unpin it."""
    cudart = torch.cuda.cudart()

    def register(address: int, num_bytes: int) -> Callable[[], None]:
        status = int(cudart.cudaHostRegister(address, num_bytes, 0))
        if status != 0:
            raise ConfigError(
                "--tiered-host-size",
                f"CUDA cannot pin {num_bytes} bytes (error {status})",
                "give less, or raise the locked-memory limit (ulimit -l)",
            )

        def unregister() -> None:
            cudart.cudaHostUnregister(address)

        return unregister

    return register


def _forward_skips_layers(ctx: Any, pool: Any) -> bool:
    """Say whether a prefill may read a layer without asking whether it has arrived.

    A captured graph replays without Python, so it would not wait layer by layer.
    """
    graphs = getattr(ctx.server_args, "cuda_graph_backend_prefill", None)
    return bool(pool.k_buffer[0].is_cuda) and graphs != "disabled"


def _log_start(parts: Parts, layout: PageLayout) -> None:
    texts = []
    for tier in (parts.host, parts.disk):
        if tier is not None:
            tokens = tier.num_slots * layout.page_tokens
            size = tier.num_slots * tier.slot_bytes / 1e9
            note = " (EMULATED speed)" if tier.health().emulated else ""
            texts.append(f"{tier.tier_id.label} {tokens} tokens, {size:.2f} GB{note}")
    calibration = parts.config.calibration
    source = "" if calibration is None else f"; costs from {calibration}"
    logger.info("sgl-tiered: %s%s; measured %s", "; ".join(texts), source, parts.probe)
