"""Plain LRU in one tier: more room never means fewer hits."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_tiered.cache.tiered_cache import CacheConfig, TierConfig, TieredCache
from sgl_tiered.core.clock import ManualClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import Namespace
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import Int32s, TransferResult
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost
from sgl_tiered.policies.eviction.lru import LRUPolicy
from sgl_tiered.testing.strategies import prompt_traces

PAGE_TOKENS = 2


def hits(trace: list[Int32s], num_slots: int) -> list[int]:
    """Return the pages found for each prompt of a trace, each then offloaded."""
    cache = TieredCache(
        CacheConfig(
            PageLayout(1, PAGE_TOKENS, 64),
            (TierConfig(TierId.HOST, num_slots),),
            load_policy="always",
        ),
        cost=CostModel(
            PrefillCost(1000, 1, 1, 1e9), {TierId.HOST: LinkCost(1e-6, 1e9)}
        ),
        eviction={TierId.HOST: LRUPolicy()},
        clock=ManualClock(),
    )
    digest = cache.open_namespace(Namespace("m", "bfloat16", PAGE_TOKENS))
    found = []
    for tokens in trace:
        found.append(cache.lookup(digest, tokens, 0).num_found)
        plan = cache.plan_offload(digest, tokens)
        if plan is not None:
            ok = np.ones(len(plan.pages), np.bool_)
            cache.finish_offload(plan, TransferResult(ok, 0, 1e-3))
    return found


def reference_hits(trace: list[Int32s], num_slots: int) -> list[int]:
    """Return the same from a list of pages in order of use, ends of prompts last."""
    order: list[bytes] = []
    found = []
    for tokens in trace:
        raw = tokens.tobytes()
        step = 4 * PAGE_TOKENS
        pages = [raw[:end] for end in range(step, len(raw) + 1, step)]
        num_hits = 0
        while num_hits < len(pages) and pages[num_hits] in order:
            num_hits += 1
        found.append(num_hits)
        order = (pages + [page for page in order if page not in pages])[:num_slots]
    return found


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    trace=prompt_traces(page_tokens=PAGE_TOKENS),
    small=st.integers(1, 12),
    more=st.integers(1, 12),
)
def test_a_larger_lru_cache_never_hits_less(
    trace: list[Int32s], small: int, more: int
) -> None:
    """For every prompt of every trace, not just in sum."""
    fewer = hits(trace, small)
    assert all(a <= b for a, b in zip(fewer, hits(trace, small + more), strict=True))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(trace=prompt_traces(page_tokens=PAGE_TOKENS), num_slots=st.integers(1, 12))
def test_lru_is_lru(trace: list[Int32s], num_slots: int) -> None:
    """Hits equal those of a plain list in order of use, page by page."""
    assert hits(trace, num_slots) == reference_hits(trace, num_slots)
