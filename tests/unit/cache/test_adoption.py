"""Adoption in slices: what may happen to a prompt of which a part is adopted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sgl_tiered.cache.adoption import Adoption, arrange
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
MakeCache = Callable[..., TieredCache]


def digest_of(tenant: int = 0) -> bytes:
    return Namespace("m", "bf16", PAGE, cache_salt=str(tenant)).digest()


def prompt(word: str) -> Int32s:
    return spell(word, PAGE)


def records(word: str, first_slot: int = 0, tenant: int = 0) -> PageRecords:
    """Return the records of a prompt, a page per letter, in slots that follow."""
    digest, tokens = digest_of(tenant), prompt(word)
    keys = page_keys(digest, tokens, PAGE)
    return PageRecords(
        namespaces=namespace_rows(digest, len(keys)),
        keys=keys,
        parents=np.concatenate([np.frombuffer(digest, np.uint8)[None], keys[:-1]]),
        tokens=tokens.reshape(-1, PAGE),
        checksums=np.arange(len(word), dtype=np.uint64),
        addresses=first_slot + np.arange(len(word)),
    )


def begin(cache: TieredCache, *groups: PageRecords) -> Adoption:
    return cache.begin_adoption(TierId.DISK, arrange(FoundPages.of(groups)))


def found(cache: TieredCache, word: str, tenant: int = 0) -> int:
    return cache.lookup(digest_of(tenant), prompt(word), 0).num_found


def store(cache: TieredCache, word: str) -> None:
    """Compute a prompt: it goes to the host, and to disk as far as there is room."""
    plan = cache.plan_offload(digest_of(), prompt(word))
    assert plan is not None
    cache.finish_offload(plan, landed(len(plan.pages)))
    while (below := cache.plan_demote(9)) is not None:
        cache.finish_demote(below, landed(len(below.pages)))


def landed(num: int) -> TransferResult:
    return TransferResult(np.ones(num, np.bool_), 0, 1e-3, np.zeros(num, np.uint64))


def test_the_newest_prompts_come_first_and_whole(make_cache: MakeCache) -> None:
    """With what they share with older ones; the oldest is the first to go."""
    cache = make_cache(disk=16)
    branch = records("abde", 4)
    branch = branch.part(slice(2, 4), branch.addresses[2:])
    adoption = begin(cache, records("xyz"), records("abc", 3), branch)
    assert [adoption.step(1) for _ in range(4)] == [1, 1, 1, 1]
    assert (found(cache, "abde"), found(cache, "abc"), found(cache, "xyz")) == (4, 2, 0)
    adoption.step(99)
    assert (found(cache, "abc"), found(cache, "xyz")) == (3, 3)
    assert not len(adoption.take_refused())
    cache.check()


def test_a_page_behind_one_that_has_gone_is_given_up(make_cache: MakeCache) -> None:
    """Whoever has the row of its parent now, it is not put behind that."""
    cache = make_cache(host=8, disk=8)
    adoption = begin(cache, records("abc"))
    assert adoption.step(1) == 1
    (row,) = cache.known_pages(digest_of(), prompt("a"))
    cache._store.discard(1, cache._table.entry_of[1][[row]].astype(np.int64))
    cache._store.settle()
    store(cache, "z")
    assert cache.known_pages(digest_of(), prompt("z")).tolist() == [row], (
        "not used again"
    )
    adoption.step(99)
    cache.check()
    assert adoption.take_refused().tolist() == [1, 2]
    assert (found(cache, "abc"), found(cache, "zbc")) == (0, 1)


def test_a_page_that_was_stored_anew_is_left_alone(make_cache: MakeCache) -> None:
    """Its old copy is forgotten; what comes after it is adopted all the same."""
    cache = make_cache(host=8, disk=8)
    adoption = begin(cache, records("abc"))
    store(cache, "ab")
    new = cache.known_pages(digest_of(), prompt("ab"))
    slots = cache._table.address[cache._table.entry_of[1][new]].tolist()
    assert not {0, 1, 2} & set(slots), "the slots of old pages are not free"
    adoption.step(99)
    cache.check()
    assert cache._table.address[cache._table.entry_of[1][new]].tolist() == slots
    assert adoption.take_refused().tolist() == [0, 1]
    assert cache.take_forgotten(TierId.DISK).tolist() == [0, 1]
    cache.drop_tier(TierId.HOST)
    assert found(cache, "abc") == 3


def test_pages_of_a_running_request_get_their_old_copies(
    make_cache: MakeCache,
) -> None:
    """Their keys were not needed before; what comes after them is adopted, by ones."""
    cache = make_cache(host=8, disk=8, demote_policy="on-evict")
    adoption = begin(cache, records("abc"))
    plan = cache.plan_offload(digest_of(), prompt("ab"))
    assert plan is not None
    cache.finish_offload(plan, landed(2))
    assert [adoption.step(1) for _ in range(3)] == [1, 1, 1]
    cache.check()
    cache.drop_tier(TierId.HOST)
    assert found(cache, "abc") == 3
    assert not len(adoption.take_refused())


def test_a_disk_full_of_old_pages_takes_new_ones(make_cache: MakeCache) -> None:
    """The oldest of those that were adopted go for them, and no slot twice."""
    cache = make_cache(host=8, disk=6)
    adoption = begin(cache, records("pq"), records("xy", 2), records("uv", 4))
    store(cache, "ab")
    assert found(cache, "ab") == 2
    assert cache.occupancy(TierId.DISK).free_slots == 0
    adoption.step(99)
    store(cache, "cd")
    cache.check()
    cache.drop_tier(TierId.HOST)
    left = [found(cache, word) for word in ("pq", "xy", "uv", "ab", "cd")]
    assert left == [0, 0, 2, 2, 2]


@pytest.mark.parametrize("end", ["reset", "drop"])
def test_nothing_comes_back_after_the_end(make_cache: MakeCache, end: str) -> None:
    """Slots of pages that were still to be adopted are free, and forgotten."""
    cache = make_cache(disk=8)
    adoption = begin(cache, records("abcd"))
    adoption.step(2)
    if end == "reset":
        cache.reset()
    else:
        cache.drop_tier(TierId.DISK)
    cache.check()
    give_back(cache)
    gone = cache.take_forgotten(TierId.DISK)
    assert gone.tolist() == [0, 1, 2, 3]
    assert (adoption.num_left, adoption.step(9)) == (0, 0)
    assert (found(cache, "abcd"), cache.num_namespaces) == (0, 0)
    assert cache.occupancy(TierId.DISK).used_slots == 0
    cache.check()


@pytest.mark.parametrize("slice_pages", [16, 64])
def test_of_two_copies_of_a_page_one_is_refused(
    make_cache: MakeCache, slice_pages: int
) -> None:
    """In one slice or in two: each page has one copy, and the other slot is free."""
    cache = make_cache(disk=8)
    twice = [records("ab"), records("abc", 2)]
    adoption = cache.begin_adoption(TierId.DISK, arrange(FoundPages.of(twice)))
    while adoption.step(slice_pages):
        cache.check()
    assert found(cache, "abc") == 3
    assert (adoption.num_adopted, adoption.num_refused) == (3, 2)
    assert cache.occupancy(TierId.DISK).used_slots == 3
    cache.check()


def test_records_that_go_round_in_circles_are_refused(make_cache: MakeCache) -> None:
    """Alone and with others behind them; what is sound beside them is adopted."""
    cache = make_cache(disk=16)
    ring, tail = records("abcd"), records("zef", 4)
    ring.parents[0] = ring.keys[3]
    tail.parents[0] = ring.keys[1]
    adoption = begin(cache, ring, tail, records("ok", 7))
    adoption.step(99)
    assert adoption.num_left == 0
    assert sorted(adoption.take_refused().tolist()) == list(range(7))
    assert found(cache, "ok") == 2
    cache.check()


def test_runs_of_many_namespaces_are_a_few_calls(make_cache: MakeCache) -> None:
    """The work of a call is bounded by runs as well as by pages."""
    cache = make_cache(disk=400)
    groups = [records("ab", 2 * n, tenant=n) for n in range(200)]
    adoption = begin(cache, *groups)
    assert adoption.step(160) <= 22
    while adoption.step(160):
        pass
    assert cache.num_namespaces == 200
    assert all(found(cache, "ab", tenant) == 2 for tenant in range(200))
    cache.check()
