"""Planner: loads what is cheaper to load, by numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_tiered.cache.planner import PassFacts, Planner, Way, weight_among
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost

LAYOUT = PageLayout(num_layers=1, page_tokens=10, token_bytes=50)  # 1,000 bytes a page
# The same bytes in 25 layers, so that a load can run under the computation.
LAYERED = PageLayout(num_layers=25, page_tokens=10, token_bytes=2)
HOST, DISK = int(TierId.HOST), int(TierId.DISK)


def make_planner(
    policy: str = "auto",
    *,
    host: tuple[float, float] = (1e-3, 1e6),
    disk: tuple[float, float] = (1e-2, 1e5),
    overhead_s: float = 5.0,
    overlaps: bool = False,
) -> Planner:
    """Return a planner; a page takes 20 ms to compute, attention next to nothing."""
    prefill = PrefillCost(10**6, 1, 1, 1e9, overhead_s=overhead_s)
    links = {TierId.HOST: LinkCost(*host), TierId.DISK: LinkCost(*disk)}
    layout = LAYERED if overlaps else LAYOUT
    return Planner(CostModel(prefill, links), layout, policy, overlaps=overlaps)


def tiers(*ids: int) -> np.ndarray:
    return np.array(ids, np.uint8)


def test_loads_what_is_cheaper() -> None:
    """3 pages: 1 ms + 3 ms from the host against 60 ms of computing."""
    choice = make_planner().choose(tiers(HOST, HOST, HOST), 0, 100)
    assert choice.num_pages == 3
    assert choice.load_s == pytest.approx(4e-3)
    assert choice.recompute_s == pytest.approx(60e-3, rel=1e-3)
    assert choice.reason == "loading is cheaper"


def test_recomputes_what_is_cheaper() -> None:
    """A link with 0.1 s latency is not asked for 3 pages; the answer says both."""
    choice = make_planner(host=(0.1, 1e6)).choose(tiers(HOST, HOST, HOST), 0, 100)
    assert choice.num_pages == 0
    assert choice.load_s == pytest.approx(0.103)
    assert choice.recompute_s == pytest.approx(60e-3, rel=1e-3)
    assert choice.reason == "recomputing is cheaper"


@pytest.mark.parametrize(("num_pages", "loads"), [(5, 0), (6, 6)])
def test_the_least_run_worth_a_load_follows_from_the_latency(
    num_pages: int, loads: int
) -> None:
    """At 0.1 s latency and 19 ms saved per page, 6 pages pay and 5 do not."""
    planner = make_planner(host=(0.1, 1e6))
    choice = planner.choose(tiers(*[HOST] * num_pages), 0, 1000)
    assert choice.num_pages == loads


def test_stops_where_the_tier_changes() -> None:
    """Host pages are loaded, the slow disk's after them are recomputed."""
    planner = make_planner(disk=(1.0, 1e6))
    choice = planner.choose(tiers(HOST, HOST, DISK, DISK), 0, 100)
    assert choice.num_pages == 2
    assert choice.load_s == pytest.approx(3e-3)


def test_crosses_a_slow_stretch_that_pays_in_sum() -> None:
    """One dear disk page is worth it when many cheap host pages come after it."""
    planner = make_planner(disk=(0.05, 1e6))
    alone = planner.choose(tiers(HOST, DISK), 0, 1000)
    assert alone.num_pages == 1
    together = planner.choose(tiers(HOST, DISK, *[HOST] * 20), 0, 1000)
    assert together.num_pages == 22
    # Each tier's latency once: 1 ms + 21 ms from the host, 50 ms + 1 ms from disk.
    assert together.load_s == pytest.approx(0.022 + 0.051)


def test_the_overhead_of_a_pass_saves_nothing() -> None:
    """A hit over the whole prompt still needs a pass for the last token."""
    planner = make_planner(host=(1.0, 1e6))
    assert planner.choose(tiers(HOST, HOST), 0, 20).num_pages == 0


def test_a_longer_prefix_makes_loading_more_worth_while() -> None:
    """Attention to the prefix is part of what a load saves."""
    prefill = PrefillCost(10**6, 10, 1000, 1e9, overhead_s=1e-6)
    cost = CostModel(prefill, {TierId.HOST: LinkCost(1e-3, 1e6)})
    planner = Planner(cost, LAYOUT, "auto")
    near = planner.choose(tiers(HOST), 0, 20)
    far = planner.choose(tiers(HOST), 100, 1020)
    assert far.recompute_s > 2 * near.recompute_s
    assert far.load_s == near.load_s


@pytest.mark.parametrize(("policy", "num_pages"), [("always", 4), ("never", 0)])
def test_load_policy_overrides_the_costs(policy: str, num_pages: int) -> None:
    """The costs are still told, for reports."""
    dear = make_planner(policy, disk=(10.0, 1e6))
    choice = dear.choose(tiers(HOST, DISK, HOST, HOST), 0, 100)
    assert choice.num_pages == num_pages
    assert choice.load_s > 10.0
    assert policy in choice.reason


def test_a_link_that_looks_slow_is_tried_now_and_then() -> None:
    """A figure from a bad moment is corrected by a trial; a true one is tried less."""
    disk = LinkCost(1e-6, 4e4)  # 25 ms a page, against 20 ms of computing
    prefill = PrefillCost(10**6, 1, 1, 1e9, overhead_s=5.0)
    cost = CostModel(prefill, {TierId.DISK: disk})
    planner = Planner(cost, LAYOUT, "auto")

    def declined_until_trial() -> int:
        for number in range(1000):
            if planner.choose(tiers(DISK), 0, 100).num_pages:
                return number
        raise AssertionError("no trial in 1,000 choices")

    assert declined_until_trial() == 32
    disk.observe(1000, 25e-3)
    assert declined_until_trial() == 64
    for _ in range(20):
        disk.observe(1000, 1e-3)
    choice = planner.choose(tiers(DISK), 0, 100)
    assert choice.num_pages == 1
    assert choice.reason == "loading is cheaper"


def test_a_hopeless_link_is_never_tried() -> None:
    """Where a load would take over four times what it saves, no trial is due."""
    planner = make_planner(disk=(1.0, 1e5))
    choices = [planner.choose(tiers(DISK), 0, 100) for _ in range(200)]
    assert not any(choice.num_pages for choice in choices)


def test_a_trial_ends_without_an_observation() -> None:
    """Loads that never report do not keep the trial open."""
    planner = make_planner(disk=(25e-3, 1e6))
    loaded = [planner.choose(tiers(DISK), 0, 100).num_pages for _ in range(60)]
    assert sum(loaded) == 8


def test_a_busy_link_counts() -> None:
    """A load that pays on a free link does not pay behind half a second of others."""
    planner = make_planner(disk=(1e-3, 1e6))
    run = tiers(*[DISK] * 10)
    assert planner.choose(run, 0, 200).num_pages == 10
    busy = PassFacts(wait_s={TierId.DISK: 0.5})
    choice = planner.choose(run, 0, 200, busy)
    assert choice.num_pages == 0
    assert choice.wait_s == pytest.approx(0.5)


def test_where_others_wait_for_the_device_a_longer_read_pays() -> None:
    """10 pages: 0.2 s of computing, held against a wait of 0.5 s for the disk.

    For itself the request would compute them; three others would wait for that.
    """
    planner = make_planner(disk=(1e-3, 1e6))
    run = tiers(*[DISK] * 10)
    busy = PassFacts(wait_s={TierId.DISK: 0.5})
    assert planner.choose(run, 0, 200, busy).num_pages == 0
    planner.compute_weight = weight_among(4, is_busy=True)
    choice = planner.choose(run, 0, 200, busy)
    assert choice.num_pages == 10
    assert choice.total_s > choice.alternative_s, "the times are told as they are"
    longer = PassFacts(wait_s={TierId.DISK: 1.0})
    assert planner.choose(run, 0, 200, longer).num_pages == 0, "there is a bound"


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_load_that_holds_the_device_weighs_as_much(overlaps: bool) -> None:
    """A host link slower than computing: its load would hold the others up as well."""
    planner = make_planner(host=(0.1, 1e4), overhead_s=1e-3, overlaps=overlaps)
    run = tiers(*[HOST] * 10)
    before = planner.choose(run, 0, 101)
    planner.compute_weight = weight_among(4, is_busy=True)
    assert planner.choose(run, 0, 101).num_pages == before.num_pages == 0


def test_the_weight_of_computing() -> None:
    """As many as wait, up to a bound; alone, or before an idle device, none."""
    assert weight_among(1, is_busy=True) == 1.0
    assert weight_among(3, is_busy=True) == 3.0
    assert weight_among(500, is_busy=True) == weight_among(4, is_busy=True)
    assert weight_among(500, is_busy=False) == 1.0
    assert weight_among(0, is_busy=True) == 1.0


def test_a_load_under_the_pass_is_free_until_the_link_is_the_longer() -> None:
    """10 ms a page against 20 ms to compute: hidden under enough tokens to compute."""
    slow = (1e-6, 1e5)
    run = tiers(*[HOST] * 10)
    assert make_planner(host=(1e-6, 3e4)).choose(run, 0, 1000).num_pages == 0
    hidden = make_planner(host=(1e-6, 3e4), overlaps=True).choose(run, 0, 1000)
    assert hidden.num_pages == 10
    assert make_planner(host=slow, overlaps=True).choose(run, 0, 110).num_pages == 10


def test_where_the_link_is_the_longer_a_part_is_loaded() -> None:
    """The first pages come while those after them are computed."""
    planner = make_planner(host=(1e-6, 6e4), overhead_s=1e-3, overlaps=True)
    run = tiers(*[HOST] * 50)
    choice = planner.choose(run, 0, 501)
    assert 20 < choice.num_pages < 50
    whole, none = (planner.choose(run[:n], 0, 501) for n in (50, 1))
    assert choice.total_s < 0.7 * none.alternative_s
    # Loading lasts as long as computing what is left, but for one page or two.
    left_s = planner.compute_s(choice.num_pages, 50 - choice.num_pages)
    assert choice.load_s == pytest.approx(left_s, abs=0.04)
    assert whole.num_pages == choice.num_pages


def test_requests_of_one_pass_share_the_link() -> None:
    """What others load under the same pass leaves less room for one's own load."""
    planner = make_planner(host=(1e-6, 6e4), overhead_s=1e-3, overlaps=True)
    run = tiers(*[HOST] * 50)
    alone = planner.choose(run, 0, 501)
    crowd = planner.choose(run, 0, 501, PassFacts(load_s=0.3))
    covered = planner.choose(run, 0, 501, PassFacts(compute_s=2.0))
    assert crowd.num_pages < alone.num_pages < covered.num_pages


def test_a_front_is_computed_until_it_meets_the_read() -> None:
    """At 20 ms a page either way half is computed; the prompt is done in half the time.

    50 pages: 25 are computed in 0.5 s while the last 25 are read in 0.5 s.
    """
    planner = make_planner(disk=(1e-6, 5e4), overhead_s=1e-3)
    run = tiers(*[DISK] * 50)
    choice = planner.choose(run, 0, 501, PassFacts(can_split=True))
    assert choice.num_pages == 50
    assert choice.split_at == pytest.approx(25, abs=1)
    assert choice.total_s == pytest.approx(0.5, rel=0.05)
    assert choice.alternative_s == pytest.approx(1.0, rel=0.05)
    assert "front" in choice.reason
    assert planner.choose(run, 0, 501).split_at == 0, "only where the engine can"


def test_a_split_pays_the_overhead_of_a_second_pass() -> None:
    """Where a pass costs more than the split would save, there is none."""
    planner = make_planner(disk=(1e-6, 5e4), overhead_s=1.2)
    choice = planner.choose(tiers(*[DISK] * 50), 0, 501, PassFacts(can_split=True))
    assert choice.split_at == 0


def test_pages_in_memory_come_before_the_computed_front() -> None:
    """What the host has is loaded; the front to compute begins after it."""
    planner = make_planner(disk=(1e-6, 5e4), overhead_s=1e-3)
    run = tiers(*[HOST] * 10, *[DISK] * 50)
    choice = planner.choose(run, 0, 601, PassFacts(can_split=True))
    assert choice.split_at == pytest.approx(35, abs=2)


def judge(
    left_s: float,
    *,
    ready: int = 0,
    can_split: bool = False,
    missing: int = 50,
    weight: float = 1.0,
):
    planner = make_planner(overhead_s=1e-3)
    planner.compute_weight = weight
    return planner.judge(
        first_page=0,
        num_pages=50,
        num_ready=ready,
        num_missing=missing,
        num_tokens=501,
        left_s=left_s,
        can_split=can_split,
    )


def test_a_read_in_time_is_waited_for() -> None:
    """0.2 s to go against 1 s of computing."""
    assert judge(0.2).way is Way.WAIT


def test_a_late_read_is_left_with_what_has_come() -> None:
    """40 of 50 pages are there: computing ten takes 0.2 s, less than waiting 0.5 s."""
    going = judge(0.5, ready=40, missing=10)
    assert going.way is Way.GO
    assert going.go_s < going.wait_s
    assert judge(0.5, ready=0).way is Way.WAIT, "computing all would take longer"


def test_where_others_wait_a_late_read_is_waited_for() -> None:
    """1.5 s to go against 1 s of computing, which would hold others up."""
    assert judge(1.5).way is Way.GO
    assert judge(1.5, weight=2.0).way is Way.WAIT
    assert judge(1.0, can_split=True, weight=4.0).way is Way.WAIT
    assert judge(9.0, weight=4.0).way is Way.GO
    plain, weighted = judge(1.5), judge(1.5, weight=2.0)
    assert (plain.wait_s, plain.go_s) == (weighted.wait_s, weighted.go_s)


def test_a_late_read_is_met_half_way_where_that_is_possible() -> None:
    """1 s to go, 1 s to compute: half of each."""
    going = judge(1.0, can_split=True)
    assert going.way is Way.SPLIT
    assert going.compute_pages == pytest.approx(25, abs=1)


def test_what_has_come_behind_is_loaded_either_way() -> None:
    """10 missing pages before 40 that have come: computing them is all that is left."""
    going = judge(0.5, missing=10)
    assert going.way is Way.GO
    assert going.go_s == pytest.approx(0.2, rel=0.1)


def test_a_trial_is_small() -> None:
    """It takes a tenth of the pass at most: the slow link is asked for few pages."""
    planner = make_planner(disk=(1e-6, 4e4), overhead_s=1e-3)
    run = tiers(*[DISK] * 100)
    sizes = {planner.choose(run, 0, 1001).num_pages for _ in range(50)}
    assert len(sizes) == 2
    assert 0 in sizes
    assert 0 < max(sizes) <= 10
