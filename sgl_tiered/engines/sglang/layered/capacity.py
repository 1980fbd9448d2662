"""How many tokens SGLang may hold, and how many of their layers fit on the device.

What the user gives as ``--max-total-tokens`` (or SGLang finds by profiling) is the
device's room: so many tokens with all their layers. SGLang is told another number, the
logical one: the host region has a row for each of these pages, so that any layer of
any page can be there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sgl_tiered.core.layout import PageLayout
from sgl_tiered.engines.sglang.agreement import group_ranks
from sgl_tiered.engines.sglang.layered.settings import LayerKvSettings
from sgl_tiered.engines.sglang.sparse.capacity import plan_rows
from sgl_tiered.errors import ConfigError
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
    """

    layout: PageLayout
    num_pages: int
    num_layer_pages: int
    half_pages: int
    settings: LayerKvSettings

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
    settings: LayerKvSettings,
    *,
    available_bytes: int | None = None,
) -> LayerPlan:
    """Return the sizes for a device with room for ``device_tokens`` in all layers.

    Args:
        layout: shape of a page.
        device_tokens: of the device's pool, all layers.
        context_tokens: longest context of the model.
        settings: what the user asked for.
        available_bytes: of memory, for this rank; None for all that is free.

    Raises:
        ConfigError: the host region is smaller than the device's pool, or more than
            the memory available; or the staging memory takes too much of the pool.
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
    return LayerPlan(layout, num_pages, num_layer_pages, half_pages, settings)


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

    from sgl_tiered.engines.sglang.args import tiered_config

    _planned.clear()
    plan_rows(None)
    config = original(configurator, *args, **kwargs)
    tiered = tiered_config(get_server_args())
    page_size = get_server_args().page_size or 1
    if tiered is not None and tiered.sparsity is not None:
        layout = _layout(configurator, page_size, "--tiered-sparsity")
        plan_rows(layout, config.max_total_num_tokens)
    if tiered is None or tiered.layerkv is None:
        return config
    layout = _layout(configurator, page_size, "--tiered-layerkv")
    plan = plan_layers(
        layout,
        config.max_total_num_tokens,
        configurator.model_config.context_len,
        tiered.layerkv,
        available_bytes=_rank_share_bytes(),
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


def _rank_share_bytes() -> int | None:
    """Return one rank's part of the free memory, alike on all; None where it is alone.

    Each looks at another moment, and pools of several sizes would admit differently.
    """
    from sglang.srt.runtime_context import get_parallel

    ranks = group_ranks(get_parallel().world_group.cpu_group)
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
