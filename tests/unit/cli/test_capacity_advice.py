"""Which size a plan recommends, and what it says for it."""

from __future__ import annotations

from dataclasses import replace
from math import nan

import numpy as np
import pytest

from sgl_tiered.cli.capacity import _is_overloaded
from sgl_tiered.cli.capacity_advice import CapacityPoint, frontier, recommend
from sgl_tiered.sim.config import ServerConfig
from sgl_tiered.sim.server import simulate
from sgl_tiered.sim.spec import SimSpec
from sgl_tiered.sim.synthetic import fixed_lengths


def point(
    host: float,
    disk: float,
    hits: float,
    mean_s: float,
    p99_s: float = 16.0,
    opt: float = 0.374,
    *,
    overloaded: bool = False,
) -> CapacityPoint:
    cost = 4.0 * host + 0.1 * disk
    return CapacityPoint(
        host, disk, cost, 0.0, hits, 0.0, mean_s, p99_s, 0.7, overloaded, hits, opt
    )


MOONCAKE = [
    point(0, 0, 0.044, 3.198),
    point(128, 0, 0.054, 3.176),
    point(128, 4_000, 0.342, 2.309),
    point(512, 0, 0.177, 2.796),
    point(512, 4_000, 0.357, 2.232),
    point(1_024, 0, 0.264, 2.513),
    point(1_024, 4_000, 0.363, 2.187),
]
"""A plan of the Mooncake conversation trace on an H800."""


def test_the_frontier_is_what_nothing_cheaper_beats() -> None:
    """More host memory without a disk is dominated by the disk."""
    sizes = [(each.host_gb, each.disk_gb) for each in frontier(MOONCAKE)]
    assert sizes == [(0, 0), (128, 0), (128, 4_000), (512, 4_000), (1_024, 4_000)]


def test_the_knee_is_recommended_with_its_reason() -> None:
    """A disk below 128 GB: five times the money adds two points of hits."""
    advice = recommend(MOONCAKE, 3.0, "$")
    assert advice.point == MOONCAKE[2]
    assert "128 GB of host memory and 4,000 GB of disk ($912)" in advice.reason
    assert "no size brings the P99 TTFT within 3 s" in advice.reason
    assert "91% of the hits that any eviction could reach" in advice.reason
    assert "3.20 -> 2.31 s against no tier ($0)" in advice.reason
    assert "$3,584 more would add 2.1 points of hits" in advice.reason


def test_a_target_that_is_met_is_bought_at_its_cheapest() -> None:
    """Although the knee lies elsewhere."""
    points = [*MOONCAKE[:4], replace(MOONCAKE[4], ttft_p99_s=2.9), *MOONCAKE[5:]]
    advice = recommend(points, 3.0, "EUR")
    assert advice.point == points[4]
    assert "(2,448 EUR): the cheapest with a P99 TTFT within 3 s" in advice.reason
    assert "To be faster" not in advice.reason  # the knee is cheaper
    points = [replace(MOONCAKE[0], ttft_p99_s=2.9), *MOONCAKE[1:]]
    advice = recommend(points, 3.0, "$")
    assert advice.point == points[0]
    assert "To be faster than asked for: 128 GB" in advice.reason


def test_where_nothing_pays_nothing_is_bought() -> None:
    """Four percent of the mean TTFT are no reason."""
    advice = recommend([point(0, 0, 0.1, 1.0), point(64, 0, 0.12, 0.96)], 0.5, "$")
    assert advice.point is None
    assert advice.reason.startswith("Nothing beyond no tier ($0)")
    assert "4.0% only" in advice.reason


def test_overload_is_said() -> None:
    """Times of a queue that grows are no times of a server, nor within a target."""
    points = [
        point(0, 0, 0.1, 9.0, overloaded=True),
        point(64, 0, 0.5, 4.0, 1.0, overloaded=True),
    ]
    advice = recommend(points, 3.0, "$")
    assert advice.point == points[1]
    assert "the cheapest with" not in advice.reason
    assert "OVERLOADED" in advice.reason


def test_without_a_trace_there_is_no_bound() -> None:
    """The hits are compared with the best that was simulated."""
    points = [replace(each, opt_hits=nan) for each in MOONCAKE]
    assert "94% of the hits that the best of these sizes has" in (
        recommend(points, 0.0, "$").reason
    )


def test_when_nothing_ran_nothing_is_recommended() -> None:
    """No percentiles, no frontier."""
    advice = recommend([point(0, 0, 0.0, nan, nan)], 3.0, "$")
    assert advice.point is None
    assert "no request could run" in advice.reason


@pytest.fixture
def server() -> ServerConfig:
    """A modelled server without tiers."""
    return SimSpec(device_gb=4.0).server()


@pytest.mark.parametrize(("rate", "overloaded"), [(0.5, False), (500.0, True)])
def test_a_queue_that_grows_is_an_overload(
    server: ServerConfig, rate: float, overloaded: bool
) -> None:
    """Half a request a second is no load for it, five hundred are."""
    load = fixed_lengths(200, rate, 2_048, 64, 16, np.random.default_rng(0))
    assert _is_overloaded(simulate(server, load)) is overloaded
