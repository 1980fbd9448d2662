"""The wrappers, in one place to import from: slow tiers and failing tiers."""

from __future__ import annotations

from sgl_tiered.tiers.faulty import Faults, FaultyTier
from sgl_tiered.tiers.throttled import ThrottledTier

__all__ = ["Faults", "FaultyTier", "ThrottledTier"]
