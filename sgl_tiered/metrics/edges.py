"""Counters of one edge between two media, and of one tier. Not thread-safe alone.

An edge is the physical way that bytes take: a page read from disk for the device is
counted on disk->host (the read) and on host->device (the copy). Sizes are bytes, times
seconds. ``MetricsRegistry`` owns the lock.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

__all__ = ["EdgeCounters", "TierCounters"]


@dataclass(slots=True)
class EdgeCounters:
    """What moved along one edge.

    Attributes:
        ops: transfers that ended, well or not.
        pages: pages that arrived.
        bytes: bytes that arrived.
        seconds: summed duration of the transfers; overlapping ones count twice.
        failures: transfers of which at least one page did not arrive.
        failed_pages: pages that did not arrive.
    """

    ops: int = 0
    pages: int = 0
    bytes: int = 0
    seconds: float = 0.0
    failures: int = 0
    failed_pages: int = 0

    def to_dict(self) -> dict[str, float]:
        """Return the counters by name."""
        return asdict(self)


@dataclass(slots=True)
class TierCounters:
    """What was asked of one tier and found there.

    Attributes:
        pages_hit, tokens_hit: found in this tier and used.
        pages_missed, tokens_missed: looked for here and not found.
        requests_hit: requests that used at least one page of this tier.
        requests_missed: requests that used none.
        evictions: copies dropped to make room, in pages.
    """

    pages_hit: int = 0
    tokens_hit: int = 0
    pages_missed: int = 0
    tokens_missed: int = 0
    requests_hit: int = 0
    requests_missed: int = 0
    evictions: int = 0

    def to_dict(self) -> dict[str, float]:
        """Return the counters by name."""
        return asdict(self)
