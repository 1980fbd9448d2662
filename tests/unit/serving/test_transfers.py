"""Ends of transfers that all ranks see alike, and what each brings to the start."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import LoadPlan, OffloadPlan, PromotePlan, TransferResult
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost
from sgl_tiered.cost.rebuild import RebuildCosts, TokensCost
from sgl_tiered.engines.device.probe import common_costs
from sgl_tiered.errors import RanksPartedError
from sgl_tiered.pipelines.completions import (
    CompletionQueue,
    LoadFigures,
    LoadFinished,
    OffloadFinished,
    PromoteFinished,
    SlotsReady,
    StageFinished,
)
from sgl_tiered.pipelines.promote import PromotedRead
from sgl_tiered.pipelines.staging import StagedRead
from sgl_tiered.serving.agreement import Agreement
from sgl_tiered.serving.transfers import MAX_OFFLOADS, SharedTransfers
from tests.unit.engines.ranks_support import on_two_ranks

NUM_PAGES, NUM_ROWS = 6, 8


class Side:
    """One of two ranks, with pipelines that do nothing by themselves."""

    def __init__(self, rank, seat):
        self.rank = rank
        self.clock = ManualClock(100.0 * rank)
        self.agreement = Agreement(self.clock, seat)
        self.completions = CompletionQueue()
        self.stuck_s = 0.0
        self.released = []
        stager = SimpleNamespace(
            largest_read_pages=NUM_ROWS,
            try_submit=self.stage,
            release=self.released.append,
            stuck_s=lambda: self.stuck_s,
        )
        promoter = SimpleNamespace(submit=PromotedRead, stuck_s=lambda: 0.0)
        self.store_s = 0.0
        self.transfers = SharedTransfers(
            self.agreement,
            self.completions,
            SimpleNamespace(stuck_s=lambda: self.store_s),
            stager,
            promoter,
        )

    def stage(self, plan, positions):
        region = np.zeros((NUM_ROWS, 4), np.uint8)
        return StagedRead(plan, positions, region, np.arange(len(positions)))

    def end(self, event):
        self.completions.post(event)


def both(work):
    """Run ``work(side)`` on two ranks; return what it returned."""
    return on_two_ranks(lambda rank, seat: work(Side(rank, seat)))


def pages(num=NUM_PAGES):
    return np.arange(num, dtype=np.int32)


def load_plan(plan_id=7):
    n = NUM_PAGES
    tiers = np.full(n, TierId.DISK, np.uint8)
    zeros = np.zeros(n, np.int64)
    return LoadPlan(plan_id, 0, pages(), tiers, zeros, zeros.astype(np.uint64), 0.0)


def offload_plan(plan_id):
    return OffloadPlan(plan_id, TierId.HOST, pages(), pages(), np.zeros(6, np.int64))


def promote_plan(plan_id, num=NUM_PAGES):
    zeros = np.zeros(num, np.int64)
    ids = TierId.DISK, TierId.HOST
    return PromotePlan(plan_id, *ids, pages(num), zeros, zeros, zeros.astype(np.uint64))


def result(bad=(), num=NUM_PAGES, seconds=1.0, error=""):
    ok = np.ones(num, np.bool_)
    ok[list(bad)] = False
    return TransferResult(ok, 100, seconds, np.full(num, 9, np.uint64), error)


def test_a_transfer_has_ended_when_it_has_on_all_ranks():
    """In the order of the plans, whatever ended first where."""

    def work(side):
        first, second = (OffloadFinished(offload_plan(n), result()) for n in (1, 2))
        side.end(second if side.rank else first)
        assert side.transfers.take() == []
        side.end(first if side.rank else second)
        return [event.plan.plan_id for event in side.transfers.take()]

    assert both(work) == [[1, 2], [1, 2]]


def test_slots_may_be_used_where_all_ranks_have_them():
    """However far each rank is, and in which order the steps came."""

    def work(side):
        for num in (10, 20) if side.rank else (10, 20, 30):
            side.end(SlotsReady(TierId.HOST, num))
        first = side.transfers.take()
        if side.rank:
            side.end(SlotsReady(TierId.HOST, 30))
        return [each.num_slots for each in first + side.transfers.take()]

    assert both(work) == [[10, 20, 30]] * 2


def test_a_page_is_good_where_it_is_on_all_ranks():
    """The slowest rank's time, anybody's error; checksums stay each rank's own."""

    def work(side):
        bad = [[1], [4]][side.rank]
        ended = result(bad, seconds=1.0 + side.rank, error="torn" if side.rank else "")
        side.end(OffloadFinished(offload_plan(1), ended))
        (event,) = side.transfers.take()
        found = event.result
        assert found.checksums is ended.checksums
        return found.ok.tolist(), found.seconds, found.error, found.num_bytes

    good = [True, False, True, True, False, True]
    assert both(work) == [(good, 2.0, "torn", 100)] * 2


@pytest.mark.parametrize("kind", [OffloadFinished, PromoteFinished])
def test_ranks_whose_transfers_have_different_sizes_have_parted(kind):
    """What is bad on rank 1 is no page of rank 0's transfer of the same number."""

    def work(side):
        num = NUM_PAGES if side.rank else NUM_PAGES - 3
        ended = result([NUM_PAGES - 1] if side.rank else [], num=num)
        if kind is OffloadFinished:
            zeros = np.zeros(num, np.int64)
            plan = OffloadPlan(1, TierId.HOST, pages(num), pages(num), zeros)
            side.end(OffloadFinished(plan, ended))
        else:
            plan = promote_plan(1, num)
            side.transfers.promoter.submit(plan)
            side.end(PromoteFinished(plan, pages(num), ended, True))
        try:
            side.transfers.take()
        except RanksPartedError as error:
            return str(error)
        return ""

    first, second = both(work)
    assert first.startswith("rank 1 of 2 has decided differently")
    assert not second


def test_nothing_of_a_read_is_seen_before_its_common_end():
    """Then what came on all ranks; what one left out is left out, not bad."""

    def work(side):
        stager = side.transfers.stager
        read = stager.try_submit(load_plan(), pages())
        own = read.own
        own._put(slice(0, 3), result(num=3))
        seen = [read.arrived.tolist(), read.num_left, read.num_unbegun, read.done]
        # Rank 1 was told to stop before the last two, and its page 2 is bad.
        tried = pages(4 if side.rank else NUM_PAGES)
        ended = result([2] if side.rank else [], num=len(tried))
        side.end(StageFinished(own.plan, tried, own, ended))
        (event,) = side.transfers.take()
        assert event.staged is read
        told = event.positions.tolist(), event.result.ok.tolist()
        return seen, told, read.arrived.tolist(), read.num_left, read.done

    seen = [[], NUM_PAGES, 0, False]
    told = [0, 1, 2, 3], [True, True, False, True]
    assert both(work) == [(seen, told, [0, 1, 3], 0, True)] * 2


@pytest.mark.parametrize("is_released_first", [True, False])
def test_rows_are_free_after_the_common_end(is_released_first):
    """Released before or after; and no rank takes a read that another could not."""

    def work(side):
        stager = side.transfers.stager
        read = stager.try_submit(load_plan(), pages())
        assert stager.try_submit(load_plan(8), pages()) is None
        if is_released_first:
            stager.release(read)
            stager.release(read)
        side.end(StageFinished(read.plan, pages(), read.own, result()))
        before = stager.num_free_rows
        side.transfers.take()
        if not is_released_first:
            stager.release(read)
            stager.release(read)
        assert side.released == [read.own]
        return before, stager.num_free_rows

    assert both(work) == [(NUM_ROWS - NUM_PAGES, NUM_ROWS)] * 2


def test_promotions_end_together_and_their_number_is_bounded_alike():
    """What a rank was told to leave out is left out on all."""

    def work(side):
        plan = promote_plan(3)
        read = side.transfers.promoter.submit(plan)
        tried = pages(4 if side.rank else NUM_PAGES)
        ended = result(num=len(tried))
        side.end(PromoteFinished(plan, tried, ended, side.rank == 0))
        (event,) = side.transfers.take()
        return event.positions.tolist(), event.is_alone, read.num_left

    assert both(work) == [([0, 1, 2, 3], False, 0)] * 2


def test_a_load_has_landed_where_it_has_on_all_ranks():
    """So where it is queued on all; its figures are the slowest rank's."""

    def work(side):
        is_good = side.rank == 0
        ticket = SimpleNamespace(wait=lambda: is_good, wait_queued=lambda: True)
        asked = side.transfers.queued(ticket), side.transfers.landed(ticket)
        ticket.wait_queued = lambda: is_good
        asked += (side.transfers.queued(ticket),)
        host = TierId.HOST
        figures = LoadFigures(
            {host: (64, 1.0 + side.rank)},
            frozenset([host]),
            host if side.rank else None,
        )
        landed = side.rank == 0
        side.end(LoadFinished(ticket, (load_plan(),), landed, 64, 1.0, "", figures))
        (event,) = side.transfers.take()
        told = event.figures
        return asked, event.landed, dict(told.moved), told.failed, told.sources

    host = TierId.HOST
    expected = (True, False, False), False, {host: (64, 2.0)}, host, frozenset([host])
    assert both(work) == [expected] * 2


def test_offloads_are_refused_until_one_has_ended_on_all_ranks():
    """One rank's queue may have room; the other's has not."""

    def work(side):
        for _ in range(MAX_OFFLOADS):
            assert side.transfers.takes_offload
            side.transfers.submitted_offload()
        if side.rank:
            side.end(OffloadFinished(offload_plan(1), result()))
        side.transfers.take()
        before = side.transfers.takes_offload
        if not side.rank:
            side.end(OffloadFinished(offload_plan(1), result()))
        side.transfers.take()
        return before, side.transfers.takes_offload

    assert both(work) == [(False, True)] * 2


def test_a_disk_that_is_stuck_anywhere_is_stuck():
    """And not any more once it reads everywhere."""

    def work(side):
        side.stuck_s = 60.0 * side.rank
        side.transfers.take()
        before = side.transfers.is_stuck
        side.stuck_s = 0.0
        side.transfers.take()
        return before, side.transfers.is_stuck

    assert both(work) == [(True, False)] * 2


def test_a_store_that_is_stuck_anywhere_is_stuck_as_long_on_all_ranks():
    """All judge it by the longest standstill, not by a clock of their own."""

    def work(side):
        told = []
        for seconds in (30.0 * side.rank, 0.0):
            side.store_s = seconds
            side.transfers.take()
            told.append(side.transfers.store_stuck_s)
        return told

    assert both(work) == [[30.0, 0.0]] * 2


def test_who_has_left_takes_its_own_ends():
    """At the end of a server nobody waits for the others' reads."""

    def work(side):
        side.end(OffloadFinished(offload_plan(1 + side.rank), result()))
        early = side.transfers.take()
        side.agreement.leave()
        side.end(OffloadFinished(offload_plan(5), result()))
        return early, [event.plan.plan_id for event in side.transfers.take()]

    assert both(work) == [([], [1, 5]), ([], [2, 5])]


def test_costs_start_from_the_figures_of_rank_0():
    """Exactly, and what is refined afterwards is refined alike."""

    def work(side):
        prefill = PrefillCost(1000, 4, 64, 1e9 * (1 + side.rank))
        links = {TierId.HOST: LinkCost(1e-4, 1e9 / (1 + side.rank))}
        lines = [TokensCost(1e-4, 1e-6 * (1 + side.rank)) for _ in "gl"]
        own = CostModel(prefill, links, RebuildCosts(*lines))
        cost = common_costs(own, side.agreement)
        before = own.snapshot() if side.rank == 0 else None
        cost.observe_prefill(10, 100, 0.5)
        cost.observe_rebuild(100, 0.5)
        return before, cost.snapshot()

    (first, a), (_, b) = both(work)
    assert a == b
    assert a != first
    alone = CostModel(PrefillCost(1000, 4, 64, 1e9), {})
    assert common_costs(alone, Agreement(ManualClock())) is alone
