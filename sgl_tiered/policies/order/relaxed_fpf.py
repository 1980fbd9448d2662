"""Relaxed fastest prefix first, the Berkeley report's fairer order."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_tiered.policies.order.base import WaitingFacts

__all__ = ["RelaxedFPFOrder"]


class RelaxedFPFOrder:
    """The highest ``(now - arrival) * (4 - N)`` first.

    Source: Berkeley report, equation 4; N is the distance of ``Location``: 0 device,
    1 host, 2 disk, 3 not computed yet (and 1.5 CXL). Ties go by arrival.

    Waiting is bounded by ageing: the weights lie between 1 and 4, so a request that has
    waited w is overtaken by requests only that have waited w/4 at least, which came in
    the first three quarters of its wait.
    """

    name = "relaxed-fpf"
    needs_facts = True

    def arrange(
        self, waiting: Sequence[WaitingFacts], now_s: float, pass_number: int
    ) -> list[int]:
        """Return them by falling priority, then by arrival."""
        del pass_number

        def negated(position: int) -> float:
            facts = waiting[position]
            return -(now_s - facts.arrival_s) * (4.0 - facts.location.value)

        return sorted(range(len(waiting)), key=negated)
