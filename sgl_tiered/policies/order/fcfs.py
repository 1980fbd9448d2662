"""First come, first served."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_tiered.policies.order.base import WaitingFacts

__all__ = ["FCFSOrder"]


class FCFSOrder:
    """Nobody is overtaken; what all others are measured against."""

    name = "fcfs"
    needs_facts = False

    def arrange(
        self, waiting: Sequence[WaitingFacts], now_s: float, pass_number: int
    ) -> list[int]:
        """Return them by arrival."""
        del now_s, pass_number
        return list(range(len(waiting)))
