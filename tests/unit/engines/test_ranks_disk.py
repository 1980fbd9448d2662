"""Where each rank keeps its part of the pages, and what of it is taken over."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from sgl_tiered.cache.adoption import arrange
from sgl_tiered.cache.tiered_cache import CacheConfig, TierConfig, TieredCache
from sgl_tiered.core.clock import ManualClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import Namespace, page_keys
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import FoundPages, PageRecords, namespace_rows
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.policies.eviction.registry import make_eviction_policy
from sgl_tiered.serving import rank_disk
from sgl_tiered.serving.agreement import Agreement
from sgl_tiered.serving.options import Options, Tiers
from sgl_tiered.serving.rank_disk import (
    _IDLE_S,
    _SHARE,
    DiskAdoption,
    open_disk,
)
from tests.draining import give_back
from tests.unit.engines.ranks_support import on_two_ranks, parting
from tests.unit.tiers.disk_support import (
    EIO,
    PATIENCE_S,
    Gate,
    HeldCalls,
    open_tier,
    recovered,
    store,
)

DIGEST = Namespace("model", "bfloat16", 2).digest()
LAYOUT = PageLayout(num_layers=2, page_tokens=2, token_bytes=96)
NUM_SLOTS, NUM_LEFT = 1024, 600
BUSY_S = 0.04
"""Of passes while requests run, after which a slice is due."""


def both(work):
    """Run ``work(rank, agreement)`` on two ranks; return what it returned."""
    return on_two_ranks(lambda rank, seat: work(rank, Agreement(ManualClock(), seat)))


def found_pages(num):
    """Return what a former server left of a prompt with so many pages."""
    tokens = np.arange(num * LAYOUT.page_tokens, dtype=np.int32)
    keys = page_keys(DIGEST, tokens, LAYOUT.page_tokens)
    before = np.frombuffer(DIGEST, np.uint8)[None]
    group = PageRecords(
        namespaces=namespace_rows(DIGEST, num),
        keys=keys,
        parents=np.concatenate([before, keys])[:num],
        tokens=tokens.reshape(num, -1),
        checksums=np.zeros(num, np.uint64),
        addresses=np.arange(num),
    )
    return FoundPages.of([group], LAYOUT.page_tokens)


class Left:
    """A disk that has something from a former server, and lets nobody read it yet."""

    tier_id = TierId.DISK
    num_slots = NUM_SLOTS

    def __init__(self, num, is_open=True):
        self.num = num
        self.forgotten = []
        self.gate = threading.Event()
        self.is_read = threading.Event()
        if is_open:
            self.gate.set()

    def recover(self):
        if self.num < 0:
            raise RuntimeError("a fault of ours")
        self.is_read.set()
        self.gate.wait()
        return found_pages(self.num)

    def forget(self, addresses):
        self.forgotten += addresses.tolist()


def make_cache(num_slots=NUM_SLOTS):
    tiers = (TierId.HOST, TierId.DISK)
    return TieredCache(
        CacheConfig(LAYOUT, tuple(TierConfig(tier, num_slots) for tier in tiers)),
        cost=CostModel(
            PrefillCost(10**6, 2, 32, 1e9), {t: LinkCost(1e-4, 1e9) for t in tiers}
        ),
        eviction={t: make_eviction_policy("lru", None) for t in tiers},
        clock=ManualClock(),
    )


def num_on_disk(cache):
    return cache.stats.pages_adopted[TierId.DISK]


@pytest.mark.parametrize(("nums", "num_adopted"), [((600, 600), 600), ((600, 599), 0)])
def test_what_is_left_is_taken_over_if_it_is_the_same_on_all_ranks(nums, num_adopted):
    """A crash may have cut the ranks off apart: then all of it is forgotten."""
    both_read = threading.Barrier(2)

    def work(rank, agreement):
        disk, cache = Left(nums[rank]), make_cache()
        metrics = MetricsRegistry()
        adoption = DiskAdoption(cache, disk, agreement, metrics)
        agreement.meet({})
        adoption._reader.join()
        both_read.wait()
        seen = []
        for _ in range(20):
            agreement.own_clock.advance(BUSY_S)
            agreement.meet({})
            adoption.advance()
            agreement.note("adopted", num_on_disk(cache))
            seen.append(num_on_disk(cache))
        cache.check()
        assert adoption.is_done
        counted = metrics.snapshot()["counters"].get("adoptions_unlike", 0)
        return seen, disk.forgotten, counted

    (first, *rest), (second, *others) = both(work)
    assert rest == others
    assert first == second
    assert first[-1] == num_adopted
    assert rest == ([[], 0] if num_adopted else [list(range(NUM_SLOTS)), 1])
    if num_adopted:
        assert any(0 < num < num_adopted for num in first), "not in slices"


def test_ranks_wait_for_the_slowest():
    """One has read what is there, the other has not: nobody adopts or writes."""

    def work(rank, agreement):
        disk, cache = Left(8, is_open=rank == 0), make_cache()
        adoption = DiskAdoption(cache, disk, agreement, MetricsRegistry())
        if rank == 0:
            adoption._reader.join()
        for _ in range(3):
            agreement.meet({})
            assert adoption.is_scanning
            assert num_on_disk(cache) == 0
        disk.gate.set()
        adoption._reader.join()
        agreement.all(True)
        for _ in range(5):
            agreement.own_clock.advance(BUSY_S)
            agreement.meet({})
        return num_on_disk(cache)

    assert both(work) == [8, 8]


def test_a_rank_that_adopts_while_rank_0_does_not_has_parted():
    """Rank 0 says how many pages follow, as long as there are any."""

    def work(rank, agreement):
        adoption = DiskAdoption(make_cache(), Left(8), agreement, MetricsRegistry())
        adoption._reader.join()
        agreement.meet({})
        assert adoption.is_adopting
        if rank == 0:
            adoption.finish()
        return parting(agreement.meet, {})

    first, second = both(work)
    assert not first
    assert second.startswith("rank 0 of 2 has decided differently")


def alone(num, is_open=True, num_slots=NUM_SLOTS, metrics=None):
    disk, cache = Left(num, is_open), make_cache(num_slots)
    agreement, metrics = Agreement(ManualClock()), metrics or MetricsRegistry()
    return disk, cache, DiskAdoption(cache, disk, agreement, metrics)


def test_a_single_rank_takes_over_what_there_is():
    """Without a word to anybody; fewer at a time while requests run."""
    disk, cache, adoption = alone(NUM_LEFT)
    adoption._reader.join()
    adoption.advance()
    assert num_on_disk(cache) == 0
    assert cache.occupancy(TierId.DISK).used_slots == NUM_LEFT
    adoption._clock.advance(BUSY_S)
    adoption.advance()
    assert 0 < num_on_disk(cache) < NUM_LEFT
    adoption.is_idle = lambda: True
    adoption._clock.advance(_IDLE_S)
    adoption.advance()
    assert adoption.is_done
    assert num_on_disk(cache) == NUM_LEFT
    assert disk.forgotten == []
    cache.check()


def test_a_gap_between_two_requests_is_not_taken():
    """Clients that ask again at once leave gaps; a long slice would hold them up."""
    _, cache, adoption = alone(NUM_LEFT)
    adoption._reader.join()
    adoption.advance()
    adoption.advance()
    adoption.is_idle = lambda: True
    adoption._clock.advance(0.003)
    adoption.advance()
    assert num_on_disk(cache) == 0, "a gap of 3 ms is not what is free"


@pytest.mark.parametrize("part", [1, 16])
@pytest.mark.parametrize("pass_s", [1e-3, 4e-3, 5e-2, 1.0])
def test_slices_take_their_share_of_passes_of_any_length(pass_s, part):
    """Each has a cost of its own, which short passes do not pay for. Where runs are
    short it has a part of what was asked for, and takes as long."""
    _, _, adoption = alone(NUM_LEFT)
    adoption._reader.join()
    adoption.advance()
    clock, begun, taken_s, num_pages = adoption._clock, adoption._adoption, 0.0, 0

    def step(most):
        nonlocal taken_s, num_pages
        took_s = 5e-4 + 4e-6 * most
        clock.advance(took_s)
        taken_s, num_pages = taken_s + took_s, num_pages + most
        return most // part

    adoption._adoption = SimpleNamespace(
        step=step, take_refused=begun.take_refused, num_left=1
    )
    began_s = clock.now()
    while clock.now() < began_s + 60.0:
        clock.advance(pass_s)
        adoption.advance()
    # What pages take is learned within the first slices.
    assert taken_s < 1.2 * _SHARE * 60.0
    assert num_pages > 60.0 * 1000


def test_the_start_does_not_wait_for_the_disk():
    """A folder that hangs: nothing is found, and nothing held up.

    Nor by the computing of it, which has the lowest priority: of this machine's cores
    the forward may need all.
    """
    disk, cache, adoption = alone(5, is_open=False)
    for _ in range(3):
        adoption.advance()
    assert adoption.is_scanning
    assert disk.is_read.wait(60)
    assert os.getpriority(os.PRIO_PROCESS, adoption._reader.native_id) == 19
    assert adoption.stats()["state"] == "scanning"
    disk.gate.set()
    adoption.finish()
    assert num_on_disk(cache) == 5


@pytest.mark.parametrize("when", ["while it is read", "before the first", "half way"])
@pytest.mark.parametrize("how", ["reset", "drop"])
def test_what_is_dropped_is_not_adopted_later(when, how):
    """Whenever that happens; and the disk forgets all of it."""
    disk, cache, adoption = alone(NUM_LEFT, is_open=when != "while it is read")
    if when != "while it is read":
        adoption._reader.join()
        adoption.advance()
    if when == "half way":
        adoption._clock.advance(BUSY_S)
        adoption.advance()
        assert 0 < num_on_disk(cache) < NUM_LEFT
    adoption.discard()
    if how == "reset":
        cache.reset()
    else:
        cache.drop_tier(TierId.DISK)
    disk.gate.set()
    adoption.finish()
    give_back(cache)
    disk.forget(cache.take_forgotten(TierId.DISK))
    assert sorted(disk.forgotten) == list(range(disk.num_slots))
    assert cache.occupancy(TierId.DISK).used_slots == 0
    assert cache.num_namespaces == 0
    cache.check()


def test_slots_that_the_cache_has_not_are_forgotten():
    """The disk of another rank is smaller, so the cache uses fewer than there are."""
    disk, cache, adoption = alone(40, num_slots=30)
    adoption.finish()
    assert num_on_disk(cache) == 30
    assert disk.forgotten == list(range(30, 40))


def test_a_fault_in_reading_costs_the_pages_and_nothing_else():
    """The tier is used as an empty one."""
    metrics = MetricsRegistry()
    _, cache, adoption = alone(-1, metrics=metrics)
    adoption.finish()
    assert adoption.is_done
    assert num_on_disk(cache) == 0
    assert metrics.snapshot()["counters"]["adoptions_unreadable"] == 1


@pytest.mark.parametrize("nums", [(8, 7), (7, 7)])
def test_pages_that_cannot_be_compared_are_no_reason_to_write_nothing(
    monkeypatch, nums
):
    """On one rank or on all: what was found is not used, and the scan has ended."""

    def digest_of(arranged):
        if len(arranged.found) == 7:
            raise RuntimeError("a fault of ours")
        return "8"

    monkeypatch.setattr(rank_disk, "_digest_of", digest_of)

    def work(rank, agreement):
        cache, metrics = make_cache(), MetricsRegistry()
        adoption = DiskAdoption(cache, Left(nums[rank]), agreement, metrics)
        adoption._reader.join()
        agreement.all(True)
        for _ in range(3):
            agreement.own_clock.advance(BUSY_S)
            agreement.meet({})
        counts = metrics.snapshot()["counters"]
        return (
            adoption.is_done,
            num_on_disk(cache),
            counts.get("adoptions_unreadable", 0),
        )

    for (is_done, num_adopted, num_counted), num in zip(both(work), nums, strict=True):
        assert is_done
        assert not num_adopted
        assert num_counted == (num == 7)


@pytest.mark.parametrize("how", ["it ends", "it fails"])
def test_what_is_dropped_is_forgotten_though_it_is_never_read(tmp_path, how):
    """A server that ends before the scan does, or whose scan fails."""
    path = tmp_path / "disk"
    former = open_tier(path)
    store(former, [3, 9], [1, 2])
    former.close()
    gate = Gate()
    calls = HeldCalls(gate)
    disk, cache = open_tier(path, calls=calls), make_cache()
    calls.kinds = {"read"}
    gate.shut()
    agreement = Agreement(ManualClock())
    adoption = DiskAdoption(cache, disk, agreement, MetricsRegistry())
    assert gate.entered.wait(PATIENCE_S)
    adoption.discard()
    cache.drop_tier(TierId.DISK)
    if how == "it fails":
        calls.read_error = EIO
    else:
        disk._access.volume.book.end_scan()
    gate.open()
    adoption._reader.join()
    calls.read_error = 0
    disk.close()
    again = open_tier(path)
    assert recovered(again) == {}
    again.close()


def test_each_rank_has_a_folder_of_its_own(tmp_path):
    """A folder has one user; that of a single rank is the one that was given."""
    config = Options(Tiers(disk_paths=(tmp_path,), disk_bytes=1 << 22))
    namespace = Namespace("model", "bfloat16", LAYOUT.page_tokens, "0/2")

    def work(rank, agreement):
        disk = open_disk(config, LAYOUT, namespace, None, agreement)
        disk.close()
        return disk.num_slots

    first, second = both(work)
    assert first == second > 0
    assert {path.name for path in tmp_path.iterdir()} == {"rank-0-of-2", "rank-1-of-2"}
    alone = tmp_path / "alone"
    config = Options(Tiers(disk_paths=(alone,), disk_bytes=1 << 22))
    clock = ManualClock()
    disk = open_disk(config, LAYOUT, namespace, None, Agreement(clock))
    disk.close()
    assert not (alone / "rank-0-of-1").exists()


@pytest.fixture
def unread(tmp_path, monkeypatch):
    """A disk with two pages of a former server, whose scan has failed; how is given."""

    def opened(how):
        path = tmp_path / "disk"
        former = open_tier(path)
        store(former, [3, 9], [1, 2])
        former.close()
        calls = HeldCalls(Gate())
        disk = open_tier(path, calls=calls)
        cache, metrics = make_cache(disk.num_slots), MetricsRegistry()
        with monkeypatch.context() as patch:
            if how == "the disk fails":
                calls.read_error = EIO
            else:

                def arrange_nothing(found):
                    if len(found):
                        raise RuntimeError("a fault of ours")
                    return arrange(found)

                patch.setattr(rank_disk, "arrange", arrange_nothing)
            adoption = DiskAdoption(cache, disk, Agreement(ManualClock()), metrics)
            adoption.finish()
        calls.read_error = 0
        assert adoption.is_done
        assert num_on_disk(cache) == 0
        return path, disk, cache, adoption

    return opened


HOW_UNREAD = pytest.mark.parametrize("how", ["the disk fails", "a fault of ours"])


@HOW_UNREAD
def test_what_could_not_be_read_may_be_found_by_the_next_server(unread, how):
    """A disk that failed for a moment costs one start its pages, and no more."""
    path, disk, _, _ = unread(how)
    disk.close()
    again = open_tier(path)
    assert recovered(again) == {3: 1, 9: 2}
    again.close()


@HOW_UNREAD
def test_what_could_not_be_read_is_forgotten_by_a_flush(unread, how):
    """Nobody knows what is there, and yet no later server finds it."""
    path, disk, cache, adoption = unread(how)
    adoption.discard()
    cache.reset()
    store(disk, [3], [7])
    disk.close()
    again = open_tier(path)
    assert recovered(again) == {3: 7}, "and what was stored afterwards"
    again.close()


def test_a_flush_after_a_failed_scan_takes_no_slot_that_is_in_use(unread):
    """What is being read or written there ends as it would have."""
    path, disk, cache, adoption = unread("the disk fails")
    used = cache._table.slots[cache._tiers.index(TierId.DISK)].alloc(4)
    assert used.tolist() == [0, 1, 2, 3]
    store(disk, [3], [7])
    adoption.discard()
    disk.close()
    again = open_tier(path)
    assert recovered(again) == {3: 7}
    again.close()
