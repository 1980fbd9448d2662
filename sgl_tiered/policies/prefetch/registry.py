"""Names of the prefetch policies, as flags spell them."""

from __future__ import annotations

from collections.abc import Callable

from sgl_tiered.errors import ConfigError
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
    maker = _MAKERS.get(name)
    if maker is None:
        raise ConfigError(
            "prefetch",
            f"{name!r} is not known",
            f"choose one of {', '.join(PREFETCH_POLICIES)}",
        )
    return maker()
