"""Namespaces take no room before their first page and after their last."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np

from sgl_tiered.cache.lookahead import QueueLookahead
from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import Namespace
from sgl_tiered.core.plans import TransferResult

PAGE = 4
TOKENS = np.arange(3 * PAGE, dtype=np.int32)


def digest_of(tenant: int) -> bytes:
    return Namespace("m", "bf16", PAGE, cache_salt=f"tenant {tenant}").digest()


def store(cache: TieredCache, digest: bytes, tokens: np.ndarray = TOKENS) -> int:
    plan = cache.plan_offload(digest, tokens)
    assert plan is not None
    num = len(plan.pages)
    done = TransferResult(np.ones(num, np.bool_), 0, 1e-3, np.zeros(num, np.uint64))
    cache.finish_offload(plan, done)
    return num


def test_who_only_asks_leaves_nothing(make_cache: Callable[..., TieredCache]) -> None:
    """Lookups, sightings and refusals in namespaces that nobody has pages in."""
    cache = make_cache(host=2)
    for tenant in range(100):
        decision = cache.lookup(digest_of(tenant), TOKENS, 0)
        assert decision.num_found == 0
        cache.sight(digest_of(tenant), TOKENS)
        assert cache.num_without_copy(digest_of(tenant), TOKENS, 0) == 3
    assert cache.num_namespaces == 0
    for _ in range(2):
        # Python keeps some freed objects of each kind for later: so twice.
        tracemalloc.start()
        for tenant in range(2000):
            cache.lookup(digest_of(tenant), TOKENS, 0)
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert kept < 20_000, "an asked namespace leaves bytes behind"


def test_a_namespace_goes_with_its_last_page(
    make_cache: Callable[..., TieredCache],
) -> None:
    """By eviction, by a drop and by a failed copy; another's pages stay."""
    cache = make_cache(host=6)
    for tenant in range(50):
        store(cache, digest_of(tenant))
        assert cache.num_namespaces <= 2
        cache.check()
    assert not cache.has_pages(digest_of(0))
    assert cache.has_pages(digest_of(49))
    cache.drop_tier(TierId.HOST)
    assert cache.num_namespaces == 0
    plan = cache.plan_offload(digest_of(1), TOKENS)
    assert plan is not None
    assert cache.num_namespaces == 1
    cache.finish_offload(plan, TransferResult.failed(3, 0.0, "no"))
    assert cache.num_namespaces == 0
    cache.check()


def test_plans_under_way_outlive_their_namespace(
    make_cache: Callable[..., TieredCache],
) -> None:
    """A reset in an offload and a load: both end, and the digest is of use again."""
    cache = make_cache(host=8)
    store(cache, digest_of(1), TOKENS[:PAGE])
    load = cache.commit_load(cache.lookup(digest_of(1), TOKENS, 0))
    offload = cache.plan_offload(digest_of(1), TOKENS)
    assert load is not None
    assert offload is not None
    cache.reset()
    assert cache.num_namespaces == 0
    assert store(cache, digest_of(1)) == 3
    cache.finish_load(load, landed=True)
    done = TransferResult(np.ones(2, np.bool_), 0, 1e-3, np.zeros(2, np.uint64))
    cache.finish_offload(offload, done)
    cache.check()
    assert cache.lookup(digest_of(1), TOKENS, 0).num_found == 3
    assert cache.num_namespaces == 1


def test_a_request_that_ends_is_no_matter_of_others_namespaces(
    make_cache: Callable[..., TieredCache],
) -> None:
    """Its pages are ranked anew without a look at all namespaces, known or not."""
    lookahead = QueueLookahead(PAGE)
    cache = make_cache(host=30, eviction="score", lookahead=lookahead)
    for tenant in range(5):
        store(cache, digest_of(tenant))
    for rid, tenant in enumerate([3, 99]):
        lookahead.entered(rid, digest_of(tenant), TOKENS)
        lookahead.finished(rid)
    assert cache.num_namespaces == 5
    cache.check()


def test_a_salt_that_is_no_text_names_a_namespace_too():
    """A client may send half a surrogate; nothing may raise for it."""
    digests = {
        Namespace("model", "bfloat16", 4, cache_salt=salt).digest()
        for salt in ("", "\ud800", "\ud801", "ü")
    }
    assert len(digests) == 4
