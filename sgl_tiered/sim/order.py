"""In what order waiting requests are looked at. FCFS, and the Berkeley report's orders.

An order gives each waiting request a number; the lowest goes first, ties by arrival.
Where it ``needs_location`` the server looks up where the request's prefix is before
each pass: 0 device, 1 host, 2 disk, 3 nowhere (the report's N).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from sgl_tiered.errors import ConfigError

__all__ = ["ORDERS", "RequestOrder", "WaitingFacts", "make_order"]


@dataclass(frozen=True, slots=True)
class WaitingFacts:
    """What an order may know of a waiting request; ``distance`` is N, see above."""

    arrival_s: float
    distance: int
    num_prompt_tokens: int


class RequestOrder(Protocol):
    """Ranks waiting requests."""

    @property
    def needs_location(self) -> bool:
        """Whether ``distance`` is to be looked up."""
        ...

    def rank(self, facts: WaitingFacts, now_s: float) -> float:
        """Return the request's number; the lowest goes first."""
        ...


class FCFSOrder:
    """First come, first served."""

    needs_location = False

    def rank(self, facts: WaitingFacts, now_s: float) -> float:
        """Return the same for all: ties go by arrival."""
        del facts, now_s
        return 0.0


class FastestPrefixFirst:
    """What is nearest to the device first, however late it came."""

    needs_location = True

    def rank(self, facts: WaitingFacts, now_s: float) -> float:
        """Return the distance."""
        del now_s
        return float(facts.distance)


class RelaxedFastestPrefixFirst:
    """Equation 4 of the report: the highest ``waited * (4 - N)`` first."""

    needs_location = True

    def rank(self, facts: WaitingFacts, now_s: float) -> float:
        """Return the negated priority."""
        return -(now_s - facts.arrival_s) * (4 - facts.distance)


ORDERS: dict[str, Callable[[], RequestOrder]] = {
    "fcfs": FCFSOrder,
    "fpf": FastestPrefixFirst,
    "relaxed-fpf": RelaxedFastestPrefixFirst,
}


def make_order(name: str) -> RequestOrder:
    """Return a new order.

    Raises:
        ConfigError: none has this name.
    """
    maker = ORDERS.get(name)
    if maker is None:
        raise ConfigError(
            "order", f"{name!r} is not known", f"choose one of {', '.join(ORDERS)}"
        )
    return maker()
