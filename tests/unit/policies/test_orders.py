"""Orders by hand: what goes first, and what may not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sgl_tiered.policies.order.base import Location, WaitingFacts
from sgl_tiered.policies.order.car import CaROrder
from sgl_tiered.policies.order.cost import CostOrder
from sgl_tiered.policies.order.fpf import FPFOrder
from sgl_tiered.policies.order.relaxed_fpf import RelaxedFPFOrder
from sgl_tiered.policies.order.shadow import FCFSShadow


def facts(
    index: int,
    arrival_s: float = 0.0,
    location: Location = Location.NOWHERE,
    service_s: float = 1.0,
) -> WaitingFacts:
    return WaitingFacts(index, arrival_s, location, 100, 50, service_s, True)


def test_cxl_lies_between_host_and_disk() -> None:
    """The report's distances, and a place for what it did not have."""
    distances = [location.value for location in Location]
    assert distances == [0.0, 1.0, 1.5, 2.0, 3.0]


def test_fpf_goes_by_distance_alone() -> None:
    """However late what is on the device came."""
    queue = [
        facts(0, 0.0, Location.NOWHERE),
        facts(1, 1.0, Location.DISK),
        facts(2, 2.0, Location.DEVICE),
        facts(3, 3.0, Location.HOST),
        facts(4, 4.0, Location.DEVICE),
    ]
    assert FPFOrder().arrange(queue, 5.0, 1) == [2, 4, 3, 1, 0]


def test_relaxed_fpf_is_equation_4() -> None:
    """(now - arrival) * (4 - N): 10 * 1, 6 * 2, 5 * 2.5, 4 * 3 and 2 * 4."""
    queue = [
        facts(0, 0.0, Location.NOWHERE),
        facts(1, 4.0, Location.DISK),
        facts(2, 5.0, Location.CXL),
        facts(3, 6.0, Location.HOST),
        facts(4, 8.0, Location.DEVICE),
    ]
    assert RelaxedFPFOrder().arrange(queue, 10.0, 1) == [2, 1, 3, 0, 4]


def test_relaxed_fpf_serves_the_farthest_in_the_end() -> None:
    """It waits until those on the device have waited a quarter of its time."""
    far, near = facts(0, 0.0, Location.NOWHERE), facts(1, 9.0, Location.DEVICE)
    assert RelaxedFPFOrder().arrange([far, near], 11.0, 1) == [0, 1]
    assert RelaxedFPFOrder().arrange([far, near], 12.5, 1) == [1, 0]


def test_car_puts_those_without_history_before_those_that_wait_for_a_tier() -> None:
    """Device, then nowhere, then host, CXL and disk alike, by arrival."""
    queue = [
        facts(0, location=Location.DISK),
        facts(1, location=Location.HOST),
        facts(2, location=Location.NOWHERE),
        facts(3, location=Location.DEVICE),
    ]
    assert CaROrder(4).arrange(queue, 1.0, 1) == [3, 2, 0, 1]


def test_car_reorders_inside_the_window_only() -> None:
    """A device hit behind the window stays where it is, until the window moves."""
    queue = [facts(n, location=Location.DISK) for n in range(3)]
    queue.append(facts(3, location=Location.DEVICE))
    assert CaROrder(3).arrange(queue, 1.0, 1) == [0, 1, 2, 3]
    assert CaROrder(3).arrange(queue[1:], 1.0, 2) == [2, 0, 1]


def test_cars_window_does_not_grow_past_its_oldest() -> None:
    """Two of three served: the third keeps the window where it is."""
    queue = [facts(0, location=Location.DISK), facts(3, location=Location.DEVICE)]
    assert CaROrder(3).arrange(queue, 1.0, 1) == [0, 1]


def test_cost_lets_a_short_one_go_first_where_there_is_slack() -> None:
    """Under fcfs the last of these would wait 26 s; the first can bear a tenth more."""
    queue = [facts(n, service_s=1.0) for n in range(26)]
    queue[5] = facts(5, service_s=0.1)
    assert CostOrder().arrange(queue, 0.0, 1)[0] == 5


def test_cost_does_not_push_anybody_into_the_tail() -> None:
    """Who already waits as long as the level is overtaken by nobody."""
    old = facts(0, arrival_s=0.0, service_s=1.0)
    new = [facts(n, arrival_s=100.0, service_s=0.1) for n in range(1, 5)]
    assert CostOrder().arrange([old, *new], 100.0, 1)[0] == 0


def test_cost_without_slack_is_fcfs() -> None:
    """A quantile of 0 leaves nothing to use up."""
    queue = [facts(n, service_s=1.0 / (n + 1)) for n in range(20)]
    assert CostOrder(quantile=0.0).arrange(queue, 1.0, 1) == list(range(20))


def test_cost_takes_near_equals_by_arrival() -> None:
    """Predictions are not good enough to swap what differs by a few per cent."""
    queue = [facts(n, service_s=1.3 - 0.01 * n) for n in range(20)]
    assert CostOrder(quantile=1.0).arrange(queue, 0.0, 1) == list(range(20))


def test_cost_counts_room_where_the_pool_holds_the_queue_up() -> None:
    """Equal passes, but those whose prompts are on the device take no room."""
    order = CostOrder(quantile=1.0)
    queue = [facts(n, service_s=0.01) for n in range(40)]
    order.arrange(queue, 0.0, 1)
    queue = queue[4:]
    for position in (9, 20):
        queue[position] = replace(queue[position], num_device_tokens=96)
    # Four requests took 100 s: it was not their passes.
    arranged = order.arrange(queue, 100.0, 2)
    assert arranged[:2] == [9, 20]


def test_the_shadow_pairs_the_first_to_leave_with_the_first_to_come() -> None:
    """Short ones leave first: the waits are of the places, not of the requests."""
    shadow = FCFSShadow()
    queue = [facts(0, 0.0, service_s=2.0), facts(1, 1.0, service_s=0.5)]
    shadow.look(queue, 1.0)
    shadow.look(queue[:1], 3.0)
    assert shadow.waits_s.tolist() == [1.0 + 2.0]
    shadow.look([], 4.0)
    assert shadow.waits_s.tolist() == [3.0, 2.0 + 0.5]


def test_the_shadow_remembers_so_many_and_no_more() -> None:
    """The oldest wait is written over by the newest."""
    shadow = FCFSShadow(history=2)
    queue = [facts(n, 0.0, service_s=1.0 + n) for n in range(4)]
    for number in range(4):
        shadow.look(queue[number:], 0.0)
    assert sorted(shadow.waits_s.tolist()) == [2.0, 3.0]


def test_the_shadow_measures_what_passes_do_not_explain() -> None:
    """10 s for a request of 1 s and 100 tokens, while another waited: 9 s were
    something else, and are put down to the room that it took."""
    shadow = FCFSShadow()
    queue = [facts(0, service_s=1.0), facts(1, service_s=1.0)]
    shadow.look(queue, 0.0)
    shadow.look(queue[1:], 10.0)
    assert shadow.held_token_s == pytest.approx(9.0 / 100)
    # Nobody waited in between: that time was idle.
    shadow.look([], 11.0)
    shadow.look([facts(2)], 1000.0)
    assert shadow.held_token_s == pytest.approx(9.0 / 100)
