"""How the bytes of a pool and of its host region are shared with activations.

Both stay as large as they would be without: on the device the act area takes room of
the pool, and on the host rows of activations take the place of rows of KV.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_tiered.core.layout import PageLayout
from sgl_tiered.errors import ConfigError
from sgl_tiered.layered.base import ActPlan
from sgl_tiered.serving.options import OPTIONS

__all__ = ["FLAG", "ActSizes", "Demand", "share_bytes"]

FLAG = OPTIONS["activations"].flag

_MOST_OF_POOL = 3
"""Without a size that is named, the act area takes a part of so many at most: then it
has as many places for a prefill's pages as are left for their KV, in an MHA model."""
_LEAST_KV_SHARE = 1 / 16
"""Of host rows. Also with activations only, what has no room in the act area is KV."""
_UP_PAGES = 8


@dataclass(frozen=True, slots=True)
class Demand:
    """What an act area is to hold.

    Attributes:
        share: of pages that are kept as activations, above 0.
        token_bytes: of one token's activation.
        open_pages: requests that may have a page whose tokens are not complete.
        chunk_pages: pages that one pass of a prefill writes at most.
        device_bytes: that the user gives the act area; 0 for what it needs.
        weight_bytes: of the device's memory for weights that are in host memory.
    """

    share: float
    token_bytes: int
    open_pages: int
    chunk_pages: int
    device_bytes: int = 0
    weight_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ActSizes:
    """Sizes of a pool that holds activations as well.

    Attributes:
        acts: of what is for activations.
        num_kv_rows: rows of KV of the host region, one that is spare not counted.
        num_layer_pages: layer-pages that are left of the pool.
    """

    acts: ActPlan
    num_kv_rows: int
    num_layer_pages: int


def share_bytes(
    layout: PageLayout,
    num_layer_pages: int,
    half_pages: int,
    host_bytes: int,
    demand: Demand,
) -> ActSizes:
    """Return how a pool and a host region are shared between KV and activations.

    Args:
        layout: shape of a page of KV.
        num_layer_pages: of the pool without activations.
        half_pages: layer-pages of one half of the staging memory.
        host_bytes: of the host region.
        demand: for activations.

    Raises:
        ConfigError: a page is larger as activations, or there is too little room.
    """
    page_bytes = demand.token_bytes * layout.page_tokens
    if page_bytes > layout.layer_page_bytes:
        raise ConfigError(
            FLAG,
            f"a page of a layer has {page_bytes} bytes as activations and "
            f"{layout.layer_page_bytes} as KV",
            "leave it out for this model",
        )
    pool_bytes = num_layer_pages * layout.layer_page_bytes - demand.weight_bytes
    # Also what is staged as activations only has to fit a half.
    staging = 2 * half_pages + _UP_PAGES
    # One open page, and one page that is captured while another goes to the host.
    least = staging + layout.num_layers + 2
    if demand.device_bytes:
        num_acts = demand.device_bytes // page_bytes
        most = pool_bytes // 2 // page_bytes
    else:
        wanted = demand.open_pages * layout.num_layers + 2 * demand.chunk_pages
        most = pool_bytes // _MOST_OF_POOL // page_bytes
        num_acts = max(least, min(staging + wanted, most))
        most = max(most, pool_bytes // 2 // page_bytes)
    if not least <= num_acts <= most:
        raise ConfigError(
            OPTIONS["activations_device_size"].flag,
            f"{num_acts * page_bytes} bytes are not from {least * page_bytes} to "
            f"half of the pool's {pool_bytes}",
            "give another size, or a larger --max-total-tokens",
        )
    left = (pool_bytes - num_acts * page_bytes) // layout.layer_page_bytes
    if 4 * half_pages > left:
        raise ConfigError(
            OPTIONS["activations_device_size"].flag,
            f"{num_acts * page_bytes} bytes leave {left} layer-pages, and staging "
            f"takes {2 * half_pages}",
            "give less, or a smaller --tiered-layerkv-staging-size",
        )
    num_kv_rows, num_act_rows = _rows(layout, page_bytes, host_bytes, demand.share)
    acts = ActPlan(
        num_act_rows=num_act_rows,
        num_acts=num_acts,
        half_acts=half_pages,
        up_acts=_UP_PAGES,
        act_layer_page_bytes=page_bytes,
    )
    return ActSizes(acts, num_kv_rows, left)


def _rows(
    layout: PageLayout, page_bytes: int, host_bytes: int, share: float
) -> tuple[int, int]:
    """Return rows of KV and of activations that fit, in the ratio of ``share``."""
    act_bytes = layout.num_layers * page_bytes
    share = min(share, 1.0 - _LEAST_KV_SHARE)
    # A row of KV is spare, for the logical page of padding.
    room = host_bytes - layout.slot_bytes
    both = int(room / (share * act_bytes + (1.0 - share) * layout.slot_bytes))
    num_act_rows = max(round(share * both), 1)
    num_kv_rows = (room - num_act_rows * act_bytes) // layout.slot_bytes
    return num_kv_rows, num_act_rows
