"""Puts an emulation around real tiers, tells what is emulated, and changes it.

One per rank. Throttles stand for the whole run, for the links that they make are shared
between tiers. Faults begin with ``arm``; they and delays can be switched while serving,
if that was allowed at the start.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TypeVar

from sgl_tiered.core.clock import Clock, SystemClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.errors import ConfigError
from sgl_tiered.serving.emulation import Delay, Emulation, Fault, parse_emulation
from sgl_tiered.testing.delayed import DelayedTier, DelaySwitch
from sgl_tiered.testing.fault_switch import FaultSwitch
from sgl_tiered.testing.faulty import FaultyTier
from sgl_tiered.testing.faulty_calls import FaultyCalls
from sgl_tiered.testing.throttled import Link, LinkPace, ThrottledTier
from sgl_tiered.testing.wrapped import WrappedTier
from sgl_tiered.tiers.base import MemoryTier, Tier, TierHealth
from sgl_tiered.tiers.disk_io import SystemCalls

__all__ = ["Emulator"]

AnyTier = TypeVar("AnyTier", bound=Tier)


class _Marked(WrappedTier):
    """A tier whose faults lie below it, where its own health cannot tell of them."""

    def __init__(self, tier: Tier, emulator: Emulator) -> None:
        super().__init__(tier)
        self._emulator = emulator

    def health(self) -> TierHealth:
        """Return the inner tier's health, marked while anything is emulated."""
        health = self.inner.health()
        if self._emulator.text(self.tier_id):
            return replace(health, emulated=True)
        return health


class Emulator:
    """The emulation of all tiers of one rank.

    Args:
        sections: from ``parse_emulation``.
        switchable: delays and faults may be switched while serving.
        clock: for links and for faults that last for a time.
    """

    def __init__(
        self,
        sections: Sequence[Emulation] = (),
        *,
        switchable: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self._sections = tuple(sections)
        self._switchable = switchable
        self._clock = clock or SystemClock()
        self._links = [
            Link(s.bandwidth_bytes_per_s, s.read_bytes_per_s, s.write_bytes_per_s)
            for s in self._sections
        ]
        self._delays: dict[TierId, DelaySwitch] = {}
        self._faults: dict[TierId, FaultSwitch] = {}
        self._switched: tuple[Emulation, ...] = ()
        self._lock = threading.Lock()

    @property
    def switchable(self) -> bool:
        """Whether ``switch`` is allowed."""
        return self._switchable

    def calls(self, tier: TierId) -> SystemCalls | None:
        """Return system calls with the tier's faults in them; None for the real ones.

        A medium that is reached by system calls gets its faults there and not from
        ``wrap``, so that the tier's own checks meet them.
        """
        if not self._may_fail(tier):
            return None
        return FaultyCalls(self._fault_switch(tier))

    def wrap(self, tier: AnyTier) -> AnyTier:
        """Return the tier with what its sections say around it.

        A memory tier stays one. Called again for a tier that is opened anew, it gives
        it the same links and switches.
        """
        wrapped: Tier = tier
        mine = [
            (section, link)
            for section, link in zip(self._sections, self._links, strict=True)
            if tier.tier_id in section.tiers
        ]
        for section, link in mine:
            if section.has_link:
                wrapped = ThrottledTier(wrapped, link, section.latency_s, self._clock)
        if self._switchable or any(section.delays for section, _ in mine):
            wrapped = DelayedTier(wrapped, self._delay_switch(tier.tier_id))
        if self._may_fail(tier.tier_id):
            if isinstance(tier, MemoryTier):
                wrapped = FaultyTier(wrapped, self._fault_switch(tier.tier_id))
            else:
                wrapped = _Marked(wrapped, self)
        # The wrappers of a MemoryTier are MemoryTiers, which no annotation can say.
        return wrapped  # type: ignore[return-value]

    def pace(self, tier: TierId) -> LinkPace | None:
        """Return the pace of copies beside the tier's, over the tier's own link."""
        for section, link in zip(self._sections, self._links, strict=True):
            if tier in section.tiers and section.has_link:
                return LinkPace(link, section.latency_s, self._clock)
        return None

    def faults(self, tier: TierId) -> FaultSwitch | None:
        """Return the faults of copies beside the tier's; None where none can come."""
        return self._fault_switch(tier) if self._may_fail(tier) else None

    def text(self, tier: TierId) -> str:
        """Return what is emulated now, in the words of the flag; empty for nothing."""
        return "; ".join(section.text for section in self._mine(tier))

    def num_struck(self, tier: TierId) -> dict[str, int]:
        """Return how many operations were struck so far, by kind of fault."""
        switch = self._faults.get(tier)
        return {} if switch is None else dict(switch.num_struck)

    def switch(self, text: str, tiers: Collection[TierId]) -> None:
        """Put these delays and faults in force, beside those of the start.

        They replace what was switched on before; an empty text switches all of it off.

        Args:
            text: sections with delays and faults only.
            tiers: those that there are.

        Raises:
            ConfigError: not allowed, not understood, or it asks for a link.
        """
        if not self._switchable:
            raise ConfigError(
                "faults", "may not be switched here", "start the server for tests"
            )
        sections = parse_emulation(text, tiers, "faults")
        for section in sections:
            if section.has_link:
                raise ConfigError(
                    "faults",
                    f"{section.text!r} asks for a link, which is made at the start",
                    "use delay and fault here",
                )
        with self._lock:
            self._switched = sections
            for tier in tiers:
                delays, faults, seed = self._drawn(tier)
                self._delay_switch(tier).set(delays, seed)
                self._fault_switch(tier).set(faults, seed)

    def arm(self) -> None:
        """Put the faults of the start in force: opening and measuring is over."""
        for tier, switch in self._faults.items():
            _, faults, seed = self._drawn(tier)
            switch.set(faults, seed)

    def release(self) -> None:
        """Let everything that hangs go on; nothing fails any more."""
        for switch in self._faults.values():
            switch.set(())

    def _may_fail(self, tier: TierId) -> bool:
        return self._switchable or any(
            one.faults for one in self._sections if tier in one.tiers
        )

    def _mine(self, tier: TierId) -> list[Emulation]:
        sections = [*self._sections, *self._switched]
        return [one for one in sections if tier in one.tiers]

    def _drawn(self, tier: TierId) -> tuple[list[Delay], list[Fault], int]:
        """Return the delays, the faults and the seed that hold for a tier now."""
        mine = self._mine(tier)
        return (
            [delay for section in mine for delay in section.delays],
            [fault for section in mine for fault in section.faults],
            mine[-1].seed if mine else 0,
        )

    def _delay_switch(self, tier: TierId) -> DelaySwitch:
        if tier not in self._delays:
            delays, _, seed = self._drawn(tier)
            self._delays[tier] = DelaySwitch(delays, seed)
        return self._delays[tier]

    def _fault_switch(self, tier: TierId) -> FaultSwitch:
        if tier not in self._faults:
            self._faults[tier] = FaultSwitch(clock=self._clock)
        return self._faults[tier]
