"""Our own orders pass the published kit, and the kit catches those that should fail."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.order.base import RequestOrder, WaitingFacts
from sgl_tiered.policies.order.car import CaROrder
from sgl_tiered.policies.order.cost import CostOrder
from sgl_tiered.policies.order.registry import ORDERS, make_order
from sgl_tiered.testing.order_kit import RequestOrderKit, most_overtaken


class TestFCFS(RequestOrderKit):
    """fcfs."""

    max_overtaking = 0

    def make_order(self) -> RequestOrder:
        return make_order("fcfs")


class TestFPF(RequestOrderKit):
    """fpf, which is not bounded."""

    def make_order(self) -> RequestOrder:
        return make_order("fpf")


class TestRelaxedFPF(RequestOrderKit):
    """relaxed-fpf, bounded in time and not in numbers."""

    def make_order(self) -> RequestOrder:
        return make_order("relaxed-fpf")


class TestCaR(RequestOrderKit):
    """car."""

    max_overtaking = CaROrder().window - 1

    def make_order(self) -> RequestOrder:
        return make_order("car")


class TestCost(RequestOrderKit):
    """cost."""

    max_overtaking = CostOrder().window - 1

    def make_order(self) -> RequestOrder:
        return make_order("cost")


def test_every_name_makes_its_order() -> None:
    """Names and objects agree, and an unknown one is refused in a sentence."""
    for name in ORDERS:
        assert make_order(name).name == name
    with pytest.raises(ConfigError, match="fcfs, fpf, relaxed-fpf, car, cost"):
        make_order("lifo")


class Newest:
    """Serves the newest first."""

    name = "newest"
    needs_facts = False

    def arrange(
        self, waiting: Sequence[WaitingFacts], now_s: float, pass_number: int
    ) -> list[int]:
        return list(range(len(waiting)))[::-1]


def test_the_kit_sees_who_is_overtaken() -> None:
    """The newest first overtakes without a bound; first come first served never."""
    rng = np.random.default_rng(0)
    assert most_overtaken(Newest(), rng, num_arrivals=300) > 100
    assert most_overtaken(make_order("fcfs"), rng, num_arrivals=300) == 0
