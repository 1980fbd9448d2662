"""Route to where the prompt's prefix is, unless waiting there costs more than it saves.

MemServe takes the instance with the longest common prefix, and sees neither load nor
tier. Here all three are one figure in prompt tokens, what waits there and what is to be
computed before this request's first token could come:

    own  = prompt - sum of credit * cached
    cost = waiting + running_cost * running + compute_cost * own

A credit is the share of a token's prefill that a cached token of that place saves: 1 on
the device, less where it has to be loaded first. With no load and credits of 1 this is
the paper's rule. Equal costs: the longer prefix, then the lower load, then in turn.

What is computed delays the request itself and those who come until the queue is empty
again: at a load of one half one more in the mean, r / (1 - r) of M/G/1. So compute_cost
is 2. With 1 a prompt is computed on a second instance because the first, which still
computes it, is counted as busy for as long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.routing.base import (
    PLACES,
    FleetFacts,
    InstanceFacts,
    RequestFacts,
    least,
    turned,
)
from sgl_tiered.policies.routing.least_load import load_tokens, loads_of

__all__ = ["DEFAULT_CREDITS", "PromptTreeRouting"]

DEFAULT_CREDITS: Mapping[str, float] = {
    "device": 1.0,
    "host": 0.9,
    "cxl": 0.8,
    "disk": 0.5,
    "peer": 0.5,
    "assumed": 0.9,
}
"""Assumptions, not measurements: they keep the order of the tiers, and load below
compute. A measured machine has its own (``--credits``)."""


class PromptTreeRouting:
    """Least work ahead of the first token, counted in prompt tokens."""

    name = "prompt-tree"

    def __init__(
        self,
        credits_by_place: Mapping[str, float] | None = None,
        running_cost_tokens: float = 64.0,
        compute_cost: float = 2.0,
    ) -> None:
        """Take credits by the words of ``PLACES``; those left out keep their default.

        Args:
            credits_by_place: see above.
            running_cost_tokens: what a request under way counts, in prompt tokens.
            compute_cost: what a token to be computed for the request counts, in tokens
                that wait; see above.

        Raises:
            ConfigError: a place is not known, or a credit is outside 0 to 1.
        """
        wanted = dict(credits_by_place or {})
        for place, credit in wanted.items():
            if place not in PLACES:
                raise ConfigError(
                    "credits", f"{place!r} is no place", f"use {', '.join(PLACES)}"
                )
            if not 0.0 <= credit <= 1.0:
                raise ConfigError(
                    "credits", f"{place}={credit} is out of range", "use 0 to 1"
                )
        table = {**DEFAULT_CREDITS, **wanted}
        self._credits = tuple(table[place] for place in PLACES)
        self._running_cost_tokens = running_cost_tokens
        self._compute_cost = compute_cost

    def cost_tokens(self, request: RequestFacts, instance: InstanceFacts) -> float:
        """Return the cost of sending the request there, in prompt tokens."""
        saved = 0.0
        # Added up one by one, in the same order as ``best`` does it for all at once.
        for credit, cached in zip(self._credits, instance.cached_tokens, strict=True):
            saved += credit * cached
        own = max(request.num_tokens - saved, 0.0)
        load = load_tokens(instance, self._running_cost_tokens)
        return load + self._compute_cost * own

    def rank(
        self, request: RequestFacts, instances: Sequence[InstanceFacts]
    ) -> tuple[int, ...]:
        """Return the positions by rising cost."""
        places = turned(request.turn, len(instances))
        keys = [
            (
                self.cost_tokens(request, each),
                -each.num_cached,
                load_tokens(each, self._running_cost_tokens),
                places[position],
            )
            for position, each in enumerate(instances)
        ]
        return tuple(sorted(range(len(instances)), key=keys.__getitem__))

    def best(self, request: RequestFacts, fleet: FleetFacts) -> int:
        """Return the position of the least cost."""
        loads = loads_of(fleet, self._running_cost_tokens)
        costs = loads + self._compute_cost * float(request.num_tokens)
        num_cached = np.zeros(len(fleet), np.int64)
        if len(fleet.holders):
            saved = np.zeros(len(fleet.holders))
            for credit, cached in zip(
                self._credits, fleet.cached_tokens.T, strict=True
            ):
                saved += credit * cached
            own = np.maximum(request.num_tokens - saved, 0.0)
            costs[fleet.holders] = loads[fleet.holders] + self._compute_cost * own
            num_cached[fleet.holders] = fleet.cached_tokens.sum(axis=1)
        return least(request.turn, costs, -num_cached, loads)
