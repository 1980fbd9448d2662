"""Builds the tiered cache of one rank; refuses what is not supported, in a sentence."""

from __future__ import annotations

import importlib.metadata
import logging
from functools import partial
from typing import Any

import numpy as np
import torch

from sgl_tiered.cache.config import CacheConfig, TierConfig
from sgl_tiered.cache.deferred import DeferredOffloads
from sgl_tiered.cache.device_ranking import DeviceRanking
from sgl_tiered.cache.lookahead import QueueLookahead
from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.cache.tombstones import cells_for
from sgl_tiered.core.clock import SystemClock
from sgl_tiered.core.encoded import EncodedLayout
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import Namespace
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.cost.calibrated import read_fitting
from sgl_tiered.engines.device.cuda_ops import (
    cuda_register,
    numa_node,
    pin_if_possible,
    use_device_in_threads,
)
from sgl_tiered.engines.device.encoded_pools import EncodedCpuPool
from sgl_tiered.engines.device.fingerprint import weights_reader
from sgl_tiered.engines.device.layer_stream_pool import LayeredStreamPool
from sgl_tiered.engines.device.pools import make_device_pool, page_layout
from sgl_tiered.engines.device.probe import common_costs, measure_costs
from sgl_tiered.engines.device.ranks import group_ranks
from sgl_tiered.engines.device.tokens import plain_tokens
from sgl_tiered.engines.sglang.adapters import Adapters
from sgl_tiered.engines.sglang.args import tiered_options
from sgl_tiered.engines.sglang.cache import TieredRadixCache
from sgl_tiered.engines.sglang.device_eviction import (
    DeviceStrategy,
    use_device_policy,
)
from sgl_tiered.engines.sglang.lengths import LengthReader
from sgl_tiered.engines.sglang.page_forms import page_form
from sgl_tiered.engines.sglang.runtime import Parts, TieredRuntime
from sgl_tiered.engines.sglang.seams import require_seams
from sgl_tiered.engines.sglang.served import machine_facts, model_facts, report
from sgl_tiered.errors import ConfigError, EngineCompatibilityError
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.pipelines.base import DevicePool
from sgl_tiered.pipelines.completions import CompletionQueue, SlotsReady
from sgl_tiered.pipelines.demote import DemoteWorker
from sgl_tiered.pipelines.layerwise_load import LayerwiseLoader
from sgl_tiered.pipelines.offload import OffloadWorker
from sgl_tiered.pipelines.promote import PromoteWorker
from sgl_tiered.pipelines.shares import BandwidthShares, Share
from sgl_tiered.pipelines.staging import StagingReader, part_pages
from sgl_tiered.pipelines.stream_pool import StreamPool
from sgl_tiered.policies.eviction.registry import make_eviction_policy
from sgl_tiered.policies.length.book import LengthBook
from sgl_tiered.policies.length.registry import make_length_predictor
from sgl_tiered.policies.prefetch.registry import make_prefetch_policy
from sgl_tiered.serving.agreement import Agreement
from sgl_tiered.serving.option_reader import FAULT_ENV
from sgl_tiered.serving.options import Options
from sgl_tiered.serving.rank_disk import DiskAdoption, open_disk
from sgl_tiered.serving.weights import WeightsIdentity
from sgl_tiered.testing.emulator import Emulator
from sgl_tiered.tiers.base import MemoryTier
from sgl_tiered.tiers.cxl import CxlTier
from sgl_tiered.tiers.host import HostTier
from sgl_tiered.tiers.memory import Register

__all__ = ["build_cache", "refuse_unsupported"]

logger = logging.getLogger(__name__)

_BLACKWELL = 10
"""The first number of its compute capability."""
_REMEDY = "serve this model without --radix-cache-backend tiered"


def build_cache(ctx: Any) -> Any:
    """Make the cache for SGLang's ``TreeCacheBuildContext``.

    Raises:
        EngineCompatibilityError: this SGLang or this model is not supported.
        ConfigError: a setting does not fit the machine.
    """
    from sglang.srt.mem_cache.registry import create_unified_radix_cache

    require_seams(http=False)
    config = tiered_options(ctx.server_args)
    assert config is not None, "the factory is only called for --radix-cache-backend"
    refuse_unsupported(ctx)
    runtime = _build_runtime(ctx, config)
    strategy = _device_strategy(ctx, config, runtime)
    tree = _tree_class(config, ctx.server_args.disaggregation_mode)
    if config.pool is not None:
        from sgl_tiered.engines.sglang.pooled.build import enter_pool

        tree = enter_pool(ctx, config, runtime, tree)

    def make(params: Any) -> TieredRadixCache:
        cache = tree(params, runtime, strategy)
        cache.announce_tiers(runtime, params)
        return cache

    cache = create_unified_radix_cache(ctx, cache_class=make)
    counter = runtime.counter
    ctx.params.token_to_kv_pool_allocator.get_kvcache().register_layer_transfer_counter(
        counter
    )
    ctx.tp_worker.register_hicache_layer_transfer_counter(counter)
    return cache


def _tree_class(config: Options, mode: str) -> type[TieredRadixCache]:
    """Return the class of the tree that the settings ask for."""
    if config.layerkv is not None:
        from sgl_tiered.engines.sglang.layered.cache import LayeredRadixCache

        return LayeredRadixCache
    if config.sparsity is not None:
        from sgl_tiered.engines.sglang.sparse.cache import SparseRadixCache

        return SparseRadixCache
    if mode == "decode":
        from sgl_tiered.engines.sglang.disagg.decode import DecodeRadixCache

        return DecodeRadixCache
    return TieredRadixCache


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


def _build_runtime(ctx: Any, config: Options) -> TieredRuntime:
    # Pipelines time what they do; decisions read the clock that all ranks share.
    clock = SystemClock()
    agreement = Agreement(clock, group_ranks(getattr(ctx.tp_group, "cpu_group", None)))
    decision_clock = agreement if agreement.is_shared else clock
    runner = ctx.tp_worker.model_runner
    allocator = ctx.params.token_to_kv_pool_allocator
    pool = allocator.get_kvcache()
    raw = page_layout(pool, ctx.params.page_size)
    form = page_form(pool, raw, config)
    layout = form.layout
    engine = "sglang " + importlib.metadata.version("sglang")
    model = model_facts(ctx, raw)

    metrics = MetricsRegistry()
    weights = WeightsIdentity(
        weights_reader(lambda: runner.model, ctx.model_config.hf_config, engine),
        agreement,
        metrics,
    )
    assert weights.value is not None
    namespace = Namespace(
        weights.value,
        f"{pool.dtype} {model.attention_backend}{form.name}",
        layout.page_tokens,
        # The same on all ranks: keys of pages are among what decisions read.
        f"0/{agreement.num_ranks}",
    )
    if config.sparsity is not None:
        from sgl_tiered.engines.sglang.sparse.build import check_profile

        check_profile(config, pool, ctx.model_config, namespace.model_fingerprint)
    is_cuda = bool(pool.k_buffer[0].is_cuda)
    if is_cuda:
        use_device_in_threads(pool.k_buffer[0].device)

    def refused(num_bytes: int) -> None:
        metrics.add("pinning_refused_bytes", num_bytes)

    def pins(setting: str) -> Register | None:
        if not is_cuda:
            return None
        device = pool.k_buffer[0].device
        return pin_if_possible(cuda_register(setting, device), device, refused)

    register = pins("--tiered-host-size")
    given = config.experiment
    emulator = Emulator(given.emulate, switchable=given.switchable_faults, clock=clock)
    forward_stream = getattr(runner, "forward_stream", None)
    placed = sparse = None
    if config.layerkv is not None:
        from sgl_tiered.engines.sglang.layered.build import place_layers

        placed = place_layers(
            pool, runner.model, config, clock, emulator, agreement, forward_stream
        )
        device: DevicePool = placed.device
        if not_pinned := getattr(pool, "pinning_refused_bytes", 0):
            refused(not_pinned)
    elif config.sparsity is not None:
        from sgl_tiered.engines.sglang.sparse.build import end_probe, place_rows

        sparse = place_rows(pool, config, form)
        device = sparse.device
    elif isinstance(layout, EncodedLayout):
        device = EncodedCpuPool(pool, layout)
    else:
        device = make_device_pool(
            pool,
            layout,
            forward_stream,
            refused,
            stores_between_forwards=_joins_offloads(
                pool.k_buffer[0].device, agreement.num_ranks
            ),
        )
    host_memory = _open_host(config, layout, register, pool.k_buffer[0].device)
    host = emulator.wrap(host_memory)
    cxl_memory = _open_cxl(config, layout, pins("--tiered-cxl-size"))
    cxl = None if cxl_memory is None else emulator.wrap(cxl_memory)
    # Of these, a device pins a part after the other.
    pinned = [memory for memory in (host_memory, cxl_memory) if memory is not None]
    calls = emulator.calls(TierId.DISK)
    disk = open_disk(config, layout, namespace, calls, agreement)
    if disk is not None:
        disk = emulator.wrap(disk)
    calibration = read_fitting("--tiered-calibration", config.loads.calibration, model)
    cost, figures = measure_costs(
        model=runner.model,
        layout=layout,
        attention_width=model.attention_width,
        device=device,
        num_device_pages=allocator.size // layout.page_tokens,
        host=host,
        num_host_slots=host_memory.num_ready,
        cxl=cxl,
        num_cxl_slots=0 if cxl_memory is None else cxl_memory.num_ready,
        disk=disk,
        clock=clock,
        calibration=calibration,
        kv_gen=None if placed is None else placed.plan.kv_gen,
    )
    if sparse is not None:
        end_probe(pool)
    cost = common_costs(cost, agreement)
    rng = np.random.default_rng(config.experiment.seed)
    lookahead = _lookahead(config, layout)
    tiers = [tier for tier in (host, cxl, disk) if tier is not None]
    _refuse_unknown_tiers(config, [tier.tier_id for tier in tiers])
    # With layers placed singly, a page has its places when its load has ended.
    waits_whole = config.layerkv is not None or _forward_skips_layers(ctx)
    # As many slots as every rank has.
    slots = [
        min(theirs)
        for theirs in zip(
            *agreement.gathered([tier.num_slots for tier in tiers]), strict=True
        )
    ]
    # And as many of memory's at first as every rank has pinned by now.
    ready = agreement.gathered([memory.num_ready for memory in pinned])
    num_open = {
        memory.tier_id: min(theirs)
        for memory, theirs in zip(pinned, zip(*ready, strict=True), strict=True)
    }
    cache = TieredCache(
        CacheConfig(
            layout=layout,
            tiers=tuple(
                TierConfig(
                    tier.tier_id,
                    num_slots,
                    min(num_open.get(tier.tier_id, num_slots), num_slots),
                )
                for tier, num_slots in zip(tiers, slots, strict=True)
            ),
            load_policy=config.loads.load_policy,
            write_policy=config.writes.write_policy,
            demote_policy=config.writes.demote_policy,
            disk_admission=config.writes.disk_admission,
            device_pages=min(agreement.gathered(allocator.size // layout.page_tokens)),
            load_overlaps=_loads_overlap(
                device, host, waits_whole=waits_whole, is_cuda=is_cuda
            ),
            tombstones=cells_for(sum(slots)) if config.observe.explain_last else 0,
            act_page_bytes=0 if placed is None else placed.plan.act_page_bytes,
            act_refusal="" if placed is None else placed.plan.act_refusal,
        ),
        cost=cost,
        eviction={
            tier.tier_id: make_eviction_policy(config.tiers.eviction_policy, rng)
            for tier in tiers
        },
        clock=decision_clock,
        lookahead=lookahead,
    )
    completions = CompletionQueue()
    for medium, num_slots in zip(pinned, slots, strict=False):
        medium.watch_ready(
            partial(_tell_ready, completions, medium.tier_id, num_slots),
            since=num_open[medium.tier_id],
        )
    loader = LayerwiseLoader(
        device,
        completions,
        clock,
        metrics,
        link=lambda: cost.link_figures(TierId.HOST),
    )
    shares = BandwidthShares(clock)
    shares.watch(Share.LOAD, lambda: loader.busy)
    stager: StagingReader | None = None
    promoter: PromoteWorker | None = None
    adoption: DiskAdoption | None = None
    if disk is not None:
        adoption = DiskAdoption(cache, disk, agreement, metrics)
        num_rows = max(config.tiers.staging_bytes // layout.slot_bytes, 1)
        part = part_pages(*cost.link_figures(TierId.DISK), layout.page_bytes)
        stager = StagingReader(
            disk,
            num_rows,
            completions,
            clock,
            metrics,
            register=register,
            part_pages=part,
        )
        reader = stager
        shares.watch(Share.LOAD, lambda: reader.busy)
        looks_ahead = make_prefetch_policy(config.queue.prefetch).looks_ahead
        # Peers are sent what memory has, and what it gets for them.
        if looks_ahead or config.pool is not None:
            promoter = ahead = PromoteWorker(
                disk,
                host,
                completions,
                clock,
                metrics,
                part_pages=part,
                shares=shares,
                is_shared=lambda: reader.busy,
            )
            shares.watch(Share.PROMOTE, lambda: ahead.busy)
    # What a tier may lose goes to the next one.
    memory = [tier for tier in (host, cxl) if tier is not None]
    demoters = {
        (source.tier_id, target.tier_id): DemoteWorker(
            source, target, completions, clock, metrics, shares=shares
        )
        for source, target in zip(memory, tiers[1:], strict=False)
    }
    parts = Parts(
        config=config,
        namespace=namespace,
        weights=weights,
        clock=decision_clock,
        cost=cost,
        cache=cache,
        device=device,
        host=host,
        cxl=cxl,
        disk=disk,
        emulator=emulator,
        metrics=metrics,
        completions=completions,
        loader=loader,
        offloader=OffloadWorker(
            device, host, completions, clock, metrics, shares=shares
        ),
        demoters=demoters,
        stager=stager,
        lookahead=lookahead,
        deferred=_deferred(
            config, allocator.size // layout.page_tokens, layout, lookahead, rng
        ),
        probe=figures,
        served={
            **report(ctx, model, machine_facts(pool.k_buffer[0].device), engine),
            **form.facts(config),
            **_loads_by(device),
        },
        lengths=_lengths(config),
        promoter=promoter,
        agreement=agreement,
        adoption=adoption,
        adapters=Adapters(getattr(runner, "lora_manager", None), agreement, metrics),
    )
    _log_start(parts, layout)
    emulator.arm()
    if placed is not None:
        from sgl_tiered.engines.sglang.layered.cache import LayeredRuntime

        layered = LayeredRuntime(parts, placed.driver)
        if ctx.server_args.disaggregation_mode == "prefill":
            layered.send_from(pool)
        return layered
    if sparse is not None:
        from sgl_tiered.engines.sglang.sparse.cache import SparseRuntime

        return SparseRuntime(parts, sparse, wait_whole=waits_whole)
    return TieredRuntime(parts, wait_whole=waits_whole)


def _lookahead(config: Options, layout: PageLayout) -> QueueLookahead | None:
    """Return the queue's view where a policy looks at it."""
    names = {config.tiers.eviction_policy, config.tiers.device_eviction} - {None}
    rng = np.random.default_rng(config.experiment.seed)
    if any(make_eviction_policy(str(name), rng).needs_queue for name in names):
        return QueueLookahead(layout.page_tokens)
    return None


def _device_strategy(
    ctx: Any, config: Options, runtime: TieredRuntime
) -> DeviceStrategy | None:
    """Plug a policy into SGLang's tree where one was asked for."""
    if config.tiers.device_eviction is None:
        return None
    page_tokens = ctx.params.page_size
    ranking = DeviceRanking(
        make_eviction_policy(
            config.tiers.device_eviction, np.random.default_rng(config.experiment.seed)
        ),
        max(1, ctx.params.token_to_kv_pool_allocator.size // page_tokens),
        page_tokens,
        runtime.lookahead,
    )
    strategy = DeviceStrategy(ranking, runtime.namespace, plain_tokens)
    use_device_policy(ctx.params, strategy)
    return strategy


def _deferred(
    config: Options,
    num_device_pages: int,
    layout: PageLayout,
    lookahead: QueueLookahead | None,
    rng: np.random.Generator,
) -> DeferredOffloads | None:
    if config.writes.write_policy != "on-evict":
        return None
    return DeferredOffloads(
        make_eviction_policy(config.tiers.eviction_policy, rng),
        layout.page_tokens,
        num_device_pages,
        config.writes.offload_threshold,
        lookahead,
    )


def _lengths(config: Options) -> LengthReader | None:
    predictor = make_length_predictor(config.queue.length_predictor)
    return None if predictor is None else LengthReader(LengthBook(predictor))


def _open_host(
    config: Options, layout: PageLayout, register: Any, device: torch.device
) -> HostTier:
    num_slots = config.tiers.host_bytes // layout.slot_bytes
    if num_slots == 0:
        raise ConfigError(
            "--tiered-host-size",
            f"{config.tiers.host_bytes} bytes is less than a page of "
            f"{layout.slot_bytes}",
            "give more",
        )
    return HostTier(
        layout.slot_bytes,
        num_slots,
        register=register,
        node=None if register is None else numa_node(device),
        page_bytes=layout.page_bytes,
    )


def _open_cxl(config: Options, layout: PageLayout, register: Any) -> CxlTier | None:
    if config.tiers.cxl is None:
        return None
    num_slots = config.tiers.cxl_bytes // layout.slot_bytes
    if num_slots == 0:
        raise ConfigError(
            "--tiered-cxl-size",
            f"{config.tiers.cxl_bytes} bytes is less than a page of "
            f"{layout.slot_bytes}",
            "give more",
        )
    return CxlTier(
        config.tiers.cxl,
        layout.slot_bytes,
        num_slots,
        register=register,
        page_bytes=layout.page_bytes,
    )


def _tell_ready(
    completions: CompletionQueue, tier: TierId, num_slots: int, num_ready: int
) -> None:
    """Say how many of the slots that every rank has are pinned here."""
    completions.post(SlotsReady(tier, min(num_ready, num_slots)))


def _refuse_unknown_tiers(config: Options, present: list[TierId]) -> None:
    """Refuse an experiment on a tier that there is not: it would show nothing."""
    for section in config.experiment.emulate:
        for tier in section.tiers:
            if tier not in present:
                raise ConfigError(
                    "--tiered-emulate",
                    f"{section.text!r} names the {tier.label} tier, which this server "
                    "does not have",
                    "leave it out, or give the server that tier",
                )


def _forward_skips_layers(ctx: Any) -> bool:
    """Say whether a prefill may read a layer without asking whether it has arrived.

    SGLang names the batch whose loads count only where tokens are generated. There
    attention asks, layer by layer: also under breakable graphs, which run it eagerly.
    And a prefill that is one whole graph is preceded by SGLang's own wait for the last
    layer.
    """
    return not getattr(ctx.model_config, "is_generation", True)


def _loads_by(device: DevicePool) -> dict[str, str]:
    """Return how layers come to a device with streams, for ``served``; else nothing."""
    if isinstance(device, StreamPool | LayeredStreamPool):
        return {"loads_by": device.way.value}
    return {}


def _joins_offloads(device: torch.device, num_ranks: int) -> bool:
    """Say whether no offload may run beside a forward.

    None needs what they write. But with prefill in breakable graphs on two ranks of
    Blackwell, HiCache's copies under the next forward left one rank waiting for the
    other for ever (SGLang issue 38300), and ours run under it in the same way.
    Elsewhere such copies run beside forwards of many ranks every day, and waiting for
    a forward would let stores fall behind.
    """
    from sglang.srt.model_executor.cuda_graph_config import (
        Backend,
        Phase,
        check_cuda_graph_backend,
    )

    if num_ranks == 1 or device.type != "cuda":
        return False
    if not check_cuda_graph_backend(Phase.PREFILL, Backend.BREAKABLE):
        return False
    return bool(torch.cuda.get_device_capability(device)[0] >= _BLACKWELL)


def _loads_overlap(
    device: DevicePool, host: MemoryTier, *, waits_whole: bool, is_cuda: bool
) -> bool:
    """Say whether loads to the device run under the pass that they are for."""
    from sglang.srt.model_executor.cuda_graph_config import (
        Backend,
        Phase,
        check_cuda_graph_backend,
    )

    # As SGLang has resolved it: the flag itself is empty by default.
    is_one_graph = is_cuda and check_cuda_graph_backend(Phase.PREFILL, Backend.FULL)
    if waits_whole or is_one_graph:
        return False
    # Where the model's thread copies, a load and its pass add up.
    return not device.waiter_copies or host.health().emulated


def _log_start(parts: Parts, layout: PageLayout) -> None:
    texts = []
    for tier in parts.tiers:
        tokens = tier.num_slots * layout.page_tokens
        size = tier.num_slots * tier.slot_bytes / 1e9
        health = tier.health()
        note = f" ({health.detail})" if health.detail else ""
        emulated = parts.emulator.text(tier.tier_id)
        if emulated or health.emulated:
            note = f" (EMULATED: {'; '.join(filter(None, (health.detail, emulated)))})"
        texts.append(f"{tier.tier_id.label} {tokens} tokens, {size:.2f} GB{note}")
    if isinstance(layout, EncodedLayout):
        texts.append(f"as {layout.form}, {layout.ratio:.2f} times smaller")
    calibration = parts.config.loads.calibration
    source = "" if calibration is None else f"; costs from {calibration}"
    logger.info("sgl-tiered: %s%s; measured %s", "; ".join(texts), source, parts.probe)
    if parts.emulator.switchable:
        logger.warning(
            "sgl-tiered: %s=1: this server fails when told to; never serve users so",
            FAULT_ENV,
        )
