"""How many tokens SGLang may hold, and how many of their layers fit on the device.

What the user gives as ``--max-total-tokens`` (or SGLang finds by profiling) is the
device's room: so many tokens with all their layers. SGLang is told another number, the
logical one: the host region has a row for each of these pages, so that any layer of
any page can be there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sgl_tiered.core.layout import PageLayout
from sgl_tiered.cost.calibration import TokensFit
from sgl_tiered.engines.device.ranks import group_ranks
from sgl_tiered.engines.sglang.layered.activations.choosing import Chosen, choose
from sgl_tiered.engines.sglang.sparse.capacity import plan_rows
from sgl_tiered.errors import ConfigError
from sgl_tiered.layered.base import ActPlan
from sgl_tiered.serving.agreement import Ranks
from sgl_tiered.serving.layered.act_sizes import Demand, share_bytes
from sgl_tiered.serving.options import LayerKv
from sgl_tiered.tiers.memory import available_memory_bytes

__all__ = ["LayerPlan", "allocator_class", "plan_layers", "pool_class", "sized"]

HOST_FACTOR = 4
"""Memory of the host region, in device pools, where the user names no size."""
_HOST_SHARE = 0.5
_MIN_STAGING_PAGES = 2


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Sizes of one pool.

    Attributes:
        layout: shape of a page.
        num_pages: logical pages, the one that padding writes to not counted.
        num_layer_pages: physical layer-pages, the same.
        half_pages: layer-pages of one half of the staging memory, among them.
        settings: what the user asked for.
        acts: sizes of what is for activations; None where all pages are KV.
        chosen: how activations are used, or why not; None where they are off.
    """

    layout: PageLayout
    num_pages: int
    num_layer_pages: int
    half_pages: int
    settings: LayerKv
    acts: ActPlan | None = None
    chosen: Chosen | None = None

    @property
    def num_kv_rows(self) -> int:
        """Return the rows of KV of the host region, one that is spare included."""
        acts = 0 if self.acts is None else self.acts.num_act_rows
        return self.num_pages + 1 - acts

    @property
    def act_page_bytes(self) -> int:
        """Return the bytes of a page as activations; 0 where all pages are KV."""
        if self.acts is None:
            return 0
        return self.layout.num_layers * self.acts.act_layer_page_bytes

    def kv_gen(self) -> TokensFit | None:
        """Return the time to rebuild tokens of a layer; None where none are rebuilt."""
        if self.acts is None or self.chosen is None:
            return None
        return self.chosen.sampled

    @property
    def act_refusal(self) -> str:
        """Return why no activations are kept where that was left to us; or nothing."""
        asked = self.settings.activations
        if self.chosen is None or self.acts is not None or asked is None:
            return ""
        return self.chosen.reason if asked.share is None else ""

    @property
    def capacity(self) -> int:
        """Return the layer-pages that requests may have: all but the staging ones."""
        return self.num_layer_pages - 2 * self.half_pages

    @property
    def longest_tokens(self) -> int:
        """Return the tokens of the longest request that can run at all.

        It is streamed, or has room with all its layers, a page to begin included.
        """
        resident = self.capacity // self.layout.num_layers
        pages = min(max(self.half_pages, resident - 1), self.num_pages)
        return pages * self.layout.page_tokens


def plan_layers(
    layout: PageLayout,
    device_tokens: int,
    context_tokens: int,
    settings: LayerKv,
    *,
    available_bytes: int | None = None,
    demand: Demand | None = None,
    chosen: Chosen | None = None,
) -> LayerPlan:
    """Return the sizes for a device with room for ``device_tokens`` in all layers.

    Args:
        layout: shape of a page.
        device_tokens: of the device's pool, all layers.
        context_tokens: longest context of the model.
        settings: what the user asked for.
        available_bytes: of memory, for this rank; None for all that is free.
        demand: for activations, out of the same bytes; None for none.
        chosen: where the demand comes from, to be told.

    Raises:
        ConfigError: the host region is smaller than the device's pool, or more than
            the memory available; or the staging memory takes too much of the pool, or
            what is for activations does.
    """
    device_pages = device_tokens // layout.page_tokens
    num_layer_pages = device_pages * layout.num_layers
    host_bytes = settings.host_bytes
    available = available_bytes
    if available is None:
        available = available_memory_bytes()
    if not host_bytes:
        host_bytes = HOST_FACTOR * device_pages * layout.slot_bytes
        if available is not None:
            host_bytes = min(host_bytes, int(available * _HOST_SHARE))
    elif available is not None and host_bytes > available:
        raise ConfigError(
            "--tiered-layerkv-host-size",
            f"{host_bytes / 2**30:.1f} GiB is more than the {available / 2**30:.1f} "
            "GiB of memory that is free",
            "give less",
        )
    num_pages = host_bytes // layout.slot_bytes - 1
    if num_pages < device_pages:
        raise ConfigError(
            "--tiered-layerkv-host-size",
            f"{host_bytes} bytes hold less than the device's pool of "
            f"{device_pages * layout.slot_bytes}",
            "give more, or a smaller --max-total-tokens",
        )
    half_pages = settings.staging_bytes // (2 * layout.layer_page_bytes)
    if not half_pages:
        longest = min(context_tokens, num_pages * layout.page_tokens)
        # A tenth of the pool at most: a longer context keeps all its layers.
        half_pages = min(-(-longest // layout.page_tokens), num_layer_pages // 20)
    half_pages = max(half_pages, _MIN_STAGING_PAGES)
    if 4 * half_pages > num_layer_pages:
        raise ConfigError(
            "--tiered-layerkv-staging-size",
            f"{2 * half_pages} layer-pages are more than half of the pool's "
            f"{num_layer_pages}",
            "give less",
        )
    if demand is None:
        plan = LayerPlan(layout, num_pages, num_layer_pages, half_pages, settings)
        return replace(plan, chosen=chosen)
    shared = share_bytes(layout, num_layer_pages, half_pages, host_bytes, demand)
    return LayerPlan(
        layout,
        shared.num_kv_rows + shared.acts.num_act_rows,
        shared.num_layer_pages,
        half_pages,
        settings,
        shared.acts,
        chosen,
    )


# What the configurator has planned, for the platform that SGLang asks next for classes
# of the pool and of the allocator.
_planned: list[LayerPlan] = []


def sized(original: Any, configurator: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand around SGLang's sizing of the pool: plan, and give the logical size.

    Rows of sparse KV are planned as well, and leave SGLang's size as it is.

    Raises:
        ConfigError: a size does not fit, or pages have one token.
        EngineCompatibilityError: the model's KV is not plain multi-head KV.
    """
    from sglang.srt.runtime_context import get_server_args

    from sgl_tiered.engines.sglang.args import tiered_options

    _planned.clear()
    plan_rows(None)
    config = original(configurator, *args, **kwargs)
    tiered = tiered_options(get_server_args())
    page_size = get_server_args().page_size or 1
    if tiered is not None and tiered.sparsity is not None:
        layout = _layout(configurator, page_size, "--tiered-sparsity")
        plan_rows(layout, config.max_total_num_tokens)
    if tiered is None or tiered.layerkv is None:
        return config
    layout = _layout(configurator, page_size, "--tiered-layerkv")
    ranks = _ranks()
    chosen = choose(configurator, tiered, layout, config.max_total_num_tokens, ranks)
    plan = plan_layers(
        layout,
        config.max_total_num_tokens,
        configurator.model_config.context_len,
        tiered.layerkv,
        available_bytes=_rank_share_bytes(ranks),
        demand=None if chosen is None else chosen.demand,
        chosen=chosen,
    )
    _planned.append(plan)
    config.max_total_num_tokens = plan.num_pages * layout.page_tokens
    return config


def pool_class() -> type | None:
    """Return the class of the pool that was planned; None for SGLang's own."""
    if not _planned:
        return None
    from sgl_tiered.engines.sglang.layered.pool import LayeredPool

    return type("PlannedLayeredPool", (LayeredPool,), {"plan": _planned[0]})


def allocator_class() -> type | None:
    """Return the class of the allocator; None for SGLang's own."""
    if not _planned:
        return None
    from sgl_tiered.engines.sglang.layered.allocator import LayeredAllocator

    return LayeredAllocator


def _ranks() -> Ranks | None:
    """Return the ranks of the server; None where this one is alone."""
    from sglang.srt.runtime_context import get_parallel

    return group_ranks(get_parallel().world_group.cpu_group)


def _rank_share_bytes(ranks: Ranks | None) -> int | None:
    """Return one rank's part of the free memory, alike on all; None where it is alone.

    Each looks at another moment, and pools of several sizes would admit differently.
    """
    if ranks is None:
        return None
    told = ranks.gather(str(available_memory_bytes() or 0).encode())
    return min(int(one) for one in told) // ranks.num_ranks or None


def _layout(configurator: Any, page_size: int, flag: str) -> PageLayout:
    from sglang.srt.runtime_context import get_parallel

    if page_size < 2:
        raise ConfigError(
            flag,
            "needs pages of several tokens, as they are placed in parts",
            "add --page-size 16",
        )
    model = configurator.model_config
    heads = model.get_num_kv_heads(
        get_parallel().attn_tp_size, get_parallel().attn_dcp_size
    )
    token_bytes = heads * model.head_dim * configurator.kv_cache_dtype.itemsize
    return PageLayout(
        configurator.layer_info.num_effective_layers, page_size, token_bytes
    )
