"""Fetches to the device in simulated time: slots of nobody, and the link to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from sgl_tiered.cache.device_prefetcher import DevicePrefetcher, Waiting
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import LoadPlan
from sgl_tiered.sim.device_tree import DeviceTree
from sgl_tiered.sim.links import Link

__all__ = ["SimDeviceRoom"]


class SimDeviceRoom:
    """The simulated device as ``DevicePrefetcher`` sees it.

    A cancelled fetch frees its pages at once; its bytes stay on the link, as a layer
    under way would, but whole.

    Args:
        tree: the device's pages.
        links: to the device, by the tier from which they lead.
        page_bytes: of a page.
        prefetcher: told of ends.
        may_evict: whether what the tree would drop next may go for a fetch: only while
            pages are offloaded when they come, so not under ``on-evict``, nor while
            ``auto`` or ``selective`` copies only what was seen twice; asked each time.
    """

    def __init__(
        self,
        tree: DeviceTree,
        links: dict[TierId, Link],
        page_bytes: int,
        prefetcher: DevicePrefetcher,
        *,
        may_evict: Callable[[], bool],
    ) -> None:
        self._tree = tree
        self._links = links
        self._page_bytes = page_bytes
        self._prefetcher = prefetcher
        self._may_evict = may_evict
        # Plan -> it, the stand-ins of its prompt up to its end, and links that run.
        self._flights: dict[int, tuple[LoadPlan, bytes, set[TierId]]] = {}
        self.num_late = 0
        tree.give_back = self._give_back

    def room_pages(self) -> int:
        """Return the pages that could be had."""
        return self._tree.available_pages

    def submit(self, plan: LoadPlan, state: Waiting, keep: Sequence[Waiting]) -> bool:
        """Take pages and send the bytes; False where there are too few."""
        tree, num_pages = self._tree, plan.num_pages
        if num_pages > tree.free_pages and self._may_evict():
            # Those far back in the queue are to go first.
            for other in reversed(keep):
                tree.match(other.tokens[: other.max_pages].tobytes())
            tree.evict_leaves(num_pages - tree.free_pages)
        if num_pages > tree.free_pages:
            return False
        tree.lent_pages += num_pages
        end = plan.first_page + num_pages
        tiers = {TierId(int(tier)) for tier in np.unique(plan.tiers)}
        self._flights[plan.plan_id] = plan, state.tokens[:end].tobytes(), tiers
        for tier in sorted(tiers):
            num_bytes = int(np.count_nonzero(plan.tiers == tier)) * self._page_bytes
            self._links[tier].submit(num_bytes, partial(self._come, plan, tier))
        return True

    def cancel(self, plan_id: int) -> None:
        """Give the pages of one back."""
        plan, _, _ = self._flights.pop(plan_id)
        self._tree.lent_pages -= plan.num_pages
        self._prefetcher.ended(plan, landed=False)

    def _come(self, plan: LoadPlan, tier: TierId) -> None:
        flight = self._flights.get(plan.plan_id)
        if flight is None:
            return
        _, raw, tiers = flight
        tiers.remove(tier)
        if tiers:
            return
        del self._flights[plan.plan_id]
        landed = self._tree.publish_lent(raw, plan.first_page)
        self.num_late += not landed
        self._prefetcher.ended(plan, landed=landed)

    def _give_back(self, num_pages: int) -> int:
        """Cancel the latest fetches until as many pages are free; return how many."""
        num_given = 0
        while self._flights and num_given < num_pages:
            plan_id = next(reversed(self._flights))
            num_given += self._flights[plan_id][0].num_pages
            self.cancel(plan_id)
        return num_given
