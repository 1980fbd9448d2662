"""Forgetting much in steps: at once out of sight, then bounded work in each call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from sgl_tiered.cache.adoption import Adoption, arrange
from sgl_tiered.cache.index import Node, RadixIndex, take_apart
from sgl_tiered.cache.table import CacheTable
from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import Namespace, page_keys
from sgl_tiered.core.plans import (
    FoundPages,
    Int32s,
    PageRecords,
    TransferResult,
    namespace_rows,
)
from sgl_tiered.testing.strategies import spell
from tests.draining import give_back

PAGE = 4
DIGEST = Namespace("m", "bf16", PAGE).digest()
NUM_PROMPTS = 700
MakeCache = Callable[..., TieredCache]
FORGET = {
    "drop": lambda cache: cache.drop_tier(TierId.HOST),
    "reset": lambda cache: cache.reset(),
}


class Visits:
    """Counts what is touched, from ``begin`` on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[str] = Counter()
        for owner, name, size in (
            (RadixIndex, "change_node", lambda index, tier, node, delta: depth(node)),
            (RadixIndex, "_prune", lambda index, node, gone: depth(node)),
            (CacheTable, "free_rows", lambda table, rows: len(rows)),
            (CacheTable, "_free_entries", lambda table, entries: len(entries)),
            (CacheTable, "let_go", lambda table, rows: len(rows)),
            (Adoption, "_refuse", lambda adoption, numbers: len(numbers)),
        ):
            self._count(monkeypatch, owner, name, size)

    def begin(self) -> None:
        self.counts.clear()

    def _count(self, monkeypatch: Any, owner: Any, name: str, size: Any) -> None:
        real = getattr(owner, name)

        def counted(*args: Any) -> Any:
            self.counts[name] += size(*args)
            return real(*args)

        monkeypatch.setattr(owner, name, counted)


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> Visits:
    return Visits(monkeypatch)


def depth(node: Node | None) -> int:
    """Return how many nodes a node's path has."""
    count = 0
    while node is not None:
        count, node = count + 1, node.parent
    return count


def prompt(number: int, num_pages: int = 4) -> Int32s:
    """Return a prompt that no other begins like."""
    return number * PAGE * num_pages + np.arange(num_pages * PAGE, dtype=np.int32)


def keep(cache: TieredCache, tokens: Int32s) -> Any:
    """Give each page of a prompt a copy in the first tier; return the plan."""
    plan = cache.plan_offload(DIGEST, tokens)
    if plan is not None:
        cache.finish_offload(plan, whole(plan))
    return plan


def whole(plan: Any) -> TransferResult:
    num = len(plan.pages)
    return TransferResult(np.ones(num, bool), 0, 1e-3, np.zeros(num, np.uint64))


def found(cache: TieredCache, tokens: Int32s) -> int:
    return cache.lookup(DIGEST, tokens, 0).num_found


def full(make_cache: MakeCache, **settings: Any) -> TieredCache:
    """Return a cache whose host tier is full of prompts of four pages."""
    cache = make_cache(host=4 * NUM_PROMPTS, **settings)
    for number in range(NUM_PROMPTS):
        keep(cache, prompt(number))
    return cache


def steps(cache: TieredCache) -> Iterator[None]:
    """Go on to the end, a value before each call."""
    while cache.is_freeing:
        yield
        cache.free_dropped()


@pytest.mark.parametrize("how", FORGET)
def test_each_call_does_bounded_work(
    make_cache: MakeCache, visits: Visits, how: str
) -> None:
    """And from the first one on nothing is found."""
    cache = full(make_cache)
    decision = cache.lookup(DIGEST, prompt(5), 0)
    assert decision.num_pages == 4
    visits.begin()
    FORGET[how](cache)
    num_calls = 1
    most = {"change_node": 260, "_prune": 260}
    for _ in steps(cache):
        for name, count in visits.counts.items():
            assert count <= most.get(name, 1100), (name, count)
        assert cache.commit_load(decision) is None
        assert not any(found(cache, prompt(n)) for n in (0, 1, 350, NUM_PROMPTS - 1))
        cache.check()
        visits.begin()
        num_calls += 1
    assert num_calls > 2
    assert cache.occupancy(TierId.HOST).used_slots == 0
    assert cache._table.rows.used_slots == cache._table.entries.used_slots == 0
    assert cache.num_namespaces == 0
    assert not any(cache._table.node)
    cache.check()


@pytest.mark.parametrize("how", FORGET)
def test_what_was_forgotten_makes_room_first(make_cache: MakeCache, how: str) -> None:
    """New pages come at once, nothing is evicted for them, and they stay."""
    cache = full(make_cache)
    FORGET[how](cache)
    assert cache.is_freeing
    for number in range(20):
        tokens = prompt(NUM_PROMPTS + number)
        assert len(keep(cache, tokens).pages) == 4
        assert found(cache, tokens) == 4
    cache.check()
    give_back(cache)
    assert all(found(cache, prompt(NUM_PROMPTS + number)) == 4 for number in range(20))
    assert cache.stats.pages_evicted[TierId.HOST] == 0
    assert cache.occupancy(TierId.HOST).used_slots == 80
    cache.check()


@pytest.mark.parametrize("how", FORGET)
def test_a_page_can_be_kept_again_at_once(make_cache: MakeCache, how: str) -> None:
    """Whether or not its former copy has been given back by then."""
    cache = full(make_cache)
    FORGET[how](cache)
    for number in (0, NUM_PROMPTS - 1):
        assert len(keep(cache, prompt(number)).pages) == 4
        cache.check()
    give_back(cache)
    assert found(cache, prompt(0)) == found(cache, prompt(NUM_PROMPTS - 1)) == 4
    assert cache.occupancy(TierId.HOST).used_slots == 8
    cache.check()


def test_trees_are_taken_apart_in_steps() -> None:
    """Wide ones and deep ones: so many visits each, and in the end all are parted."""
    roots = [Node(None, b"", np.zeros(0, np.int32), 0, DIGEST, 1) for _ in range(2)]
    nodes = list(roots)
    for number in range(50):
        for parent in (roots[0], nodes[-1]):
            child = Node(parent, b"", np.zeros(0, np.int32), 0, DIGEST, 1)
            parent.children[str(number).encode()] = child
            nodes.append(child)
    parted = [
        sum(node.parent is None for node in nodes) - len(roots)
        for _ in take_apart(list(roots), 10)
    ]
    assert np.diff([0, *parted]).max() <= 10
    assert not any(node.children or node.parent for node in nodes)


@pytest.mark.parametrize("how", FORGET)
def test_again_before_the_end(make_cache: MakeCache, how: str) -> None:
    """What came in between goes as well, and what was left of the first is no worse."""
    cache = full(make_cache)
    for round_ in range(4):
        FORGET[how](cache)
        keep(cache, prompt(NUM_PROMPTS + round_))
        cache.check()
    cache.reset()
    assert not found(cache, prompt(NUM_PROMPTS + 3))
    give_back(cache)
    assert cache.occupancy(TierId.HOST).used_slots == 0
    assert not any(cache._table.node)
    cache.check()


@pytest.mark.parametrize("how", FORGET)
def test_many_behind_one_page_and_many_behind_each_other(
    make_cache: MakeCache, visits: Visits, how: str
) -> None:
    """A node of 600 children, and a path of 100 nodes, whose climbs count."""
    cache = make_cache(host=4000)
    for number in range(600):
        keep(cache, np.concatenate([prompt(0, 1), prompt(1 + number, 1)]))
    long = prompt(2000)
    for number in range(100):
        keep(cache, long)
        long = np.concatenate([long, prompt(2001 + number, 1)])
    visits.begin()
    FORGET[how](cache)
    for _ in steps(cache):
        assert visits.counts["change_node"] <= 128 + 101 + 1
        visits.begin()
    cache.check()
    assert cache.occupancy(TierId.HOST).used_slots == 0
    assert not any(cache._table.node)


def test_dropping_one_tier_gives_nothing_back_for_another(
    make_cache: MakeCache, visits: Visits
) -> None:
    """Room on disk is made by evicting there, whatever is left of the host tier."""
    cache = full(make_cache, disk=4)
    plan = cache.plan_demote(4)
    assert plan is not None
    cache.finish_demote(plan, whole(plan))
    cache.drop_tier(TierId.HOST)
    tokens = prompt(NUM_PROMPTS)
    keep(cache, tokens)
    visits.begin()
    plan = cache.plan_demote(4)
    assert plan is not None
    assert visits.counts["_free_entries"] == 4
    assert cache.stats.pages_evicted[TierId.DISK] == 4
    cache.finish_demote(plan, whole(plan))
    give_back(cache)
    assert found(cache, tokens) == 4
    cache.check()


def test_flights_and_readers_outlive_the_removal(make_cache: MakeCache) -> None:
    """Their slots are theirs until they end, which brings nothing into sight."""
    cache = full(make_cache)
    load = cache.commit_load(cache.lookup(DIGEST, prompt(5), 0))
    assert load is not None
    cache.drop_tier(TierId.HOST)
    tokens = prompt(NUM_PROMPTS)
    offload = cache.plan_offload(DIGEST, tokens)
    assert offload is not None
    cache.reset()
    give_back(cache)
    assert cache.occupancy(TierId.HOST).used_slots == 8
    assert cache.occupancy(TierId.HOST).pinned_slots == 8
    again = cache.plan_offload(DIGEST, tokens)
    assert again is not None
    assert not set(again.addresses) & {*load.addresses, *offload.addresses}
    cache.finish_offload(offload, whole(offload))
    assert found(cache, tokens) == 0
    cache.finish_load(load, landed=True)
    assert cache.occupancy(TierId.HOST).used_slots == 4
    cache.finish_offload(again, whole(again))
    assert found(cache, tokens) == 4
    cache.check()


def test_what_waits_to_be_written_is_forgotten_with_its_tier(
    make_cache: MakeCache,
) -> None:
    """A thousand offers are not looked at one by one for pages that are gone."""
    cache = full(make_cache, disk=4 * NUM_PROMPTS)
    cache.drop_tier(TierId.HOST)
    assert cache.is_freeing
    assert cache.plan_demote(128) is None
    assert not cache._chain._edges[0]._queue


def test_adoption_is_cancelled_in_steps(make_cache: MakeCache, visits: Visits) -> None:
    """Slots of thousands of pages that were still to be adopted."""
    num = 5000
    cache = make_cache(disk=num)
    tokens = np.arange(num * PAGE, dtype=np.int32)
    keys = page_keys(DIGEST, tokens, PAGE)
    before = np.concatenate([np.frombuffer(DIGEST, np.uint8)[None], keys[:-1]])
    records = PageRecords(
        namespaces=namespace_rows(DIGEST, num),
        keys=keys,
        parents=before,
        tokens=tokens.reshape(-1, PAGE),
        checksums=np.zeros(num, np.uint64),
        addresses=np.arange(num),
    )
    adoption = cache.begin_adoption(TierId.DISK, arrange(FoundPages.of([records])))
    adoption.step(100)
    visits.begin()
    cache.drop_tier(TierId.DISK)
    assert adoption.num_left == adoption.step(9) == 0
    for _ in steps(cache):
        assert all(count <= 1100 for count in visits.counts.values())
        cache.check()
        visits.begin()
    assert cache.occupancy(TierId.DISK).used_slots == 0
    assert cache.take_forgotten(TierId.DISK).tolist() == list(range(num))
    assert found(cache, spell("ab", PAGE)) == 0
