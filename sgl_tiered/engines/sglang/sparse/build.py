"""Puts the parts of a pool of rows together."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from sgl_tiered.core.encoded import EncodedLayout
from sgl_tiered.engines.sglang.config import TieredConfig
from sgl_tiered.engines.sglang.page_forms import PageForm
from sgl_tiered.engines.sglang.sparse.device_pool import SparseDevicePool
from sgl_tiered.engines.sglang.sparse.encoded_device_pool import EncodedSparsePool
from sgl_tiered.engines.sglang.sparse.parts import SparseParts
from sgl_tiered.errors import EngineCompatibilityError
from sgl_tiered.sparse.keep import KeepPolicy, KeepShare, KeepWrong
from sgl_tiered.sparse.mass import PageMass
from sgl_tiered.sparse.stored import StoredTokens

__all__ = ["attach_scheduler", "end_probe", "place_rows"]

logger = logging.getLogger(__name__)

_MASS_BYTES = 256 * 2**20
"""Host memory for what attention gave to pages: 4 bytes a token and layer, which is a
thousandth of the KV of a model with 8 KV heads of 128."""


def place_rows(pool: Any, config: TieredConfig, form: PageForm) -> SparseParts:
    """Make what rules the rows of a `SparsePool`.

    Pages are bound until ``end_probe``, so that the start measures real copies.

    Raises:
        EngineCompatibilityError: SGLang has made a pool of another kind.
    """
    if not hasattr(pool, "row_plan"):
        raise EngineCompatibilityError(
            f"--tiered-sparsity does not work with SGLang's {type(pool).__name__}: "
            "leave it out."
        )
    settings = config.sparsity
    assert settings is not None, "sparse KV is off"
    policy: KeepPolicy = KeepShare(settings.keep)
    if config.keeps_wrong:
        policy = KeepWrong(settings.keep)
    layout = form.layout
    page_bytes = 4 * layout.num_layers * layout.page_tokens
    pages = PageMass(
        layout.num_layers, layout.page_tokens, max(1, _MASS_BYTES // page_bytes)
    )
    device = _device_pool(pool, form)
    probed = np.arange(1, pool.row_plan.device_pages + 1)
    stored = None
    if settings.on_store:
        stored = StoredTokens(layout.num_layers, layout.page_tokens)
        first = np.arange(len(probed))[:, None] * layout.page_tokens
        some = (first + np.arange(device.stored_tokens)).reshape(-1)
        pool.binding.bind_kept(probed, [some] * layout.num_layers)
    else:
        pool.binding.bind(probed)
    logger.warning(
        "sgl-tiered: sparse KV (--tiered-sparsity) is experimental: requests that "
        "allow lossy KV may be answered otherwise than by the whole of it."
    )
    return SparseParts(
        pool.binding,
        device,
        policy,
        pool.mass,
        pages,
        pool.measured,
        device.share_of(settings.keep),
        stored,
    )


def _device_pool(pool: Any, form: PageForm) -> SparseDevicePool:
    if isinstance(form.whole, EncodedLayout):
        return EncodedSparsePool(pool, form.layout, form.whole)
    return SparseDevicePool(pool, form.layout)


def end_probe(pool: Any) -> None:
    """Give the rows back that ``place_rows`` has bound."""
    pool.binding.clear()


def attach_scheduler(scheduler: Any) -> None:
    """Tell the parts of a scheduler that compare sizes what the pool's size is.

    They are made later. The scheduler's own number stays the device's room: a request
    alone, without anything loaded sparse, has to fit in there.
    """
    allocator = scheduler.token_to_kv_pool_allocator
    names = ("pool_stats_observer", "invariant_checker")
    allocator.sizes.comparing.append((scheduler, names))
