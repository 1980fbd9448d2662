"""A tier made as slow as the medium that it stands for. Every figure is emulated."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from sgl_tiered.core.clock import Clock, SystemClock
from sgl_tiered.core.plans import TransferResult
from sgl_tiered.tiers.base import MemoryTier, Tier, TierHealth, TierIO
from sgl_tiered.tiers.wrapped import WrappedMemory, WrappedTier

__all__ = ["ThrottledMemoryTier", "ThrottledTier"]


class ThrottledTier(WrappedTier):
    """Gives a tier a bandwidth and a latency; called on a ``MemoryTier`` it stays one.

    All transfers share one link: each holds it for ``bytes / bandwidth``, and ends a
    latency later. A transfer that is slower by itself is not slowed further.

    Args:
        tier: the tier that does the work.
        bandwidth_bytes_per_s: of the link, both directions together.
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
        bandwidth_bytes_per_s: float,
        latency_s: float = 0.0,
        clock: Clock | None = None,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        if bandwidth_bytes_per_s <= 0 or latency_s < 0:
            raise ValueError(
                f"a link of {bandwidth_bytes_per_s} B/s and {latency_s} s is none"
            )
        super().__init__(tier)
        self._bandwidth_bytes_per_s = bandwidth_bytes_per_s
        self._latency_s = latency_s
        self._clock = clock or SystemClock()
        # An event that nobody sets is a sleep, without the module of the real clock.
        self._sleep = sleep or threading.Event().wait
        self._lock = threading.Lock()
        self._link_free_s = 0.0

    def load(self, io: TierIO) -> TransferResult:
        """Read pages, no faster than the link."""
        return self._paced(self.inner.load, io)

    def store(self, io: TierIO) -> TransferResult:
        """Write pages, no faster than the link."""
        return self._paced(self.inner.store, io)

    def health(self) -> TierHealth:
        """Return the inner tier's health, marked as emulated."""
        return replace(self.inner.health(), emulated=True)

    def _paced(
        self, transfer: Callable[[TierIO], TransferResult], io: TierIO
    ) -> TransferResult:
        started_s = self._clock.now()
        end_s = self._reserve(len(io.addresses) * self.slot_bytes)
        result = transfer(io)
        self._wait_until(end_s)
        return replace(result, seconds=self._clock.now() - started_s)

    def _reserve(self, num_bytes: int) -> float:
        """Take the link for ``num_bytes``; return when they will have arrived."""
        with self._lock:
            start_s = max(self._clock.now(), self._link_free_s)
            self._link_free_s = start_s + num_bytes / self._bandwidth_bytes_per_s
            return self._link_free_s + self._latency_s

    def _wait_until(self, end_s: float) -> None:
        rest_s = end_s - self._clock.now()
        if rest_s > 0:
            self._sleep(rest_s)


class ThrottledMemoryTier(ThrottledTier, WrappedMemory):
    """A throttled ``MemoryTier``: copies done in place pay through ``charge``."""

    inner: MemoryTier

    def charge(self, num_bytes: int) -> None:
        """Wait as long as the link would need for the copy just done."""
        end_s = self._reserve(num_bytes)
        self.inner.charge(num_bytes)
        self._wait_until(end_s)
