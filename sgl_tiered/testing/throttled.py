"""A tier made as slow as the medium that it stands for. Every figure is emulated."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace

from sgl_tiered.core.clock import Clock, SystemClock
from sgl_tiered.core.plans import TransferResult
from sgl_tiered.testing.wrapped import WrappedMemory, WrappedTier
from sgl_tiered.tiers.base import MemoryTier, Tier, TierHealth, TierIO

__all__ = ["Link", "LinkPace", "ThrottledMemoryTier", "ThrottledTier"]


class Link:
    """A link that transfers take in turn; several tiers may share one. Thread-safe.

    Args:
        bandwidth_bytes_per_s: both directions together.
        read_bytes_per_s, write_bytes_per_s: of each direction for itself.
    """

    def __init__(
        self,
        bandwidth_bytes_per_s: float = math.inf,
        read_bytes_per_s: float = math.inf,
        write_bytes_per_s: float = math.inf,
    ) -> None:
        bandwidths = (bandwidth_bytes_per_s, read_bytes_per_s, write_bytes_per_s)
        if min(bandwidths) <= 0:
            raise ValueError(f"a link of {min(bandwidths)} B/s is none")
        self._s_per_byte = [1.0 / bandwidth for bandwidth in bandwidths]
        self._lock = threading.Lock()
        # One for both directions, one for reads, one for writes.
        self._free_s = [0.0, 0.0, 0.0]

    def reserve(self, num_bytes: int, now_s: float, *, is_store: bool) -> float:
        """Take the link for ``num_bytes``; return when the last will have arrived."""
        end_s = now_s
        with self._lock:
            for lane in (0, 2 if is_store else 1):
                if self._s_per_byte[lane]:
                    start_s = max(now_s, self._free_s[lane])
                    self._free_s[lane] = start_s + num_bytes * self._s_per_byte[lane]
                    end_s = max(end_s, self._free_s[lane])
        return end_s


class LinkPace:
    """Makes copies take as long as on a link: each ends a latency after its last byte.

    Args:
        link: that they take in turn.
        latency_s: of each copy.
        clock: tells the time.
        sleep: waits for so many seconds.
    """

    def __init__(
        self,
        link: Link,
        latency_s: float = 0.0,
        clock: Clock | None = None,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        if latency_s < 0:
            raise ValueError(f"a latency of {latency_s} s is none")
        self._link = link
        self._latency_s = latency_s
        self._clock = clock or SystemClock()
        # An event that nobody sets is a sleep, without the module of the real clock.
        self._sleep = sleep or threading.Event().wait

    def reserve(self, num_bytes: int, *, is_store: bool) -> float:
        """Take the link for ``num_bytes``; return when they will have arrived."""
        now_s = self._clock.now()
        return self._link.reserve(num_bytes, now_s, is_store=is_store) + self._latency_s

    def wait_until(self, end_s: float) -> None:
        """Sleep until then; a copy that is late by itself is not slowed further."""
        rest_s = end_s - self._clock.now()
        if rest_s > 0:
            self._sleep(rest_s)


class ThrottledTier(WrappedTier):
    """Gives a tier a bandwidth and a latency; called on a ``MemoryTier`` it stays one.

    Each transfer holds the link for ``bytes / bandwidth``, and ends a latency later. A
    transfer that is slower by itself is not slowed further.

    Args:
        tier: the tier that does the work.
        link: the link, or the bandwidth of one of its own, in bytes per second.
        latency_s: of each transfer.
        clock: tells the time.
        sleep: waits for so many seconds.
    """

    def __new__(cls, tier: Tier, *_args: object, **_settings: object) -> ThrottledTier:
        """Choose ``ThrottledMemoryTier`` for a tier that can be read in place."""
        if cls is ThrottledTier and isinstance(tier, MemoryTier):
            return super().__new__(ThrottledMemoryTier)
        return super().__new__(cls)

    def __init__(
        self,
        tier: Tier,
        link: Link | float,
        latency_s: float = 0.0,
        clock: Clock | None = None,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        super().__init__(tier)
        self._clock = clock or SystemClock()
        shared = link if isinstance(link, Link) else Link(link)
        self._pace = LinkPace(shared, latency_s, self._clock, sleep)

    def load(self, io: TierIO) -> TransferResult:
        """Read pages, no faster than the link."""
        return self._paced(self.inner.load, io, is_store=False)

    def store(self, io: TierIO) -> TransferResult:
        """Write pages, no faster than the link."""
        return self._paced(self.inner.store, io, is_store=True)

    def health(self) -> TierHealth:
        """Return the inner tier's health, marked as emulated."""
        return replace(self.inner.health(), emulated=True)

    def _paced(
        self,
        transfer: Callable[[TierIO], TransferResult],
        io: TierIO,
        *,
        is_store: bool,
    ) -> TransferResult:
        started_s = self._clock.now()
        num_bytes = len(io.addresses) * self.slot_bytes
        end_s = self._pace.reserve(num_bytes, is_store=is_store)
        result = transfer(io)
        self._pace.wait_until(end_s)
        return replace(result, seconds=self._clock.now() - started_s)


class ThrottledMemoryTier(ThrottledTier, WrappedMemory):
    """A throttled ``MemoryTier``: copies done in place pay through ``charge``."""

    inner: MemoryTier

    def charge(self, num_bytes: int, *, is_store: bool = False) -> None:
        """Wait as long as the link would need for the copy just done."""
        end_s = self._pace.reserve(num_bytes, is_store=is_store)
        self.inner.charge(num_bytes, is_store=is_store)
        self._pace.wait_until(end_s)
