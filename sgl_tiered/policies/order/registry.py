"""Names of the orders, as flags spell them."""

from __future__ import annotations

from collections.abc import Callable

from sgl_tiered.policies.by_name import maker_of
from sgl_tiered.policies.order.base import RequestOrder
from sgl_tiered.policies.order.car import CaROrder
from sgl_tiered.policies.order.cost import CostOrder
from sgl_tiered.policies.order.fcfs import FCFSOrder
from sgl_tiered.policies.order.fpf import FPFOrder
from sgl_tiered.policies.order.relaxed_fpf import RelaxedFPFOrder

__all__ = ["ORDERS", "make_order"]

_MAKERS: dict[str, Callable[[], RequestOrder]] = {
    "fcfs": FCFSOrder,
    "fpf": FPFOrder,
    "relaxed-fpf": RelaxedFPFOrder,
    "car": CaROrder,
    "cost": CostOrder,
}

ORDERS: tuple[str, ...] = tuple(_MAKERS)


def make_order(name: str) -> RequestOrder:
    """Return a new order.

    Raises:
        ConfigError: none has this name.
    """
    return maker_of(_MAKERS, "order", name)()
