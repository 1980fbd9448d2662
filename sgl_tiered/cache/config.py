"""Settings of the cache, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_tiered.core.ids import TierId
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.errors import ConfigError

__all__ = [
    "DEMOTE_POLICIES",
    "LOAD_POLICIES",
    "WRITE_POLICIES",
    "CacheConfig",
    "TierConfig",
    "check_choice",
]

LOAD_POLICIES: tuple[str, ...] = ("auto", "always", "never")
WRITE_POLICIES: tuple[str, ...] = ("write-through", "selective")
DEMOTE_POLICIES: tuple[str, ...] = ("write-through", "on-evict")


@dataclass(frozen=True, slots=True)
class TierConfig:
    """One tier: which, and how many pages it holds."""

    tier: TierId
    num_slots: int

    def __post_init__(self) -> None:
        if self.tier == TierId.DEVICE:
            raise ConfigError(
                "tiers", "the device level belongs to the engine", "leave it out"
            )
        if self.num_slots < 1:
            raise ConfigError(
                f"tiers.{self.tier.label}.num_slots",
                f"{self.num_slots} slots hold no page",
                "give the tier room for one page at least",
            )


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How the cache decides.

    Attributes:
        layout: shape of one page.
        tiers: one or two tiers, fastest first.
        load_policy: ``auto`` loads what is cheaper to load than to recompute;
            ``always`` and ``never`` do not ask for the cost.
        write_policy: ``write-through`` gives every page a copy in the first tier;
            ``selective`` a page that is seen for the second time.
        demote_policy: ``write-through`` copies pages to the second tier soon after
            they are in the first; ``on-evict`` only the coldest, once the first tier
            is fuller than ``demote_watermark``.
        demote_watermark: share of the first tier, between 0 and 1.
        load_overlaps: loads to the device run under the pass, layer by layer.
    """

    layout: PageLayout
    tiers: tuple[TierConfig, ...]
    load_policy: str = "auto"
    write_policy: str = "write-through"
    demote_policy: str = "write-through"
    demote_watermark: float = 0.9
    load_overlaps: bool = False

    def __post_init__(self) -> None:
        order = [int(tier.tier) for tier in self.tiers]
        if not 1 <= len(order) <= 2 or order != sorted(set(order)):
            raise ConfigError(
                "tiers",
                f"{[tier.tier.label for tier in self.tiers]} is not one or two "
                "different tiers, fastest first",
                "list the host first and the disk second",
            )
        check_choice("load_policy", self.load_policy, LOAD_POLICIES)
        check_choice("write_policy", self.write_policy, WRITE_POLICIES)
        check_choice("demote_policy", self.demote_policy, DEMOTE_POLICIES)
        if not 0.0 <= self.demote_watermark <= 1.0:
            raise ConfigError(
                "demote_watermark",
                f"{self.demote_watermark} is not between 0 and 1",
                "give a share of the first tier, such as 0.9",
            )


def check_choice(setting: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ConfigError unless the value is one of the choices."""
    if value not in choices:
        raise ConfigError(
            setting, f"{value!r} is not known", f"choose one of {', '.join(choices)}"
        )
