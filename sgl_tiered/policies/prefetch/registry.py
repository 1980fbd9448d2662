"""Names of the prefetch policies, as flags spell them."""

from __future__ import annotations

from collections.abc import Callable

from sgl_tiered.policies.by_name import maker_of
from sgl_tiered.policies.prefetch.arrival import ArrivalPrefetch
from sgl_tiered.policies.prefetch.base import PrefetchPolicy
from sgl_tiered.policies.prefetch.car import CarPrefetch
from sgl_tiered.policies.prefetch.none import NoPrefetch

__all__ = ["PREFETCH_POLICIES", "make_prefetch_policy"]

_MAKERS: dict[str, Callable[[], PrefetchPolicy]] = {
    "none": NoPrefetch,
    "arrival": ArrivalPrefetch,
    "car": CarPrefetch,
}

PREFETCH_POLICIES: tuple[str, ...] = tuple(_MAKERS)


def make_prefetch_policy(name: str) -> PrefetchPolicy:
    """Return a new policy.

    Raises:
        ConfigError: no policy has this name.
    """
    return maker_of(_MAKERS, "prefetch", name)()
