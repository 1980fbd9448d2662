"""Settings of the cache, checked when they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sgl_tiered.core.ids import Encoding, TierId
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.write_admission.registry import WRITE_ADMISSIONS

__all__ = [
    "DEMOTE_POLICIES",
    "LOAD_POLICIES",
    "WRITE_POLICIES",
    "CacheConfig",
    "TierConfig",
    "check_choice",
]

LOAD_POLICIES: tuple[str, ...] = ("auto", "always", "never")
WRITE_POLICIES: tuple[str, ...] = ("auto", "write-through", "selective", "on-evict")
DEMOTE_POLICIES: tuple[str, ...] = ("write-through", "on-evict")
_MAX_TIERS = len(TierId) - 1


@dataclass(frozen=True, slots=True)
class TierConfig:
    """One tier: which, and how many pages it holds.

    Attributes:
        tier: which.
        num_slots: pages that it holds, in the end.
        num_open: those that it holds from the start; ``TieredCache.open_slots`` adds
            more. All if None.
    """

    tier: TierId
    num_slots: int
    num_open: int | None = None

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
        assert self.num_open is None or 0 < self.num_open <= self.num_slots


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How the cache decides.

    Attributes:
        layout: shape of one page.
        tiers: a chain, fastest first; what one loses may be in the next.
        load_policy: ``auto`` loads what is cheaper to load than to recompute;
            ``always`` and ``never`` do not ask for the cost.
        write_policy: ``write-through`` gives every page a copy in the first tier;
            ``selective`` a page that is seen for the second time; ``auto`` is the one
            while pages come again and the other while none does (``sightings.py``);
            ``on-evict`` what the device is about to lose, which its owner knows
            (``DeferredOffloads``).
        demote_policy: ``write-through`` copies pages to the next tier soon after
            they are in one; ``on-evict`` only the coldest, once a tier is fuller than
            ``demote_watermark``.
        demote_watermark: share of a tier, between 0 and 1.
        demote_rest_s: pause of an edge after a copy of which no page arrived: a full
            disk does not empty itself at once.
        disk_admission: name of a write admission: which pages are written to disk.
        device_pages: pages that the device has; what it can serve itself counts to the
            distance at which reuse is looked for.
        load_overlaps: loads to the device run under the pass, layer by layer.
        tombstones: pages of which it is remembered why they are gone, a power of two;
            0 for none (``tombstones.cells_for`` gives a fitting number).
        act_page_bytes: bytes of a page as activations, over all layers; 0 where pages
            are KV only.
        act_refusal: one sentence that says why activations were asked for and are not
            kept; empty where they are, or were not asked for.
    """

    layout: PageLayout
    tiers: tuple[TierConfig, ...]
    load_policy: str = "auto"
    write_policy: str = "write-through"
    demote_policy: str = "write-through"
    demote_watermark: float = 0.9
    demote_rest_s: float = 5.0
    disk_admission: str = "all"
    device_pages: int = 0
    load_overlaps: bool = False
    tombstones: int = 0
    act_page_bytes: int = 0
    act_refusal: str = ""

    def __post_init__(self) -> None:
        order = [int(tier.tier) for tier in self.tiers]
        if not 1 <= len(order) <= _MAX_TIERS or order != sorted(set(order)):
            raise ConfigError(
                "tiers",
                f"{[tier.tier.label for tier in self.tiers]} is not a list of "
                "different tiers, fastest first",
                "list the host first, then CXL, then the disk",
            )
        check_choice("load_policy", self.load_policy, LOAD_POLICIES)
        check_choice("write_policy", self.write_policy, WRITE_POLICIES)
        check_choice("demote_policy", self.demote_policy, DEMOTE_POLICIES)
        check_choice("disk_admission", self.disk_admission, WRITE_ADMISSIONS)
        if not 0.0 <= self.demote_watermark <= 1.0:
            raise ConfigError(
                "demote_watermark",
                f"{self.demote_watermark} is not between 0 and 1",
                "give a share of a tier, such as 0.9",
            )
        num_layers = self.layout.num_layers
        if not 0 <= self.act_page_bytes <= self.layout.page_bytes or (
            self.act_page_bytes % num_layers
            or (self.act_page_bytes and self.layout.encoding is not Encoding.RAW)
        ):
            raise ConfigError(
                "act_page_bytes",
                f"{self.act_page_bytes} B of activations do not fit a slot of "
                f"{self.layout.page_bytes} B, {num_layers} layers of raw KV",
                "give 0, or as many bytes for each layer",
            )
        if not (math.isfinite(self.demote_rest_s) and self.demote_rest_s >= 0):
            raise ConfigError(
                "demote_rest_s", f"{self.demote_rest_s} is not a time", "give seconds"
            )


def check_choice(setting: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ConfigError unless the value is one of the choices."""
    if value not in choices:
        raise ConfigError(
            setting, f"{value!r} is not known", f"choose one of {', '.join(choices)}"
        )
