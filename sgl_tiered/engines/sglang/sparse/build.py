"""Puts the parts of a pool of rows together."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from sgl_tiered.core.encoded import EncodedLayout
from sgl_tiered.engines.device.encoded_sparse_pool import EncodedSparsePool
from sgl_tiered.engines.device.sparse_parts import SparseParts
from sgl_tiered.engines.device.sparse_pool import SparseDevicePool
from sgl_tiered.engines.sglang.page_forms import PageForm
from sgl_tiered.errors import EngineCompatibilityError
from sgl_tiered.policies.sparsity.profile import refuse_other_model
from sgl_tiered.policies.sparsity.registry import make_selection
from sgl_tiered.policies.sparsity.solver import HeldCurves
from sgl_tiered.serving.options import KEEP_FAULT, OPTIONS, Options
from sgl_tiered.sparse.gauge import MassGauge
from sgl_tiered.sparse.keep import SpanChoice
from sgl_tiered.sparse.stored import StoredTokens

__all__ = ["attach_scheduler", "check_profile", "end_probe", "place_rows"]

logger = logging.getLogger(__name__)

_MASS_BYTES = 256 * 2**20
"""Host memory for what attention gave to pages: 2 bytes a token, layer and KV head, and
2 more for all heads, half a percent of the KV where heads have 128 elements."""


def place_rows(pool: Any, config: Options, form: PageForm) -> SparseParts:
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
    layout = form.layout
    rng = np.random.default_rng(config.experiment.seed)
    selection = make_selection(settings.policy, rng)
    profile = settings.profile
    choice = SpanChoice(
        selection,
        layout.num_layers,
        settings.keep,
        max_lost=settings.budget,
        curves=None if profile is None else HeldCurves.of_profile(profile),
        is_wrong=config.experiment.fault == KEEP_FAULT,
    )
    pool.gauge = MassGauge(
        selection,
        num_layers=layout.num_layers,
        num_heads=int(pool.head_num),
        num_slots=pool.binding.table.shape[1],
        page_tokens=layout.page_tokens,
        max_bytes=_MASS_BYTES,
        most_queries=settings.queries,
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
        choice,
        pool.gauge,
        pool.measured,
        device.share_of(choice.share()),
        stored,
    )


def _device_pool(pool: Any, form: PageForm) -> SparseDevicePool:
    if isinstance(form.whole, EncodedLayout):
        return EncodedSparsePool(pool, form.layout, form.whole)
    return SparseDevicePool(pool, form.layout)


def check_profile(
    config: Options, pool: Any, model_config: Any, fingerprint: str
) -> None:
    """Refuse a sparsity profile that is not of the model that is served.

    Raises:
        ConfigError: one sentence that says what differs.
    """
    settings = config.sparsity
    if settings is not None and settings.profile is not None:
        refuse_other_model(
            settings.profile,
            OPTIONS["sparsity_profile"].flag,
            num_layers=int(pool.layer_num),
            num_heads=int(model_config.num_attention_heads),
            num_kv_heads=int(pool.head_num),
            fingerprint=fingerprint,
        )


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
