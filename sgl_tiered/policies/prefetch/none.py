"""No prefetch: a read begins when the engine first looks at its request."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sgl_tiered.policies.prefetch.base import QueueFacts

__all__ = ["NoPrefetch"]


class NoPrefetch:
    """Never ahead of need."""

    name = "none"
    at_arrival = False
    looks_ahead = False

    def starts_s(self, facts: QueueFacts) -> tuple[float, ...]:
        """Return 0 for each: nobody asks."""
        return (0.0,) * len(facts.services_s)

    def due_in_s(
        self, starts_s: Sequence[float], loads_s: Sequence[float]
    ) -> tuple[float, ...]:
        """Return never."""
        del loads_s
        return (math.inf,) * len(starts_s)
