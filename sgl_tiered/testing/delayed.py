"""A tier whose operations take longer than they would: always, by chance, in spikes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from sgl_tiered.core.plans import TransferResult
from sgl_tiered.serving.emulation import Delay
from sgl_tiered.testing.wrapped import WrappedMemory, WrappedTier
from sgl_tiered.tiers.base import MemoryTier, Tier, TierHealth, TierIO

__all__ = ["DelaySwitch", "DelayedMemoryTier", "DelayedTier"]


class DelaySwitch:
    """The delays of one tier; may be changed while serving. Thread-safe.

    Args:
        delays: in force from the beginning; an operation suffers all of them.
        seed: of what is drawn.
    """

    def __init__(self, delays: Sequence[Delay] = (), seed: int = 0) -> None:
        self._lock = threading.Lock()
        self.set(delays, seed)

    @property
    def delays(self) -> tuple[Delay, ...]:
        """What is switched on."""
        return self._delays

    def set(self, delays: Sequence[Delay], seed: int = 0) -> None:
        """Start over with these delays."""
        with self._lock:
            self._delays = tuple(delays)
            self._rng = np.random.default_rng(seed)

    def draw_s(self) -> float:
        """Return the delay of one operation, in seconds."""
        if not self._delays:
            return 0.0
        with self._lock:
            total_s = 0.0
            for delay in self._delays:
                if delay.probability >= 1.0 or self._rng.random() < delay.probability:
                    total_s += float(self._rng.uniform(delay.low_s, delay.high_s))
            return total_s


class DelayedTier(WrappedTier):
    """Delays each operation of a tier; called on a ``MemoryTier`` it stays one.

    Args:
        tier: the tier that does the work.
        switch: how long.
        sleep: waits for so many seconds.
    """

    def __new__(cls, tier: Tier, *_args: object, **_settings: object) -> DelayedTier:
        """Choose ``DelayedMemoryTier`` for a tier that can be read in place."""
        if cls is DelayedTier and isinstance(tier, MemoryTier):
            return super().__new__(DelayedMemoryTier)
        return super().__new__(cls)

    def __init__(
        self,
        tier: Tier,
        switch: DelaySwitch,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        super().__init__(tier)
        self.switch = switch
        self._sleep = sleep or threading.Event().wait

    def load(self, io: TierIO) -> TransferResult:
        """Read pages, later."""
        return self._late(self.inner.load, io)

    def store(self, io: TierIO) -> TransferResult:
        """Write pages, later."""
        return self._late(self.inner.store, io)

    def health(self) -> TierHealth:
        """Return the inner tier's health, marked where a delay is switched on."""
        health = self.inner.health()
        return replace(health, emulated=True) if self.switch.delays else health

    def _late(
        self, transfer: Callable[[TierIO], TransferResult], io: TierIO
    ) -> TransferResult:
        delay_s = self._wait()
        result = transfer(io)
        return replace(result, seconds=result.seconds + delay_s)

    def _wait(self) -> float:
        delay_s = self.switch.draw_s()
        if delay_s > 0:
            self._sleep(delay_s)
        return delay_s


class DelayedMemoryTier(DelayedTier, WrappedMemory):
    """A delayed ``MemoryTier``: copies done in place wait in ``charge``."""

    inner: MemoryTier

    def charge(self, num_bytes: int, *, is_store: bool = False) -> None:
        """Account for a copy done in place, later."""
        self._wait()
        self.inner.charge(num_bytes, is_store=is_store)
