"""Prefetch that arrives when it is due: CaR's rule over the queue.

CaR (papers: "CaR", section "Prefetcher", the formula of fetch(t)) begins a read at the
first t with

    min_i {TPOT * len_i - (t - timer_i)} <= SIZE / bandwidth

over the requests i that the device answers: when the first of them is predicted to end
not later than the read would. ``len_i`` is the predicted answer, ``timer_i`` the time
of its first token.

The paper has one request in mind, the next one. Here the k-th of the queue is to be
there when it can start, and all share one link, so the rule is applied to every head of
the queue: reads up to k begin when

    start_k <= sum over j <= k of SIZE_j / bandwidth

where ``start_k`` is the k-th smallest of CaR's terms while the head of the queue waits
for an end (k = 0 alone is CaR's rule), but not before the passes over those ahead of it
are computed. Where nobody has to end, those passes are all that it waits for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from sgl_tiered.policies.prefetch.base import Decoding, QueueFacts

__all__ = ["CarPrefetch", "releases_s"]


def releases_s(tpot_s: float, decoding: Sequence[Decoding]) -> list[float]:
    """Return CaR's terms ``TPOT * len_i - (t - timer_i)``, smallest first, not below 0.

    The first is the minimum of the formula.
    """
    return sorted(max(tpot_s * d.num_tokens - d.past_s, 0.0) for d in decoding)


class CarPrefetch:
    """Due when the device will be there for it, and not before."""

    name = "car"
    at_arrival = False
    looks_ahead = True

    def starts_s(self, facts: QueueFacts) -> tuple[float, ...]:
        """Return the k-th release, or the end of the passes ahead where that is later.

        More wait than decode: those beyond the last release start after it.
        """
        ends = []
        if facts.is_blocked:
            ends = releases_s(facts.tpot_s, facts.decoding)
        starts = []
        passed_s = facts.busy_s
        for place, service_s in enumerate(facts.services_s):
            end_s = ends[min(place, len(ends) - 1)] if ends else 0.0
            passed_s = max(passed_s, end_s)
            starts.append(passed_s)
            passed_s += service_s
        return tuple(starts)

    def due_in_s(
        self, starts_s: Sequence[float], loads_s: Sequence[float]
    ) -> tuple[float, ...]:
        """Return the earliest time at which a read from here on would be late."""
        sums_s = list(accumulate(loads_s))
        due = [math.inf] * len(starts_s)
        latest_s = math.inf
        for place in reversed(range(len(starts_s))):
            if loads_s[place] > 0.0:
                latest_s = min(latest_s, starts_s[place] - sums_s[place])
            due[place] = latest_s
        return tuple(due)
