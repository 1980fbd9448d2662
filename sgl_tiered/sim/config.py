"""Settings of a simulated server, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass, field

from sgl_tiered.cache.prefetcher import DEFAULT_WINDOW
from sgl_tiered.core.ids import TierId
from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.admission.registry import ADMISSIONS as SLO_ADMISSIONS
from sgl_tiered.policies.admission.registry import NO_ADMISSION
from sgl_tiered.policies.layers.pressure import LOW_SHARE, RETURN_SHARE
from sgl_tiered.policies.layers.registry import make_turns
from sgl_tiered.policies.layers.turns import PauseTurns
from sgl_tiered.policies.length.registry import NO_PREDICTOR
from sgl_tiered.policies.order.registry import ORDERS
from sgl_tiered.policies.prefetch.registry import check_prefetch_to
from sgl_tiered.sim.hardware import LinkSpeed
from sgl_tiered.sim.links import DISCIPLINES
from sgl_tiered.sim.times import DeviceTimes

__all__ = [
    "LOAD_MODES",
    "LayerSetup",
    "SchedulerConfig",
    "ServerConfig",
    "TierSetup",
]

LOAD_MODES = ("layerwise", "waiter")
ADMISSIONS = ("sglang", "vllm")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How requests are admitted; the defaults are SGLang 0.5.23's.

    Attributes:
        admission: ``sglang`` reserves room for answers; ``vllm`` (0.5.5) admits what
            has room for its prompt and preempts the newest request when it is wrong.
        chunk_tokens: new tokens of a prefill pass; 0 computes prompts whole.
        max_prefill_tokens: new tokens of a pass of several prompts.
        max_running: requests that decode at a time.
        ignore_eos: answers have the length asked for, as in benchmarks; SGLang then
            reserves it whole. Without, a ratio that decays is reserved.
        order: name in ``policies/order/registry.py``.
        slo_admission: ``none``, or ``slo`` to hold prefill for the decoders' sake.
        ttft_slo_s, tpot_slo_s: its targets; 0 for none.
    """

    admission: str = "sglang"
    chunk_tokens: int = 8_192
    max_prefill_tokens: int = 16_384
    max_running: int = 256
    ignore_eos: bool = False
    order: str = "fcfs"
    slo_admission: str = NO_ADMISSION
    ttft_slo_s: float = 0.0
    tpot_slo_s: float = 0.0

    def __post_init__(self) -> None:
        if self.admission not in ADMISSIONS:
            raise ConfigError(
                "admission", f"{self.admission!r} is not known", "sglang or vllm"
            )
        if self.chunk_tokens < 0 or min(self.max_running, self.max_prefill_tokens) < 1:
            raise ConfigError(
                "scheduler",
                f"chunk {self.chunk_tokens}, prefill {self.max_prefill_tokens}, "
                f"running {self.max_running}",
                "give positive numbers (a chunk of 0 means no chunks)",
            )
        if self.slo_admission not in SLO_ADMISSIONS:
            raise ConfigError(
                "slo_admission",
                f"{self.slo_admission!r} is not known",
                f"choose one of {', '.join(SLO_ADMISSIONS)}",
            )
        if self.order not in ORDERS:
            raise ConfigError(
                "order",
                f"{self.order!r} is not known",
                f"choose one of {', '.join(ORDERS)}",
            )
        if min(self.ttft_slo_s, self.tpot_slo_s) < 0:
            raise ConfigError(
                "scheduler",
                f"TTFT {self.ttft_slo_s} s, TPOT {self.tpot_slo_s} s",
                "give positive targets, or 0 for none",
            )


@dataclass(frozen=True, slots=True)
class TierSetup:
    """One tier below the device: its size and the way to it and back.

    Attributes:
        tier: host, cxl or disk.
        size_bytes: of this rank.
        read: tier -> device (a memory tier) or tier -> host (a disk).
        write: the other direction.
    """

    tier: TierId
    size_bytes: int
    read: LinkSpeed
    write: LinkSpeed


@dataclass(frozen=True, slots=True)
class LayerSetup:
    """Layer-wise memory (LayerKV): layers of running requests in host memory.

    Attributes:
        host_tokens: that have rows in host memory; the pool as the engine sees it.
        max_context_tokens: of prompt and answer; twice one layer of it is set aside on
            the device for what is streamed.
        down, up: the link to the host and back, of this rank.
        decode: name in ``policies/layers/registry.py``.
        low_share, return_share: of the device, see ``policies/layers/pressure.py``.
    """

    host_tokens: int
    max_context_tokens: int
    down: LinkSpeed
    up: LinkSpeed
    decode: str = PauseTurns.name
    low_share: float = LOW_SHARE
    return_share: float = RETURN_SHARE

    def __post_init__(self) -> None:
        make_turns(self.decode)
        if not 0 < self.max_context_tokens <= self.host_tokens:
            raise ConfigError(
                "layers",
                f"contexts of {self.max_context_tokens} tokens, host rows for "
                f"{self.host_tokens}",
                "give the host room for the longest context at least",
            )
        if not 0.0 <= self.low_share <= self.return_share <= 1.0:
            raise ConfigError(
                "layers",
                f"shares of {self.low_share} and {self.return_share}",
                "give two from 0 to 1, the lower one first",
            )


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """One rank of a server with its tiers.

    Attributes:
        times: of the device.
        page_tokens: tokens of a page.
        num_layers: of the model.
        kv_token_bytes: keys and values of a token over all layers, of this rank.
        device_tokens: tokens of the device pool.
        tiers: fastest first: none, or a chain that begins with a memory tier.
        scheduler: admission.
        device_reuse: the device keeps prefixes (a radix cache).
        load_mode: ``layerwise`` under the prefill; ``waiter``: the computing thread
            copies (our CPU form), so load and prefill add up.
        link_discipline: ``fair`` or ``fifo``, see links.py.
        load_policy, write_policy, demote_policy, disk_admission: of ``CacheConfig``.
        offload_threshold: share of the device above which ``on-evict`` copies.
        eviction: of the tiers.
        device_eviction: of the device's tree; lru is SGLang's own.
        staging_bytes: memory for pages on their way from disk; 0 for no bound.
        prefetch: when reads from disk begin: ``none``, ``arrival``, ``car``, see
            policies/prefetch.
        prefetch_window: requests at the head of the queue that ``car`` looks at.
        prefetch_to: how far ``car`` brings pages: to the ``host`` or on to the
            ``device``.
        length_predictor: name in ``LENGTH_PREDICTORS``; it learns as the server runs.
        max_offloads: plans that may wait for the offload; more are dropped.
        layers: layer-wise memory; None for a device that holds all layers of a page.
        explain: say of each request why it waited and what became of its pages.
        seed: for policies that draw.
    """

    times: DeviceTimes
    page_tokens: int
    num_layers: int
    kv_token_bytes: int
    device_tokens: int
    tiers: tuple[TierSetup, ...] = ()
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device_reuse: bool = True
    load_mode: str = "layerwise"
    link_discipline: str = "fair"
    load_policy: str = "auto"
    write_policy: str = "auto"
    demote_policy: str = "write-through"
    disk_admission: str = "auto"
    offload_threshold: float = 0.9
    eviction: str = "lru"
    device_eviction: str = "lru"
    staging_bytes: int = 0
    prefetch: str = "arrival"
    prefetch_window: int = DEFAULT_WINDOW
    prefetch_to: str = "host"
    length_predictor: str = NO_PREDICTOR
    max_offloads: int = 64
    layers: LayerSetup | None = None
    explain: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.load_mode not in LOAD_MODES:
            raise ConfigError(
                "load_mode",
                f"{self.load_mode!r} is not known",
                f"choose one of {', '.join(LOAD_MODES)}",
            )
        if self.link_discipline not in DISCIPLINES:
            raise ConfigError(
                "link_discipline",
                f"{self.link_discipline!r} is not known",
                f"choose one of {', '.join(DISCIPLINES)}",
            )
        check_prefetch_to(self.prefetch, self.prefetch_to)
        if self.prefetch_window < 1:
            raise ConfigError(
                "prefetch_window",
                f"{self.prefetch_window} requests are none",
                "give 1 or more",
            )
        if self.capacity_pages < 2:
            raise ConfigError(
                "device_tokens",
                f"{self.device_tokens} tokens are {self.capacity_pages} pages",
                "give the device room for two pages at least",
            )
        if any(setup.tier is TierId.PEER for setup in self.tiers):
            raise ConfigError("tiers", "a peer is not modelled", "leave it out")
        if not 0.0 <= self.offload_threshold <= 1.0:
            raise ConfigError(
                "offload_threshold",
                f"{self.offload_threshold} is not a share",
                "give a number from 0 to 1",
            )
        if (
            self.scheduler.slo_admission != NO_ADMISSION
            and self.length_predictor == NO_PREDICTOR
        ):
            raise ConfigError(
                "length_predictor",
                "is needed by an admission that looks at what answers have to come",
                "choose online",
            )
        if self.tiers and not self.device_reuse:
            raise ConfigError(
                "device_reuse", "the tiers load into the device's tree", "keep it on"
            )
        if self.layers is not None and self.device_reuse:
            raise ConfigError(
                "layers",
                "shared prefixes are not modelled with them",
                "switch reuse off",
            )
        if self.tiers and self.tiers[0].tier is TierId.DISK:
            raise ConfigError(
                "tiers", "a disk has no memory tier above it", "add a host tier"
            )

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.page_tokens * self.kv_token_bytes

    @property
    def capacity_pages(self) -> int:
        """Pages of the pool that the engine sees."""
        tokens = self.device_tokens if self.layers is None else self.layers.host_tokens
        return tokens // self.page_tokens
