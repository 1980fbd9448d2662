"""Route to the instance with the least work, whatever it holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sgl_tiered.policies.routing.base import (
    FleetFacts,
    InstanceFacts,
    RequestFacts,
    least,
    turned,
)

__all__ = ["LeastLoadRouting", "load_tokens", "loads_of"]


def load_tokens(instance: InstanceFacts, running_cost_tokens: float) -> float:
    """Return the work of an instance in prompt tokens: what waits, and what runs.

    Args:
        instance: its facts.
        running_cost_tokens: prompt tokens that cost a newcomer as much delay as one
            request under way does.
    """
    return instance.waiting_tokens + running_cost_tokens * instance.num_running


def loads_of(fleet: FleetFacts, running_cost_tokens: float) -> npt.NDArray[np.float64]:
    """Return ``load_tokens`` of all instances, to the last bit the same."""
    loads: npt.NDArray[np.float64] = (
        fleet.waiting_tokens + running_cost_tokens * fleet.num_running
    )
    return loads


class LeastLoadRouting:
    """Fewest tokens of work; among equals, in turn."""

    name = "least-load"

    def __init__(self, running_cost_tokens: float = 64.0) -> None:
        self._running_cost_tokens = running_cost_tokens

    def rank(
        self, request: RequestFacts, instances: Sequence[InstanceFacts]
    ) -> tuple[int, ...]:
        """Return the positions by rising load."""
        places = turned(request.turn, len(instances))
        loads = [load_tokens(each, self._running_cost_tokens) for each in instances]
        return tuple(sorted(range(len(instances)), key=lambda i: (loads[i], places[i])))

    def best(self, request: RequestFacts, fleet: FleetFacts) -> int:
        """Return the position of the least load."""
        return least(request.turn, loads_of(fleet, self._running_cost_tokens))
