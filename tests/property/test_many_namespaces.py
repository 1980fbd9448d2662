"""Batches of many namespaces: what a failed write costs, and what a restart finds.

Tenants with prompts out of few tokens, so that many pages have equal tokens under
several namespaces, are written to a real disk tier in batches of any size, of which
some pages or all fail. A model holds what arrived. A second cache adopts what the tier
recovers: each tenant finds exactly its own pages, with their own bytes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_tiered.cache.adoption import arrange
from sgl_tiered.cache.tiered_cache import CacheConfig, TierConfig, TieredCache
from sgl_tiered.core.clock import ManualClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import Namespace
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import DemotePlan, TransferResult
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost
from sgl_tiered.policies.eviction.base import EvictionPolicy
from sgl_tiered.policies.eviction.fifo import FIFOPolicy
from sgl_tiered.policies.eviction.lru import LRUPolicy
from sgl_tiered.testing.strategies import spell
from sgl_tiered.tiers.base import TierIO
from sgl_tiered.tiers.checks import expected_checksums
from sgl_tiered.tiers.disk import DiskTier
from sgl_tiered.tiers.disk_format import record_dtype
from sgl_tiered.tiers.memory import aligned_buffer

PAGE_TOKENS = 4
LAYOUT = PageLayout(2, PAGE_TOKENS, 32)
NUM_SLOTS = 64
HOST, DISK = TierId.HOST, TierId.DISK
Page = tuple[int, str]
"""Number of a tenant, and its prompt up to and with the page."""

WORDS = st.text("ab", min_size=1, max_size=4)
PROMPTS = st.lists(st.tuples(st.integers(0, 9), WORDS), min_size=1, max_size=12)


def digest_of(tenant: int) -> bytes:
    return Namespace("m", "bf16", PAGE_TOKENS, cache_salt=f"tenant {tenant}").digest()


def bytes_of(page: Page) -> Any:
    """Return what a tenant computes for a page: uint8 [page_bytes]."""
    tenant, word = page
    seed = [tenant, *word.encode()]
    return np.random.default_rng(seed).integers(0, 256, LAYOUT.page_bytes, np.uint8)


def make_cache(
    num_disk_slots: int,
    policy: str = "write-through",
    clock: ManualClock | None = None,
    eviction: EvictionPolicy | None = None,
) -> TieredCache:
    sizes = {HOST: NUM_SLOTS, DISK: num_disk_slots}
    return TieredCache(
        CacheConfig(
            LAYOUT,
            tuple(TierConfig(tier, num) for tier, num in sizes.items()),
            load_policy="always",
            demote_policy=policy,
            demote_watermark=0.0,
            demote_rest_s=1.0,
        ),
        cost=CostModel(
            PrefillCost(10**6, 2, 32, 1e9), {t: LinkCost(1e-4, 1e9) for t in sizes}
        ),
        eviction={tier: eviction or LRUPolicy() for tier in sizes},
        clock=clock or ManualClock(),
    )


def open_tier(folder: Path) -> DiskTier:
    slot_bytes = LAYOUT.slot_bytes
    return DiskTier.open(
        folder,
        slot_bytes=slot_bytes,
        page_bytes=LAYOUT.page_bytes,
        page_tokens=PAGE_TOKENS,
        max_bytes=NUM_SLOTS * (slot_bytes + record_dtype(PAGE_TOKENS).itemsize),
        fingerprint="m",
        io="threads",
        num_threads=1,
    )


def offload(cache: TieredCache, tenant: int, word: str) -> dict[int, Page]:
    """Keep a prompt in the host tier; return its new pages by host slot."""
    plan = cache.plan_offload(digest_of(tenant), spell(word, PAGE_TOKENS))
    if plan is None:
        return {}
    ok = np.ones(len(plan.pages), np.bool_)
    sums = np.zeros(len(plan.pages), np.uint64)
    cache.finish_offload(plan, TransferResult(ok, 0, 1e-3, sums))
    pages = [(tenant, word[: at + 1]) for at in plan.positions.tolist()]
    return dict(zip(plan.addresses.tolist(), pages, strict=True))


def write(
    tier: DiskTier, plan: DemotePlan, pages: list[Page], failed: set[int]
) -> TransferResult:
    """Write a batch but for some positions; return the result of the whole."""
    buffer = aligned_buffer(len(pages), LAYOUT.slot_bytes)
    for row, page in enumerate(pages):
        buffer[row, : LAYOUT.page_bytes] = bytes_of(page)
    at = np.array([i for i in range(len(pages)) if i not in failed], np.int64)
    slots = plan.target_addresses[at]
    done = tier.store(TierIO(slots, buffer, at, plan.records.part(at, slots)))
    assert done.ok.all(), done.error
    ok = np.zeros(len(pages), np.bool_)
    sums = np.zeros(len(pages), np.uint64)
    ok[at], sums[at] = True, done.checksums
    return TransferResult(ok, 0, 1e-3, sums, "" if ok.all() else "told to fail")


def held(cache: TieredCache, tenant: int, word: str) -> int:
    """Return how many leading pages of a prompt the disk has for a tenant."""
    decision = cache.lookup(
        digest_of(tenant), spell(word, PAGE_TOKENS), 0, tiers_allowed={DISK}
    )
    return decision.num_found


def leading(there: set[Page], tenant: int, word: str) -> int:
    """Return the same by the model."""
    num = 0
    while num < len(word) and (tenant, word[: num + 1]) in there:
        num += 1
    return num


@pytest.mark.parametrize("policy", ["write-through", "on-evict"])
@settings(max_examples=40)
@given(data=st.data(), prompts=PROMPTS, most=st.integers(1, 20))
def test_each_page_is_found_under_its_own_namespace(
    policy: str, data: st.DataObject, prompts: list[tuple[int, str]], most: int
) -> None:
    """Whatever batches it was written in, and whatever of them failed."""
    with tempfile.TemporaryDirectory() as name:
        tier = open_tier(Path(name))
        cache = make_cache(NUM_SLOTS, policy)
        at_host: dict[int, Page] = {}
        for tenant, word in prompts:
            at_host |= offload(cache, tenant, word)
        there: set[Page] = set()
        while (plan := cache.plan_demote(most)) is not None:
            pages = [at_host[slot] for slot in plan.source_addresses.tolist()]
            assert len(pages) <= most
            for page, row in zip(pages, plan.records.namespaces, strict=True):
                assert row.tobytes() == digest_of(page[0])
            failed = data.draw(st.sets(st.integers(0, len(pages) - 1), max_size=2))
            cache.check()
            cache.finish_demote(plan, write(tier, plan, pages, failed))
            there |= {page for i, page in enumerate(pages) if i not in failed}
            cache.check()
        # What failed for good is not there, and holds nothing.
        assert cache.occupancy(DISK).used_slots == len(there)
        assert cache.occupancy(DISK).pinned_slots == 0
        assert cache.occupancy(HOST).pinned_slots == 0
        asked = [(tenant, word) for tenant in range(10) for _, word in prompts]
        for tenant, word in asked:
            assert held(cache, tenant, word) == leading(there, tenant, word)
        tier.close()

        tier = open_tier(Path(name))
        found = tier.recover()
        assert len(found) == len(there)
        cache = make_cache(tier.num_slots)
        adoption = cache.begin_adoption(DISK, arrange(found))
        while adoption.step(3):
            pass
        cache.check()
        for tenant, word in asked:
            num = held(cache, tenant, word)
            assert num == leading(there, tenant, word)
            if num:
                check_bytes(cache, tier, tenant, word[:num])
        tier.close()


def check_bytes(cache: TieredCache, tier: DiskTier, tenant: int, word: str) -> None:
    """What is loaded of a prompt is what its tenant has computed."""
    decision = cache.lookup(digest_of(tenant), spell(word, PAGE_TOKENS), 0)
    plan = cache.commit_load(decision)
    assert plan is not None
    buffer = aligned_buffer(plan.num_pages, LAYOUT.slot_bytes)
    wanted = expected_checksums(plan.checksums, plan.addresses)
    rows = np.arange(plan.num_pages)
    result = tier.load(TierIO(plan.addresses, buffer, rows, wanted))
    assert result.ok.all(), result.error
    for row in rows.tolist():
        page = tenant, word[: row + 1]
        assert np.array_equal(buffer[row, : LAYOUT.page_bytes], bytes_of(page))
    cache.finish_load(plan, landed=True)


def test_a_failed_batch_is_tried_again_for_all_its_namespaces() -> None:
    """None of them has a page on disk before, all have after; sources stay pinned."""
    clock = ManualClock()
    cache = make_cache(NUM_SLOTS, clock=clock)
    for tenant in range(10):
        offload(cache, tenant, "ab")
    plan = cache.plan_demote(100)
    assert plan is not None
    assert len({row.tobytes() for row in plan.records.namespaces}) == 10
    assert cache.occupancy(HOST).pinned_slots == 20
    cache.finish_demote(plan, TransferResult.failed(20, 1e-3, "told to fail"))
    assert cache.occupancy(HOST).pinned_slots == 0
    assert cache.occupancy(DISK).used_slots == 0
    # The edge rests, and no tenant's turn comes before.
    assert cache.plan_demote(100) is None
    clock.advance(2.0)
    again = cache.plan_demote(100)
    assert again is not None
    assert sorted(again.pages.tolist()) == sorted(plan.pages.tolist())
    sums = np.arange(1, 21, dtype=np.uint64)
    cache.finish_demote(again, TransferResult(np.ones(20, np.bool_), 0, 1e-3, sums))
    assert [held(cache, tenant, "ab") for tenant in range(10)] == [2] * 10
    cache.check()


def test_many_tenants_share_few_writes() -> None:
    """A hundred tenants of one page each: as many batches as their pages need."""
    cache = make_cache(128)
    sizes = []
    for first in range(0, 100, 50):
        for tenant in range(first, first + 50):
            offload(cache, tenant, "a")
        while (plan := cache.plan_demote(32)) is not None:
            num = len(plan.pages)
            sizes.append(num)
            sums = np.ones(num, np.uint64)
            done = TransferResult(np.ones(num, np.bool_), 0, 1e-3, sums)
            cache.finish_demote(plan, done)
    assert sizes == [32, 18, 32, 18]
    cache.check()


def test_a_batch_evicts_nothing_of_its_own() -> None:
    """Of a disk that is nearly full, the room for later tenants of a batch comes from
    before it, and never from the beginnings that the batch goes on from."""
    # The first that came go first: the beginning of what has grown since.
    cache = make_cache(6, eviction=FIFOPolicy())
    host: dict[int, Page] = {}
    on_disk: set[Page] = set()

    def demote() -> list[Page]:
        done: list[Page] = []
        while (plan := cache.plan_demote(6)) is not None:
            pages = [host[slot] for slot in plan.source_addresses.tolist()]
            done += pages
            sums = np.ones(len(pages), np.uint64)
            ok = np.ones(len(pages), np.bool_)
            cache.finish_demote(plan, TransferResult(ok, 0, 1e-3, sums))
            cache.check()
        return done

    for tenant in range(3):
        host |= offload(cache, tenant, "ab")
    on_disk |= set(demote())
    assert len(on_disk) == 6
    # Tenant 0's prompt grows, and two new tenants come: 1 and 2 have to go.
    host |= offload(cache, 0, "abc")
    host |= offload(cache, 3, "a")
    host |= offload(cache, 4, "a")
    assert set(demote()) == {(0, "abc"), (3, "a"), (4, "a")}
    asked = [(0, "abc"), (3, "a"), (4, "a")]
    assert [held(cache, *prompt) for prompt in asked] == [3, 1, 1]
