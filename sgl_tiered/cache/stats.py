"""What the cache has done so far, in pages; a frozen value for reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sgl_tiered.core.ids import TierId

__all__ = ["CacheStats", "StatsCounters"]


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters since the start; mappings have one number per tier.

    Attributes:
        num_lookups: lookups answered, PENDING ones included.
        num_pending: lookups answered PENDING.
        num_refused_loads: decisions that no longer held when they were committed.
        num_refused_offload_pages: pages that found no room in the first tier.
        num_seen_once_pages: pages that the write policy copies when they come again.
        pages_loaded: pages landed on the device, by the tier they came from.
        pages_stored: pages that got a copy in the tier.
        pages_evicted: copies dropped to make room.
        pages_uncopied: those of them that the next tier had no copy of, whatever the
            reason: refused there, not admitted, or evicted before they were written.
        pages_bad: copies dropped because their bytes were wrong or unreadable.
        pages_failed: copies that did not arrive in the tier.
        pages_adopted: copies taken over from a former process.
        pages_dropped: pages that were to come from the tier above and did not, by
            reason: ``no room`` (the tier values what it has more, or uses all of it),
            ``failed`` (again and again), ``queue full`` (in paths, not pages).
    """

    num_lookups: int
    num_pending: int
    num_refused_loads: int
    num_refused_offload_pages: int
    num_seen_once_pages: int
    pages_loaded: Mapping[TierId, int]
    pages_stored: Mapping[TierId, int]
    pages_evicted: Mapping[TierId, int]
    pages_uncopied: Mapping[TierId, int]
    pages_bad: Mapping[TierId, int]
    pages_failed: Mapping[TierId, int]
    pages_adopted: Mapping[TierId, int]
    pages_dropped: Mapping[TierId, Mapping[str, int]]

    def lost_writes(self) -> dict[str, int]:
        """Return the writes that did not happen, by edge and reason, for exporters."""
        lost = {
            "offload_no_room_pages": self.num_refused_offload_pages,
            "offload_seen_once_pages": self.num_seen_once_pages,
        }
        for tier, num_pages in self.pages_uncopied.items():
            lost[f"evict_{tier.label}_uncopied_pages"] = num_pages
        for tier, reasons in self.pages_dropped.items():
            for reason, num_pages in reasons.items():
                name = f"demote_{tier.label}_{reason}_pages".replace(" ", "_")
                lost[name] = num_pages
        return lost


class StatsCounters:
    """The counters behind ``CacheStats``."""

    def __init__(self, tiers: tuple[TierId, ...]) -> None:
        self.num_lookups = 0
        self.num_pending = 0
        self.num_refused_loads = 0
        self.num_refused_offload_pages = 0
        self.num_seen_once_pages = 0
        self.loaded = dict.fromkeys(tiers, 0)
        self.stored = dict.fromkeys(tiers, 0)
        self.evicted = dict.fromkeys(tiers, 0)
        self.uncopied = dict.fromkeys(tiers[:-1], 0)
        self.bad = dict.fromkeys(tiers, 0)
        self.failed = dict.fromkeys(tiers, 0)
        self.adopted = dict.fromkeys(tiers, 0)
        self.dropped: dict[TierId, dict[str, int]] = {tier: {} for tier in tiers}

    def note_dropped(self, tier: TierId, reason: str, num_pages: int) -> None:
        """Count pages that did not come to a tier."""
        reasons = self.dropped[tier]
        reasons[reason] = reasons.get(reason, 0) + num_pages

    def freeze(self) -> CacheStats:
        """Return the counters as they are now."""
        return CacheStats(
            num_lookups=self.num_lookups,
            num_pending=self.num_pending,
            num_refused_loads=self.num_refused_loads,
            num_refused_offload_pages=self.num_refused_offload_pages,
            num_seen_once_pages=self.num_seen_once_pages,
            pages_loaded=dict(self.loaded),
            pages_stored=dict(self.stored),
            pages_evicted=dict(self.evicted),
            pages_uncopied=dict(self.uncopied),
            pages_bad=dict(self.bad),
            pages_failed=dict(self.failed),
            pages_adopted=dict(self.adopted),
            pages_dropped={tier: dict(d) for tier, d in self.dropped.items()},
        )
