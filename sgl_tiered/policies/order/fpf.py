"""Fastest prefix first, the Berkeley report's unfair order."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_tiered.policies.order.base import WaitingFacts

__all__ = ["FPFOrder"]


class FPFOrder:
    """What is nearest to the device first, however late it came.

    Source: Berkeley report, "Fastest-Prefix-First (FPF)": requests whose prefixes are
    on the GPU "at all costs", then by distance N. Ties go by arrival.

    Waiting is not bounded: while requests with nearer prefixes keep coming, one whose
    prefix is far is never served. The report says so too ("leads to starvation").
    """

    name = "fpf"
    needs_facts = True

    def arrange(
        self, waiting: Sequence[WaitingFacts], now_s: float, pass_number: int
    ) -> list[int]:
        """Return them by distance, then by arrival."""
        del now_s, pass_number
        # Python's sort keeps equals in their order, which is that of arrival.
        return sorted(range(len(waiting)), key=lambda i: waiting[i].location.value)
