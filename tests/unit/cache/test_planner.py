"""Planner: loads what is cheaper to load, by numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_tiered.cache.planner import Planner
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost

LAYOUT = PageLayout(num_layers=1, page_tokens=10, token_bytes=50)  # 1,000 bytes a page
HOST, DISK = int(TierId.HOST), int(TierId.DISK)


def make_planner(
    policy: str = "auto",
    *,
    host: tuple[float, float] = (1e-3, 1e6),
    disk: tuple[float, float] = (1e-2, 1e5),
) -> Planner:
    """Return a planner; a page takes 20 ms to compute, attention next to nothing."""
    prefill = PrefillCost(10**6, 1, 1, 1e9, overhead_s=5.0)
    links = {TierId.HOST: LinkCost(*host), TierId.DISK: LinkCost(*disk)}
    return Planner(CostModel(prefill, links), LAYOUT, policy)


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
