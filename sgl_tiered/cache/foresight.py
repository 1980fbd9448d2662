"""What a waiting request would cost if the next pass were its own: facts for orders.

Asks the cache as a prediction, which changes nothing, not even what is hot: a queue
that is looked at often must not keep its pages from being evicted by that alone.
"""

from __future__ import annotations

from typing import Any

from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.cache.waiting_state import WaitingLoad
from sgl_tiered.core.ids import Lookup, TierId
from sgl_tiered.policies.order.base import Location
from sgl_tiered.policies.order.queue import Outlook

__all__ = ["foresee"]
_LOCATIONS = {
    TierId.DEVICE: Location.DEVICE,
    TierId.HOST: Location.HOST,
    TierId.CXL: Location.CXL,
    TierId.DISK: Location.DISK,
}


def foresee(
    cache: TieredCache, state: WaitingLoad[Any], device_pages: int, num_tokens: int
) -> Outlook:
    """Say where a request's prefix would come from, and how long its pass would take.

    A read from disk that was begun counts as done: it runs before the pass.

    Args:
        cache: holds the tiers.
        state: of the request.
        device_pages: leading pages of its prompt that are on the device now.
        num_tokens: tokens of the prompt, in the unit of the cache's pages.
    """
    plan = state.plan
    if plan is not None and plan.first_page <= device_pages:
        tiers, kinds = plan.part(device_pages - plan.first_page, state.num_good)
        is_found = True
    else:
        decision = cache.lookup(
            state.digest,
            state.tokens,
            device_pages,
            max_pages=max(state.max_pages - device_pages, 0),
            tiers_allowed=_memory_of(cache) if state.memory_only else None,
            quiet=True,
        )
        tiers, kinds = decision.tiers, decision.representations
        is_found = decision.num_found > 0 or decision.lookup is Lookup.PENDING
    location = Location.DEVICE if device_pages else Location.NOWHERE
    if len(tiers):
        location = _LOCATIONS[TierId(int(tiers.max()))]
    done = (device_pages + len(tiers)) * cache.config.layout.page_tokens
    return Outlook(
        location,
        max(num_tokens - done, 1),
        cache.planner.service_s(tiers, device_pages, num_tokens, kinds),
        is_found or device_pages > 0,
        device_pages * cache.config.layout.page_tokens,
    )


def _memory_of(cache: TieredCache) -> tuple[TierId, ...]:
    return tuple(
        tier.tier for tier in cache.config.tiers if tier.tier is not TierId.DISK
    )
