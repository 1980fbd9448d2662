"""Conformance kit for orders of the waiting queue: subclass it in a pytest module.

Example:
    class TestMyOrder(RequestOrderKit):
        def make_order(self):
            return MyOrder()
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from sgl_tiered.policies.order.base import Location, RequestOrder, WaitingFacts

__all__ = ["RequestOrderKit", "most_overtaken"]


def _random_queue(
    rng: np.random.Generator, num_waiting: int, now_s: float, first: int = 0
) -> list[WaitingFacts]:
    arrivals = np.sort(rng.uniform(0.0, now_s, size=num_waiting))
    queue = []
    for number, arrival_s in enumerate(arrivals.tolist()):
        num_prompt = int(rng.integers(1, 20_000))
        location = list(Location)[int(rng.integers(len(Location)))]
        is_new = location is Location.NOWHERE
        num_uncached = num_prompt if is_new else int(rng.integers(1, num_prompt + 1))
        queue.append(
            WaitingFacts(
                index=first + number,
                arrival_s=arrival_s,
                location=location,
                num_prompt_tokens=num_prompt,
                num_uncached_tokens=num_uncached,
                service_s=float(num_uncached * 3e-5 + 2e-3),
                has_history=not is_new or bool(rng.integers(2)),
            )
        )
    return queue


class RequestOrderKit:
    """What a scheduler relies on, whatever an order prefers.

    Set ``max_overtaking`` where the order bounds it: how many later arrivals are served
    before a request at most.
    """

    max_overtaking: int | None = None

    def make_order(self) -> RequestOrder:
        """Return a new order; the one method to write."""
        raise NotImplementedError

    def test_has_the_interface(self) -> None:
        """It is a RequestOrder with a name that a flag can spell."""
        order = self.make_order()
        assert isinstance(order, RequestOrder)
        assert order.name
        assert order.name == order.name.lower().strip()

    @pytest.mark.parametrize("num_waiting", [0, 1, 2, 33, 300])
    def test_arranges_everybody_once(self, num_waiting: int) -> None:
        """A permutation, pass after pass, whoever was served in between."""
        order, rng = self.make_order(), np.random.default_rng(num_waiting)
        queue = _random_queue(rng, num_waiting, 10.0)
        for pass_number in range(5):
            arranged = order.arrange(queue, 10.0 + pass_number, pass_number)
            assert sorted(arranged) == list(range(len(queue)))
            served = set(arranged[: int(rng.integers(4))])
            queue = [facts for i, facts in enumerate(queue) if i not in served]

    def test_equals_go_by_arrival(self) -> None:
        """Among requests that are alike nobody is overtaken."""
        order = self.make_order()
        one = _random_queue(np.random.default_rng(1), 1, 1.0)[0]
        queue = [
            replace(one, index=number, arrival_s=number * 0.01) for number in range(50)
        ]
        assert order.arrange(queue, 60.0, 1) == list(range(50))

    def test_equal_histories_give_equal_arrangements(self) -> None:
        """Two objects that saw the same agree, so that ranks and replays do."""
        one, two = self.make_order(), self.make_order()
        rng = np.random.default_rng(7)
        queue = _random_queue(rng, 60, 10.0)
        for pass_number in range(8):
            arranged = one.arrange(queue, 10.0 + pass_number, pass_number)
            assert two.arrange(queue, 10.0 + pass_number, pass_number) == arranged
            served = set(arranged[:3])
            queue = [facts for i, facts in enumerate(queue) if i not in served]

    def test_the_only_one_goes_first(self) -> None:
        """Nothing is held back by an order."""
        order = self.make_order()
        for facts in _random_queue(np.random.default_rng(3), 20, 1.0):
            assert order.arrange([facts], 2.0 + facts.index, facts.index) == [0]

    def test_overtaking_is_bounded(self) -> None:
        """Nobody is served after more later arrivals than the order allows."""
        if self.max_overtaking is None:
            return
        rng = np.random.default_rng(11)
        worst = most_overtaken(self.make_order(), rng, num_arrivals=600)
        assert worst <= self.max_overtaking


def most_overtaken(
    order: RequestOrder,
    rng: np.random.Generator,
    *,
    num_arrivals: int,
    serve: Sequence[int] = (0, 1, 1, 2, 5),
    join: Sequence[int] = (0, 1, 1, 2, 5, 20),
) -> int:
    """Serve a random queue in an order; return by how many later ones at most any
    request was overtaken.

    Args:
        order: under test.
        rng: draws the requests, how many join and how many are served per pass.
        num_arrivals: requests in all.
        serve, join: numbers per pass, drawn from.
    """
    now_s, joined, pass_number, worst = 0.0, 0, 0, 0
    queue: list[WaitingFacts] = []
    overtaken: dict[int, int] = {}
    while joined < num_arrivals or queue:
        pass_number += 1
        now_s += float(rng.exponential(0.1))
        num_new = min(int(rng.choice(join)), num_arrivals - joined)
        fresh = _random_queue(rng, num_new, 1.0, first=joined)
        queue += [replace(facts, arrival_s=now_s) for facts in fresh]
        overtaken |= {facts.index: 0 for facts in fresh}
        joined += num_new
        arranged = order.arrange(queue, now_s, pass_number)
        served = [queue[i].index for i in arranged[: int(rng.choice(serve))]]
        for index in served:
            worst = max(worst, overtaken.pop(index))
            for other in overtaken:
                overtaken[other] += other < index
        queue = [facts for facts in queue if facts.index in overtaken]
    return worst
