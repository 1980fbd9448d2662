"""Bounded waiting of the orders that promise it, on queues that Hypothesis makes up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_tiered.policies.order.base import Location, RequestOrder, WaitingFacts
from sgl_tiered.policies.order.car import CaROrder
from sgl_tiered.policies.order.cost import CostOrder

WINDOWS = st.integers(1, 9)
SERVICE_S = st.sampled_from([1e-3, 2e-3, 0.01, 0.05, 1.0, 30.0])
REQUEST = st.tuples(st.sampled_from(list(Location)), SERVICE_S)
# A pass: who joins, how many are served, how much time goes by.
PASS = st.tuples(
    st.lists(REQUEST, max_size=12), st.integers(0, 6), st.sampled_from([0.0, 0.01, 5.0])
)

MAKERS: dict[str, Callable[[int], RequestOrder]] = {
    "car": CaROrder,
    "cost": CostOrder,
    "cost, all slack": lambda window: CostOrder(window, quantile=1.0),
}


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=150, deadline=None)
@given(window=WINDOWS, passes=st.lists(PASS, max_size=40))
def test_a_request_waits_for_those_before_it_and_a_window_at_most(
    name: str,
    window: int,
    passes: list[tuple[list[tuple[Location, float]], int, float]],
) -> None:
    """With p requests before it when it joins it is served after p + window - 1 others
    at the latest, whatever comes later and whatever is predicted."""
    order = MAKERS[name](window)
    queue: list[WaitingFacts] = []
    due: dict[int, int] = {}
    now_s, num_joined, num_served = 0.0, 0, 0
    # The queue is served to its end, so that every request is seen to be served.
    drain = [([], 1, 0.01)] * sum(len(joining) for joining, _, _ in passes)
    for number, (joining, num_serve, passed_s) in enumerate([*passes, *drain]):
        now_s += passed_s
        for location, service_s in joining:
            due[num_joined] = num_served + len(queue) + window - 1
            queue.append(
                WaitingFacts(
                    index=num_joined,
                    arrival_s=now_s,
                    location=location,
                    num_prompt_tokens=100,
                    num_uncached_tokens=50,
                    service_s=service_s,
                    has_history=location is not Location.NOWHERE,
                )
            )
            num_joined += 1
        arranged = order.arrange(queue, now_s, number)
        assert sorted(arranged) == list(range(len(queue)))
        for facts in [queue[i] for i in arranged[:num_serve]]:
            assert num_served <= due[facts.index], (facts.index, num_served)
            num_served += 1
            queue.remove(facts)
    assert not queue
