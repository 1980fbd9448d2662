"""What is known of the coming uses of a run: the queue's view, and learned worth.

Joins ``QueueLookahead`` and the tiers' ``ReuseHistory`` for the evictors, which ask per
node. A policy that looks at neither costs nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

from sgl_tiered.cache.index import Node
from sgl_tiered.cache.lookahead import QueueLookahead
from sgl_tiered.cache.reuse import ReuseHistory
from sgl_tiered.core.plans import UInt64s

__all__ = ["NO_OUTLOOK", "ComingUses", "Outlook", "OutlookFacts"]

OutlookFacts = tuple[float, int, float, float]
"""``score``, ``queued``, ``next_use``, ``worth`` of ``EvictionFacts``."""
_NOTHING: OutlookFacts = (0.0, 0, math.inf, 0.0)


class Outlook(Protocol):
    """Says what is to come for a run of pages in a tier."""

    def facts(self, node: Node, tier: int, num_taken: int) -> OutlookFacts:
        """Return what is known of a run's last page in a tier, less some pages."""
        ...

    def alike_from(self, node: Node, position: int) -> int:
        """Return from where on the same requests wait as for the page at a position."""
        ...

    def ages(self, tier: int) -> bool:
        """Return whether a run's worth changes as it ages."""
        ...

    def next_step(self, node: Node, tier: int) -> int | None:
        """Return the access at which age alone changes a run's worth; None: never."""
        ...

    def now(self, tier: int) -> int:
        """Return the number of the latest access, in the unit of ``next_step``."""
        ...

    def version(self, tier: int) -> int:
        """Return a number that grows when worth has changed for all runs at once."""
        ...


class _NoOutlook:
    def facts(self, node: Node, tier: int, num_taken: int) -> OutlookFacts:
        del node, tier, num_taken
        return _NOTHING

    def alike_from(self, node: Node, position: int) -> int:
        del node, position
        return 0

    def ages(self, tier: int) -> bool:
        del tier
        return False

    def next_step(self, node: Node, tier: int) -> int | None:
        del node, tier
        return None

    def now(self, tier: int) -> int:
        del tier
        return 0

    def version(self, tier: int) -> int:
        del tier
        return 0


NO_OUTLOOK: Outlook = _NoOutlook()


class ComingUses:
    """The outlook of the tiers of one cache.

    Args:
        lookahead: the queue; None where no policy looks at it.
        histories: by tier number, for the tiers whose policy looks at worth.
        key_of: (node, position) -> short key of a page of the run.
        reload_s: (node, tier number) -> seconds per page to bring a run back that the
            tier loses; None where all pages are alike.
    """

    def __init__(
        self,
        lookahead: QueueLookahead | None,
        histories: Mapping[int, ReuseHistory],
        key_of: Callable[[Node, int], int],
        reload_s: Callable[[Node, int], float] | None = None,
    ) -> None:
        self.lookahead = lookahead
        self.histories = histories
        self._key_of = key_of
        self._reload_s = reload_s

    def facts(self, node: Node, tier: int, num_taken: int) -> OutlookFacts:
        """Return what is known of a run's last page in a tier, less some pages."""
        score, queued, next_use = 0.0, 0, math.inf
        if self.lookahead is not None and len(self.lookahead):
            key = self._key_of(node, max(0, node.resident[tier] - num_taken - 1))
            queued = self.lookahead.queued(key)
            next_use = self.lookahead.next_use(key)
            score = self.lookahead.score(key)
        history = self.histories.get(tier)
        worth = 0.0
        if history is not None and history.is_used:
            density = history.density(node.kinds[tier], node.access_sequence)
            worth = density * self._seconds(node, tier)
        return score, queued, next_use, worth

    def alike_from(self, node: Node, position: int) -> int:
        """Return from where on the same requests wait as for the page at a position.

        A request that uses a page uses those before it, so as many means the same.
        """
        lookahead = self.lookahead
        if lookahead is None or not len(lookahead):
            return 0
        key = self._key_of(node, position)
        wanted = (lookahead.queued(key), lookahead.score(key))
        low, high = 0, position
        while low < high:
            middle = (low + high) // 2
            key = self._key_of(node, middle)
            if (lookahead.queued(key), lookahead.score(key)) == wanted:
                high = middle
            else:
                low = middle + 1
        return low

    def ages(self, tier: int) -> bool:
        """Return whether a run's worth changes as it ages."""
        history = self.histories.get(tier)
        return history is not None and history.is_used

    def next_step(self, node: Node, tier: int) -> int | None:
        """Return the access at which age alone changes a run's worth; None: never."""
        history = self.histories.get(tier)
        if history is None or not history.is_used:
            return None
        return history.next_step(node.access_sequence)

    def now(self, tier: int) -> int:
        """Return the number of the latest access, in the unit of ``next_step``."""
        history = self.histories.get(tier)
        return 0 if history is None else history.sequence

    def version(self, tier: int) -> int:
        """Return a number that grows when worth has changed for all runs at once."""
        history = self.histories.get(tier)
        return 0 if history is None else history.version

    def see(
        self, keys: UInt64s, path: list[Node], seen_pages: int, sequence: int
    ) -> list[tuple[int, int]]:
        """Note that a request used its pages; return (tier, kind) of its last page.

        Args:
            keys: of all its pages.
            path: nodes of the index that hold the first of them.
            seen_pages: leading pages of earlier calls for the same request.
            sequence: number of the access.
        """
        last = []
        for tier, history in self.histories.items():
            kinds = history.see(keys, seen_pages, sequence)
            if not len(kinds):
                continue
            for node in path:
                end = node.first_page + len(node.rows)
                node.kinds[tier] = int(kinds[min(end, len(kinds)) - 1])
            last.append((tier, int(kinds[-1])))
        return last

    def _seconds(self, node: Node, tier: int) -> float:
        """Return what a page of a run costs to bring back, as a power of 2."""
        if self._reload_s is None:
            return 1.0
        seconds = self._reload_s(node, tier)
        # Nodes of one prompt differ by little: age and kind decide between them.
        return 2.0 ** round(math.log2(seconds)) if seconds > 0.0 else 0.0
