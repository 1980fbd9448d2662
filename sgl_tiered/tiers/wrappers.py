"""The wrappers, in one place to import from: slow tiers and failing tiers."""

from __future__ import annotations

from sgl_tiered.tiers.delayed import DelayedTier, DelaySwitch
from sgl_tiered.tiers.emulation import Delay, Emulation, Fault
from sgl_tiered.tiers.fault_switch import FaultSwitch
from sgl_tiered.tiers.faulty import FaultyTier
from sgl_tiered.tiers.throttled import Link, ThrottledTier

__all__ = [
    "Delay",
    "DelaySwitch",
    "DelayedTier",
    "Emulation",
    "Fault",
    "FaultSwitch",
    "FaultyTier",
    "Link",
    "ThrottledTier",
]
