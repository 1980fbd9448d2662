"""Names of the prefetch policies, as flags spell them."""

from __future__ import annotations

from collections.abc import Callable

from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.by_name import maker_of
from sgl_tiered.policies.prefetch.arrival import ArrivalPrefetch
from sgl_tiered.policies.prefetch.base import PrefetchPolicy
from sgl_tiered.policies.prefetch.car import CarPrefetch
from sgl_tiered.policies.prefetch.none import NoPrefetch

__all__ = [
    "PREFETCH_POLICIES",
    "PREFETCH_TARGETS",
    "check_prefetch_to",
    "make_prefetch_policy",
]

_MAKERS: dict[str, Callable[[], PrefetchPolicy]] = {
    "none": NoPrefetch,
    "arrival": ArrivalPrefetch,
    "car": CarPrefetch,
}

PREFETCH_POLICIES: tuple[str, ...] = tuple(_MAKERS)
PREFETCH_TARGETS = ("host", "device")


def make_prefetch_policy(name: str) -> PrefetchPolicy:
    """Return a new policy.

    Raises:
        ConfigError: no policy has this name.
    """
    return maker_of(_MAKERS, "prefetch", name)()


def check_prefetch_to(name: str, target: str, setting: str = "prefetch_to") -> None:
    """Check how far a policy is to bring pages.

    Args:
        name: of the policy.
        target: one of ``PREFETCH_TARGETS``.
        setting: as the user spells it, for the error.

    Raises:
        ConfigError: there is no such policy or target, or it does not look ahead.
    """
    looks_ahead = make_prefetch_policy(name).looks_ahead
    if target not in PREFETCH_TARGETS:
        choices = ", ".join(PREFETCH_TARGETS)
        raise ConfigError(setting, f"{target!r} is not known", f"use {choices}")
    if target != "host" and not looks_ahead:
        raise ConfigError(
            setting,
            f"prefetch {name} does not look ahead over the queue",
            "use it with the prefetch car",
        )
